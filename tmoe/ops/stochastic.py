"""Stochastic rounding to bf16 with numbers that depend on the element and the step, never on the layout.

A value between two neighbours in bf16 is rounded to either, in proportion to its distance from the other, so
the mean of many roundings is the value. The 16 random bits of an element are a hash of (seed, name of the
parameter, number of the step, index of the element in the whole parameter). A generator has a state, from
which a rank would draw in the order of the elements that it stores. A hash has none, so a run that is resumed
or laid out otherwise rounds the same elements in the same way.

next: ops/narrow_adamw.py
"""

import hashlib
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOW = 0xFFFFFFFF


class Place(NamedTuple):
    """Where the elements of a rank's part lie in the whole parameter, and the parameter's salt.

    Element i of the part, which is contiguous, has index base + i // chunk * stride + i % chunk.
    """

    salt: int
    """32 bits of a hash of the run's seed and the parameter's name"""
    base: int = 0
    chunk: int = 1
    """elements of the part that are contiguous in the whole"""
    stride: int = 1
    """elements between the beginnings of two such chunks in the whole; `chunk` for a contiguous part"""


def salt_of(seed: int, name: str) -> int:
    """The salt of a parameter: 32 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "little")


def place_of(shape: tuple[int, ...], part: tuple[slice, ...], salt: int) -> Place:
    """The place of a part that is cut along axis 0 and along at most one further axis.

    part: the slices of the whole, in `shape`, that the rank holds (`local_slices` of parallel/mesh.py).
    ValueError for parts that are cut along two axes other than axis 0.
    """
    cut = [axis for axis, n in enumerate(shape) if axis and (part[axis].stop - part[axis].start) != n]
    if len(cut) > 1:
        raise ValueError(f"place_of: a part cut along axes {cut}; valid: axis 0 and one other axis")
    if not shape or 0 in shape:
        return Place(salt)
    axis = cut[0] if cut else 0
    inner = 1
    for n in shape[axis + 1 :]:
        inner *= n
    stride = shape[axis] * inner
    base = part[axis].start * inner
    if axis:
        rows = 1
        for n in shape[1:axis]:
            rows *= n
        base += part[0].start * rows * stride
        return Place(salt, base, max(1, part[axis].stop - part[axis].start) * inner, stride)
    return Place(salt, base)


def random_bits(
    place: Place, step: int | Tensor, count: int, device: torch.device, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Two hashes of each of `count` elements of a part, from `first` on: int64 [count], 32 bits each.

    step: a number, or 0-dim int64 on the device.
    """
    at = torch.arange(first, first + count, device=device)
    index = place.base + at.div(place.chunk, rounding_mode="floor") * place.stride + at % place.chunk
    key = _mixed(torch.as_tensor((place.salt ^ step) & LOW, device=device))
    bits = _mixed(index & LOW ^ _mixed(index >> 32 ^ key))
    return bits, _mixed(bits ^ 0x9E3779B9)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which each input bit flips each output bit with probability 1/2.

    lowbias32 of Wellons' "Prospecting for Hash Functions" (2018). x: int64, from 0 to 2^32 - 1.
    """
    x = x ^ x >> 16
    x = x * 0x7FEB352D & LOW
    x = x ^ x >> 15
    x = x * 0x846CA68B & LOW
    return x ^ x >> 16


def rounded(x: Tensor, draws: Tensor) -> Tensor:
    """x (fp32) in bf16, stochastically. draws: int64 of x's shape, from 0 to 2^16 - 1.

    A finite number whose exponent is bf16's largest may become infinite, as in rounding to the nearest.
    """
    bits = x.contiguous().view(torch.int32) + draws.to(torch.int32)
    return (bits & -65536).view(torch.float32).bfloat16()


@triton.jit
def mixed(x):
    """`_mixed` in a kernel. x: uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def bits_of(index, key):
    """`random_bits` in a kernel, from an int64 index and the key of parameter and step (uint32)."""
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    first = mixed(low ^ mixed(high ^ key))
    return first, mixed(first ^ 0x9E3779B9)


@triton.jit
def bits_after(start, near, key):
    """`bits_of` start + near, with one hash less for each element.

    start: int64, 0-dim; near: int32, from 0.
    """
    high = (start >> 32).to(tl.uint32)
    low = start.to(tl.uint32) + near.to(tl.uint32)
    carried = low < near.to(tl.uint32)
    first = mixed(low ^ tl.where(carried, mixed((high + 1) ^ key), mixed(high ^ key)))
    return first, mixed(first ^ 0x9E3779B9)


@triton.jit
def round_bf16(x, draws):
    """`rounded` in a kernel. draws: uint32 below 2^16."""
    bits = x.to(tl.uint32, bitcast=True) + draws
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)
