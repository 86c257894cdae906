"""Weight gradients that ops add to sums themselves: against fp64 and autograd's way, and edge cases."""

import pytest
import torch
import torch.nn.functional as F
from gradient_sum import Sum
from torch import Tensor

from tmoe.ops import gradient_sums, moe_mlp, reference
from tmoe.ops.experts.deferred import collecting
from tmoe.ops.experts.op import moe_mlp_deferred, moe_mlp_summed
from tmoe.ops.linear import linear_summed

D, WIDTH, E, K = 16, 12, 5, 3


def micro_batches(dtype: torch.dtype, n: int = 4, T: int = 41) -> tuple[list[Tensor], list[tuple]]:
    """gate_up and down; and of each micro-batch x, weights, ids and the gradient of y."""
    draw = torch.Generator().manual_seed(5)
    matrices = [torch.randn(*shape, generator=draw).to(dtype) for shape in ((E, 2 * WIDTH, D), (E, D, WIDTH))]
    batches = []
    for i in range(n):
        x, dy = (torch.randn(T, D, generator=draw).to(dtype) for _ in range(2))
        ids = torch.randint(-1, E - 1 - i % 2, (T, K), generator=draw)  # the last expert has no rows
        batches.append((x, torch.rand(T, K, generator=draw).to(dtype), ids, dy))
    return matrices, batches


def by_autograd(matrices: list[Tensor], batches: list[tuple], op=moe_mlp) -> list[Tensor]:
    """fp32 sums of gradients, each of which autograd gets in the matrices' type: how FSDP2 sums."""
    sums = [torch.zeros(t.shape, dtype=torch.promote_types(t.dtype, torch.float32)) for t in matrices]
    for x, weights, ids, dy in batches:
        leaves = [t.clone().requires_grad_() for t in matrices]
        op(x.clone().requires_grad_(), *leaves, weights, ids).backward(dy)
        for total, leaf in zip(sums, leaves, strict=True):
            total += leaf.grad
    return sums


def landed(matrices: list[Tensor], batches: list[tuple], op=moe_mlp_summed) -> list[Tensor]:
    """The same sums by the op. Deferred gradients are computed after all backwards."""
    sums = [Sum(t) for t in matrices]
    with collecting() as left:
        for x, weights, ids, dy in batches:
            op(x.clone().requires_grad_(), *matrices, weights, ids).backward(dy)
    for layer in left:
        into = sums[0].open(), sums[1].open()
        for total, target, grad in zip(sums, into, layer.gradients(into), strict=True):
            total.close(target, grad)
    assert [total.count for total in sums] == [len(batches)] * 2
    return [total.total for total in sums]


def exact(matrices: list[Tensor], batches: list[tuple]) -> list[Tensor]:
    wide = [tuple(t.double() if t.is_floating_point() else t for t in batch) for batch in batches]
    return by_autograd([t.double() for t in matrices], wide, reference.moe_mlp)


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("op", [moe_mlp_summed, moe_mlp_deferred])
def test_sums_are_nearer_to_fp64_than_sums_of_rounded_gradients(op):
    """In bf16 the experts' inputs are rounded as well, so both ways are compared where inputs are the same.

    dH and the activation that both ways multiply are those of the op, so the difference between the ways is
    the rounding of the products alone: 2^-9 of each, and none.
    """
    matrices, batches = micro_batches(torch.bfloat16)
    want = exact(matrices, batches)
    with_rounding = errors(by_autograd(matrices, batches), want)
    without = errors(landed(matrices, batches, op), want)
    for ours, theirs in zip(without, with_rounding, strict=True):
        assert ours < 0.97 * theirs


@pytest.mark.parametrize("op", [moe_mlp_summed, moe_mlp_deferred])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_micro_batch_is_rounded_to_the_gradient_that_autograd_gets(dtype, op):
    matrices, batches = micro_batches(dtype, 1)
    for ours, theirs in zip(landed(matrices, batches, op), by_autograd(matrices, batches), strict=True):
        # MKL's and the CPU's bf16 product may differ by a rounding where the sum has another order
        assert torch.allclose(ours.to(dtype).float(), theirs, rtol=1e-2 if dtype == torch.bfloat16 else 0)


def test_in_fp32_the_sums_have_autograds_bits():
    matrices, batches = micro_batches(torch.float32)
    for op in (moe_mlp_summed, moe_mlp_deferred):
        for ours, theirs in zip(landed(matrices, batches, op), by_autograd(matrices, batches), strict=True):
            assert torch.equal(ours, theirs)


def test_other_gradients_are_moe_mlps():
    matrices, (batch, *_) = micro_batches(torch.float32)
    x, weights, ids, dy = batch
    bias = torch.randn(E, 2 * WIDTH)
    sums = [Sum(t) for t in matrices]
    found = []
    for op in (moe_mlp, moe_mlp_summed):
        leaves = [t.clone().requires_grad_() for t in (x, weights, bias)]
        y = op(leaves[0], *matrices, leaves[1], ids, leaves[2])
        y.backward(dy)
        found.append([y.detach(), *(t.grad for t in leaves)])
    assert all(map(torch.equal, *found)) and sums[0].count == 1


def test_no_tokens_write_zeros_or_add_nothing():
    matrices, batches = micro_batches(torch.bfloat16, 1, T=0)
    assert not any(total.any() for total in landed(matrices, batches * 2))
    full = micro_batches(torch.bfloat16, 1)[1]
    for some, none in zip(landed(matrices, full), landed(matrices, full + batches), strict=True):
        assert torch.equal(some, none)


def test_a_sum_in_a_narrower_type():
    matrices, batches = micro_batches(torch.float32)
    sums = [Sum(t, torch.bfloat16) for t in matrices]
    for x, weights, ids, dy in batches:
        moe_mlp_summed(x.clone().requires_grad_(), *matrices, weights, ids).backward(dy)
    assert max(errors([total.total.double() for total in sums], exact(matrices, batches))) < 1e-2


def test_no_gradient_is_lost():
    matrices, (batch, *_) = micro_batches(torch.float32)
    x, weights, ids, dy = batch
    for name, i in (("gate_up", 0), ("down", 1)):
        wanted = [t.clone().requires_grad_(i == j) for j, t in enumerate(matrices)]
        with pytest.raises(ValueError, match=f"{name}: got a tensor that needs a gradient"):
            moe_mlp_summed(x, *wanted, weights, ids)
    sums = [Sum(t) for t in matrices]
    y = moe_mlp_summed(x.clone().requires_grad_(), *matrices, weights, ids)
    del sums[1]
    with pytest.raises(RuntimeError, match=rf"shape \({E}, {D}, {WIDTH}\) has no sum of gradients"):
        y.backward(dy)
    assert gradient_sums.find(matrices[0]) is sums[0] and gradient_sums.find(matrices[1]) is None


def test_the_op_is_what_its_schema_says():
    matrices, (batch, *_) = micro_batches(torch.float32)
    x, weights, ids, _ = batch
    ids = ids.clamp(min=0)  # with absent slots the end of H is not written
    op = torch.ops.tmoe.moe_mlp_summed
    x.requires_grad_()
    checks = "test_schema", "test_autograd_registration", "test_faketensor"  # others copy the matrices
    args = x, *matrices, weights, ids, None, None, None, "swiglu", ids.numel(), True
    torch.library.opcheck(op.default, args, test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_dense_matrix(dtype):
    """Sums of four micro-batches, compared with fp64; y and dx are those of F.linear."""
    draw = torch.Generator().manual_seed(2)
    weight = torch.randn(6, 8, generator=draw).to(dtype)
    total, rounded = Sum(weight), torch.zeros(6, 8)
    want = torch.zeros(6, 8, dtype=torch.float64)
    for T in (7, 1, 0, 33):
        x, dy = (torch.randn(T, n, generator=draw).to(dtype) for n in (8, 6))
        leaf = weight.clone().requires_grad_()
        found = []
        for op, matrix in ((F.linear, leaf), (linear_summed, weight)):
            a = x.clone().requires_grad_()
            y = op(a, matrix)
            y.backward(dy)
            found.append((y.detach(), a.grad))
        assert all(map(torch.equal, *found))
        rounded += leaf.grad
        want += dy.double().T @ x.double()
    ours, theirs = errors([total.total, rounded], [want, want])
    assert ours < (1e-5 if dtype == torch.bfloat16 else 1e-6) and ours <= theirs * 1.5
    with pytest.raises(ValueError, match="weight: got a tensor that needs a gradient"):
        linear_summed(x, leaf)
    with pytest.raises(ValueError, match=r"weight: got shape \(6, 8\)"):
        linear_summed(x[:, :4], weight)
