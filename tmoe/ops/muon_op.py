"""Muon's two passes over memory on a GPU: before Newton-Schulz and after it.

    look_ahead_     reads gradient and momentum, writes the momentum and Nesterov's look ahead
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

BLOCK = 2048


@triton.jit(do_not_specialize=["count", "beta"])
def look_ahead_kernel(grad, momentum, ahead, factor, finite, count, beta, BLOCK: tl.constexpr):
    """The new momentum and the look ahead of BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    g = tl.load(grad + at, mask).to(tl.float32) * tl.load(factor)
    m = tl.load(momentum + at, mask)
    m += (1 - beta) * (g - m)
    if tl.load(finite) != 0:
        tl.store(momentum + at, m, mask)
    tl.store(ahead + at, (g + beta * (m - g)).to(ahead.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["count", "columns", "rows", "lr", "decay"])
def write_kernel(
    weight, update, copy, scales, finite, count, columns, rows, lr, decay,
    COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The new weight of BLOCK elements. scales: of each row of a matrix [rows, columns] of the stack."""
    if tl.load(finite) == 0:
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    w = tl.load(weight + at, mask)
    u = tl.load(update + at, mask).to(tl.float32)
    scale = tl.load(scales + at // columns % rows, mask)
    w -= lr * decay * w
    w -= lr * scale * u
    tl.store(weight + at, w, mask)
    if COPY:
        tl.store(copy + at, w.to(copy.dtype.element_ty), mask)


def look_ahead_(
    grad: Tensor, momentum: Tensor, factor: Tensor, finite: Tensor, beta: float, dtype: torch.dtype
) -> Tensor:
    """Nesterov's look ahead in `dtype`, of grad's shape; the new momentum is written in place.

    grad: any float type, multiplied by `factor`. momentum: fp32; both contiguous, of one shape.
    factor, finite: 0-dim fp32; if `finite` is 0, the momentum is not written.
    ValueError for other tensors.
    """
    alike = grad.shape == momentum.shape and grad.is_contiguous() and momentum.is_contiguous()
    if not alike or momentum.dtype != torch.float32 or grad.dtype not in DTYPES:
        got = [f"{t.dtype} {list(t.shape)} by {t.stride()}" for t in (grad, momentum)]
        raise ValueError(f"look_ahead_: grad, momentum {got}, valid: contiguous, of one shape, momentum fp32")
    ahead = torch.empty_like(grad, dtype=dtype)
    if count := grad.numel():
        with torch.cuda.device_of(grad):
            grid, args = (cdiv(count, BLOCK),), (grad, momentum, ahead, factor, finite, count, beta)
            launch(look_ahead_kernel, grid, *args, BLOCK, num_warps=8)
    return ahead


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
    if count := weight.numel():
        rows, columns = weight.shape[-2:]
        with torch.cuda.device_of(weight):
            numbers = count, columns, rows, lr, decay
            args = weight, update, weight if copy is None else copy, scales, finite, *numbers
            launch(write_kernel, (cdiv(count, BLOCK),), *args, copy is not None, BLOCK, num_warps=8)


def trace(dtype: torch.dtype) -> None:
    """Launches the kernels that training in dtype needs. They run on meta tensors, inside compile_only."""
    products = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    number, scales = torch.empty((), device="meta"), torch.empty(4, device="meta")
    weight = torch.empty(4, 16, device="meta")
    for grad in {torch.float32, dtype}:
        look_ahead_(weight.to(grad), weight, number, number, 0.95, products)
    for copy in [None] if dtype == torch.float32 else [None, weight.to(dtype)]:
        write_(weight, weight.to(products), copy, scales, number, 1e-3, 0.1)


def _of_step(step: StepShapes) -> Iterable[tuple]:
    if step.muon:
        yield trace, step.dtype


collect("muon", {StepShapes: _of_step})
