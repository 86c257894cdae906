"""Narrow states with gradients that ops add to their sums.

next: tests/optim/test_states_layouts.py
"""

from __future__ import annotations

from functools import partial

import layouts
import pytest
import torch
from tiers import slow_but

from tmoe.parallel.copies import WorkingCopy
from tmoe.parallel.shared_copies import GatheredCopy

WORDS = dict(model="wide", dtype="bf16", micros=4, documents=False)
KINDS = [  # processes, axes, optimizer; whether ops add to sums
    (1, {}, dict(states="bf16", masters="bf16"), True),
    (1, {}, dict(states="int8"), True),
    (1, {}, dict(states="bf16", masters="bf16", sums="bf16"), False),
    (2, dict(ep=2), dict(states="int8", masters="bf16"), True),
    (2, dict(dp=2), dict(states="bf16", sums="bf16"), False),
    (2, dict(dp=2), dict(states="bf16", masters="bf16"), True),
    (2, dict(pp=2), dict(states="bf16", masters="bf16"), True),
]


def trained(rank: int, world: int, axes: dict[str, int], optim: dict[str, str]):
    """A training, and the types of the sums that ops added to."""
    kinds = set()

    def watch(kind):
        opened = kind.open

        def watched(self, *args):
            target = opened(self, *args)
            if target.add:
                kinds.add(target.tensor.dtype)
            return target

        kind.open = watched

    watch(WorkingCopy)
    watch(GatheredCopy)
    return layouts.train(rank, world, axes, optim=optim, **WORDS), kinds


@pytest.mark.parametrize(("world", "axes", "optim", "adds"), slow_but(KINDS[:1], KINDS))
def test_narrow_states_train_with_sums(gloo, world, axes, optim, adds):
    """Ops add to sums in fp32 even if the weights are bf16; the rest follows the same course."""
    curve, kinds = gloo(world, trained, axes, optim)[0]
    assert kinds == ({torch.float32} if adds else set())
    wide = gloo(world, partial(layouts.train, **WORDS), axes)[0]
    assert curve.losses == pytest.approx(wide.losses, rel=2e-2)
    assert {p.dtype for p in curve.parameters.values()} == {
        torch.bfloat16 if optim.get("masters") else torch.float32
    }
