"""Quantised tensors of a Hugging Face folder, seen as the 16-bit tensors that they stand for.

A format is one function: from the folder's tensors and its quantization_config it makes the views, and a view turns boxes of the packed tensors into a box of the
values. Everything behind Folder (comparison, import, direct start) sees names, shapes and values only. Nothing is packed again on the
way back: training moved the weights, so an export writes the values.

next: hf_files.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tmoe.config import ConfigError

QUANTISED = "quantization_config"
Read = Callable[[str, tuple], Tensor]  # (name of a tensor in the files, slices) -> that box
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class View:
    """A tensor that is not in the files but computed from `parts`, which are."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    """the type, as safetensors names it, that an export gives it"""
    read: Callable[[Read, tuple[slice, ...]], Tensor]
    """(how to read the files, slices of this tensor) -> that box"""


# ---- MXFP4 (Open Compute Project, Microscaling Formats 1.0, 2023), as gpt-oss is published ----

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign bit
BLOCK = 32  # values that share a power of two


def mxfp4(shapes: Shapes, dtypes: dict[str, str], settings: dict[str, Any]) -> dict[str, View]:
    """NAME_blocks [E, M, W/32, 16] and NAME_scales [E, M, W/32], both U8, stand for NAME [E, W, M].

    A byte holds two values, the lower four bits first; a scale is an exponent of two plus 127. bf16 holds every product exactly.
    """
    found = {}
    for blocks in shapes:
        name = blocks.removesuffix("_blocks")
        scales, shape = f"{name}_scales", shapes[blocks]
        packed = name != blocks and len(shape) == 4 and shape[3] * 2 == BLOCK and shapes.get(scales) == shape[:3]
        if packed and dtypes[blocks] == dtypes[scales] == "U8":
            whole = (shape[0], shape[2] * BLOCK, shape[1])
            found[name] = View(
                (blocks, scales), whole, "BF16", lambda read, box, b=blocks, s=scales: unpack(read, b, s, box)
            )
    return found


def unpack(read: Read, blocks: str, scales: str, box: tuple[slice, ...]) -> Tensor:
    """The box [E, W, M] in fp32, one expert at a time: what is read grows eightfold on the way. M's slice may have a step.

    84 million values a second on one core (a gather of each byte's pair of values), transformers' conversion 22.
    """
    experts, wide, rows = box
    first, last = wide.start // BLOCK, math.ceil(wide.stop / BLOCK)
    low = wide.start - first * BLOCK
    values = torch.tensor([*FP4, *(-v for v in FP4)])
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)  # of every byte
    pairs = pairs.view(torch.float64).flatten()  # two at once: a gather of single numbers is fast
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
    out = torch.empty(experts.stop - experts.start, len(range(*rows.indices(rows.stop))), wide.stop - wide.start)
    for i in range(out.shape[0]):
        here = (slice(experts.start + i, experts.start + i + 1), rows, slice(first, last))
        scale = powers[read(scales, here)[0].to(torch.int32)]
        numbers = pairs[read(blocks, (*here, slice(0, BLOCK // 2)))[0].to(torch.int32)].view(torch.float32)
        out[i] = numbers.mul_(scale[..., None]).flatten(-2)[:, low : low + out.shape[2]]
    return out.mT


# ---- fp8 in blocks, as DeepSeek-V3 is published ----


def fp8(shapes: Shapes, dtypes: dict[str, str], settings: dict[str, Any]) -> dict[str, View]:
    """NAME [M, W] in F8_E4M3 times NAME_scale_inv [ceil(M/m), ceil(W/w)], a factor for each block of `weight_block_size` m x w.

    fp32 holds the products to its own rounding; an export rounds them to bf16, as DeepSeek's own conversion does.
    """
    block = settings.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ConfigError(f"quantization_config: weight_block_size={block!r}: fp8 is read with a factor for each block")
    found = {}
    for name, shape in shapes.items():
        factors, blocks = f"{name}_scale_inv", tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=False))
        if dtypes[name] == "F8_E4M3" and len(shape) == 2 and shapes.get(factors) == blocks:
            found[name] = View((name, factors), shape, "BF16", partial(scaled, name, factors, block))
    return found


def scaled(name: str, factors: str, block: list[int], read: Read, box: tuple[slice, ...]) -> Tensor:
    """The box [M, W] in fp32."""
    touched = tuple(slice(s.start // b, math.ceil(s.stop / b)) for s, b in zip(box, block, strict=True))
    scale = read(factors, touched).float()
    for axis, (s, b) in enumerate(zip(box, block, strict=True)):
        scale = scale.repeat_interleave(b, axis).narrow(axis, s.start % b, s.stop - s.start)
    return read(name, box).float() * scale


FORMATS: dict[str, Callable[[Shapes, dict[str, str], dict[str, Any]], dict[str, View]]] = dict(mxfp4=mxfp4, fp8=fp8)


def unpacked(packed: str) -> str:
    """What import and export say about a folder whose tensors were in the format `packed`."""
    return f"its {packed} tensors are read as the 16-bit values that they stand for; exports hold those, without {QUANTISED}"
