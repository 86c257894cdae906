"""Reads folders that compressed-tensors and llm-compressor write: integers, fp8 and fp4 with their factors.

A config.json has groups; a group has targets, which are names of modules, and the numbers of its weights. The
files state which modules are quantised; the groups state how, so `ignore` is not needed. A scheme that is not
in READ is refused by name.

next: hf/files.py
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.base.quantised import FP4, MX_BIAS
from tmoe.config.check import ConfigError
from tmoe.hf.packed import (
    CONVERTED,
    QUANTISED,
    Found,
    PackedTensor,
    Read,
    Shape,
    Shapes,
    View,
    problems_of,
)

# Valid values of a group's weights for each format.
INT = dict(type=("int",), symmetric=(True, False))
FLOAT = dict(type=("float",), symmetric=(True,))
READ: dict[str, dict[str, tuple]] = {
    "pack-quantized": INT | dict(num_bits=(2, 4, 8), strategy=("group", "channel", "tensor")),
    "int-quantized": INT | dict(num_bits=(*range(2, 9),), strategy=("group", "channel", "tensor", "block")),
    "float-quantized": FLOAT | dict(num_bits=(8,), strategy=("group", "channel", "tensor", "block")),
    "mxfp4-pack-quantized": FLOAT | dict(num_bits=(4,), strategy=("group",), group_size=(32,)),
    "mxfp8-quantized": FLOAT | dict(num_bits=(8,), strategy=("group",), group_size=(32,)),
    "nvfp4-pack-quantized": FLOAT | dict(num_bits=(4,), strategy=("tensor_group",), group_size=(16,)),
}
NAIVE = dict(int="int-quantized", float="float-quantized")  # naive-quantized, by the type of the weights
# Valid values of further keys. The values of actorder need no reordering of columns.
FURTHER = dict(actorder=(None, False, "weight", "static"), dynamic=(None, False))
DEFAULTS = dict(num_bits=8, type="int", symmetric=True)
ROAD = (  # the way to 16-bit weights
    "take the published folder of 16-bit weights, or decompress it: transformers' "
    + CONVERTED.format(how=", quantization_config=CompressedTensorsConfig(dequantize=True)")
)
# Tensors of quantised activations, keys and values, which tmoe computes in 16 bits.
ACTIVATIONS = re.compile(r".*\.(input|output|[qkv])_(scale|zero_point|global_scale)")
FLOATS = ("BF16", "F16", "F32")
# The tensor with a matrix's numbers: the end of its name, and its type.
NUMBERS = {
    "pack-quantized": ("_packed", "I32"),
    "int-quantized": ("", "I8"),
    "float-quantized": ("", "F8_E4M3"),
    "mxfp4-pack-quantized": ("_packed", "U8"),
    "mxfp8-quantized": ("", "F8_E4M3"),
    "nvfp4-pack-quantized": ("_packed", "U8"),
}
SCALES = {"mxfp4-pack-quantized": ("U8",), "mxfp8-quantized": ("U8",), "nvfp4-pack-quantized": ("F8_E4M3",)}
HELPERS = ("_zero_point", "_g_idx", "_global_scale", "_bitmask")  # refused where a format has none


class Scheme(NamedTuple):
    """How the weights of a group are stored."""

    format: str
    targets: tuple[str, ...]
    bits: int
    symmetric: bool
    block: tuple[int, int]
    """rows and columns that share a factor; 0: all"""
    said: str
    """for errors"""

    @property
    def words(self) -> bool:
        """Whether numbers are packed in words of 32 bits."""
        return self.format == "pack-quantized"

    @property
    def packs_zeros(self) -> bool:
        """Whether zero points are packed too, along the rows; one for the whole matrix is not."""
        return self.words and self.block != (0, 0)

    @property
    def values(self) -> int:
        """The numbers in an element of the stored tensor."""
        return 32 // self.bits if self.words else 2 if NUMBERS[self.format][1] == "U8" else 1


def compressed(shapes: Shapes, dtypes: dict[str, str], settings: dict[str, Any]) -> Found:
    """Views of the matrices that compressed-tensors quantised: values are (numbers - zero points) x factors.

    A matrix NAME.weight [M, W] is stored as NAME.weight_packed or NAME.weight, and NAME.weight_scale. Tensors
    of quantised activations are in `unread`. ConfigError for a group that is not in READ.
    """
    schemes = read_groups(settings)
    names = {name.removesuffix(end) for name in shapes for end in ("_packed", "_scale") if name.endswith(end)}
    names |= {name for name, kind in dtypes.items() if kind == "I8" or kind.startswith("F8_")}
    result = Found({}, [], [name for name in shapes if ACTIVATIONS.fullmatch(name)])
    for name in sorted(name for name in names if name.endswith(".weight")):
        module = name.removesuffix(".weight")
        if (scheme := scheme_of(module, schemes)) is None:
            result.problems.append(f"{name}: quantised, but no target of {QUANTISED} matches {module}")
            continue
        table = table_of(scheme)
        wrong = problems_of(table, name, shapes, dtypes)
        others = [
            name + end for end in HELPERS if name + end in shapes and end not in {r.suffix for r in table}
        ]
        wrong += [f"{other}: not in {scheme.format} with {scheme.said}" for other in others]
        result.problems.extend(wrong)
        if not wrong:
            first = shapes[name + table[0].suffix]
            shape = first[0], first[1] * scheme.values
            parts = tuple(name + row.suffix for row in table)
            axes = {part: len(shapes[part]) for part in parts}
            result.views[name] = View(parts, shape, "BF16", partial(values, name, scheme, axes))
    return result


# ---- the groups of quantization_config ----


def read_groups(settings: dict[str, Any]) -> list[Scheme]:
    """The schemes of quantization_config. ConfigError names the first value that is not read."""
    if settings.get("transform_config"):
        raise _refused("transform_config", settings["transform_config"], (None, {}))
    sparse = settings.get("sparsity_config") or {}
    if not isinstance(sparse, dict) or sparse.get("format", "dense") != "dense":
        raise _refused("sparsity_config", sparse, (None, {}))
    groups = settings.get("config_groups")
    groups = groups if isinstance(groups, dict) else {}
    schemes = [_scheme(f"config_groups.{name}", groups[name], settings.get("format")) for name in groups]
    if not any(schemes):
        raise ConfigError(f"{QUANTISED}: config_groups={groups!r}: one with weights is read; {ROAD}")
    return [scheme for scheme in schemes if scheme]


def _scheme(place: str, group: Any, of_all: Any) -> Scheme | None:
    """The scheme of the group at `place`; None if the group quantises activations alone.

    of_all: the format of quantization_config, for a group that states none.
    """
    weights = group.get("weights") if isinstance(group, dict) else group
    if isinstance(group, dict) and weights is None:
        return None
    if not isinstance(weights, dict) or not isinstance(group.get("targets", []), list):
        raise ConfigError(f"{QUANTISED}: {place}={group!r}: targets and weights are read; {ROAD}")
    stated: dict[str, Any] = DEFAULTS | {key: value for key, value in weights.items() if value is not None}
    size = stated.get("group_size")
    if "strategy" not in stated:  # as in compressed-tensors
        stated["strategy"] = "tensor" if size is None else "channel" if size == -1 else "group"
    form = group.get("format") or of_all
    form = NAIVE.get(str(stated["type"]), form) if form == "naive-quantized" else form
    if not isinstance(form, str) or form not in READ:
        raise _refused(f"{place}: format", form, tuple(READ))
    for key, valid in (READ[form] | FURTHER).items():
        if stated.get(key) not in valid or isinstance(stated.get(key), float):
            raise _refused(f"{place}: {key}", stated.get(key), valid)
    targets = tuple(map(str, group.get("targets", ["Linear"])))
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as error:
            raise ConfigError(f"{QUANTISED}: {place}: targets has {target!r}: {error}") from None
    words = "asymmetric " * (not stated["symmetric"]) + f"{stated['num_bits']} bits a {stated['strategy']}"
    return Scheme(form, targets, stated["num_bits"], stated["symmetric"], _block(place, stated), words)


def _block(place: str, stated: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a factor; 0: all. ConfigError for sizes that no matrix can have."""
    if stated["strategy"] in ("tensor", "channel"):
        return int(stated["strategy"] == "channel"), 0
    key = "block_structure" if stated["strategy"] == "block" else "group_size"
    sides = stated.get(key) if key == "block_structure" else [1, stated.get(key)]
    if not (isinstance(sides, list) and len(sides) == 2 and all(type(n) is int and n > 0 for n in sides)):
        raise ConfigError(f"{QUANTISED}: {place}: {key}={stated.get(key)!r}: must be above 0; {ROAD}")
    return sides[0], sides[1]


def _refused(key: str, value: Any, valid: tuple) -> ConfigError:
    words = " or ".join(map(repr, valid))
    return ConfigError(f"{QUANTISED}: {key}={value!r}: only {words} is read; {ROAD}")


def scheme_of(module: str, schemes: list[Scheme]) -> Scheme | None:
    """The scheme of a module: by its whole name first, then by a pattern ("re:"), then by a class.

    Every module with quantised weights counts as one of each class, because files do not state classes.
    """
    ranked = [(_rank(module, target), target, i) for i, s in enumerate(schemes) for target in s.targets]
    _, _, best = min((match for match in ranked if match[0] is not None), default=(None, None, None))
    return None if best is None else schemes[best]


def _rank(module: str, target: str) -> int | None:
    """How closely a target names a module: 0 by name, 1 by pattern, 2 by class; None: not at all."""
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), module) else None
    return 2 if target.isidentifier() and target[0].isupper() else None


# ---- the tensors of a matrix ----


def table_of(scheme: Scheme) -> tuple[PackedTensor, ...]:
    """The stored tensors of a matrix; the first one has its numbers."""

    def factors(shape: Shape, first: Shape) -> bool:
        rows, columns = _factors(scheme, (first[0], first[1] * scheme.values))
        return shape == (rows, columns) or ((rows, columns) == (1, 1) and shape in ((1,), ()))

    def zeros(shape: Shape, first: Shape) -> bool:
        rows, columns = _factors(scheme, (first[0], first[1] * scheme.values))
        if scheme.packs_zeros:
            return shape == (math.ceil(rows * scheme.bits / 32), columns)
        return shape == (rows, columns) or (shape == (1,) and rows == columns == 1)

    suffix, kind = NUMBERS[scheme.format]
    fits = (lambda shape, _: len(shape) == 2) if not scheme.words else partial(_whole_words, scheme)
    table = [
        PackedTensor(suffix, (kind,), fits, "[M, W]" if scheme.values == 1 else f"[M, W/{scheme.values}]")
    ]
    rows, columns = scheme.block
    said = (
        f"a factor for {f'{rows} x ' * (rows > 1)}{columns} values of a row" if columns else "[M, 1] or [1]"
    )
    table.append(PackedTensor("_scale", SCALES.get(scheme.format, FLOATS), factors, said))
    if scheme.words:
        table.append(PackedTensor("_shape", ("I32", "I64"), lambda shape, _: shape == (2,), "[2]"))
    if scheme.format == "nvfp4-pack-quantized":
        table.append(PackedTensor("_global_scale", FLOATS, lambda shape, _: shape in ((1,), ()), "[1]"))
    if not scheme.symmetric:
        table.append(
            PackedTensor("_zero_point", ("I32" if scheme.packs_zeros else "I8",), zeros, "one a factor")
        )
    return tuple(table)


def _whole_words(scheme: Scheme, shape: Shape, _: Shape) -> bool:
    return len(shape) == 2 and shape[1] * scheme.values % (scheme.block[1] or 1) == 0


def _factors(scheme: Scheme, shape: Shape) -> Shape:
    """The shape of the factors of a matrix [M, W]."""
    return tuple(math.ceil(n / (b or n)) if n else 0 for n, b in zip(shape, scheme.block, strict=True))


def values(name: str, scheme: Scheme, axes: dict[str, int], read: Read, box: tuple[slice, ...]) -> Tensor:
    """The box [M, W] in fp32 of the matrix `name`. Its slices may have steps.

    axes: the number of axes of each stored tensor.
    """
    rows, columns = (slice(s.start, s.stop) for s in box)
    numbers = _numbers(name, scheme, read, (rows, columns))
    if not scheme.symmetric:
        numbers -= _spread(name + "_zero_point", scheme, axes, read, (rows, columns))
    numbers *= _spread(name + "_scale", scheme, axes, read, (rows, columns))
    if scheme.format == "nvfp4-pack-quantized":
        numbers /= read(name + "_global_scale", (slice(0, 1),) * axes[name + "_global_scale"]).float()
    return numbers[:: box[0].step or 1, :: box[1].step or 1]


def _numbers(name: str, scheme: Scheme, read: Read, box: tuple[slice, slice]) -> Tensor:
    """The stored numbers of a box, in fp32."""
    suffix, _ = NUMBERS[scheme.format]
    if scheme.values == 1:
        return read(name + suffix, box).float()
    rows, wide = box
    first = wide.start // scheme.values
    packed = read(name + suffix, (rows, slice(first, math.ceil(wide.stop / scheme.values))))
    if scheme.words:
        numbers = _bits(packed, scheme.bits).flatten(-2).float()
    else:
        table = torch.tensor([*FP4, *(-v for v in FP4)])
        numbers = table[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()]
    return numbers.narrow(1, wide.start - first * scheme.values, wide.stop - wide.start)


def _bits(words: Tensor, bits: int) -> Tensor:
    """The integers of int32 words, the lowest bits first, along a new last axis."""
    shifted = words[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)
    return (shifted & (1 << bits) - 1) - (1 << bits - 1)


def _spread(part: str, scheme: Scheme, axes: dict[str, int], read: Read, box: tuple[slice, slice]) -> Tensor:
    """The factors or zero points of a box, in fp32: each repeated over its block, unless it is for all."""
    touched = [
        slice(s.start // b, math.ceil(s.stop / b)) if b else slice(0, 1)
        for s, b in zip(box, scheme.block, strict=True)
    ]
    if part.endswith("_zero_point") and scheme.packs_zeros:
        high, low = math.ceil(touched[0].stop * scheme.bits / 32), touched[0].start * scheme.bits // 32
        words = read(part, (slice(low, high), touched[1]))
        factors = _bits(words, scheme.bits).transpose(1, 2).flatten(0, 1).float()
        factors = factors.narrow(
            0, touched[0].start - low * 32 // scheme.bits, touched[0].stop - touched[0].start
        )
    else:
        factors = read(part, tuple(touched) if axes[part] == 2 else (slice(0, 1),) * axes[part])
        factors = factors.float() if factors.dtype != torch.uint8 else torch.exp2(factors.float() - MX_BIAS)
        factors = factors.view(1, 1) if factors.dim() < 2 else factors
    for axis, (s, b) in enumerate(zip(box, scheme.block, strict=True)):
        if b > 1:
            factors = factors.repeat_interleave(b, axis).narrow(axis, s.start % b, s.stop - s.start)
    return factors
