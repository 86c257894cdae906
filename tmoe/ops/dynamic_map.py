"""Numbers in 8 bits with a scale for each block: the dynamic map of 8-bit optimizers.

A block's numbers are divided by its largest magnitude, and each quotient is stored as the number of the
nearest of 256 values (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization", section 2). The
values have seven decades down to 1e-6, and each decade has twice as many values as the one below: 2^i of each
sign in a signed map, 2^(i+1) in an unsigned one. torchao's AdamW8bit and bitsandbytes have the same values.

next: ops/narrow_adamw.py
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # most numbers of a block
TINY = 1e-12  # least scale, so that a block of zeros has quotients of zero
DECADES = 7
# A decade is found from the bits of a number above the lowest 12, which rise nearly as its logarithm: the
# first begins at FIRST, and each has 2^29 / RATE of them.
FIRST = tl.constexpr(212634)
RATE = tl.constexpr(79600)


@functools.cache
def maps(device: torch.device) -> Tensor:
    """fp32 [4, 256]: values of the signed map, their bounds, the same of the unsigned map.

    Bound c is the middle of values c - 1 and c; bound 0 is minus infinity.
    """
    rows = []
    for signed in (True, False):
        values = torch.tensor(_values(signed), dtype=torch.float64)
        bounds = torch.cat([torch.tensor([-torch.inf]), (values[:-1] + values[1:]) / 2])
        rows += [values, bounds]
    return torch.stack(rows).float().to(device)


@functools.cache
def decades(device: torch.device) -> Tensor:
    """int64 [2, 8]: slope and start in fp32 for each decade of the signed and of the unsigned map.

    The n values of a decade have the numbers n to 2n - 1 among the values of a sign (from 1 on in the
    unsigned map). For a magnitude s, s * slope + start, rounded to an integer, is the number of the nearest
    value or of the value above it. start contains 1.5 * 2^23, so fp32 rounds the sum to an integer, and its
    lowest bits are the number. The last decade is listed twice, because 1 is where an eighth would begin.
    """
    rows = []
    for signed in (True, False):
        for decade in (*range(DECADES), DECADES - 1):
            n = 2**decade if signed else 2 ** (decade + 1)
            shift = round(n / 9)
            slope = 3.35 if n == 4 else n + shift  # 4 would be 0.58 too high at the decade's first bound
            rows.append([slope * 10.0 ** (DECADES - 1 - decade), 1.5 * 2**23 + n - shift])
    return torch.tensor(rows).view(torch.int64).view(2, DECADES + 1).to(device)


def _values(signed: bool) -> list[float]:
    values = [0.0, 1.0]
    for decade in range(DECADES):
        n = 2**decade if signed else 2 ** (decade + 1)
        sizes = [10.0 ** (decade - DECADES + 1) * (0.1 + 0.9 * (k + 0.5) / n) for k in range(n)]
        values += sizes + ([-size for size in sizes] if signed else [])
    return sorted(values)


def zero_code(signed: bool) -> int:
    """The code of 0."""
    return 127 if signed else 0


def quantise(x: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes uint8 of x's shape and scales fp32 [..., D / block].

    x: fp32 [..., D]. block: divides D.
    """
    blocks = x.unflatten(-1, (x.shape[-1] // block, block))
    scale = blocks.abs().amax(-1).clamp(min=TINY)
    bounds = maps(x.device)[1 if signed else 3][1:]
    codes = torch.bucketize(blocks / scale[..., None], bounds, right=True)
    return codes.to(torch.uint8).flatten(-2), scale


def dequantise(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """The numbers, fp32 in the shape of codes. codes: [..., D]; scale: [..., D / block]."""
    values = maps(codes.device)[0 if signed else 2][codes.int()]
    if not values.numel():
        return values
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


@triton.jit
def code_of(x, bounds, decades, SIGNED: tl.constexpr):
    """The code of the value nearest to x, which is from -1 to 1, as `quantise` finds it.

    bounds, decades: addresses of the map's rows of `maps` and `decades`. The decade's line gives a code that
    is right or one too high; the bound below that code decides. A binary search would read eight bounds.
    """
    bits = x.to(tl.uint32, bitcast=True)
    high = (bits & 0x7FFFFFFF if SIGNED else bits) >> 12
    decade = ((tl.maximum(high, FIRST) - FIRST) * RATE) >> 29  # 0 to 7, even if x is NaN
    line = tl.load(decades + decade.to(tl.int32))
    slope = line.to(tl.int32).to(tl.float32, bitcast=True)
    start = (line >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    found = (tl.abs(x) * slope + start).to(tl.int32, bitcast=True)
    if SIGNED:
        below = x.to(tl.int32, bitcast=True) >> 31  # -1 below 0
        found = (found ^ below) + 127 + (below & 2)
    else:
        found -= 1
    found &= 255
    return found - (x < tl.load(bounds + found)).to(tl.int32)
