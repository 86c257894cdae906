"""add_norm: adds a branch to the residual stream, and computes the RMS norm of the sum, in one launch.

next: tmoe/generate/forward.py
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.argument_checks import FLOATS, check_device, require
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, empty, launch
from tmoe.ops.launch.shapes import DecodeShapes
from tmoe.ops.register import collect

WIDEST = 16384  # most numbers of a row, which is kept in registers


def add_norm(
    x_BD: Tensor, y_BD: Tensor, weight_D: Tensor, eps: float, offset: bool = False
) -> tuple[Tensor, Tensor]:
    """(x + y, rms_norm(x + y) * weight). The sum is rounded to x's type first, as two separate ops would do.

    Args:
        x_BD, y_BD: [B, D], contiguous, both of the same type: fp32, bf16 or fp16. D at most 16,384.
        weight_D: [D], of any of these types.
        eps: added to the mean square.
        offset: multiply by 1 + weight.

    For a GPU; not differentiable. Raises ValueError for arguments that do not fit.
    """
    fit = x_BD.dim() == 2 and x_BD.is_contiguous() and 0 < x_BD.shape[1] <= WIDEST
    require(fit, "x", f"shape {tuple(x_BD.shape)}", f"[B, D <= {WIDEST}], contiguous")
    require(x_BD.dtype in FLOATS, "x", x_BD.dtype, "float32, bfloat16 or float16")
    alike = y_BD.shape == x_BD.shape and y_BD.dtype == x_BD.dtype and y_BD.is_contiguous()
    require(alike, "y", f"shape {tuple(y_BD.shape)}, {y_BD.dtype}", f"x's {tuple(x_BD.shape)}, {x_BD.dtype}")
    B, D = x_BD.shape
    require(tuple(weight_D.shape) == (D,), "weight", f"shape {tuple(weight_D.shape)}", f"[D={D}]")
    check_device(x_BD, y=y_BD, weight=weight_D)
    total, normed = (empty(x_BD.shape, x_BD.dtype, x_BD.device) for _ in range(2))
    DP = power_of_2(D)
    rows = max(1, 1024 // DP)
    if B:
        launch(
            add_norm_kernel, (cdiv(B, rows),), x_BD, y_BD, weight_D, total, normed, B, eps, D, DP, rows,
            offset, num_warps=8 if DP > 2048 else 4,
        )  # fmt: skip
    return total, normed


@triton.jit(do_not_specialize=["B", "eps"])
def add_norm_kernel(
    x, y, weight, total, normed, B, eps,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Handles ROWS rows of D numbers, padded to DP."""
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, DP)
    at = b.to(tl.int64)[:, None] * D + c[None, :]
    mask = (b < B)[:, None] & (c < D)[None, :]
    x_BD = tl.load(x + at, mask, 0.0).to(tl.float32)
    y_BD = tl.load(y + at, mask, 0.0).to(tl.float32)
    rounded = (x_BD + y_BD).to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask)
    wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    scale = tl.load(weight + c, c < D, 0.0).to(tl.float32)
    if OFFSET:
        scale += 1.0
    tl.store(normed + at, (wide * inverse[:, None] * scale[None, :]).to(normed.dtype.element_ty), mask)


def trace(D: int, dtype: torch.dtype, offset: bool = False) -> None:
    """Launch the kernel on meta tensors, inside compile_only."""
    x = torch.empty(1, D, dtype=dtype, device="meta")
    add_norm(x, x, x[0], 1e-6, offset)


def _of_decoding(step: DecodeShapes) -> Iterable[tuple]:
    if step.fused and step.dim <= WIDEST:
        yield trace, step.dim, step.dtype, step.norm_offset


collect("add_norm", {DecodeShapes: _of_decoding})
