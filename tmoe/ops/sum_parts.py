"""Sums a gradient's parts from several ranks in fp32 and in rank order, in one pass over memory.

torch's own reduction over an outer axis of size 2 reaches a third of the memory's bandwidth, while products
use the same multiprocessors.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from tmoe.ops.launch.kernel_launch import cdiv, launch
from tmoe.ops.launch.shapes import StepShapes
from tmoe.ops.register import collect

BLOCK = 4096


@triton.jit(do_not_specialize=["P", "units"])
def sum_parts_kernel(parts, out, P, units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """out [n] = the sum of parts [P, n] over P, where n is `units` times UNIT.

    With a UNIT of 16 the compiler knows that it may load 16 bytes at a time.
    """
    n = units.to(tl.int64) * UNIT
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    total = tl.load(parts + at, mask=mask, other=0.0).to(tl.float32)
    p = 1
    while p < P:
        total += tl.load(parts + (p * n + at), mask=mask, other=0.0).to(tl.float32)
        p += 1
    tl.store(out + at, total, mask=mask)


def sum_parts(parts: torch.Tensor) -> torch.Tensor:
    """The sum of parts [P, ...] over P: [...] in fp32. parts: any float type, contiguous, on a GPU."""
    out = torch.empty(parts.shape[1:], dtype=torch.float32, device=parts.device)
    if n := out.numel():
        unit = 1 if n % 16 else 16
        launch(
            sum_parts_kernel,
            (cdiv(n, BLOCK),),
            parts,
            out,
            parts.shape[0],
            n // unit,
            unit,
            BLOCK,
            num_warps=8,
        )
    return out


def trace(dtype: torch.dtype) -> None:
    """Launch the kernel for gradients of dtype and for fp32 sums over micro-batches.

    It runs on meta tensors, inside compile_only.
    """
    for kind in {dtype, torch.float32}:
        sum_parts(torch.empty(2, 64, dtype=kind, device="meta"))


def _of_step(step: StepShapes) -> Iterable[tuple]:
    yield trace, step.dtype


collect("sum_parts", {StepShapes: _of_step})
