"""Frozen experts in fp8, with and without adapters: layouts agree, the base keeps its bits, values are freed.

next: tests/ops/test_adapted_fp8.py
"""

from __future__ import annotations

import functools
import re

import layouts
import pytest
import torch
from tiers import slow_but
from torch import nn

from tmoe.config.run import LoraConfig
from tmoe.model.lora import is_adapter
from tmoe.ops.experts.fp8_codes import codes_of, encode
from tmoe.parallel import values_away
from tmoe.parallel.copies import WorkingCopy, make_stale

EXPERTS, DOWN = re.compile(r"experts\.(gate_up|down)$"), re.compile(r"experts\.down$")

FP8 = dict(fp8="experts", fp8_everywhere=True)
WHAT = dict(
    lora=dict(lora=LoraConfig(rank=6, alpha=12.0)),
    frozen=dict(optim=dict(freeze=r"experts\.(gate_up|down)$")),
    half=dict(optim=dict(freeze=r"experts\.down$")),
)
LAYOUTS = [  # (processes, axes, what is trained, what else differs)
    (2, dict(dp=2), "lora", {}),  # experts gathered once, then freed
    (2, dict(ep=2), "frozen", {}),
    (2, dict(dp=2), "frozen", dict(parallel=dict(gathered_gib=0))),  # FSDP2 gathers them
    (2, dict(dp=2), "frozen", dict(micros=2, parallel=dict(checkpoint="block"))),
    (1, {}, "lora", dict(compile=True, inductor=False)),
    (2, dict(pp=2), "lora", dict(micros=4, parallel=dict(schedule="v"))),
    (4, dict(dp=2, ep=2), "half", {}),
]


def trained(rank, world, axes, what, changes):
    """The curve, and for each copy with codes whether it is frozen, and the bytes of its values.

    Parameters move to "the host", which has the same memory here.
    """
    values_away.moves = lambda local: True
    made, init = [], WorkingCopy.__init__

    def noting(self, *args, **more):
        init(self, *args, **more)
        made.append(self)

    WorkingCopy.__init__ = noting
    curve = layouts.train(rank, world, axes, train=FP8, **WHAT[what], **changes)
    WorkingCopy.__init__ = init
    coded = [copy for copy in made if copy.codes]
    return curve, [(copy.frozen, copy.tensor.untyped_storage().size()) for copy in coded]


@pytest.fixture(scope="module")
def alone(gloo):
    """The results of one process."""
    return functools.cache(lambda what: gloo(1, trained, {}, what, {})[0])


@pytest.mark.parametrize(("world", "axes", "what", "more"), slow_but(LAYOUTS[:2], LAYOUTS), ids=str)
def test_layouts_agree(gloo, alone, world, axes, what, more):
    """To 3e-5 in fp32, as trained experts in fp8; values of frozen experts are freed, of trained ones not."""
    want, kept = alone(what)
    assert kept and all((size == 0) == frozen for frozen, size in kept)
    for got, copies in gloo(world, trained, axes, what, more):
        layouts.assert_same(got, want, 3e-5)
        assert all((size == 0) == frozen for frozen, size in copies)
        assert bool(copies) == (more.get("parallel", {}).get("gathered_gib") != 0)


@pytest.mark.parametrize("what", slow_but(["lora"], WHAT))
def test_the_base_keeps_every_bit(gloo, alone, what):
    """It is that of a run without fp8, and the rest is as near to that run as fp8 is."""
    plain = gloo(1, functools.partial(layouts.train, **WHAT[what]), {})[0]
    got = alone(what)[0]
    base = {"lora": lambda name: not is_adapter(name), "frozen": EXPERTS.search, "half": DOWN.search}[what]
    assert any(map(base, got.parameters))
    for name, p in plain.parameters.items():
        assert torch.equal(got.parameters[name], p) == bool(base(name)), name
    apart = max(abs(a / b - 1) for a, b in zip(got.losses, plain.losses, strict=True))
    assert 1e-7 < apart < 1e-2


def test_a_copy_follows_a_frozen_parameter_that_is_written():
    """Written by name, in its local memory, or by code that calls make_stale: codes and values are new."""
    for write in (
        lambda p: p.mul_(2),
        lambda p: p.detach().mul_(2),
        lambda p: (p.data.mul_(2), make_stale([p])),
    ):
        master = nn.Parameter(torch.randn(2, 32, 32), requires_grad=False)
        copy = master.working_copy = WorkingCopy(master, torch.bfloat16)
        for coded in (True, True, False, True):
            copy.refresh(coded)
            assert torch.equal(codes_of(copy.tensor, copy.tensor, 1), encode(master.bfloat16()))
            assert coded or torch.equal(copy.tensor, master.bfloat16())
            copy.rest(coded)
            assert (copy.tensor.untyped_storage().size() == 0) == coded
        with torch.no_grad():
            write(master)
        copy.refresh(True)
        assert not copy.codes and torch.equal(copy.tensor, master.bfloat16())
