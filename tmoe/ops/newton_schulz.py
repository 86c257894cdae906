"""Newton-Schulz on stacks of matrices: each matrix becomes nearly orthogonal, as Muon's updates are.

The iteration is X <- a X + (b A + c A^2) X with A = X X^T, after division by the norm; `newton_schulz` in
reference.py is its definition for one matrix. A stack [E, out, in] is a batch: a matrix has the result
that it has alone. Sums of products are in fp32.

On a GPU an iteration of 16-bit matrices is three launches without a pass over memory between them:

    A = s^2 X X^T          M = s (a I + b A + c A^2)          X <- M X

The factor s divides by the norm in the first iteration; later it is 1. Where X is much longer than wide, two
iterations have one such A and one product with X, and further products of the size of A:

    M1 = a I + b A + c A^2       A <- (A M1) M1       M2 = a' I + b' A + c' A^2       X <- s (M2 M1) X

A and each product with it are in fp16 there: in bf16 such pairs of iterations have 5 times the error, or
diverge. Three iterations at a time have 5 times the error in fp16 as well.

next: optim/muon.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tmoe.ops.launch.shapes import StepShapes
from tmoe.ops.reference import SLACK, TINY, polynomials
from tmoe.ops.register import collect
from tmoe.ops.symmetric import Terms, commuting_product, stacked_product, symmetric_product

CHUNK = 2**29  # most elements of the matrices that are iterated at a time: 1 GiB in bf16
# The type of A, and of X between the first product and the last. fp16 has 8 times the precision of bf16, and
# all these numbers are below 100. Only where the norm is below 1e-13, and the result nearly 0, X underflows.
BETWEEN = torch.float16
# Pairs of iterations: they are used for at least this many columns for each row, and as many iterations. With
# four or fewer the last pair leaves an error that no later iteration corrects.
LONG, MANY = 4 / 3, 5


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
    (by_launches if by_kernels else by_torch)(stack, scales, iterations, out)


def by_torch(stack: Tensor, scales: Tensor, iterations: int, out: Tensor) -> None:
    """`_iterated` by products of torch, with passes over memory between them."""
    x = (stack * scales.view(-1, 1, 1)).to(stack.dtype)
    tall = x.shape[-2] > x.shape[-1]
    for a, b, c in polynomials(iterations):
        gram = x.mT @ x if tall else x @ x.mT
        mix = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, mix, beta=a) if tall else torch.baddbmm(x, mix, x, beta=a)
    out.copy_(x)


def by_launches(
    stack: Tensor,
    scales: Tensor,
    iterations: int,
    out: Tensor,
    pairs: bool | None = None,
    between: torch.dtype | None = None,
) -> None:
    """`_iterated` by the kernels of ops/symmetric.py; the stack's rows are contiguous.

    pairs: whether two iterations have one product with X; None: where this is faster and as accurate.
    between: the type of A, and of X between the first product and the last; None: BETWEEN for 16-bit
        matrices, and the stack's type for others.
    """
    rows, columns = stack.shape[-2:]
    tall = rows > columns
    between = between or (BETWEEN if stack.element_size() == 2 else stack.dtype)
    if pairs is None:
        pairs = iterations >= MANY and max(rows, columns) >= LONG * min(rows, columns)
    size, table, ones = 1 + pairs, polynomials(iterations), torch.ones_like(scales)
    x = stack
    for begin in range(0, iterations, size):
        scale = ones if begin else scales
        mix = _mixed(  # the only reference to A is its own, so that it can free A
            symmetric_product(x, scale * scale, Terms(1.0), tall, between),
            table[begin : begin + size],
            scale,
            x.dtype,
        )
        last = begin + size >= iterations
        into = out if last else torch.empty(x.shape, dtype=between, device=x.device)
        x = stacked_product(x, mix, into) if tall else stacked_product(mix, x, into)


def _mixed(
    gram: Tensor, table: Sequence[tuple[float, float, float]], scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """The matrices that X is multiplied by for one or two iterations, times scale. gram: A [E, m, m]."""
    (a, b, c), *later = table
    if not later:
        return symmetric_product(gram, scale, Terms(c, b, a), dtype=dtype)
    ones = torch.ones_like(scale)
    first = symmetric_product(gram, ones, Terms(c, b, a))
    gram = commuting_product(commuting_product(gram, first, ones), first, ones)
    ((a, b, c),) = later
    second = symmetric_product(gram, ones, Terms(c, b, a))
    return commuting_product(second, first, scale, dtype)


def flops(rows: int, columns: int, iterations: int = 5) -> int:
    """FLOPs of `orthogonal` for one matrix."""
    short, long = sorted((rows, columns))
    return iterations * (4 * short * short * long + 2 * short**3)


def trace(dtype: torch.dtype) -> None:
    """Launches the kernels that training in dtype needs. They run on meta tensors, inside compile_only."""
    for shape in ((2, 768, 2048), (2, 2048, 768)):
        x = torch.empty(shape, dtype=dtype, device="meta")
        scales, out = torch.empty(2, device="meta"), torch.empty_like(x)
        for pairs in (False, True):
            by_launches(x, scales, MANY, out, pairs)


def _of_step(step: StepShapes) -> Iterable[tuple]:
    if step.muon and step.dtype == torch.bfloat16:
        yield trace, step.dtype


collect("newton_schulz", {StepShapes: _of_step})
