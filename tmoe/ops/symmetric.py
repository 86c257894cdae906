"""alpha X X^T + beta D for a stack of matrices, whose result is symmetric: half of the products.

A product of two matrices does not know that its result is symmetric. This kernel computes the tiles on and
below the diagonal, and writes each tile below it twice. With m / 128 = 6 tiles a side it computes 21 of 36.

next: ops/newton_schulz.py
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.launch.kernel_launch import cdiv, launch
from tmoe.ops.launch.shapes import StepShapes
from tmoe.ops.register import collect

TILE, INNER = 128, 64  # rows and columns of a tile of the result, and columns of X that are read at a time


@triton.jit(do_not_specialize=["alpha", "beta"])
def symmetric_kernel(
    x, d, out, rows, inner, alpha, beta,
    TALL: tl.constexpr, ADDS: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """The tile of one matrix that the program's number names, counted along the rows of the lower half."""
    tile = tl.program_id(0)
    low = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    low = tl.where(low * (low + 1) // 2 > tile, low - 1, low)  # the root may be rounded
    low = tl.where((low + 1) * (low + 2) // 2 <= tile, low + 1, low)
    left = tile - low * (low + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    at_i, at_j, at_k = low * TILE + tl.arange(0, TILE), left * TILE + tl.arange(0, TILE), tl.arange(0, INNER)
    base = x + matrix * rows * inner
    if TALL:
        one, two = base + at_i[:, None] + at_k[None, :] * rows, base + at_j[None, :] + at_k[:, None] * rows
        step = INNER * rows
    else:
        one, two = base + at_i[:, None] * inner + at_k[None, :], base + at_j[None, :] * inner + at_k[:, None]
        step = INNER
    sums = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, inner, INNER):
        inside = at_k < inner - k
        a = tl.load(one, (at_i < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(two, inside[:, None] & (at_j < rows)[None, :], other=0.0)
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
        one += step
        two += step
    sums *= alpha
    to = matrix * rows * rows
    here = to + at_i[:, None] * rows + at_j[None, :]
    mask = (at_i < rows)[:, None] & (at_j < rows)[None, :]
    if ADDS:
        sums += beta * tl.load(d + here, mask, other=0.0).to(tl.float32)
    result = sums.to(out.dtype.element_ty)
    tl.store(out + here, result, mask)
    if low != left:
        there = to + at_j[:, None] * rows + at_i[None, :]
        tl.store(out + there, tl.trans(result), (at_j < rows)[:, None] & (at_i < rows)[None, :])


def symmetric_product(
    x: Tensor, d: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0, tall: bool = False
) -> Tensor:
    """alpha X X^T + beta D [E, m, m], in x's type, with fp32 sums, on the GPU; tall: alpha X^T X + beta D.

    x: [E, m, k], or [E, k, m] if tall, in bf16, fp16 or fp32. d: symmetric matrices [E, m, m] of this type;
    None: zero. Both contiguous.
    ValueError for other tensors.
    """
    E, m, k = x.mT.shape if tall else x.shape
    fits = d is None or (d.shape == (E, m, m) and d.is_contiguous() and d.dtype == x.dtype)
    if not fits or not x.is_contiguous() or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        got = [f"{t.dtype} {list(t.shape)} by {t.stride()}" for t in (x, d) if t is not None]
        raise ValueError(f"symmetric_product: x, d {got}, valid: [E, m, k] and [E, m, m], contiguous")
    out = torch.empty(E, m, m, dtype=x.dtype, device=x.device)
    side = cdiv(m, TILE)
    if out.numel():
        with torch.cuda.device_of(x):
            args = x, out if d is None else d, out, m, k, alpha, beta
            how = tall, d is not None, "ieee" if x.dtype == torch.float32 else "tf32", TILE, INNER
            launch(symmetric_kernel, (side * (side + 1) // 2, E), *args, *how, num_warps=8, num_stages=3)
    return out


def trace(dtype: torch.dtype) -> None:
    """Launches the kernels that training in dtype needs. They run on meta tensors, inside compile_only."""
    for rows, columns in ((768, 2048), (2048, 768)):
        x = torch.empty(2, rows, columns, dtype=dtype, device="meta")
        gram = symmetric_product(x, tall=rows > columns)
        symmetric_product(gram, gram)


def _of_step(step: StepShapes) -> Iterable[tuple]:
    if step.muon and step.dtype == torch.bfloat16:
        yield trace, step.dtype


collect("symmetric_product", {StepShapes: _of_step})
