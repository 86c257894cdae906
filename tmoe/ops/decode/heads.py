"""decode_heads: norms and rotates a token's queries and keys, and writes its keys and values to the pages.

Norm, rotation, factor and copies into the cache are some twenty small kernels in plain PyTorch, and a token's
step waits for each of them. In this kernel a program handles a few heads of one row. It norms and rotates
queries and keys as model/attention.py does, with the same intermediate roundings, and writes keys and values
to their pages.

next: tmoe/generate/forward.py
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.argument_checks import FLOATS, check_device, require
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, empty, launch
from tmoe.ops.launch.shapes import DecodeShapes
from tmoe.ops.register import collect

MOST = 16384  # most numbers of a row that are normed together, because they are kept in registers
TILE = 2048  # numbers that a program handles, if each head is normed separately


class Heads(NamedTuple):
    """The layout and the treatment of the heads in a row of the product."""

    queries: int  # number of query heads, H; keys and values have G heads, with the pages' channels
    norm: str = "none"  # none, head (each head), full (all heads together), rotated (each, after rotation)
    eps: float = 0.0
    interleave: bool = False  # rotated pairs are neighbouring channels
    value_multiplier: float = 1.0
    offset: bool = False  # norms multiply by 1 + weight


def decode_heads(
    qkv_BX: Tensor,
    cos_BR: Tensor,
    sin_BR: Tensor,
    places_B: Tensor,
    pages: tuple[Tensor, Tensor],
    how: Heads,
    norms: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Writes each row's key and value into the pages; returns its queries [B, H, C], normed and rotated.

    Args:
        qkv_BX: rows of H C queries, G C keys and G V values, followed by any other columns; fp32, bf16 or
            fp16.
        cos_BR, sin_BR: fp32, rope_table's rows of the tokens; R is the number of rotated channels, an even
            number from 0 to C.
        places_B: int64, the slot of each token: page * T + its place in the page. If rows have equal slots,
            any of them may remain.
        pages: keys [P, T, G, C] and values [P, T, G, V] of qkv's type, contiguous.
        how: see Heads.
        norms: weights of queries and keys, [C], for "full" [H C] and [G C]; None without a norm.

    For a GPU; not differentiable. A norm of more than 16,384 numbers is refused (`fits`).
    Raises ValueError for arguments that do not fit.
    """
    k_PTGC, v_PTGC = pages
    _check(qkv_BX, (cos_BR, sin_BR), places_B, pages, how, norms)
    B, H = qkv_BX.shape[0], how.queries
    (G, C), V, R = k_PTGC.shape[2:], v_PTGC.shape[3], cos_BR.shape[1]
    q_BHC = empty((B, H, C), qkv_BX.dtype, qkv_BX.device)
    if not B:
        return q_BHC
    CP = max(2, power_of_2(max(C, V)))
    whole = how.norm == "full"
    rows = power_of_2(H) if whole else max(1, TILE // CP)
    of_q, of_k = cdiv(H, rows), cdiv(G, rows)
    w_q, w_k = norms or (cos_BR, cos_BR)
    launch(
        decode_heads_kernel, (B, of_q + 2 * of_k), qkv_BX, cos_BR, sin_BR, places_B, w_q, w_k, q_BHC, k_PTGC,
        v_PTGC, how.eps, how.value_multiplier, qkv_BX.stride(0), cos_BR.stride(0), sin_BR.stride(0),
        H, G, C, V, R, CP, rows, of_q, of_k, how.norm, how.interleave, how.value_multiplier != 1.0,
        how.offset,
        num_warps=8 if rows * CP > 4096 else 4,
        enable_fp_fusion=False,  # so that a rotation rounds as in model/rope.py and has the same bits
    )  # fmt: skip
    return q_BHC


def fits(H: int, C: int, norm: str) -> bool:
    """Whether the kernel has room for this norm of H query heads of C channels."""
    return norm != "full" or power_of_2(H) * power_of_2(C) <= MOST


def _check(
    qkv: Tensor,
    turns: tuple[Tensor, Tensor],
    places: Tensor,
    pages: tuple[Tensor, Tensor],
    how: Heads,
    norms: tuple[Tensor, Tensor] | None,
) -> None:
    require(
        qkv.dim() == 2 and qkv.stride(1) == 1, "qkv", f"shape {tuple(qkv.shape)}", "[B, X], rows contiguous"
    )
    require(qkv.dtype in FLOATS, "qkv", qkv.dtype, "float32, bfloat16 or float16")
    k, v = pages
    for name, t in (("k", k), ("v", v)):
        require(
            t.dim() == 4 and t.is_contiguous(), name, f"shape {tuple(t.shape)}", "[P, T, G, C], contiguous"
        )
        require(t.dtype == qkv.dtype, name, t.dtype, f"qkv's {qkv.dtype}")
    require(k.shape[:3] == v.shape[:3], "v", f"shape {tuple(v.shape)}", f"{tuple(k.shape[:3])} and channels")
    B, (G, C), V, H = qkv.shape[0], k.shape[2:], v.shape[3], how.queries
    least = (H + G) * C + G * V
    require(qkv.shape[1] >= least, "qkv", f"{qkv.shape[1]} columns", f"at least {least}")
    for name, t in zip(("cos", "sin"), turns, strict=True):
        shaped = t.dim() == 2 and t.shape[0] == B and t.shape[1] <= C and t.shape[1] % 2 == 0
        require(
            shaped and t.shape == turns[0].shape,
            name,
            f"shape {tuple(t.shape)}",
            f"[B={B}, R <= C={C}, even]",
        )
        require(t.dtype == torch.float32, name, t.dtype, "float32")
    require(
        tuple(places.shape) == (B,) and places.dtype == torch.int64,
        "places",
        tuple(places.shape),
        f"int64 [{B}]",
    )
    require(how.norm in ("none", "head", "full", "rotated"), "norm", how.norm, "none, head, full or rotated")
    require(fits(H, C, how.norm), "norm", f"full of {H} heads of {C}", f"at most {MOST} numbers")
    require(
        (norms is None) == (how.norm == "none"),
        "norms",
        norms is not None,
        "weights exactly where there is a norm",
    )
    for weight, heads in zip(norms or (), (H, G), strict=False):
        want = (heads * C,) if how.norm == "full" else (C,)
        require(tuple(weight.shape) == want, "norms", f"shape {tuple(weight.shape)}", f"{want}")
    check_device(qkv, cos=turns[0], sin=turns[1], places=places, k=k, v=v)


@triton.jit
def inverse_root(x_HC, width, eps, WHOLE: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of each head [rows, 1], or with WHOLE of all heads together."""
    squares = tl.sum(x_HC * x_HC, 1)
    if WHOLE:
        squares = tl.zeros_like(squares) + tl.sum(squares, 0)
    return tl.rsqrt(squares / width + eps)[:, None]


@triton.jit
def turned_heads(
    x, weight, cos, sin, h, heads, eps,
    C: tl.constexpr, R: tl.constexpr, CP: tl.constexpr, NORM: tl.constexpr, INTERLEAVE: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """Heads h of a row [rows, C], normed and rotated, in x's type.

    A thread also reads the partner of each of its numbers, so no number is exchanged between threads.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    c = tl.arange(0, CP)
    mask = (h < heads)[:, None] & (c < C)[None, :]
    at = h[:, None] * C + c[None, :]
    own = tl.load(x + at, mask, 0.0).to(tl.float32)
    inverse = own
    w_at = at if NORM == "full" else tl.zeros_like(at) + c[None, :]
    if NORM == "head" or NORM == "full":
        width = heads * C if NORM == "full" else C
        inverse = inverse_root(own, width, eps, NORM == "full")
        w = tl.load(weight + w_at, mask, 0.0).to(tl.float32)
        if OFFSET:
            w += 1.0
        own = (own * inverse * w).to(dtype).to(tl.float32)
    if R:
        turns = c < R
        if INTERLEAVE:
            partner = tl.where(turns, c ^ 1, c)
            angle = c // 2
            sign = tl.where(c % 2 == 0, -1.0, 1.0)
        else:
            partner = tl.where(turns, (c + R // 2) % R, c)
            angle = c
            sign = tl.where(c < R // 2, -1.0, 1.0)
        step = (partner - c)[None, :]
        other = tl.load(x + at + step, mask, 0.0).to(tl.float32)
        if NORM == "head" or NORM == "full":
            w = tl.load(weight + w_at + step, mask, 0.0).to(tl.float32)
            if OFFSET:
                w += 1.0
            other = (other * inverse * w).to(dtype).to(tl.float32)
        cosine = tl.load(cos + angle, turns, 1.0)[None, :]
        sine = tl.load(sin + angle, turns, 0.0)[None, :]
        own = (own * cosine + sign[None, :] * other * sine).to(dtype).to(tl.float32)
    if NORM == "rotated":
        w = tl.load(weight + w_at, mask, 0.0).to(tl.float32)
        if OFFSET:
            w += 1.0
        own = own * inverse_root(own, C, eps, False) * w
    return own.to(dtype), at, mask


@triton.jit(do_not_specialize=["eps", "multiplier", "cos_row", "sin_row"])
def decode_heads_kernel(
    qkv, cos, sin, places, w_q, w_k, q_out, k_pages, v_pages, eps, multiplier, row, cos_row, sin_row,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CP: tl.constexpr,
    ROWS: tl.constexpr, OF_Q: tl.constexpr, OF_K: tl.constexpr, NORM: tl.constexpr,
    INTERLEAVE: tl.constexpr, SCALED: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Handles ROWS heads of one row: the first programs handle queries, the next keys, the last values."""
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    x = qkv + b * row
    cos += b * cos_row
    sin += b * sin_row
    if part < OF_Q:
        h = part * ROWS + tl.arange(0, ROWS)
        y, at, mask = turned_heads(x, w_q, cos, sin, h, H, eps, C, R, CP, NORM, INTERLEAVE, OFFSET)
        tl.store(q_out + b * H * C + at, y, mask)
    elif part < OF_Q + OF_K:
        h = (part - OF_Q) * ROWS + tl.arange(0, ROWS)
        y, at, mask = turned_heads(x + H * C, w_k, cos, sin, h, G, eps, C, R, CP, NORM, INTERLEAVE, OFFSET)
        tl.store(k_pages + tl.load(places + b) * G * C + at, y, mask)
    else:
        h = (part - OF_Q - OF_K) * ROWS + tl.arange(0, ROWS)
        c = tl.arange(0, CP)
        mask = (h < G)[:, None] & (c < V)[None, :]
        at = h[:, None] * V + c[None, :]
        y = tl.load(x + (H + G) * C + at, mask, 0.0)
        if SCALED:
            y = (y.to(tl.float32) * multiplier).to(y.dtype)
        tl.store(v_pages + tl.load(places + b) * G * V + at, y, mask)


def trace(how: Heads, G: int, C: int, V: int, R: int, dtype: torch.dtype) -> None:
    """Launch the kernel on meta tensors, inside compile_only."""
    H = how.queries
    qkv, k, v = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape in ((1, (H + G) * C + G * V), (1, 128, G, C), (1, 128, G, V))
    )
    cos = torch.empty(1, R, device="meta")
    places = torch.empty(1, dtype=torch.int64, device="meta")
    widths = (H * C, G * C) if how.norm == "full" else (C, C)
    norms = None if how.norm == "none" else (qkv.new_empty(widths[0]), qkv.new_empty(widths[1]))
    decode_heads(qkv, cos, cos, places, (k, v), how, norms)


def _of_decoding(step: DecodeShapes) -> Iterable[tuple]:
    for layer in step.layers:
        norm = layer.norm if step.fused else "none"
        if not layer.latent and fits(layer.queries, layer.key_dim, norm):
            how = Heads(layer.queries, norm, layer.norm_eps, layer.interleave, layer.value_multiplier)
            how = how._replace(offset=step.norm_offset)
            sizes = layer.keys, layer.key_dim, layer.value_dim, layer.rotary_dim
            yield trace, how, *sizes, step.dtype


collect("decode_heads", {DecodeShapes: _of_decoding})
