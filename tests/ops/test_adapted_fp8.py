"""Experts with adapters and fp8 products of the base: against merged values in fp64, and against codes alone.

next: test_adapted.py
"""

import pytest
import torch

from tmoe.base.activations import activation as named
from tmoe.ops import moe_mlp, reference
from tmoe.ops.experts.adapted import Adapters, moe_mlp_adapted
from tmoe.ops.experts.cpu import ExpertWeights
from tmoe.ops.experts.fp8_codes import Codes, encode

T, D, F, E, K, R = 70, 128, 96, 4, 2, 3
SCALES = (0.5, 2.0)
NAMES = "y x weights bias up_a up_b down_a down_b".split()


def operands(activation="swiglu", biased=False):
    """x, gate_up, down, weights, ids, bias and adapters of a size that moves y by a fifth."""
    draw = torch.Generator().manual_seed(0)
    rows = named(activation).halves * F

    def new(*shape):
        return torch.randn(*shape, generator=draw) * shape[-1] ** -0.5

    ids = torch.randint(-1, E - 1, (T, K), generator=draw, dtype=torch.int32)  # the last expert has no rows
    adapters = Adapters(new(E, R, D), new(E, rows, R), new(E, R + 1, F), new(E, D, R + 1))
    bias = new(E, rows) if biased else None
    x, weights = new(T, D) * D**0.5, torch.rand(T, K, generator=draw)
    return x, new(E, rows, D), new(E, D, F), weights, ids, bias, adapters


def codes_of(gate_up, down, activation):
    return encode(gate_up, named(activation).halves), encode(down)


def values(packed, matrix, halves):
    """The values of codes, in the shape of the matrix."""
    codes = Codes.of(packed, tuple(matrix.shape), halves)
    return torch.stack([codes.value(m) for m in range(len(codes.codes))]).view(matrix.shape)


def error(got, want):
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm())


def with_gradients(op, leaves, dy):
    for t in leaves:
        if t is not None:
            t.requires_grad_()
    y = op()
    y.backward(dy)
    return y.detach(), *(None if t is None else t.grad for t in leaves)


CASES = [("swiglu", False, ""), ("clamped", True, ""), ("relu2", False, "gate_up"), ("geglu", True, "down")]


@pytest.mark.parametrize("activation, biased, gone", CASES)
def test_gradients_are_near_those_of_merged_weights(activation, biased, gone):
    """The base is its values in fp8: what is left is the rounding of rows and tiles. gone: no adapter."""
    x, gate_up, down, weights, ids, bias, adapters = operands(activation, biased)
    adapters = Adapters(
        *(None if gone and name.startswith(gone) else t for name, t in adapters._asdict().items())
    )
    packed = codes_of(gate_up, down, activation)
    dy = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    leaves = [x, weights, bias, *adapters]
    experts = ExpertWeights(gate_up, down, bias, activation)
    got = with_gradients(
        lambda: moe_mlp_adapted(x, experts, adapters, weights, ids, scales=SCALES, codes=packed), leaves, dy
    )
    exact = [None if t is None else t.detach().double() for t in leaves]
    up_a, up_b, down_a, down_b = exact[3:]
    halves = named(activation).halves

    def merged():
        up = values(packed[0], gate_up, halves).double() + (0 if up_a is None else SCALES[0] * up_b @ up_a)
        out = values(packed[1], down, 1).double() + (0 if down_a is None else SCALES[1] * down_b @ down_a)
        return reference.moe_mlp(exact[0], up, out, exact[1], ids, exact[2], activation)

    want = with_gradients(merged, exact, dy.double())
    for name, ours, theirs in zip(NAMES, got, want, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert error(ours, theirs) < 8e-2, (name, error(ours, theirs))
    base = moe_mlp(x.detach(), gate_up, down, weights.detach(), ids, bias, activation, codes=packed)
    assert error(base, want[0]) > 0.15, "adapters that change nothing"


def test_adapters_of_zero_give_the_bits_of_the_codes():
    """Also without values of the matrices, which are never read: they are NaN."""
    x, gate_up, down, weights, ids, bias, adapters = operands("clamped", True)
    packed = codes_of(gate_up, down, "clamped")
    adapters = adapters._replace(gate_up_b=adapters.gate_up_b * 0, down_b=adapters.down_b * 0)
    nan = [torch.full_like(t, float("nan")) for t in (gate_up, down)]
    found = []
    for adapted in (False, True):
        t, s = x.clone().requires_grad_(), weights.clone().requires_grad_()
        if adapted:
            experts = ExpertWeights(*nan, bias, "clamped")
            y = moe_mlp_adapted(t, experts, adapters, s, ids, codes=packed)
        else:
            y = moe_mlp(t, *nan, s, ids, bias, "clamped", codes=packed)
        y.backward(torch.ones_like(y))
        found.append((y.detach(), t.grad, s.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_op_is_one_graph_and_what_its_schema_says():
    x, gate_up, down, weights, ids, _, adapters = operands()
    ids.clamp_(min=0)  # with absent slots the end of H is not written
    packed, experts = codes_of(gate_up, down, "swiglu"), ExpertWeights(gate_up, down, None, "swiglu")
    leaves = [t.requires_grad_() for t in (x, weights, *adapters)]
    compiled = torch.compile(moe_mlp_adapted, fullgraph=True, backend="aot_eager")
    found = [
        torch.autograd.grad(op(x, experts, adapters, weights, ids, codes=packed).square().sum(), leaves)
        for op in (compiled, moe_mlp_adapted)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    args = x, gate_up, down, weights, ids, None, *adapters, *packed, "swiglu", T * K, True, *SCALES
    torch.library.opcheck(torch.ops.tmoe.moe_mlp_adapted.default, args)
    with pytest.raises(ValueError, match="down's codes: got None"):
        moe_mlp_adapted(x, experts, adapters, weights, ids, codes=(packed[0], None))
