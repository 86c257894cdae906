"""Frozen experts: the same gradients for all else, and none of their own products."""

import pytest
import torch

from tmoe.ops import moe_mlp
from tmoe.ops.experts import cpu

T, D, F, E, K = 37, 16, 12, 4, 2


def operands(dtype, biased):
    torch.manual_seed(0)
    x = torch.randn(T, D, dtype=dtype)
    matrices = torch.randn(E, 2 * F, D, dtype=dtype), torch.randn(E, D, F, dtype=dtype)
    weights = torch.rand(T, K, dtype=dtype)
    bias = torch.randn(E, 2 * F, dtype=dtype) if biased else None
    return x, *matrices, weights, torch.randint(-1, E, (T, K)), bias


def gradients(op, tensors, which):
    leaves = [t if t is None else t.detach().clone() for t in tensors]
    for i in which:
        leaves[i].requires_grad_()
    y = op(*leaves)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return [y.detach(), *(leaves[i].grad for i in which)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_all_else_gets_its_gradients_and_the_experts_cost_nothing(biased, compiled, monkeypatch):
    tensors = operands(torch.float64, biased)
    others = [0, 3, 5] if biased else [0, 3]
    y, _, _, *want = gradients(moe_mlp, tensors, [1, 2, *others])
    monkeypatch.setattr(cpu, "gradients_of_matrices", None)  # a call would raise
    op = torch.compile(moe_mlp, fullgraph=True, backend="aot_eager") if compiled else moe_mlp
    for ours, theirs in zip(gradients(op, tensors, others), [y, *want], strict=True):
        assert torch.equal(ours, theirs)


def test_one_trained_matrix_gets_its_gradient():
    tensors = operands(torch.float64, False)
    both = gradients(moe_mlp, tensors, [1, 2])
    for place in (1, 2):
        assert torch.equal(gradients(moe_mlp, tensors, [place])[1], both[place])


def test_the_frozen_op_is_what_its_schema_says():
    tensors = list(operands(torch.float32, True))
    tensors[4].clamp_(min=0)  # with absent slots the end of H is not written
    tensors[0].requires_grad_()
    args = *tensors, None, None, "swiglu", T * K, True
    torch.library.opcheck(torch.ops.tmoe.moe_mlp_frozen.default, args)
