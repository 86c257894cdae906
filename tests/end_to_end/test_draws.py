"""Dropout and jitter: layouts whose ranks work on the same tokens draw the same numbers, others do not."""

import functools
from dataclasses import replace
from typing import Any

import layouts
import pytest
import torch
from tiers import slow_but

SAME = [  # all of two ranks: each works on whole sequences of its own
    dict(ep=2),
    dict(replicate=2),
    dict(etp=2),
    dict(parallel=dict(shard=1)),
    dict(parallel=dict(checkpoint="block")),
]


def drawn(rank: int, world: int, parallel: dict[str, Any] | None = None, **axes: int) -> layouts.Curve:
    """Trains with the seeds of tmoe/run/process.py."""
    torch.manual_seed(7 + rank)
    noisy = replace(layouts.GQA, dropout=0.1, moe=replace(layouts.ROUTED, jitter=0.1))
    layouts.MODELS["noisy"] = noisy
    return layouts.train(rank, world, axes=axes, model="noisy", parallel=parallel)


@pytest.fixture(scope="module")
def reference(gloo):
    return gloo(2, drawn)[0]


@pytest.mark.parametrize("layout", slow_but(SAME[:1], SAME), ids=str)
def test_the_same_tokens_draw_the_same(gloo, reference, layout):
    layouts.assert_same(gloo(2, functools.partial(drawn, **layout))[0], reference)


def test_other_tokens_draw_otherwise(gloo, reference):
    found = gloo(2, functools.partial(drawn, tp=2))[0]
    apart = max(abs(a - b) for a, b in zip(found.losses, reference.losses, strict=True))
    assert 1e-4 < apart < 0.5, "another draw, not another model"
