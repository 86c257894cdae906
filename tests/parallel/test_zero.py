"""ZeRO-1 and ZeRO-2: unsharded AdamW's numbers, one gather a step, and no old weights left in use."""

import functools
from dataclasses import replace
from typing import Any

import layouts
import pytest
import torch
import torch.distributed as dist
from tiers import slow_but
from torch.distributed.fsdp import FSDPModule

from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError
from tmoe.config.presets import presets
from tmoe.config.run import ParallelConfig
from tmoe.model.count import block_shapes, numel, root_shapes
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Totals
from tmoe.optim.adamw import build_optimizer
from tmoe.optim.ema import Ema
from tmoe.parallel import build_mesh, pipeline
from tmoe.plan.memory import memory_per_rank


def unsharded(rank: int, world: int) -> layouts.Curve:
    """Every rank holds all of the model, adds up all gradients, and takes torch's own AdamW step."""
    cfg = layouts.config(ParallelConfig(), "gqa", 1)
    model = Transformer(cfg.model)
    model.init_weights(0)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [dict(params=decayed, weight_decay=cfg.optim.weight_decay), dict(params=rest, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, cfg.optim.lr, cfg.optim.betas, cfg.optim.eps)
    losses, norms = [], []
    for tokens, targets, marks in layouts.batches(True):
        counts = ((targets != -100).sum(), targets.numel(), layouts.SEQUENCES)
        totals = Totals(*(torch.as_tensor(float(count)) for count in counts))
        mine = slice(rank, None, world)
        model.balancer.start_step()
        model(tokens[mine], targets[mine], documents_BS=marks[mine], totals=totals).backward()
        loss = model.task_loss.clone()
        dist.all_reduce(loss)
        for p in model.parameters():
            dist.all_reduce(p.grad)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return layouts.Curve(losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()})


@pytest.fixture(scope="module")
def reference(gloo):
    return gloo(4, unsharded)[0]


CASES = [  # (processes, axes, what else differs)
    (4, dict(ep=2), dict(micros=2)),
    (4, dict(), dict(micros=1)),
    (4, dict(ep=2), dict(micros=2, parallel=dict(gathered_gib=0.0))),  # FSDP2 gathers experts as ever
    (4, dict(replicate=2, ep=2), dict(micros=2)),
    (4, dict(cp=2, tp=2, ep=4), dict(micros=2)),
    (4, dict(pp=2, ep=2), dict(micros=4)),
    (4, dict(pp=2), dict(micros=4, parallel=dict(schedule="v"))),
    (2, dict(), dict(micros=4, whole_forwards=False, parallel=dict(checkpoint="block"))),
    (2, dict(ep=2), dict(micros=2, compile=True, inductor=False)),
    (1, dict(), dict(micros=2)),
]


@pytest.mark.parametrize("shard", [1, 2])
@pytest.mark.parametrize(
    ("world", "axes", "more"), slow_but(lambda case: case in (CASES[0], CASES[3], CASES[5]), CASES), ids=str
)
def test_unsharded_adamw(gloo, reference, shard, world, axes, more):
    parallel = dict(shard=shard, **more.get("parallel", {}))
    work = functools.partial(layouts.train, axes=axes, **(more | dict(parallel=parallel)))
    layouts.assert_same(gloo(world, work, timeout=240)[0], reference)


# of FSDP2's collectives, by the names of torch 2.13 and 2.11
NAMES = dict(
    gather=("all_gather_single", "all_gather_into_tensor"),
    scatter=("reduce_scatter_single", "reduce_scatter_tensor"),
    replicas=("all_reduce", "all_reduce"),
)


class Calls:
    """Counts collectives while patched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.counts = dict.fromkeys(NAMES, 0)
        for kind, (new, old) in NAMES.items():
            name = new if hasattr(dist, new) else old
            monkeypatch.setattr(dist, name, self.counted(kind, getattr(dist, name)))

    def counted(self, kind: str, call: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.counts[kind] += 1
            return call(*args, **kwargs)

        return counting

    def since(self) -> tuple[int, ...]:
        found = tuple(self.counts.values())
        self.counts = dict.fromkeys(self.counts, 0)
        return found


def built(axes: dict[str, int], shard: int, micros: int, **parallel: Any):
    cfg = layouts.config(ParallelConfig(**axes, shard=shard, **parallel), "gqa", micros)
    mesh = build_mesh(**axes)
    staged = mesh.axes.pp > 1
    net = pipeline(cfg, mesh) if staged else layouts.transformer(cfg, mesh, whole_forwards=False)
    net.to_empty(device="cpu")
    net.init_weights(0)
    return net, build_optimizer(net.named_parameters(), cfg.optim, torch.device("cpu"))


def micro_batches(rank: int, step: int, micros: int):
    draw = torch.Generator().manual_seed(100 * step + rank)
    tokens = [torch.randint(layouts.VOCAB, (2, layouts.SEQ), generator=draw) for _ in range(micros)]
    one = torch.ones(())
    return [(t, t.roll(-1, 1), None) for t in tokens], Totals(one * 512, one * 512, one * 16)


def count(rank: int, world: int, axes: dict[str, int], shard: int, micros: int, **parallel: Any):
    """Units of this rank's dense weights (the roots among them), and collectives of three steps."""
    net, optimizer = built(axes, shard, micros, **parallel)
    staged = "pp" in axes
    roots = list(net) if staged else [net]
    units = sum(1 + (1 if staged else len(root.blocks)) for root in roots)  # a stage's few blocks are one
    monkeypatch = pytest.MonkeyPatch()
    calls = Calls(monkeypatch)
    told = []
    for step in range(3):
        parts, totals = micro_batches(0, step, micros)
        if staged:
            net.forward_backward(parts, totals)
        else:
            layouts.accumulate(net, parts, totals)
        optimizer.step()
        optimizer.zero_grad()
        told.append(calls.since())
    monkeypatch.undo()
    return len(roots), units, told


@pytest.mark.parametrize(("world", "axes"), [(2, dict(ep=2)), (4, dict(pp=2, ep=2))], ids=str)
def test_collectives_of_a_step(gloo, world, axes):
    """Without ranks that share experts all that FSDP2 has is dense."""
    micros = 3
    for shard in (1, 2, 3):
        work = functools.partial(count, axes=axes, shard=shard, micros=micros)
        for roots, units, told in gloo(world, work):
            gathers = micros * (2 * units - roots) if shard == 3 else units
            assert told == [(gathers, micros * units if shard == 2 else units, 0)] * 3, (shard, told)


@pytest.mark.slow
def test_replicas_add_up_once_a_step(gloo):
    axes = dict(replicate=2, ep=2)
    for shard in (1, 2, 3):
        for _, units, told in gloo(4, functools.partial(count, axes=axes, shard=shard, micros=3)):
            experts = 3  # MoE layers, whose replicas add up as well
            assert [replicas for *_, replicas in told] == [units + experts] * 3, (shard, told)


def disturbed(rank: int, world: int, shard: int, event: str) -> dict[str, torch.Tensor]:
    """Parameters after steps between which other weights were in place for a while, or none."""
    net, optimizer = built({}, shard, 2)
    ema = Ema(net.named_parameters(), 0.5)
    for step in range(3):
        parts, totals = micro_batches(rank, step, 2)
        if event:
            with ema.swapped(), torch.no_grad():
                net(parts[0][0])
        layouts.accumulate(net, parts, totals)
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        for module in net.modules():
            if isinstance(module, FSDPModule):
                assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in module.parameters())
    return {name: p.full_tensor() for name, p in net.named_parameters()}


@pytest.mark.parametrize("shard", [1, 2])
def test_an_average_in_between_leaves_nothing_behind(gloo, shard):
    want = gloo(2, disturbed, 3, "")[0]
    got = gloo(2, disturbed, shard, "validated")[0]
    for name, p in want.items():
        torch.testing.assert_close(got[name], p, rtol=1e-5, atol=1e-6, msg=name)


def test_memory_of_the_dry_run():
    """Of 8 ranks with an eighth of the experts each, kept in bf16 by all three."""
    base = presets()["olmoe-1b-7b"]
    base = replace(base, train=replace(base.train, accumulate=2))
    cfgs = {shard: replace(base, parallel=ParallelConfig(ep=8, shard=shard)) for shard in (1, 2, 3)}
    one, two, three = (memory_per_rank(cfgs[shard], Axes(ep=8)) for shard in (1, 2, 3))
    blocks = [block_shapes(base.model, layer) for layer in range(base.model.layers)]
    P = numel(root_shapes(base.model)) + sum(numel(dense) for dense, _ in blocks)
    experts = sum(numel(shapes) for _, shapes in blocks) // 8
    assert one["gathered"] == two["gathered"] == 2 * (P + experts) > three["gathered"]
    assert one["accumulated"] == three["accumulated"] == 4 * (P + experts)
    assert two["accumulated"] == 4 * (P // 8 + experts)
    for name in one.keys() - {"gathered", "accumulated"}:
        assert one[name] == two[name] == three[name]
    assert memory_per_rank(cfgs[1], Axes()) == memory_per_rank(cfgs[3], Axes()), "a rank that is alone"


def test_what_is_no_degree():
    with pytest.raises(ConfigError, match=r"--parallel.shard=0: must be one of 1, 2, 3"):
        ParallelConfig(shard=0)  # pyrefly: ignore
