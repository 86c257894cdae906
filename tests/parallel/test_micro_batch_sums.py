"""Sums of gradients over micro-batches where a rank holds weights whole: values, hooks, graphs."""

from dataclasses import replace

import layouts
import pytest
import torch
from tiers import slow_but
from tiny_models import MODEL, SEQ
from torch._dynamo.utils import counters

from tmoe.config.run import Config, LoraConfig, OptimConfig, ParallelConfig, TrainConfig
from tmoe.model.dense_sums import SummedLinear
from tmoe.model.freeze import settle
from tmoe.model.lora import is_adapter
from tmoe.model.nf4 import slots_of
from tmoe.model.transformer import Transformer
from tmoe.moe.experts import Experts
from tmoe.parallel import build_mesh, parallelize
from tmoe.parallel.copies import WorkingCopy, working_copy
from tmoe.parallel.mesh import local_part
from tmoe.parallel.shared_copies import GatheredCopy

SUMMED = ("embedding.weight", "head.weight", "experts.gate_up", "experts.down")
LINEAR = (
    "qkv.weight",
    "o.weight",
    *(f"{ffn}.{matrix}.weight" for ffn in ("ffn", "shared") for matrix in ("gate_up", "down")),
)


def build(
    dtype: str = "bf16",
    tied: bool = False,
    compile: bool = False,
    base: str = "",
    freeze: str = "",
    sums: str = "fp32",
    **parallel,
):
    """A laid-out net. base: of adapters, "" without; freeze: a pattern of names."""
    model = replace(MODEL, tied=tied)
    how = ParallelConfig(**parallel)
    cfg = Config(compile=compile, model=model, train=TrainConfig(seq=SEQ, dtype=dtype), parallel=how)
    lora = LoraConfig(rank=4, base=base) if base else LoraConfig()
    cfg = replace(cfg, lora=lora, optim=OptimConfig(freeze=freeze or None, sums=sums))
    with torch.device("meta"):
        net = Transformer(model)
        shapes = {name: p.shape for name, p in net.named_parameters()}
        settle(net, cfg)
    parallelize(net, build_mesh(), cfg, whole_forwards=True)
    net.to_empty(device="cpu")
    draw = torch.Generator().manual_seed(7)
    for name, slot in slots_of(net).items():
        slot.put(torch.randn(shapes[name], generator=draw) * 0.2)
    net.init_weights(0)
    for p in net.parameters():
        p.grad_dtype = None  # as build_optimizer does on a GPU
    return net


def backwards(net, micros: int, marked: bool = True, after=lambda i: None) -> None:
    """The backwards of a step; `after` is called with the number of each."""
    draw = torch.Generator().manual_seed(1)
    net.balancer.start_step()
    for i in range(micros):
        if marked:
            net.set_requires_gradient_sync(i + 1 == micros)
        tokens = torch.randint(MODEL.vocab, (2, SEQ), generator=draw)
        (net(tokens, tokens.roll(-1, 1)) / micros).backward()
        after(i)


def clear(net) -> None:
    for p in net.parameters():
        p.grad = None


def gradients(net) -> dict[str, torch.Tensor]:
    return {name: local_part(p.grad) for name, p in net.named_parameters() if p.grad is not None}


def without_sums(net):
    """The net as if no op knew of sums: autograd gets each micro-batch's gradient, in the copies' type."""
    for module in net.modules():
        if isinstance(module, Experts):
            module.summed = False
        if isinstance(module, SummedLinear):
            module.__class__ = torch.nn.Linear
    patch = pytest.MonkeyPatch()
    for where in ("tmoe.model.loss.find_table", "tmoe.model.transformer.find_table"):
        patch.setattr(where, lambda matrix: None)
    return patch


def nearer(rank: int, world: int, tied: bool, checkpoint: str):
    """Errors against fp32 sums of a net in fp32: of the sums, and of sums of rounded gradients."""
    found = {}
    for way in ("exact", "sums", "rounded"):
        net = build("fp32" if way == "exact" else "bf16", tied, checkpoint=checkpoint)
        for p in net.parameters():  # values that bf16 has
            local_part(p.detach()).copy_(local_part(p.detach()).bfloat16().float())
        patch = without_sums(net) if way == "rounded" else None
        backwards(net, 6)
        if patch:
            patch.undo()
        found[way] = gradients(net)
        assert all(grad.dtype == torch.float32 for grad in found[way].values())
    want = found["exact"]
    return {
        name: [
            float((found[way][name] - want[name]).norm() / want[name].norm()) for way in ("sums", "rounded")
        ]
        for name in want
    }


@pytest.mark.parametrize(("tied", "checkpoint"), [(False, "none"), (True, "block")])
def test_sums_are_nearer(gloo, tied, checkpoint):
    errors = gloo(1, nearer, tied, checkpoint)[0]
    summed = {n: e for n, e in errors.items() if n.endswith((*SUMMED, *LINEAR))}
    assert len(summed) == (1 if tied else 2) + 4 + 2 * 3 + 2 + 2 * 2
    assert all(ours < theirs for ours, theirs in summed.values()), summed
    others = [abs(ours / theirs - 1) for n, (ours, theirs) in errors.items() if n not in summed]
    assert max(others) < 0.2


def whatever(rank: int, world: int):
    """Facts about the parameters' gradients after each micro-batch, in several uses."""
    told = {}
    for tied in (False, True):
        net = build("fp32", tied)
        backwards(net, 3)
        want = gradients(net)
        patch = without_sums(net)
        clear(net)
        backwards(net, 3)
        patch.undo()
        told["equal", tied] = max(
            float((a - want[n]).abs().max() / want[n].abs().max()) for n, a in gradients(net).items()
        )

    net = build()
    kinds = []
    backwards(net, 1, after=lambda i: kinds.append({g.dtype for g in gradients(net).values()}))
    clear(net)
    backwards(net, 3, after=lambda i: kinds.append({gradients(net)[n].dtype for n in matrices(net)}))
    marked = gradients(net)
    clear(net)
    backwards(
        net, 3, marked=False, after=lambda i: kinds.append({gradients(net)[n].dtype for n in matrices(net)})
    )
    told["kinds"] = kinds
    told["unmarked"] = max(float((marked[n] - g).norm() / g.norm()) for n, g in gradients(net).items())

    # a hook gets the parameter after each micro-batch, and may take its gradient
    calls = []
    name = matrices(net)[0]
    p = dict(net.named_parameters())[name]
    p.grad = None
    p.register_post_accumulate_grad_hook(
        lambda p: (calls.append(local_part(p.grad).clone()), setattr(p, "grad", None))
    )
    backwards(net, 3)
    told["hook"] = (
        len(calls),
        float((sum(c.float() for c in calls) - marked[name]).norm() / marked[name].norm()),
    )

    # a tied table is used twice in a micro-batch, and its hook is called once
    net, tables = build(tied=True), []
    table = dict(net.named_parameters())["embedding.weight"]
    table.register_post_accumulate_grad_hook(lambda p: tables.append(local_part(p.grad).clone()))
    backwards(net, 3)
    patch = without_sums(net)
    clear(net)
    backwards(net, 3)
    patch.undo()
    told["tied hook"] = len(tables), all(map(torch.equal, tables[:3], tables[3:]))

    # one matrix of two is frozen: autograd gets the other's gradient
    net = build("fp32")
    up, down = (dict(net.named_parameters())[n] for n in matrices(net)[:2])
    backwards(net, 2)
    want = local_part(down.grad).clone()
    up.grad = down.grad = None
    up.requires_grad_(False)
    backwards(net, 2)
    told["frozen"] = up.grad is None, torch.equal(local_part(down.grad), want)

    # a write between forward and backward is refused
    net = build()
    tokens = torch.zeros(2, SEQ, dtype=torch.int64)
    loss = net(tokens, tokens)
    with torch.no_grad():
        dict(net.named_parameters())[matrices(net)[2]].add_(1)
    with pytest.raises(RuntimeError, match="was written between"):
        loss.backward()
    return told


def matrices(net) -> list[str]:
    return [n for n, _ in net.named_parameters() if n.endswith(("experts.gate_up", "experts.down"))]


def test_uses(gloo):
    told = gloo(1, whatever)[0]
    assert told["equal", False] < 1e-6 and told["equal", True] < 1e-6
    wide, narrow = {torch.float32}, {torch.bfloat16}
    # one micro-batch: rounded; three: sums from the first on; without marks: from the second on
    assert told["kinds"] == [narrow, wide, wide, wide, narrow, wide, wide]
    assert told["unmarked"] < 5e-3
    calls, error = told["hook"]
    assert calls == 3 and error < 5e-3  # the last is rounded: it finds no sum
    assert told["tied hook"] == (6, True)
    assert told["frozen"] == (True, True)


class Opened:
    """Notes the gradients that ops compute themselves."""

    def __init__(self):
        self.copies: list[WorkingCopy] = []
        self.patch = pytest.MonkeyPatch()
        for kind in (WorkingCopy, GatheredCopy):
            self.patch.setattr(kind, "open", self.noted(kind.open))

    def noted(self, opens):
        def noting(copy, *args):
            self.copies.append(copy)
            return opens(copy, *args)

        return noting

    def count(self, net) -> int:
        """The number of gradients of experts, embedding and head."""
        copies = [working_copy(p) for name, p in net.named_parameters() if name.endswith(SUMMED)]
        return sum(any(copy is one for one in copies) for copy in self.copies)


def adapted(rank: int, world: int, base: str):
    """Number of gradients that ops compute themselves; and errors of the adapters' gradients.

    They are to be the fp32 sums of the micro-batches' gradients, which autograd gets.
    """
    net = build(base=base)
    parts: dict[str, torch.Tensor] = {}

    def note(i: int) -> None:
        for name, grad in gradients(net).items():
            parts[name] = parts.get(name, 0) + grad.float()
        clear(net)

    opened = Opened()
    backwards(net, 3, marked=False, after=note)
    backwards(net, 3)
    opened.patch.undo()
    found = gradients(net)
    assert all(map(is_adapter, found)) and sum("experts" in name for name in found) == 2 * 4
    assert all(grad.dtype == torch.float32 for grad in found.values())
    return len(opened.copies), {n: bool(torch.equal(grad, parts[n])) for n, grad in found.items()}


@pytest.mark.parametrize(
    ("world", "base"), slow_but(lambda case: case == (1, "whole"), [(1, "whole"), (1, "nf4"), (2, "whole")])
)
def test_adapters_have_autograds_gradients(gloo, world, base):
    """A frozen base has no sums; adapters are small, and autograd gets their gradients as without sums."""
    for opened, equal in gloo(world, adapted, base):
        assert opened == 0 and all(equal.values()), equal


def frozen(rank: int, world: int, freeze: str):
    """Whether the other parameters' gradients have the bits that they have in a net without frozen parts."""
    found, opened = [], []
    for pattern in ("", freeze):
        net = build("fp32", freeze=pattern)
        calls = Opened()
        backwards(net, 3)
        calls.patch.undo()
        opened.append(calls.count(net))
        found.append(gradients(net))
    every, rest = found
    return opened, len(every) - len(rest), all(torch.equal(grad, every[n]) for n, grad in rest.items())


@pytest.mark.parametrize(
    ("freeze", "opened"),
    [
        (r"experts\.(gate_up|down)$", 3 * 2),  # head and embedding are left
        (r"embedding|blocks\.[01]\.(?!moe\.experts)", 3 * 3),  # x of block 1 needs no gradient
    ],
)
def test_frozen_parts(gloo, freeze, opened):
    (counts, gone, equal) = gloo(1, frozen, freeze)[0]
    assert counts == [3 * 6, opened] and gone > 0 and equal


def skipped(rank: int, world: int):
    """Gradients of a step after a step with a NaN, of which nothing is kept, and without that step."""
    found = []
    for poisoned in (True, False):
        net = build()
        if poisoned:
            hook = net.blocks[1].register_forward_hook(lambda module, args, y: (y[0] * float("nan"), *y[1:]))
            backwards(net, 3)
            hook.remove()
            assert not gradients(net)["head.weight"].isfinite().any()
            clear(net)
        backwards(net, 3)
        assert all(getattr(working_copy(p), "unsent", None) is None for p in net.parameters())
        found.append(gradients(net))
    return all(torch.equal(grad, found[1][n]) for n, grad in found[0].items())


@pytest.mark.parametrize("world", slow_but(lambda world: world == 1, [1, 2]))
def test_a_skipped_step_leaves_nothing(gloo, world):
    assert all(gloo(world, skipped))


def narrow(rank: int, world: int):
    """Whether sums in bf16 have the bits that they have if no op knows of sums."""
    found = []
    for way in ("sums", "autograd"):
        net = build(sums="bf16")
        patch = without_sums(net) if way == "autograd" else None
        backwards(net, 3)
        if patch:
            patch.undo()
        found.append(gradients(net))
    ours, autograds = found
    widths = {g.dtype for name, g in ours.items() if name in matrices(net)}
    return widths, [name for name, grad in ours.items() if not torch.equal(grad, autograds[name])]


@pytest.mark.parametrize(
    ("world", "dtype"), slow_but([(1, torch.bfloat16)], [(1, torch.bfloat16), (2, torch.float32)])
)
def test_sums_in_bf16_are_autograds(gloo, world, dtype):
    """The kernels that add are for fp32. Ranks that share experts reduce the sums in fp32."""
    for widths, others in gloo(world, narrow):
        assert widths == {dtype} and not others


def compiled(rank: int, world: int, checkpoint: str):
    """Gradients of an eager and a compiled net over steps of 1, 3 and 1 micro-batches, and the graphs."""
    layouts.partitioned()
    found, graphs = [], []
    for compile in (False, True):
        net = build("fp32", compile=compile, checkpoint=checkpoint)
        for micros in (1, 3, 1):
            clear(net)
            backwards(net, micros)
            graphs.append(counters["stats"]["unique_graphs"])
            found.append(gradients(net))
    errors = [
        float((a[n] - b[n]).norm() / b[n].norm())
        for a, b in zip(found[3:], found[:3], strict=True)
        for n in b
    ]
    return max(errors), graphs, dict(counters["graph_break"])


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["none", "block"])
def test_no_graph_more_for_later_micro_batches(gloo, checkpoint):
    error, graphs, breaks = gloo(1, compiled, checkpoint)[0]
    assert error < 1e-5 and not breaks
    assert graphs == [0, 0, 0, 2, 2, 2]  # one for the dense block, one for all MoE blocks


def test_an_op_without_an_owner_is_named():
    copy = WorkingCopy(torch.nn.Parameter(torch.ones(2, 2)), torch.bfloat16)
    assert copy.open().plain and copy.open(last=False).dtype == torch.float32
