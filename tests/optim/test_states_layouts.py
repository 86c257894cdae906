"""Narrow states and sums of gradients in whole trainings: layouts, micro-batches, checkpoints."""

from __future__ import annotations

from functools import partial

import layouts
import pytest
import torch
from tiers import slow_but

from tmoe.config.run import LoraConfig
from tmoe.optim.states import block_of
from tmoe.parallel.copies import WorkingCopy
from tmoe.parallel.shared_copies import GatheredCopy

MASTERS = dict(states="bf16", masters="bf16", sums="bf16")
CASES = [  # processes, axes, states of the optimizer
    (2, dict(ep=2), dict(states="bf16")),
    (4, dict(dp=2, ep=2), dict(states="int8")),
    (4, dict(dp=4), dict(states="bf16")),
    (2, dict(pp=2), dict(states="int8")),
    (4, dict(replicate=2, ep=2), dict(states="bf16")),
    (2, dict(tp=2), dict(states="int8")),
    (4, dict(cp=2, etp=2), dict(states="int8")),
    (4, dict(dp=2, ep=2, shard=2), dict(states="bf16")),
]


@pytest.fixture(scope="module")
def alone(gloo):
    made: dict[str, layouts.Curve] = {}

    def train(states: str) -> layouts.Curve:
        if states not in made:
            made[states] = gloo(1, partial(layouts.train, model="wide", optim=dict(states=states)), {})[0]
        return made[states]

    return train


@pytest.mark.parametrize(("world", "axes", "optim"), slow_but(CASES[1:2], CASES))
def test_layouts_train_alike(gloo, alone, world, axes, optim):
    """fp32 sums of other orders may flip a rounding of a moment, which changes a weight by 1e-5 of it."""
    parallel = {name: axes[name] for name in axes if name == "shard"}
    axes = {name: size for name, size in axes.items() if name != "shard"}
    words = dict(model="wide", optim=optim, micros=2, parallel=parallel)
    found = gloo(world, partial(layouts.train, **words), axes)[0]
    layouts.assert_same(found, alone(optim["states"]), 2e-3)


def test_most_matrices_of_these_layouts_are_quantised():
    cfg = layouts.config(layouts.ParallelConfig(), "wide", 1, optim=dict(states="int8"))
    with torch.device("meta"):
        found = {n for n, p in layouts.Transformer(cfg.model).named_parameters() if block_of(p)}
    names = "moe.experts.gate_up", "moe.experts.down", "attention.qkv.weight"
    assert found >= {"embedding.weight", *(f"blocks.1.{name}" for name in names)}


def gradients(rank: int, world: int, sums: str, micros: int, axes: dict[str, int]):
    """Gradients of one step by name, with each of its micro-batches alone, and both types of the sums."""
    cfg = layouts.config(layouts.ParallelConfig(**axes), "gqa", micros, dtype="bf16", optim=dict(sums=sums))
    mesh = layouts.build_mesh(**axes)
    net = layouts.transformer(cfg, mesh, True)
    net.to_empty(device="cpu")
    net.init_weights(0)
    optimizer = layouts.build_optimizer(net.named_parameters(), cfg.optim, torch.device("cpu"))
    tokens, targets, _ = next(iter(layouts.batches(False)))
    counts = ((targets != -100).sum(), targets.numel(), layouts.SEQUENCES)
    totals = layouts.Totals(*(torch.as_tensor(float(count)) for count in counts))
    per = layouts.SEQUENCES // world // micros
    rows = [slice((a * world + rank) * per, (a * world + rank + 1) * per) for a in range(micros)]
    kinds = set()
    real = WorkingCopy.give

    def give(self, grad):
        real(self, grad)
        kinds.add(self.master.grad.dtype)

    WorkingCopy.give = give
    try:
        layouts.accumulate(net, [(tokens[r], targets[r], None) for r in rows], totals)
    finally:
        WorkingCopy.give = real
    found = {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).float()
        for name, p in net.named_parameters()
    }
    optimizer.step()
    return found, kinds


@pytest.mark.parametrize(("world", "axes"), [(1, {}), (4, dict(dp=2, ep=2))])
def test_sums_in_bf16_are_those_in_fp32_but_for_rounding(gloo, world, axes):
    """Each of 2 additions rounds by at most 2^-9 of a partial sum; the reduction over ranks stays fp32."""
    wide, narrow = (gloo(world, gradients, sums, 2, axes)[0] for sums in ("fp32", "bf16"))
    differs = 0
    for name, want in wide[0].items():
        got = narrow[0][name]
        far = (got - want).norm() / want.norm().clamp(min=1e-6)
        assert far < 2e-2, (name, far)
        differs += not torch.equal(got, want)
    assert differs, "sums in bf16 round somewhere"
    if world == 1:
        assert (wide[1], narrow[1]) == ({torch.float32}, {torch.bfloat16})


@pytest.mark.slow
def test_bf16_masters_train(gloo):
    """All narrow settings together, on two meshes: the weights are bf16, and the loss falls as with fp32."""
    words = dict(dtype="bf16", micros=2)
    narrow = gloo(4, partial(layouts.train, optim=MASTERS, **words), dict(dp=2, ep=2))[0]
    assert {p.dtype for p in narrow.parameters.values()} == {torch.bfloat16}
    wide = gloo(1, partial(layouts.train, **words), {})[0]
    assert narrow.losses[0] == pytest.approx(wide.losses[0], rel=5e-3)
    assert narrow.losses[-1] == pytest.approx(wide.losses[-1], rel=3e-2)


def sums_of(rank: int, world: int, sums: str, axes: dict[str, int], words: dict):
    """Losses and parameters of a training, and the types of the sums that tmoe made in it."""
    kinds = set()
    give, send = WorkingCopy.give, GatheredCopy.send

    def given(self, grad):
        give(self, grad)
        if type(self) is WorkingCopy:  # a gathered copy is given what ranks added up in fp32
            kinds.add(self.master.grad.dtype)

    def sent(self, grad):
        kinds.add(grad.dtype)
        send(self, grad)

    WorkingCopy.give, GatheredCopy.send = given, sent
    curve = layouts.train(rank, world, axes, optim=dict(sums=sums), dtype="bf16", **words)
    return curve, kinds


LORA = LoraConfig(rank=4)
SUMMED = [  # processes, axes, settings; experts of dp are gathered or sharded by FSDP2
    (4, dict(pp=2, dp=2), dict(micros=4, parallel=dict(schedule="v"))),
    (2, dict(pp=2), dict(micros=4)),
    (2, dict(pp=2), dict(micros=4, parallel=dict(schedule="interleaved"), model="deep")),
    (4, dict(pp=2, ep=2), dict(micros=4, lora=LORA)),
    (2, dict(tp=2), dict(micros=2)),
    (4, dict(cp=2, ep=2), dict(micros=2, whole_forwards=False)),
    (2, dict(dp=2), dict(micros=2, lora=LORA)),
    (2, dict(dp=2), dict(micros=2, parallel=dict(shard=1))),
]


@pytest.mark.parametrize(("world", "axes", "words"), slow_but(SUMMED[1:2], SUMMED))
def test_every_layout_sums_in_bf16(gloo, world, axes, words):
    """After three steps losses differ by rounding: 2^-9 of a gradient, where the learning rate is 3e-3."""
    (wide, before), (narrow, after) = (
        gloo(world, sums_of, sums, axes, words)[0] for sums in ("fp32", "bf16")
    )
    assert torch.float32 in before or not before
    assert after <= {torch.bfloat16}
    assert narrow.losses == pytest.approx(wide.losses, rel=1e-2)
    moved = [name for name, p in wide.parameters.items() if not torch.equal(narrow.parameters[name], p)]
    assert moved, "sums in bf16 round somewhere"
