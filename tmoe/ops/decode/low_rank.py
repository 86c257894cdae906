"""add_low_rank: adds a low-rank adapter of a dense layer to the layer's result, in one launch.

Two products of cuBLAS are three launches, because it divides the long sum of so narrow a result. With a few
rows each of them costs as much as the time in which 10 MB of weights are read.

next: tmoe/model/adapted.py
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from tmoe.ops.argument_checks import check_device, require
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, device_facts, early, empty, launch
from tmoe.ops.launch.shapes import DecodeShapes
from tmoe.ops.register import collect

MOST_ROWS = 128  # with more, cuBLAS is not slower
MOST_RANK = 128  # x a^T of a tile is kept in registers
BM = 16  # rows of a tile
WARPS = 4
PROGRAMS = 64  # fewest programs, for which tiles become narrower


def fits(x: Tensor, a_rL: Tensor) -> bool:
    """Whether add_low_rank computes this adapter for the rows of x [..., L]."""
    rows = x.numel() // max(x.shape[-1], 1)
    few = 0 < rows <= MOST_ROWS and len(a_rL) <= MOST_RANK
    return few and x.is_cuda and x.element_size() == 2 and a_rL.dtype == x.dtype


def add_low_rank(y_BW: Tensor, x_BL: Tensor, a_rL: Tensor, b_Wr: Tensor, scale: float) -> Tensor:
    """y + scale (x a^T) b^T, [B, W]; scale x a^T is rounded to x's type.

    Args:
        y_BW, x_BL, a_rL, b_Wr: of one type. r at most 128.
        scale: factor of the adapter.

    For a GPU; not differentiable. Raises ValueError for arguments that do not fit.
    """
    y_BW, x_BL, a_rL, b_Wr = (t.contiguous() for t in (y_BW, x_BL, a_rL, b_Wr))
    (B, L), (r, W) = x_BL.shape, (a_rL.shape[0], b_Wr.shape[0])
    for name, t, shape in (("y", y_BW, (B, W)), ("a", a_rL, (r, L)), ("b", b_Wr, (W, r))):
        fit = tuple(t.shape) == shape and t.dtype == x_BL.dtype
        require(fit, name, f"shape {tuple(t.shape)}, {t.dtype}", f"{shape}, x's {x_BL.dtype}")
    require(0 < r <= MOST_RANK, "a", f"rank {r}", f"1 to {MOST_RANK}")
    check_device(x_BL, y=y_BW, a=a_rL, b=b_Wr)
    out = empty((B, W), x_BL.dtype, x_BL.device)
    if B:
        RB = max(16, power_of_2(r))
        BN = max(n for n in (64, 128, 256) if n == 64 or cdiv(B, BM) * cdiv(W, n) >= PROGRAMS)
        BL, stages = steps_of(RB, L, x_BL.device)
        ahead = early(x_BL.device)
        launch(
            add_low_rank_kernel, (cdiv(W, BN), cdiv(B, BM)),
            y_BW, x_BL, a_rL, b_Wr, out, B, L, W, r, scale,
            BM, BN, BL, RB, WARPS, L % BL == 0, bool(ahead), num_warps=WARPS, num_stages=stages, **ahead,
        )  # fmt: skip
    return out


def steps_of(RB: int, L: int, device: torch.device) -> tuple[int, int]:
    """The columns of a step, and its stages. A program waits for memory, so its steps are long."""
    if RB > 32:
        return 64, 3
    if RB == 16 and L % 512 == 0 and device.type != "cpu" and device_facts(device)[0] == "cuda:90":
        return 512, 4
    return 256, 4 if RB == 16 else 3


@triton.jit(do_not_specialize=["B", "scale"])
def add_low_rank_kernel(
    y, x, a, b, out, B, L, W, R, scale,
    BM: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, RB: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program computes a tile of BM rows and BN columns, and x a^T of these rows. EVEN: BL divides L.

    PARTS: the number of warps. Each sums a part of a step's columns of x a^T. That product is too small to be
    divided otherwise: each warp would read all operands from shared memory.
    """
    if EARLY:
        gdc_wait()
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, RB)
    l = tl.arange(0, PARTS)[:, None] * (BL // PARTS) + tl.arange(0, BL // PARTS)[None, :]
    inside = (m < B)[:, None] & (n < W)[None, :]
    at = m.to(tl.int64)[:, None] * W + n[None, :]
    total = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(b + n[None, :] * R + k[:, None], mask=(n < W)[None, :] & (k < R)[:, None], other=0.0)
    x_at = x + m.to(tl.int64)[None, :, None] * L + l[:, None, :]
    a_at = a + k[None, None, :] * L + l[:, :, None]
    parts = tl.zeros((PARTS, BM, RB), tl.float32)
    for i in range(tl.cdiv(L, BL)):
        left = (l < L - i * BL) | EVEN
        rows = tl.load(x_at + i * BL, mask=(m < B)[None, :, None] & left[:, None, :], other=0.0)
        low = tl.load(a_at + i * BL, mask=left[:, :, None] & (k < R)[None, None, :], other=0.0)
        parts = tl.dot(rows, low, parts)
    u = tl.sum(parts, 0)
    total = tl.dot((u * scale).to(x.dtype.element_ty), right, total)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def trace(L: int, W: int, r: int, dtype: torch.dtype, rows: int) -> None:
    """Launch the kernel on meta tensors, inside compile_only."""
    new = lambda *shape: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    add_low_rank(new(rows, W), new(rows, L), new(r, L), new(W, r), 1.0)


def _of_decoding(step: DecodeShapes) -> Iterable[tuple]:
    if not step.in_blocks and step.dtype.itemsize == 2:
        for L, W, r in step.adapted:
            if r <= MOST_RANK:
                for rows in (16, 32, 64, MOST_ROWS):  # the width of tiles depends on the number of rows
                    yield trace, L, W, r, step.dtype, rows


collect("add_low_rank", {DecodeShapes: _of_decoding})
