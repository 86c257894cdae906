"""Newton-Schulz on stacks of matrices: each matrix becomes nearly orthogonal, as Muon's updates are.

The iteration is X <- a X + (b A + c A^2) X with A = X X^T, after division by the norm; `newton_schulz` in
reference.py is its definition for one matrix. A stack [E, out, in] is a batch: a matrix has the result
that it has alone. Products are in the type of X, with fp32 sums. The Gram form, which iterates on A
alone, has 2.5 times the error in bf16, and is not used.

next: optim/muon.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from tmoe.ops.reference import SLACK, TINY, polynomials
from tmoe.ops.symmetric import symmetric_product

# Least short edge for which ops/symmetric.py computes A and A^2; None: none. No GPU has measured it yet.
SYMMETRIC: int | None = None
CHUNK = 2**29  # most elements of the matrices that are iterated at a time: 1 GiB in bf16


@torch.no_grad()
def orthogonal(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Nearly U V^T of each matrix U S V^T; a matrix of zeros stays zero.

    matrices: [..., out, in] in fp32, bf16 or fp64, which is the type of the products and of the result.
    ValueError for fewer than two axes.
    """
    if matrices.ndim < 2:
        raise ValueError(f"orthogonal: matrices of shape {list(matrices.shape)}, valid: [..., out, in]")
    rows, columns = matrices.shape[-2:]
    if not matrices.numel():
        return matrices.clone()
    stack = matrices.reshape(-1, rows, columns)
    at_a_time = max(1, CHUNK // (rows * columns))
    found = [_iterated(part, iterations) for part in stack.split(at_a_time)]
    return (found[0] if len(found) == 1 else torch.cat(found)).view(matrices.shape)


def _iterated(stack: Tensor, iterations: int) -> Tensor:
    """`orthogonal` of a stack [E, out, in]."""
    wide = torch.promote_types(stack.dtype, torch.float32)
    norm = torch.linalg.vector_norm(stack, dim=(-2, -1), keepdim=True, dtype=wide)
    x = torch.mul(stack, 1 / (norm * SLACK + TINY), out=torch.empty_like(stack))
    tall = x.shape[-2] > x.shape[-1]
    halved = x.is_cuda and x.dtype == torch.bfloat16 and SYMMETRIC is not None
    halved = halved and min(x.shape[-2:]) >= SYMMETRIC
    for a, b, c in polynomials(iterations):
        if halved:
            gram = symmetric_product(x, tall=tall)
            mix = symmetric_product(gram, gram, c, b)
        else:
            gram = x.mT @ x if tall else x @ x.mT
            mix = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, mix, beta=a) if tall else torch.baddbmm(x, mix, x, beta=a)
    return x


def flops(rows: int, columns: int, iterations: int = 5) -> int:
    """FLOPs of `orthogonal` for one matrix."""
    short, long = sorted((rows, columns))
    return iterations * (4 * short * short * long + 2 * short**3)
