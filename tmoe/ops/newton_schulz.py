"""Newton-Schulz on stacks of matrices: each matrix becomes nearly orthogonal, as Muon's updates are.

The iteration is X <- a X + (b A + c A^2) X with A = X X^T, after division by the norm; `newton_schulz` in
reference.py is its definition for one matrix. A stack [E, out, in] is a batch: a matrix has the result
that it has alone. Products are in the type of X, with fp32 sums. The Gram form, which iterates on A
alone, has 2.5 times the error in bf16, and is not used.

On a GPU an iteration of 16-bit matrices is three launches without a pass over memory between them:

    A = s^2 X X^T          M = s (a I + b A + c A^2)          X <- M X

The factor s divides by the norm in the first iteration; later it is 1.

next: optim/muon.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from tmoe.ops.reference import SLACK, TINY, polynomials
from tmoe.ops.symmetric import Terms, stacked_product, symmetric_product

CHUNK = 2**29  # most elements of the matrices that are iterated at a time: 1 GiB in bf16


@torch.no_grad()
def orthogonal(
    matrices: Tensor, iterations: int = 5, squares: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Nearly U V^T of each matrix U S V^T; a matrix of zeros stays zero.

    matrices: [..., out, in] in fp32, bf16 or fp64, which is the type of the products and of the result.
    squares: fp32 [...], the sum of squares of each matrix; None: computed here.
    out: a tensor of this shape and type, to which the result is written; None: a new one.
    ValueError for fewer than two axes.
    """
    if matrices.ndim < 2:
        raise ValueError(f"orthogonal: matrices of shape {list(matrices.shape)}, valid: [..., out, in]")
    rows, columns = matrices.shape[-2:]
    result = torch.empty_like(matrices, memory_format=torch.contiguous_format) if out is None else out
    if not matrices.numel():
        return result
    stack, into = matrices.reshape(-1, rows, columns), result.view(-1, rows, columns)
    if stack.stride(-1) != 1:
        stack = stack.contiguous()
    wide = torch.promote_types(stack.dtype, torch.float32)
    at_a_time = max(1, CHUNK // (rows * columns))
    for begin in range(0, len(stack), at_a_time):
        part = stack[begin : begin + at_a_time]
        if squares is None:
            norm = torch.linalg.vector_norm(part, dim=(-2, -1), dtype=wide)
        else:
            norm = squares.reshape(-1)[begin : begin + at_a_time].sqrt()
        _iterated(part, 1 / (norm * SLACK + TINY), iterations, into[begin : begin + at_a_time])
    return result


def _iterated(stack: Tensor, scales: Tensor, iterations: int, out: Tensor) -> None:
    """Writes `orthogonal` of a stack [E, out, in] to `out`. scales [E]: the inverse of each norm."""
    by_kernels = stack.is_cuda and stack.dtype in (torch.bfloat16, torch.float16) and iterations > 0
    (by_three_launches if by_kernels else by_torch)(stack, scales, iterations, out)


def by_torch(stack: Tensor, scales: Tensor, iterations: int, out: Tensor) -> None:
    """`_iterated` by products of torch, with passes over memory between them."""
    x = (stack * scales.view(-1, 1, 1)).to(stack.dtype)
    tall = x.shape[-2] > x.shape[-1]
    for a, b, c in polynomials(iterations):
        gram = x.mT @ x if tall else x @ x.mT
        mix = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, mix, beta=a) if tall else torch.baddbmm(x, mix, x, beta=a)
    out.copy_(x)


def by_three_launches(stack: Tensor, scales: Tensor, iterations: int, out: Tensor) -> None:
    """`_iterated` by the kernels of ops/symmetric.py; the stack's rows are contiguous."""
    x, tall = stack, stack.shape[-2] > stack.shape[-1]
    ones = torch.ones_like(scales)
    for i, (a, b, c) in enumerate(polynomials(iterations)):
        scale = ones if i else scales
        gram = symmetric_product(x, scale * scale, Terms(1.0), tall)
        mix = symmetric_product(gram, scale, Terms(c, b, a))
        into = out if i == iterations - 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        x = stacked_product(x, mix, into) if tall else stacked_product(mix, x, into)


def flops(rows: int, columns: int, iterations: int = 5) -> int:
    """FLOPs of `orthogonal` for one matrix."""
    short, long = sorted((rows, columns))
    return iterations * (4 * short * short * long + 2 * short**3)
