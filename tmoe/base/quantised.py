"""Formats of quantised weights, in plain torch: a weight to codes and scales, and codes and scales to values.

A weight has shape [..., W]; its last axis, the input of the product, is a row. `quantise` returns a tuple of
plain tensors, the parts, and `dequantise` computes the values of the parts. `stored` lists names, shapes and
types of the parts without computing them. A format is a line of FORMATS:

    kind    a scale for      parts
    int8    a row            codes int8 [..., W], scales bf16 [..., 1]
    int4    128 of a row     codes uint8 [..., 64 G], scales bf16 [..., G], G = ceil(W / 128)
    fp8     a row            codes e4m3 [..., W], scales bf16 [..., 1]
    mxfp4   32 of a row      codes uint8 [..., 16 G], scales uint8 [..., G], G = ceil(W / 32)
    nf4     64 of all        codes uint8 [ceil(n / 2)], maxima uint8 [ceil(n / 64)], most fp32, offset fp32 []

Values are rounded to the nearest code. The scale of zeros is 1 (of NF4: 0), and their values are zeros. The
codes of int8, int4 and fp8 are computed for the rounded scale in bf16, so that a file of them holds the
values of these tensors in bits. Inputs of 16, 32 and 64 bits are computed in fp32. All functions are pure and
run on any device. `quantise` waits for a GPU once, to refuse inf and NaN.

next: ops/quantised/op.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, ...]
Parts = tuple[Tensor, ...]
Stored = tuple[str, Shape, torch.dtype]  # name, shape and type of a part

LARGEST = 2.0**127  # of a weight: a larger value may round up to inf
PIECE = 2**23  # numbers that are computed together, so that temporary tensors stay small
FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0  # its largest number

INT4_GROUP = 128  # values of a row that share a scale
INT4_HALF = INT4_GROUP // 2

MX_GROUP = 32
MX_BIAS = 127  # a power of two is stored as its exponent plus this (E8M0)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign, which is bit 3

# Quantiles of a normal distribution (Dettmers et al. 2023, QLoRA, appendix E), as bitsandbytes stores them.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
NF4_BLOCK = 64  # values of the flat weight that share a maximum
NF4_MAXIMA = 256  # maxima that share a scale
DYNAMIC_STEPS = 65535 / 2  # bitsandbytes' CPU library finds a number's 8 bits in a table of 2^16 of [-1, 1]


class Format(NamedTuple):
    """A format of weights. Its functions handle rows [M, W], and NF4's a flat weight [n]."""

    stored: Callable[[Shape], tuple[Stored, ...]]
    """the parts of a weight of this shape"""
    encode: Callable[[Tensor], Parts]
    """the parts of fp32 values; with `flat` of all, else of some rows"""
    decode: Callable[[Parts, int], Tensor]
    """(parts, W) -> values in fp32 of some rows; with `flat` (parts, n) -> values of the flat weight"""
    flat: bool = False
    """whether groups run across rows"""


def quantise(weight: Tensor, kind: str, name: str = "weight") -> Parts:
    """The parts of a weight.

    Args:
        weight: floating point [..., W], any strides; rows may be missing or zeros.
        kind: a name in FORMATS.
        name: of the weight, for errors.

    Raises ValueError for another kind, a weight that is not floating point or has no axis, and for inf and
    NaN.
    """
    how = format_of(kind)
    if not weight.is_floating_point() or weight.dim() == 0 or weight.shape[-1] == 0:
        raise ValueError(
            f"{name}: {weight.dtype} of shape {tuple(weight.shape)} cannot be quantised to {kind}; "
            "valid: floating point [..., W], W at least 1"
        )
    rows = weight.detach().reshape(-1, weight.shape[-1])
    finite = torch.ones((), dtype=torch.bool, device=weight.device)
    for piece in _pieces(rows):
        finite &= (piece.float().abs() <= LARGEST).all()
    if not finite:
        raise ValueError(f"{name}: holds inf, NaN or a number above 2^127; valid for {kind}: other numbers")
    if how.flat:
        return how.encode(rows.flatten())
    parts = [how.encode(piece.float()) for piece in _pieces(rows)]
    whole = [torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True)]
    return tuple(
        part.view(shape) for part, (_, shape, _) in zip(whole, how.stored(tuple(weight.shape)), strict=True)
    )


def dequantise(parts: Parts, kind: str, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of a weight of this shape: computed in fp32, then rounded to `dtype`.

    parts: of `quantise`, or slices of it along axes before the last, for which `shape` is that of the slice
    (not of NF4).
    """
    how = format_of(kind)
    if how.flat:
        return how.decode(parts, math.prod(shape)).to(dtype).view(shape)
    out = parts[0].new_empty(shape, dtype=dtype)
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    rows, width = out.view(-1, shape[-1]), shape[-1]
    step = max(1, PIECE // width)
    for i in range(0, len(rows), step):
        rows[i : i + step] = how.decode(tuple(part[i : i + step] for part in flat), width)
    return out


def stored(kind: str, shape: Shape) -> tuple[Stored, ...]:
    """Name, shape and type of each part of a weight of this shape."""
    return format_of(kind).stored(tuple(shape))


def size_of(kind: str, shape: Shape) -> int:
    """The bytes of a quantised weight of this shape."""
    return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in stored(kind, shape))


def format_of(kind: str) -> Format:
    """A format by its name; ValueError for a name that is not in FORMATS."""
    if kind not in FORMATS:
        raise ValueError(f"kind: got {kind!r}, valid is {', '.join(FORMATS)}")
    return FORMATS[kind]


def _pieces(rows: Tensor) -> tuple[Tensor, ...]:
    """Some rows each; one piece without rows if there are none."""
    return rows.split(max(1, PIECE // rows.shape[1])) if len(rows) else (rows,)


def _groups(x_MW: Tensor, size: int) -> Tensor:
    """Rows as groups [M, G, size]; zeros fill the last group."""
    M, W = x_MW.shape
    G = math.ceil(W / size)
    if G * size > W:
        x_MW = torch.cat([x_MW, x_MW.new_zeros(M, G * size - W)], 1)
    return x_MW.view(M, G, size)


def _scale(most: Tensor, codes: float) -> Tensor:
    """The scale in bf16 for values up to `most` and codes up to `codes`; 1 where it would be zero."""
    scale = (most / codes).to(torch.bfloat16)
    return torch.where(scale == 0, 1.0, scale)


# ---- int8 and fp8: a scale for a row ----


def _stored_row(dtype: torch.dtype) -> Callable[[Shape], tuple[Stored, ...]]:
    return lambda shape: (("codes", shape, dtype), ("scales", (*shape[:-1], 1), torch.bfloat16))


def _encode_int8(x_MW: Tensor) -> Parts:
    """Codes -127 to 127 of a row: round(x / scale), scale = max|x| / 127."""
    scale = _scale(x_MW.abs().amax(1, keepdim=True), 127)
    return (x_MW / scale.float()).round_().clamp_(-127, 127).to(torch.int8), scale


def _encode_fp8(x_MW: Tensor) -> Parts:
    """e4m3 of a row: x / scale, scale = max|x| / 448."""
    scale = _scale(x_MW.abs().amax(1, keepdim=True), FP8_MOST)
    return (x_MW / scale.float()).clamp_(-FP8_MOST, FP8_MOST).to(FP8), scale


def _decode_row(parts: Parts, W: int) -> Tensor:
    codes, scale = parts
    return codes.float() * scale.float()


# ---- int4: a scale for 128 values of a row ----


def _stored_int4(shape: Shape) -> tuple[Stored, ...]:
    *rows, W = shape
    G = math.ceil(W / INT4_GROUP)
    return ("codes", (*rows, INT4_HALF * G), torch.uint8), ("scales", (*rows, G), torch.bfloat16)


def _encode_int4(x_MW: Tensor) -> Parts:
    """Integers -8 to 7 of a group: round(x / scale), scale = max|x| / 7.5, as in compressed-tensors.

    A code is the integer plus 8. Byte j of a group holds value j in its low four bits and value j + 64 in its
    high ones, so that a kernel gets 64 consecutive values of each without moving data between threads.
    """
    x_MGJ = _groups(x_MW, INT4_GROUP)
    scale_MG = _scale(x_MGJ.abs().amax(2), 7.5)
    q_MGJ = (x_MGJ / scale_MG.float()[..., None]).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    low, high = q_MGJ.split(INT4_HALF, 2)
    return (low | high << 4).flatten(1), scale_MG


def integers(codes: Tensor, W: int) -> Tensor:
    """The integers -8 to 7 of int4's codes: int8 [..., W]."""
    groups = codes.unflatten(-1, (-1, INT4_HALF))
    both = torch.cat([groups & 15, groups >> 4], -1).flatten(-2)
    return both[..., :W].to(torch.int8) - 8


def _decode_int4(parts: Parts, W: int) -> Tensor:
    codes, scale_MG = parts
    values = _groups(integers(codes, W).float(), INT4_GROUP) * scale_MG.float()[..., None]
    return values.flatten(1)[:, :W]


# ---- mxfp4: a power of two for 32 values of a row (Open Compute Project, Microscaling Formats 1.0) ----


def _stored_mxfp4(shape: Shape) -> tuple[Stored, ...]:
    *rows, W = shape
    G = math.ceil(W / MX_GROUP)
    return ("codes", (*rows, MX_GROUP // 2 * G), torch.uint8), ("scales", (*rows, G), torch.uint8)


def _encode_mxfp4(x_MW: Tensor) -> Parts:
    """E2M1 of a group times 2^e, both rounded to the nearest, ties to even codes.

    e is the exponent of the group's largest value minus 2, the largest exponent of E2M1. It is one larger
    from 7 / 4 on, the middle of 6 and 8, so that no value above 7 is stored as 6 (compressed-tensors' rule;
    the error of normal values is .113, and .118 without it). A byte holds two values, the first in its low
    bits.
    """
    x_MGJ = _groups(x_MW, MX_GROUP)
    most_MG = x_MGJ.abs().amax(2)
    fraction, exponent = torch.frexp(most_MG)  # most = fraction 2^exponent, fraction from 1/2 to 1
    e = torch.where(most_MG == 0, 0, exponent - 3 + (fraction >= 0.875))
    e = e.clamp(-MX_BIAS, MX_BIAS)
    # scaled by two powers of two, because a single one may have no fp32
    scaled = torch.ldexp(torch.ldexp(x_MGJ, (-e // 2)[..., None]), (-e - (-e // 2))[..., None])
    edges = torch.tensor(_fp4_edges(), device=x_MW.device)
    q_MGJ = torch.bucketize(scaled.abs(), edges, out_int32=True).to(torch.uint8)
    q_MGJ |= (scaled < 0).to(torch.uint8) << 3
    pairs = q_MGJ.unflatten(2, (-1, 2))
    codes = pairs[..., 0] | pairs[..., 1] << 4
    return codes.flatten(1), (e + MX_BIAS).to(torch.uint8)


@cache
def _fp4_edges() -> list[float]:
    """The largest fp32 number of each code but the last: a tie belongs to the even code."""
    middles = [(a + b) / 2 for a, b in pairwise(FP4)]
    below = torch.nextafter(torch.tensor(middles), torch.zeros(())).tolist()
    return [below[i] if i % 2 else middle for i, middle in enumerate(middles)]


def _decode_mxfp4(parts: Parts, W: int) -> Tensor:
    codes, scales = parts
    table = torch.tensor([*FP4, *(-v for v in FP4)], device=codes.device)
    q = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    values = table[q.int()].unflatten(1, (-1, MX_GROUP))
    return torch.ldexp(values, (scales.int() - MX_BIAS)[..., None]).flatten(1)[:, :W]


# ---- nf4: a maximum for 64 values, the maxima in 8 bits (Dettmers et al. 2023, QLoRA, section 3) ----


def _stored_nf4(shape: Shape) -> tuple[Stored, ...]:
    n = math.prod(shape)
    maxima = math.ceil(n / NF4_BLOCK)
    most = math.ceil(maxima / NF4_MAXIMA)
    return (
        ("codes", (math.ceil(n / 2),), torch.uint8),
        ("maxima", (maxima,), torch.uint8),
        ("most", (most,), torch.float32),
        ("offset", (), torch.float32),
    )


@cache
def dynamic() -> tuple[float, ...]:
    """256 numbers of 8 bits: a sign, leading zeros as a power of ten, a fraction (Dettmers 2016)."""
    found = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, device="cpu")
        means = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        found += means.tolist() + (-means).tolist()
    return tuple(sorted(found))


def _middles(table: Tensor) -> Tensor:
    return (table[1:] + table[:-1]) / 2


def _encode_nf4(x_n: Tensor) -> Parts:
    """bitsandbytes' bits, with compress_statistics.

    A code is the nearest number of the table to x / max|x| of its block. A byte holds two, the first in its
    high bits. The maxima minus their mean are stored in 8 bits, relative to the largest of 256 of them.
    """
    table = torch.tensor(NF4, device=x_n.device)
    codes, tops = [], []
    for piece in x_n.split(PIECE) if len(x_n) else (x_n,):
        x_BJ = _groups(piece.float()[None], NF4_BLOCK)[0]
        top_B = x_BJ.abs().amax(1)
        scaled = (x_BJ / torch.where(top_B == 0, 1.0, top_B)[:, None]).flatten()
        q = torch.bucketize(scaled[: len(piece) + len(piece) % 2], _middles(table), out_int32=True)
        pairs = q.to(torch.uint8).view(-1, 2)
        codes.append(pairs[:, 0] << 4 | pairs[:, 1])
        tops.append(top_B)
    top = torch.cat(tops)
    offset = top.mean() if len(top) else top.new_zeros(())
    blocks = _groups((top - offset)[None], NF4_MAXIMA)[0]
    most = blocks.abs().amax(1)
    relative = blocks / torch.where(most == 0, 1.0, most)[:, None]
    relative = ((relative + 1) * DYNAMIC_STEPS).round_() / DYNAMIC_STEPS - 1
    eight = torch.tensor(dynamic(), device=x_n.device)
    maxima = torch.bucketize(relative, _middles(eight), out_int32=True).to(torch.uint8)
    return torch.cat(codes), maxima.flatten()[: len(top)], most, offset


def maxima_of(maxima: Tensor, most: Tensor, offset: Tensor) -> Tensor:
    """The maximum of each block of NF4, fp32 [ceil(n / 64)]."""
    table = torch.tensor(dynamic(), device=maxima.device)
    scale = most.repeat_interleave(NF4_MAXIMA)[: len(maxima)]
    return table[maxima.int()] * scale + offset


def _decode_nf4(parts: Parts, n: int) -> Tensor:
    codes, *rest = parts
    return nf4_values(codes, maxima_of(*rest), n)


def nf4_values(codes: Tensor, top: Tensor, n: int) -> Tensor:
    """The first n values, fp32, of codes whose blocks have these maxima."""
    table = torch.tensor(NF4, device=codes.device)
    out = codes.new_empty(n, dtype=torch.float32)
    for i in range(0, n, PIECE):
        part = codes[i // 2 : (i + PIECE) // 2]
        values = table[torch.stack([part >> 4, part & 15], 1).int()].flatten()[: n - i]
        blocks = top[i // NF4_BLOCK : math.ceil((i + PIECE) / NF4_BLOCK)]
        out[i : i + PIECE] = values * blocks.repeat_interleave(NF4_BLOCK)[: len(values)]
    return out


FORMATS = {
    "int8": Format(_stored_row(torch.int8), _encode_int8, _decode_row),
    "int4": Format(_stored_int4, _encode_int4, _decode_int4),
    "fp8": Format(_stored_row(FP8), _encode_fp8, _decode_row),
    "mxfp4": Format(_stored_mxfp4, _encode_mxfp4, _decode_mxfp4),
    "nf4": Format(_stored_nf4, _encode_nf4, _decode_nf4, flat=True),
}
