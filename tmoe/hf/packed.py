"""Reads quantised tensors of a Hugging Face folder as the 16-bit tensors that they encode.

A format is a table and a function. The table lists the stored tensors that make up one packed tensor, with
their types and shapes. A tensor that differs from the table is refused by name, because the type of a helper
tensor is a part of its meaning. The function makes the views from the folder's tensors and its
quantization_config. A view converts boxes of the stored tensors to a box of the values. All code that uses
Folder (comparison, import, direct start) handles only names, shapes and values. An export does not quantise
again, because training has changed the weights: it writes the values.

next: hf/files.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.base.quantised import FP4, MX_BIAS, MX_GROUP
from tmoe.config.check import ConfigError

QUANTISED = "quantization_config"
CONVERTED = "AutoModelForCausalLM.from_pretrained(DIR{how}).save_pretrained(NEW_DIR)"
Read = Callable[[str, tuple], Tensor]  # (name of a tensor in the files, slices) -> that box
Shape = tuple[int, ...]
Shapes = dict[str, Shape]


@dataclass(frozen=True)
class View:
    """A tensor that is not in the files but is computed from the stored tensors `parts`."""

    parts: tuple[str, ...]
    shape: Shape
    dtype: str
    """its type in an export, by its name in safetensors"""
    read: Callable[[Read, tuple[slice, ...]], Tensor]
    """(function that reads the files, slices of this tensor) -> that box"""


class Found(NamedTuple):
    """The result of looking for a format in a folder."""

    views: dict[str, View]
    """by name"""
    problems: list[str]
    """a line for each tensor that differs from the format"""
    unread: list[str] = []  # noqa: RUF012
    """tensors of the format that tmoe has no use for"""


class PackedTensor(NamedTuple):
    """A row of a format's table: one of the stored tensors that make up a packed tensor NAME."""

    suffix: str
    """suffix that is appended to NAME in its name"""
    dtypes: tuple[str, ...]
    """its valid types, by their names in safetensors"""
    fits: Callable[[Shape, Shape], bool]
    """(its shape, the shape of the first row's tensor) -> whether its shape is that of the format"""
    said: str
    """the valid shape in words"""


def find(
    table: tuple[PackedTensor, ...], shapes: Shapes, dtypes: dict[str, str]
) -> tuple[list[str], list[str]]:
    """Names of the packed tensors, and a line for each tensor that is missing or differs from the table.

    A tensor belongs to the format if its name ends in one of the table's suffixes. If the table has a row
    without a suffix, every tensor of an fp8 type belongs to the format too.
    """
    suffixes = tuple(row.suffix for row in table if row.suffix)
    names = {name.removesuffix(end) for name in shapes for end in suffixes if name.endswith(end)}
    if len(suffixes) < len(table):
        fp8 = {name for name, kind in dtypes.items() if kind.startswith(("F8_E4", "F8_E5"))}
        names |= {name for name in fp8 if not name.endswith(suffixes)}
    problems = [line for name in sorted(names) for line in problems_of(table, name, shapes, dtypes)]
    return sorted(names), problems


def problems_of(
    table: tuple[PackedTensor, ...], name: str, shapes: Shapes, dtypes: dict[str, str]
) -> list[str]:
    """A line for each stored tensor of the packed tensor `name` that is missing or differs from the table."""
    bare = any(not row.suffix for row in table)  # one of them has the packed tensor's own name
    parts = {f"{name}{row.suffix}": row for row in table}
    there = [part for part in parts if part in shapes]
    problems = [f"{part}: missing, but {there[0]} is there" for part in parts if part not in shapes]
    if not bare and name in shapes:
        problems.append(f"{name}: there, and packed as {there[0]} as well")
    for part in there:
        row = parts[part]
        if dtypes[part] not in row.dtypes:
            problems.append(f"{part}: {dtypes[part]}; valid are {', '.join(row.dtypes)}")
    first = f"{name}{table[0].suffix}"
    for part in there if first in shapes else []:
        if not parts[part].fits(shapes[part], shapes[first]):
            problems.append(f"{part}: shape {shapes[part]}, must be {parts[part].said}")
            break  # the shapes of the later tensors follow from the first
    return problems


# ---- MXFP4 (Open Compute Project, Microscaling Formats 1.0, 2023), as gpt-oss is published ----

MXFP4 = (
    PackedTensor(
        "_blocks", ("U8",), lambda shape, _: len(shape) == 4 and shape[3] * 2 == MX_GROUP, "[E, M, W/32, 16]"
    ),
    PackedTensor(
        "_scales", ("U8",), lambda shape, blocks: shape == blocks[:3], "the blocks' without its last axis"
    ),
)


def mxfp4(shapes: Shapes, dtypes: dict[str, str], settings: dict[str, Any]) -> Found:
    """Views of MXFP4: NAME_blocks [E, M, W/32, 16] and NAME_scales [E, M, W/32], U8, encode NAME [E, W, M].

    A byte holds two values, the lower four bits first; a scale is an exponent of two plus 127. bf16 holds
    every product exactly.
    """
    names, problems = find(MXFP4, shapes, dtypes)
    if problems:
        return Found({}, problems)
    views = {}
    for name in names:
        blocks, scales = (f"{name}{row.suffix}" for row in MXFP4)
        E, M, groups, _ = shapes[blocks]
        views[name] = View(
            (blocks, scales), (E, groups * MX_GROUP, M), "BF16", partial(unpack, blocks, scales)
        )
    return Found(views, [])


def unpack(blocks: str, scales: str, read: Read, box: tuple[slice, ...]) -> Tensor:
    """The box [E, W, M] in fp32. One expert is converted at a time, because the data grow eightfold.

    M's slice may have a step. Measured on one core: 84 million values a second (by a gather of each byte's
    pair of values); transformers' conversion does 22 million.
    """
    experts, wide, rows = box
    first = wide.start // MX_GROUP
    last = math.ceil(wide.stop / MX_GROUP)
    low = wide.start - first * MX_GROUP

    # Double the numbers and halve the powers: fp32 has no 2^128, but it has the value 0.5 times 2^128.
    values = 2 * torch.tensor([*FP4, *(-v for v in FP4)])
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - MX_BIAS - 1)
    # Store the two fp32 values of every byte as one fp64 number, because a gather of single numbers is fast.
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)
    pairs = pairs.view(torch.float64).flatten()

    out = torch.empty(
        experts.stop - experts.start, len(range(*rows.indices(rows.stop))), wide.stop - wide.start
    )
    for i in range(out.shape[0]):
        index = (slice(experts.start + i, experts.start + i + 1), rows, slice(first, last))
        scale = powers[read(scales, index)[0].to(torch.int32)]
        numbers = pairs[read(blocks, (*index, slice(0, MX_GROUP // 2)))[0].to(torch.int32)].view(
            torch.float32
        )
        out[i] = numbers.mul_(scale[..., None]).flatten(-2)[:, low : low + out.shape[2]]
    return out.mT


# ---- fp8 in blocks, as DeepSeek-V3 is published ----

BLOCKS = [128, 128]  # the default of weight_block_size
FP8_SETTINGS = dict(  # valid values; the first is the default of a missing key
    activation_scheme=("dynamic",),
    scale_fmt=("float", "ue8m0"),
    expert_dtype=("fp8",),
    modules_to_convert=(None, []),
)


FP8_ROAD = "take the published folder of 16-bit weights, or write it: transformers' " + CONVERTED.format(
    how=", quantization_config=FineGrainedFP8Config(dequantize=True)"
)


def fp8(shapes: Shapes, dtypes: dict[str, str], settings: dict[str, Any]) -> Found:
    """Views of fp8: NAME [M, W] in F8_E4M3 times NAME_scale_inv [ceil(M/m), ceil(W/w)], a factor a block.

    A block is m x w, the settings' `weight_block_size`. The type of the factors decides their meaning, as in
    transformers, and scale_fmt does not: they are numbers, or exponents of two plus 127 in F8_E8M0 or in
    plain bytes. The products are rounded to fp32; an export rounds them to bf16, as DeepSeek's own conversion
    does. ConfigError for settings with other values.
    """
    for key, valid in FP8_SETTINGS.items():
        if settings.get(key, valid[0]) not in valid:
            choices = " or ".join(map(repr, valid))
            raise ConfigError(f"{QUANTISED}: {key}={settings[key]!r}: only {choices} is read; {FP8_ROAD}")
    block = settings.get("weight_block_size", BLOCKS)
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise ConfigError(
            f"{QUANTISED}: weight_block_size={block!r}: fp8 is read with a factor for each block; {FP8_ROAD}"
        )

    def one_a_block(shape: Shape, weight: Shape) -> bool:
        return shape == tuple(math.ceil(n / b) for n, b in zip(weight, block, strict=True))

    scales = ("F32", "BF16", "F16", "U8", "F8_E8M0")
    table = (
        PackedTensor("", ("F8_E4M3",), lambda shape, _: len(shape) == 2, "[M, W]"),
        PackedTensor(
            "_scale_inv", scales, one_a_block, f"a factor for each block of {block[0]} x {block[1]}"
        ),
    )
    names, problems = find(table, shapes, dtypes)
    if problems:
        return Found({}, problems)
    views = {}
    for name in names:
        factors = f"{name}_scale_inv"
        views[name] = View((name, factors), shapes[name], "BF16", partial(scaled, name, factors, block))
    return Found(views, [])


def scaled(name: str, factors: str, block: list[int], read: Read, box: tuple[slice, ...]) -> Tensor:
    """The box [M, W] in fp32: the fp8 numbers times the factors of their blocks."""
    touched = tuple(slice(s.start // b, math.ceil(s.stop / b)) for s, b in zip(box, block, strict=True))
    scale = read(factors, touched)
    scale = torch.exp2(scale.float() - MX_BIAS) if scale.dtype == torch.uint8 else scale.float()
    for axis, (s, b) in enumerate(zip(box, block, strict=True)):
        scale = scale.repeat_interleave(b, axis).narrow(axis, s.start % b, s.stop - s.start)
    return read(name, box).float() * scale


READABLE = "fp8 in blocks, compressed-tensors and mxfp4"
# For each quantisation method, the call of transformers that writes a folder of 16-bit weights.
WAYS = {
    "bitsandbytes": CONVERTED.format(how=").dequantize("),
}


def no_reader(quantised: Any) -> str:
    """The error for a quantization_config whose method is not read, with the way to get 16-bit weights."""
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    shown = f"quant_method={method!r}" if method else f"{quantised!r}, without a quant_method"
    conversion = WAYS.get(method, "") if isinstance(method, str) else ""
    writes = f", or write them: transformers' {conversion}" if conversion else ""
    return (
        f"{QUANTISED}: {shown}: only {READABLE} are read: take the published folder of 16-bit weights "
        f"(base_model in the model's README.md){writes}"
    )


def unpacked(packed: str) -> str:
    """The note of import and export about a folder whose tensors were in the format `packed`."""
    return (
        f"its {packed} tensors are read as the 16-bit values that they stand for; "
        f"exports hold those, without {QUANTISED}"
        + "; factors of quantised activations, if the folder has some, are left out"
        * (packed == "compressed-tensors")
    )
