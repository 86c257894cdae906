"""moe_mlp_adapted on the CPU: values and gradients of merged weights, in fp64."""

import pytest
import torch

from tmoe.base.activations import activation as named
from tmoe.ops import moe_mlp, reference
from tmoe.ops.experts.adapted import NAMES, Adapters, moe_mlp_adapted
from tmoe.ops.experts.cpu import ExpertWeights

T, D, F, E, K, R = 37, 16, 12, 5, 3, 2


def operands(dtype=torch.float64, activation="swiglu", biased=False):
    """x, both matrices, weights, ids, bias, adapters; an expert has no rows, and some slots are elsewhere."""
    draw = torch.Generator().manual_seed(0)

    def new(*shape):
        return (torch.randn(*shape, generator=draw, dtype=torch.float64) * 0.4).to(dtype)

    rows = named(activation).halves * F
    x, gate_up, down, weights = new(T, D), new(E, rows, D), new(E, D, F), new(T, K)
    ids = torch.rand(T, E, generator=draw).topk(K).indices.int()
    ids[ids == 3] = -1
    ids[0] = -1
    adapters = Adapters(new(E, R, D), new(E, rows, R), new(E, R + 1, F), new(E, D, R + 1))
    return x, gate_up, down, weights, ids, new(E, rows) if biased else None, adapters


def merged(matrix, a, b, scale):
    return matrix if a is None else matrix + scale * b @ a


def without(adapters, gone):
    return Adapters(*(None if name.startswith(gone) else t for name, t in adapters._asdict().items()))


CASES = [
    ("swiglu", False, "none"),
    ("clamped", True, "none"),
    ("relu2", False, "none"),
    ("swiglu", False, "gate_up"),
    ("swiglu", True, "down"),
]


@pytest.mark.parametrize(("activation", "biased", "gone"), CASES)
def test_gradients_are_those_of_merged_weights(activation, biased, gone):
    """To 1e-12 of the largest of each; gone: the matrix without an adapter."""
    x, gate_up, down, weights, ids, bias, adapters = operands(activation=activation, biased=biased)
    adapters = without(adapters, gone)
    leaves = [t for t in (x, weights, bias, *adapters) if t is not None]
    for t in leaves:
        t.requires_grad_()
    experts, scales = ExpertWeights(gate_up, down, bias, activation), (0.5, 3.0)
    got = moe_mlp_adapted(x, experts, adapters, weights, ids, scales=scales)
    up, down = (
        merged(matrix, getattr(adapters, f"{name}_a"), getattr(adapters, f"{name}_b"), scale)
        for name, matrix, scale in zip(("gate_up", "down"), (gate_up, down), scales, strict=True)
    )
    want = reference.moe_mlp(x, up, down, weights, ids, bias, activation)
    dy = torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs = [(got, want)]
    pairs += zip(*(torch.autograd.grad(y, leaves, dy) for y in (got, want)), strict=True)
    for ours, theirs in pairs:
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_zero_give_the_bits_of_the_base(dtype):
    x, gate_up, down, weights, ids, bias, adapters = operands(dtype, biased=True)
    weights = weights.float()
    adapters = adapters._replace(gate_up_b=adapters.gate_up_b * 0, down_b=adapters.down_b * 0)
    found = []
    for args in ((), (adapters,)):
        t = x.clone().requires_grad_()
        op = moe_mlp_adapted if args else moe_mlp
        call = (ExpertWeights(gate_up, down, bias, "swiglu"), *args) if args else (gate_up, down)
        y = op(t, *call, weights, ids, *([] if args else [bias]))
        y.backward(torch.ones_like(y))
        found.append((y.detach(), t.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_row_has_its_bits_whatever_is_beside_it():
    x, gate_up, down, weights, ids, _, adapters = operands(torch.float32)
    whole = moe_mlp_adapted(x, ExpertWeights(gate_up, down, None, "swiglu"), adapters, weights, ids)
    experts = ExpertWeights(gate_up, down, None, "swiglu")
    for rows in (slice(1, 2), slice(5, 12)):
        part = moe_mlp_adapted(x[rows], experts, adapters, weights[rows], ids[rows])
        assert torch.equal(part, whole[rows])


def test_compiled_as_one_graph():
    x, gate_up, down, weights, ids, _, adapters = operands()
    leaves = [t.requires_grad_() for t in (x, weights, *adapters)]
    args = (x, ExpertWeights(gate_up, down, None, "swiglu"), adapters, weights, ids)
    compiled = torch.compile(moe_mlp_adapted, fullgraph=True, backend="aot_eager")
    found = [torch.autograd.grad(op(*args).square().sum(), leaves) for op in (compiled, moe_mlp_adapted)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_op_is_what_its_schema_says():
    x, gate_up, down, weights, ids, bias, adapters = operands(torch.float32, biased=True)
    ids.clamp_(min=0)  # with absent slots the end of H is not written
    adapters.gate_up_a.requires_grad_()
    args = (x, gate_up, down, weights, ids, bias, *adapters, None, None, "swiglu", T * K, True, 0.5, 2.0)
    torch.library.opcheck(torch.ops.tmoe.moe_mlp_adapted.default, args)


def test_what_does_not_fit_is_named():
    x, gate_up, down, weights, ids, _, adapters = operands(torch.float32)
    experts = ExpertWeights(gate_up, down, None, "swiglu")
    for name in NAMES:
        wrong = adapters._replace(**{name: getattr(adapters, name)[:, :, 1:]})
        with pytest.raises(ValueError, match=rf"^{name[:4]}.*valid is"):
            moe_mlp_adapted(x, experts, wrong, weights, ids)
    with pytest.raises(ValueError, match="down_a, down_b: got one of them alone"):
        moe_mlp_adapted(x, experts, adapters._replace(down_b=None), weights, ids)
    wrong = adapters._replace(down_a=adapters.down_a.double())
    with pytest.raises(ValueError, match=r"down_a: got torch.float64, valid is x's torch.float32"):
        moe_mlp_adapted(x, experts, wrong, weights, ids)
    gate_up.requires_grad_()
    with pytest.raises(ValueError, match="gate_up: got a tensor that needs a gradient"):
        moe_mlp_adapted(x, experts, adapters, weights, ids)
