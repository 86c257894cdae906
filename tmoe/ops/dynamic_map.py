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


@functools.cache
def maps(device: torch.device) -> Tensor:
    """fp32 [4, 256]: values of the signed map, their midpoints, the same of the unsigned map.

    Midpoint c lies between values c and c + 1; midpoint 255 is infinite.
    """
    rows = []
    for signed in (True, False):
        values = torch.tensor(_values(signed), dtype=torch.float64)
        middles = torch.cat([(values[:-1] + values[1:]) / 2, torch.tensor([torch.inf])])
        rows += [values, middles]
    return torch.stack(rows).float().to(device)


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
    middles = maps(x.device)[1 if signed else 3][:-1]
    codes = torch.bucketize(blocks / scale[..., None], middles, right=True)
    return codes.to(torch.uint8).flatten(-2), scale


def dequantise(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """The numbers, fp32 in the shape of codes. codes: [..., D]; scale: [..., D / block]."""
    values = maps(codes.device)[0 if signed else 2][codes.int()]
    if not values.numel():
        return values
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


@triton.jit
def code_of(x, middles, SIGNED: tl.constexpr):
    """The code of the value nearest to x, which is from -1 to 1; middles: address of the map's midpoints.

    Decade and place in the decade are computed, within one code; the midpoints on both sides correct them. A
    binary search would read eight values.
    """
    size = tl.abs(x)
    decade = tl.ceil(tl.log2(tl.maximum(size, 1e-30)) * 0.30103) + 6.0
    decade = tl.minimum(tl.maximum(decade, 0.0), 6.0)
    n = tl.exp2(decade) if SIGNED else tl.exp2(decade + 1.0)
    place = tl.floor((size * tl.exp2((6.0 - decade) * 3.321928094887362) - 0.1) / 0.9 * n)
    place = tl.minimum(tl.maximum(place, -1.0), n - 1.0)
    if SIGNED:
        code = (127.0 + tl.where(x < 0, -(n + place), n + place)).to(tl.int32)
    else:
        code = (n - 1.0 + place).to(tl.int32)
    code = tl.minimum(tl.maximum(code, 0), 255)
    above = x >= tl.load(middles + code)
    below = (x < tl.load(middles + tl.maximum(code - 1, 0))) & (code > 0)
    return code + above.to(tl.int32) - below.to(tl.int32)
