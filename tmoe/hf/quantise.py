"""Quantises the matrices of an export in the formats of compressed-tensors, which transformers loads.

The matrices of attention, of dense and shared layers and of experts are quantised. Everything else keeps its
type and is listed in `ignore`: routers, norms, embedding, head, biases, tensors that are only carried along.
The package compressed-tensors is not needed. `hf/compressed.py` reads such a folder.

next: hf/compressed.py
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.base.quantised import INT4_GROUP, MX_GROUP, integers, quantise
from tmoe.config.check import ConfigError, require
from tmoe.hf.rules import HEAD, HF, Architecture, TensorPiece, their_shapes

Shape = tuple[int, ...]
Stored = dict[str, tuple[str, Shape]]  # name -> type, as safetensors names it, and shape

MATRICES = re.compile(
    r"blocks\.\d+\."
    r"(attention\.(qkvz?|qkv_a|q_b|kv_b|o|out)|ffn\.(gate_up|down)|moe\.shared\.(gate_up|down))\.weight"
    r"|blocks\.\d+\.moe\.experts\.(gate_up|down)"
)
EXPERTS = ".moe.experts."
RENAMED = "backbone."  # Nemotron-H's root in folders; its module is `model`
WEIGHT = ".weight"
NVFP4 = (
    "transformers 5.23 loads its experts without their global factor and without an error: "
    "weights are thousands of times too large"
)


class Scheme(NamedTuple):
    """A preset of compressed-tensors."""

    preset: str
    format: str
    group: int
    """values of a row that share a factor; 0: a whole row"""
    weights: dict[str, Any]
    activations: dict[str, Any] | None = None


INT = dict(type="int", symmetric=True, strategy="group", group_size=INT4_GROUP, dynamic=False)
ROWS = dict(num_bits=8, type="float", symmetric=True, strategy="channel", dynamic=False)
BYTES = dict(scale_dtype="torch.uint8", zp_dtype="torch.uint8")
SCHEMES = {
    "int8": Scheme("W8A16", "pack-quantized", INT4_GROUP, dict(num_bits=8) | INT),
    "int4": Scheme("W4A16", "pack-quantized", INT4_GROUP, dict(num_bits=4) | INT),
    "fp8": Scheme("FP8_DYNAMIC", "float-quantized", 0, ROWS, ROWS | dict(strategy="token", dynamic=True)),
    "mxfp4": Scheme(
        "MXFP4A16",
        "mxfp4-pack-quantized",
        MX_GROUP,
        dict(num_bits=4) | INT | dict(type="float", group_size=MX_GROUP) | BYTES,
    ),
}


class Quantised(NamedTuple):
    """The matrices that an export quantises.

    kind: a name in SCHEMES.
    matrices: the shapes of the quantised matrices, by their names in the folder.
    kept: matrices that keep their type, because groups do not divide their rows.
    """

    kind: str
    matrices: dict[str, Shape]
    kept: dict[str, Shape]

    def stored(self, name: str, kind: str, shape: Shape) -> Stored:
        """The stored tensors of one tensor of the folder. kind: its type if it is not quantised."""
        if name not in self.matrices:
            return {name: (kind, shape)}
        M, W = shape
        group = SCHEMES[self.kind].group or W
        scale = "F32" if kind == "F32" else "BF16"
        if self.kind == "fp8":
            return {name: ("F8_E4M3", shape), f"{name}_scale": (scale, (M, 1))}
        if self.kind == "mxfp4":
            return {f"{name}_packed": ("U8", (M, W // 2)), f"{name}_scale": ("U8", (M, W // group))}
        words = W * (8 if self.kind == "int8" else 4) // 32
        return {
            f"{name}_packed": ("I32", (M, words)),
            f"{name}_scale": (scale, (M, W // group)),
            f"{name}_shape": ("I64", (2,)),
        }

    def packed(self, name: str, weight: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of a matrix in fp32, as in `stored`. ValueError for inf and NaN."""
        M, W = weight.shape
        scale_type = torch.float32 if kind == "F32" else torch.bfloat16
        group = SCHEMES[self.kind].group or W
        codes, scales = quantise(weight.view(M, W // group, group), self.kind, name)
        scales = scales.view(M, W // group)
        if self.kind == "fp8":
            yield name, codes.view(M, W)
        elif self.kind == "mxfp4":
            yield f"{name}_packed", codes.view(M, W // 2)
        else:
            if self.kind == "int8":
                raw = (codes.view(M, W).to(torch.int16) + 128).to(torch.uint8)
            else:
                pairs = (integers(codes, group).view(M, W // 2, 2) + 8).to(torch.uint8)
                raw = pairs[..., 0] | pairs[..., 1] << 4
            yield f"{name}_packed", raw.contiguous().view(torch.int32)  # the lowest bits are the first value
            yield f"{name}_shape", torch.tensor([M, W])
        yield f"{name}_scale", scales if self.kind == "mxfp4" else scales.to(scale_type)

    def config(self, names: Iterable[str]) -> HF:
        """quantization_config. names: all tensors of the folder before quantising."""
        scheme = SCHEMES[self.kind]
        group = dict(
            targets=["Linear"],
            weights=scheme.weights,
            input_activations=scheme.activations,
            output_activations=None,
            format=scheme.format,
        )
        return dict(
            quant_method="compressed-tensors",
            format=scheme.format,
            quantization_status="compressed",
            global_compression_ratio=None,
            kv_cache_scheme=None,
            ignore=ignored(names, self.matrices.keys()),
            config_groups=dict(group_0=group),
        )

    def notes(self, types: dict[str, str]) -> list[str]:
        """Lines of an export: what is quantised, and which matrices are not. types: before quantising."""
        scheme = SCHEMES[self.kind]
        lines = [f"{len(self.matrices):,} matrices in {self.kind}, compressed-tensors' {scheme.preset}"]
        kinds = sorted(
            {f"{re.sub(r'[.][0-9]+[.]', '.*.', name)} (rows of {W})" for name, (_, W) in self.kept.items()}
        )
        if kinds:
            lines.append(
                f"not quantised, because {scheme.group} does not divide their rows: {', '.join(kinds)}"
            )
        if (self.kind == "mxfp4" or "F16" in types.values()) and {*types.values()} - {"BF16"}:
            lines.append("factors are bf16: export with --dtype bf16, or load it with dtype=torch.bfloat16")
        return lines


def require_kind(kind: str) -> None:
    """ConfigError for a kind that is not written, with the reason."""
    wrong = NVFP4 if kind == "nvfp4" else "no format that is written"
    require(kind in SCHEMES, "quantize", kind, wrong, ", ".join(SCHEMES))


def quantised(kind: str, arch: Architecture, pieces: dict[str, list[TensorPiece]]) -> Quantised:
    """The matrices that --quantize quantises.

    pieces: for each of tmoe's tensors the pieces of the folder's tensors.
    ConfigError names a family whose experts are stored in one tensor, and experts whose rows groups do not
    divide.
    """
    shapes = their_shapes(pieces)
    matrices: dict[str, Shape] = {}
    kept: dict[str, Shape] = {}
    group = SCHEMES[kind].group
    for ours, group_of_ours in pieces.items():
        if not MATRICES.fullmatch(ours):
            continue
        for name in dict.fromkeys(piece.name for piece in group_of_ours):
            shape = shapes[name]
            if len(shape) != 2 or not name.endswith(WEIGHT):
                one = f"a {arch.model_type} stores all experts of a layer in one tensor ({name})"
                wrong = f"{one}, and transformers reads none that compressed-tensors quantised"
                raise ConfigError.of("quantize", kind, wrong)
            if group and shape[1] % group:
                if EXPERTS in ours:
                    wrong = f"{name} has rows of {shape[1]} values, which must be a multiple of {group}"
                    raise ConfigError.of("quantize", kind, wrong, "fp8")
                kept[name] = shape
            else:
                matrices[name] = shape
    return Quantised(kind, matrices, kept)


def ignored(names: Iterable[str], matrices: Collection[str]) -> list[str]:
    """The `ignore` of quantization_config: the modules with a weight that is not quantised.

    Modules that differ only in numbers share a pattern, unless it matches a quantised module too. A part of
    the model without quantised modules has one pattern, because transformers renames modules inside it. It
    renames RENAMED as well, so a pattern leaves that root out.
    """
    left = [name.removesuffix(WEIGHT) for name in names if name.endswith(WEIGHT) and name not in matrices]
    taken = {_kind(name.removesuffix(WEIGHT)) for name in matrices}
    parts = {_part(name) for name in matrices}
    patterns: dict[str, None] = {HEAD.removesuffix(WEIGHT): None}
    for module in left:
        part, kind = _part(module), _kind(module)
        if part not in parts and "." in _inside(module):
            patterns[rf"re:(.*\.)?{re.escape(part)}\..*"] = None
        elif module.startswith(RENAMED):
            inside = _inside(module)
            patterns[rf"re:(.*\.)?{re.escape(inside) if kind in taken else _kind(inside)}$"] = None
        else:
            patterns[module if kind in taken or "+" not in kind else f"re:{kind}$"] = None
    return list(patterns)


def _part(name: str) -> str:
    """The part of the model that a name belongs to: layers, visual, vision_tower."""
    return _inside(name).split(".")[0]


def _inside(name: str) -> str:
    """The name without the root of the model."""
    return name.removeprefix("model.").removeprefix(RENAMED)


def _kind(module: str) -> str:
    """The pattern of the modules that differ from `module` only in numbers."""
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in module.split("."))
