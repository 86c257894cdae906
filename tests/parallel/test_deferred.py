"""Gradients of experts' matrices that a pipeline makes after the backward: equal, in order, within bounds."""

import logging
import weakref
from contextlib import contextmanager
from dataclasses import replace

import layouts
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tmoe.config.run import ParallelConfig
from tmoe.model.stages import obstacle
from tmoe.moe.balance import Totals
from tmoe.moe.exchange.dispatch import SymmDispatcher
from tmoe.moe.experts import LocalExperts
from tmoe.moe.layer import MoE
from tmoe.ops import moe_mlp
from tmoe.ops.experts.deferred import collecting
from tmoe.ops.experts.op import moe_mlp_deferred
from tmoe.parallel import build_mesh, pipeline, pipelining
from tmoe.parallel.copies import working_copy
from tmoe.parallel.mesh import local_part
from tmoe.parallel.pipeline_schedule import simulate
from tmoe.parallel.shared_copies import GatheredCopy

# The op ----------------------------------------------------------------------------------------------------


def operands(dtype: torch.dtype, biased: bool, T: int = 37) -> tuple[list[Tensor | None], Tensor]:
    """x, gate_up, down, weights, ids, bias; and the gradient of y."""
    D, F, E, K = 16, 12, 5, 3
    draw = torch.Generator().manual_seed(3)
    shapes = [(T, D), (E, 2 * F, D), (E, D, F), (T, K)]
    x, gate_up, down, weights = (torch.randn(*shape, generator=draw).to(dtype) for shape in shapes)
    ids = torch.randint(-1, E - 1, (T, K), generator=draw)  # the last expert has no rows
    bias = torch.randn(E, 2 * F, generator=draw).to(dtype) if biased else None
    return [x, gate_up, down, weights, ids, bias], torch.randn(T, D, generator=draw).to(dtype)


def gradients(op, tensors: list[Tensor | None], dy: Tensor, which: list[int], activation: str):
    """y, and the gradients of these operands."""
    leaves = [t if t is None else t.clone() for t in tensors]
    for i in which:
        leaves[i].requires_grad_()
    y = op(*leaves, activation)
    y.backward(dy)
    return [y.detach(), *(leaves[i].grad for i in which)]


@pytest.mark.parametrize("T", [37, 0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("dtype", "activation"),
    [(torch.float64, "swiglu"), (torch.float32, "clamped"), (torch.bfloat16, "swiglu")],
    ids=str,
)
def test_both_parts_are_the_whole_backward(dtype, activation, biased, T):
    tensors, dy = operands(dtype, biased, T)
    others = [0, 3, 5] if biased else [0, 3]
    y, d_gate_up, d_down, *want = gradients(moe_mlp, tensors, dy, [1, 2, *others], activation)
    with collecting() as left:
        got = gradients(moe_mlp_deferred, tensors, dy, others, activation)
        assert len(left) == 1
    for ours, theirs in zip([*got, *left[0].gradients()], [y, *want, d_gate_up, d_down], strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_kept_is_its_own_memory():
    """A compiled graph writes over x and the gradient of y once they are read."""
    tensors, dy = operands(torch.float32, False)
    with collecting() as left:
        gradients(moe_mlp_deferred, tensors, dy, [0, 3], "swiglu")
    want = left[0].gradients()
    with collecting() as again:
        leaves = [t if t is None else t.clone() for t in tensors]
        leaves[0].requires_grad_()
        moe_mlp_deferred(*leaves).backward(dy)
    for t in (leaves[0].data, leaves[3], dy):
        t.fill_(float("nan"))
    for ours, theirs in zip(again[0].gradients(), want, strict=True):
        assert torch.equal(ours, theirs)
    assert again[0].bytes == sum(t.nbytes for t in again[0].kept)


def test_nobody_loses_a_gradient():
    tensors, dy = operands(torch.float32, False)
    with pytest.raises(RuntimeError, match="no caller collects them"):
        gradients(moe_mlp_deferred, tensors, dy, [0, 3], "swiglu")
    for i, name in ((1, "gate_up"), (2, "down")):
        with pytest.raises(ValueError, match=f"{name}: got a tensor that needs a gradient"):
            gradients(moe_mlp_deferred, tensors, dy, [0, i], "swiglu")
    with torch.no_grad():
        assert torch.equal(moe_mlp_deferred(*tensors), moe_mlp(*tensors))


def test_the_op_is_what_its_schema_says():
    tensors, dy = operands(torch.float32, True)
    tensors[4].clamp_(min=0)  # with absent slots the end of H is not written
    how = None, None, "swiglu", tensors[4].numel()
    op = torch.ops.tmoe.moe_mlp_deferred
    tensors[0].requires_grad_()
    with collecting():
        torch.library.opcheck(op.default, (*tensors, *how, True))
        with torch.no_grad():
            _, h, packed = op(*tensors, *how, True)
            x, gate_up, down, weights, _, bias = (t.detach() for t in tensors)
            args = (dy, x, gate_up, down, weights, h, packed, bias, *how)
            torch.library.opcheck(torch.ops.tmoe.moe_mlp_deferred_backward.default, args)


# The pipeline ----------------------------------------------------------------------------------------------


def stages(axes: dict[str, int], micros: int, model: str = "gqa", compile: bool | None = None, **parallel):
    """The parts of a model. compile given: of one whose chunks have two blocks of one kind."""
    how = ParallelConfig(**axes, schedule="v", **parallel)
    cfg = layouts.config(how, model, micros, compile=bool(compile))
    if compile is not None:
        cfg = replace(cfg, model=replace(cfg.model, layers=8, dense_layers=0))
    net = pipeline(cfg, build_mesh(**axes))
    net.to_empty(device="cpu")
    net.init_weights(0)
    return net


def step(net, micros: int, seed: int = 0) -> None:
    draw = torch.Generator().manual_seed(seed)
    S = layouts.SEQ
    tokens = torch.randint(layouts.VOCAB, (micros, 2, S), generator=draw)
    totals = Totals(*(torch.as_tensor(float(n)) for n in (micros * 2 * S, micros * 2 * S, micros * 2)))
    net.forward_backward([(t, t.roll(-1, 1), None) for t in tokens], totals)


def matrices(net, chunk: int) -> list[Tensor]:
    return [p for experts in net.chunks[chunk].experts for p in (experts.gate_up, experts.down)]


def watch(rank: int, world: int, axes: dict[str, int], micros: int, model: str, **parallel):
    """What happens in one step: the row, the events, most W that waited, and the bytes that they kept."""
    net = stages(axes, micros, model, **parallel)
    events, alive, sizes, held = [], [], [0], [0]

    def living() -> int:
        return sum(t.nbytes for ref in alive if (t := ref()) is not None)

    @contextmanager
    def watching():
        with collecting() as left:
            yield left
        alive.extend(weakref.ref(t) for layer in left for t in layer.kept)
        sizes.append(sum(layer.bytes for layer in left))
        held.append(living())

    def watched(number, chunk):
        back, finish = chunk.begin_backward, chunk.finish_experts

        def begin_backward(micro, last):
            done = {op for op, c, _ in events if c == number}
            if "W" not in done:
                assert all(p.grad is None for p in matrices(net, number)), "I has made gradients of matrices"
            events.append(("I", number, last))
            back(micro, last)

        def finish_experts(left, last):
            assert len(left) == len(chunk.experts)
            finish(left, last)
            events.append(("W", number, last))

        chunk.begin_backward, chunk.finish_experts = begin_backward, finish_experts

    for number, chunk in net.chunks.items():
        watched(number, chunk)
    patch = pytest.MonkeyPatch()
    patch.setattr(pipelining, "collecting", watching)
    sent, send = [], GatheredCopy.send
    patch.setattr(GatheredCopy, "send", lambda copy, grad: (sent.append(copy.number), send(copy, grad)))
    step(net, micros)
    patch.undo()
    kept = simulate(net.table).kept[net.mesh.place.pp]
    found = [working_copy(p) for _, p in net.named_parameters()]
    copies = [copy for copy in found if isinstance(copy, GatheredCopy)]
    return dict(
        row=[tuple(a) for a in net.pipeline.row],
        events=events,
        bound=kept * max(sizes),
        held=max(held),
        kept=kept,
        left=living(),
        gathered=len(copies),
        sent=len(sent),
        unsent=any(copy.unsent is not None for copy in copies),
        missing=sum(p.grad is None for number in net.chunks for p in matrices(net, number)),
    )


CASES = [  # axes, micros, model, gathered copies
    (dict(pp=2, ep=2), 4, "gqa", False),
    (dict(pp=2, dp=2), 6, "gpt_oss", True),
]


@pytest.mark.parametrize(("axes", "micros", "model", "gathered"), CASES, ids=str)
def test_w_comes_after_i_and_frees_what_it_kept(gloo, axes, micros, model, gathered):
    for told in gloo(4, watch, axes, micros, model):
        wanted = [(op, chunk) for op, chunk, _ in told["row"] if op != "F"]
        assert [event[:2] for event in told["events"]] == wanted
        ops = [op for op, _ in wanted]
        assert ops.count("I") == ops.count("W") == 2 * micros
        assert "IWIW" not in "".join(ops)[:4], "nothing waits: the test has lost its point"
        for op in "IW":  # the last of each is told that it is
            for chunk in {chunk for _, chunk in wanted}:
                lasts = [last for o, c, last in told["events"] if (o, c) == (op, chunk)]
                assert lasts == [False] * (micros - 1) + [True]
        assert 2 <= told["kept"] <= 4  # pp x chunks: what the table lets wait
        assert 0 < told["held"] <= told["bound"]
        assert not told["left"] and not told["missing"] and not told["unsent"]
        assert bool(told["gathered"]) == gathered and told["sent"] == told["gathered"], "once for each copy"


def refused(rank: int, world: int, axes: dict[str, int], parallel: dict):
    notes = []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())
    logging.getLogger("tmoe.model.stages").addHandler(handler)
    net = stages(axes, 2, **parallel)
    step(net, 2)
    return {op for row in net.table.ranks for op, *_ in row}, notes


@pytest.mark.parametrize(
    ("world", "axes", "parallel", "why"),
    [
        (4, dict(pp=2, dp=2), dict(gathered_gib=0), "FSDP2 holds the experts"),
        (4, dict(pp=2, replicate=2), {}, "FSDP2 holds the experts"),
        (4, dict(pp=2, etp=2), {}, "--parallel.etp"),
    ],
    ids=str,
)
def test_where_nothing_can_wait_one_rank_says_why(gloo, world, axes, parallel, why):
    told = gloo(world, refused, axes, parallel)
    assert all(ops == {"F", "B"} for ops, _ in told)
    assert [len(notes) for _, notes in told] == [1] + [0] * (world - 1)
    assert why in told[0][1][0]


def test_symm_and_autocast_cannot_wait():
    moe = MoE(16, layouts.ROUTED)
    assert not obstacle(moe)
    moe.dispatcher = object.__new__(SymmDispatcher)
    assert "--parallel.dispatch nccl" in obstacle(moe)
    experts = LocalExperts(torch.zeros(2, 8, 4), torch.zeros(2, 4, 4), deferred=True)
    assert experts.to(torch.float32).deferred
    with pytest.raises(ValueError, match=r"autocast: got torch.bfloat16, valid is torch.float32"):
        experts.to(torch.bfloat16)


def frozen(rank: int, world: int):
    """Everything but gate_up is frozen: nothing in front of the first block has a gradient."""
    net = stages(dict(pp=2), 2, compile=False)
    net.requires_grad_(False)
    for number in net.chunks:
        for p in matrices(net, number)[::2]:
            p.requires_grad_()
    step(net, 2)
    return {name: p.grad is not None for name, p in net.named_parameters()}


def test_frozen_parameters_get_no_gradient(gloo):
    for told in gloo(2, frozen):
        assert {name for name, has in told.items() if has} == {
            n for n in told if n.endswith("experts.gate_up")
        }


def compiled(rank: int, world: int):
    """Gradients of two steps, compiled and eager; and how many graphs there are after each."""
    found, graphs = {}, []
    for compile in (False, True):
        net = stages(dict(pp=2), 4, compile=compile)
        assert {op for op, *_ in net.pipeline.row} == set("FIW")
        for seed in range(2):
            step(net, 4, seed)
            graphs.append(counters["stats"]["unique_graphs"])
        found[compile] = {name: local_part(p.grad) for name, p in net.named_parameters()}
    return found, graphs, dict(counters["graph_break"])


@pytest.mark.slow
def test_compiled_once_for_all_layers(gloo):
    for found, graphs, breaks in gloo(2, compiled):
        for name, want in found[False].items():
            assert (found[True][name] - want).norm() <= 1e-5 * want.norm(), name
        assert graphs == [0, 0, 1, 1], "one graph for all layers and micro-batches"
        assert not breaks
