"""Adapters train the same in every layout: losses, norms and weights of a slow twin in one process.

The twin merges W + b a of every expert in each forward, and lets autograd find the gradients.

next: tests/model/test_lora.py
"""

import functools

import layouts
import pytest
import torch
from tiers import slow_but

from tmoe.config.run import LoraConfig
from tmoe.model.lora import is_adapter
from tmoe.moe import experts
from tmoe.ops import moe_mlp

LORA = LoraConfig(rank=6, alpha=12.0)
EAGER = dict(documents=False, compile=True, inductor=False)  # graphs that PyTorch runs
LAYOUTS = [  # (processes, axes, model, what else differs)
    (1, {}, "gqa", {}),
    (1, {}, "gqa", dict(micros=2, parallel=dict(checkpoint="block"))),
    (1, {}, "gpt_oss", {}),
    (1, {}, "gqa", dict(documents=False, compile=True)),
    (2, dict(ep=2), "gqa", {}),
    (2, dict(ep=2), "gqa", EAGER | dict(parallel=dict(checkpoint="moe"))),
    (2, dict(dp=2), "gqa", {}),
    (2, dict(dp=2), "gqa", dict(parallel=dict(gathered_gib=0))),
    (2, dict(dp=2), "gqa", dict(micros=2, parallel=dict(gathered_gib=0, shard=1))),
    (4, dict(dp=2, ep=2), "gqa", dict(micros=2)),
    (4, dict(dp=2, ep=2), "gpt_oss", dict(parallel=dict(gathered_gib=0))),
    (4, dict(replicate=2, ep=2), "gqa", {}),
    (2, dict(ep=2), "gqa", dict(parallel=dict(adaptive_r=0))),
    (4, dict(ep=2, dp=2), "gpt_oss", dict(micros=2, parallel=dict(adaptive_r=0, gathered_gib=0))),
    (2, dict(ep=2), "gqa", EAGER | dict(parallel=dict(adaptive_r=0))),
    (2, dict(etp=2), "gqa", {}),
    (4, dict(etp=2, ep=2), "gpt_oss", {}),
    (4, dict(etp=2, ep=2), "narrow", {}),
    (2, dict(tp=2), "gqa", {}),
    (4, dict(tp=2, ep=2), "gqa", dict(parallel=dict(tp_pieces=2, checkpoint="block"))),
    (4, dict(tp=2, ep=2), "gpt_oss", dict(documents=False)),
    (4, dict(tp=2, ep=2), "latent", {}),
    (2, dict(tp=2), "latent_0", {}),
    (2, dict(cp=2), "gqa", {}),
    (4, dict(cp=2, tp=2, ep=2), "latent", {}),
    (2, dict(pp=2), "gqa", dict(micros=2)),
    (4, dict(pp=2, ep=2), "gqa", dict(micros=4, parallel=dict(schedule="v"))),
    (4, dict(pp=2, dp=2), "olmoe", dict(micros=2)),
    (2, dict(ep=2), "latent", {}),
    (2, dict(ep=2), "capacity", {}),
    (2, dict(ep=2), "padded", {}),
    (2, dict(tp=2), "linear", {}),
    (2, dict(cp=2), "linear", dict(parallel=dict(cp_exchange="heads"))),
    (2, dict(tp=2), "mimo", {}),
    (2, dict(pp=2), "kinds", dict(micros=2, parallel=dict(cut=(3, 1)))),
]
FAST = [LAYOUTS[i] for i in (0, 4, 18)]


def merged(x, matrices, adapters, weights, ids, pairs=None, scales=(1, 1), codes=None):
    """moe_mlp_adapted, slowly."""
    assert codes is None
    gate_up, down, *how = matrices
    up_a, up_b, down_a, down_b = adapters
    gate_up, down = gate_up + scales[0] * up_b @ up_a, down + scales[1] * down_b @ down_a
    return moe_mlp(x, gate_up, down, weights, ids, *how, pairs)


def curve(rank, world, axes, model, changes, twin):
    if twin:
        experts.moe_mlp_adapted = merged
    return layouts.train(rank, world, axes, model, lora=LORA, **changes)


@functools.cache
def expected(gloo, model, documents):
    """The twin's curve, on one process."""
    return gloo(1, curve, {}, model, dict(documents=documents), True)[0]


@pytest.mark.parametrize(("world", "axes", "model", "changes"), slow_but(FAST, LAYOUTS), ids=str)
def test_adapters_are_trained_as_the_twin_trains_them(gloo, world, axes, model, changes):
    """Three steps to 1e-6, and the base stays as it was, in every bit.

    The rows that a capacity drops depend on the layout, so the twin has the same layout there.
    """
    if model == "capacity":
        want = gloo(world, curve, axes, model, changes, True)[0]
    else:
        want = expected(gloo, model, changes.get("documents", True))
    for got in gloo(world, curve, axes, model, changes, False):
        for ours, theirs in ((got.losses, want.losses), (got.norms, want.norms)):
            far = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
            assert far < 1e-6, (ours, theirs)
        assert got.parameters.keys() == want.parameters.keys()
        for name, p in want.parameters.items():
            if not is_adapter(name):
                assert torch.equal(got.parameters[name], p), name
            else:
                far = (got.parameters[name] - p).norm() / p.norm()
                assert p.any() and far < 1e-5, (name, far.item())
