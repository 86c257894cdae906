"""Muon's two passes over memory on a GPU: before Newton-Schulz and after it.

    look_ahead_     reads gradient and momentum, writes the momentum, Nesterov's look ahead and its squares
    write_          reads update and weight, writes the weight and its working copy

Both clip, and leave every byte of a skipped step, without the host. With a bf16 gradient, products and copy
in bf16, they move 12 and 12 bytes an element.

next: ops/newton_schulz.py
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.adamw_op import DTYPES
from tmoe.ops.launch.kernel_launch import cdiv, launch
from tmoe.ops.launch.shapes import StepShapes
from tmoe.ops.register import collect

ROWS, COLUMNS = 8, 128  # of a tile: a warp reads one row, four numbers a lane


@triton.jit
def tile_at(rows, columns, c, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets and mask of the columns from c on of this program's rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = c + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * columns + col[None, :]
    return at, (row < rows)[:, None] & (col < columns)[None, :]


@triton.jit(do_not_specialize=["rows", "beta"])
def look_ahead_kernel(
    grad, momentum, ahead, squares, factor, finite, rows, columns, beta,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The new momentum and the look ahead of ROWS rows, and the sum of the squares of each row."""
    keeps = tl.load(finite) != 0
    clip = tl.load(factor)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for c in range(0, columns, COLUMNS):
        at, mask = tile_at(rows, columns, c, ROWS, COLUMNS)
        g = tl.load(grad + at, mask, other=0.0).to(tl.float32) * clip
        m = tl.load(momentum + at, mask, other=0.0)
        m += (1 - beta) * (g - m)
        if keeps:
            tl.store(momentum + at, m, mask)
        u = (g + beta * (m - g)).to(ahead.dtype.element_ty)
        tl.store(ahead + at, u, mask)
        total += u.to(tl.float32) * u.to(tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(squares + row, tl.sum(total, 1), row < rows)


@triton.jit(do_not_specialize=["rows", "height", "lr", "decay"])
def write_kernel(
    weight, update, copy, scales, finite, rows, columns, height, lr, decay,
    COPY: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The new weight of ROWS rows. scales: of each row of a matrix [height, columns] of the stack."""
    if tl.load(finite) == 0:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    scale = tl.load(scales + row % height, row < rows, other=0.0)[:, None]
    for c in range(0, columns, COLUMNS):
        at, mask = tile_at(rows, columns, c, ROWS, COLUMNS)
        w = tl.load(weight + at, mask)
        u = tl.load(update + at, mask).to(tl.float32)
        w -= lr * decay * w
        w -= lr * scale * u
        tl.store(weight + at, w, mask)
        if COPY:
            tl.store(copy + at, w.to(copy.dtype.element_ty), mask)


def look_ahead_(
    grad: Tensor, momentum: Tensor, factor: Tensor, finite: Tensor, beta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Nesterov's look ahead in `dtype`, of grad's shape; the new momentum is written in place.

    Returns the look ahead, and the sums of the squares of its rows, fp32 [..., rows].

    grad: any float type, multiplied by `factor`. momentum: fp32; both contiguous, of one shape, of two or
        more axes.
    factor, finite: 0-dim fp32; if `finite` is 0, the momentum is not written.
    ValueError for other tensors.
    """
    alike = grad.shape == momentum.shape and grad.is_contiguous() and momentum.is_contiguous()
    alike = alike and grad.ndim > 1
    if not alike or momentum.dtype != torch.float32 or grad.dtype not in DTYPES:
        got = [f"{t.dtype} {list(t.shape)} by {t.stride()}" for t in (grad, momentum)]
        raise ValueError(f"look_ahead_: grad, momentum {got}, valid: contiguous, of one shape, momentum fp32")
    ahead = torch.empty_like(grad, dtype=dtype)
    squares = torch.empty(grad.shape[:-1], dtype=torch.float32, device=grad.device)
    if grad.numel():
        rows, columns = squares.numel(), grad.shape[-1]
        with torch.cuda.device_of(grad):
            args = grad, momentum, ahead, squares, factor, finite, rows, columns, beta
            launch(look_ahead_kernel, (cdiv(rows, ROWS),), *args, ROWS, COLUMNS, num_warps=8)
    return ahead, squares


def write_(
    weight: Tensor,
    update: Tensor,
    copy: Tensor | None,
    scales: Tensor,
    finite: Tensor,
    lr: float,
    decay: float,
) -> None:
    """weight <- (1 - lr decay) weight - lr scales update, in place, on the GPU.

    weight: fp32 [..., rows, columns]. update: a float of this shape. copy: a float of this shape, to which
    the new weight is written, rounded to its type; or None. All contiguous. scales: fp32 [rows].
    finite: 0-dim fp32; if it is 0, nothing is written.
    ValueError for other tensors.
    """
    tensors = [t for t in (weight, update, copy) if t is not None]
    alike = all(t.shape == weight.shape and t.is_contiguous() and t.dtype in DTYPES for t in tensors)
    if not alike or weight.dtype != torch.float32 or scales.shape != weight.shape[-2:-1]:
        got = [f"{t.dtype} {list(t.shape)} by {t.stride()}" for t in (*tensors, scales)]
        raise ValueError(f"write_: weight, update, copy, scales {got}, valid: contiguous, of one shape, fp32")
    if weight.numel():
        height, columns = weight.shape[-2:]
        rows = weight.numel() // columns
        with torch.cuda.device_of(weight):
            args = weight, update, weight if copy is None else copy, scales, finite
            numbers = rows, columns, height, lr, decay
            how = copy is not None, ROWS, COLUMNS
            launch(write_kernel, (cdiv(rows, ROWS),), *args, *numbers, *how, num_warps=8)


def trace(dtype: torch.dtype) -> None:
    """Launches the kernels that training in dtype needs. They run on meta tensors, inside compile_only."""
    products = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    number, scales = torch.empty((), device="meta"), torch.empty(4, device="meta")
    for columns in (16, 17):
        weight = torch.empty(4, columns, device="meta")
        for grad in {torch.float32, dtype}:
            look_ahead_(weight.to(grad), weight, number, number, 0.95, products)
        for copy in [None] if dtype == torch.float32 else [None, weight.to(dtype)]:
            write_(weight, weight.to(products), copy, scales, number, 1e-3, 0.1)


def _of_step(step: StepShapes) -> Iterable[tuple]:
    if step.muon:
        yield trace, step.dtype


collect("muon", {StepShapes: _of_step})
