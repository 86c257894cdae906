"""Names of tensors in a GGUF file, and the part of one of ours that each of them holds.

Names are those that the gguf package's maps give to Hugging Face's names, which the tables of
hf/architectures give to ours.

next: extras/gguf/rows.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import gguf
from torch import Tensor

from tmoe.config.model import ModelConfig
from tmoe.extras.gguf import linear, mamba
from tmoe.extras.gguf.families import Family
from tmoe.extras.gguf.rows import Heads, turned
from tmoe.hf.architectures import ARCHITECTURES
from tmoe.hf.rules import Architecture, of_layer, pieces
from tmoe.model.shapes import model_shapes
from tmoe.parallel.layout import Box

STACKED = re.compile(r"\.experts\.\d+\.")
ATTENTION = re.compile(r"blocks\.(\d+)\.attention\.(.+)")
HEAD = "output.weight"
HALVES = dict(input_linear=("gate", "up"))  # one tensor of theirs that is two of llama.cpp's


class Entry(NamedTuple):
    """A tensor of a GGUF file: some rows of one of our tensors."""

    name: str
    ours: str
    whole: tuple[int, ...]
    """shape of our tensor"""
    axis: int
    """the axis of our rows"""
    start: int
    rows: int
    heads: Heads | None = None
    """query or key heads whose rotated rows change their order"""
    latent: str = ""
    """"k" or "v": keys or values of all heads from the latent, a matrix a head"""
    widths: tuple[int, int] = (0, 0)
    """of a head's keys without position, and of its values"""
    flat: bool = False
    """one row is written as a vector"""
    order: Tensor | None = None
    """our rows in the box, in the order of the file's rows; None: all in the same order"""
    view: tuple[int, ...] = ()
    """the file's shape, if it is another one of the box's values"""
    value: str = ""
    """the function of our values that the file has, see extras/gguf/linear.py"""

    @property
    def box(self) -> Box:
        offset, shape = [0] * len(self.whole), list(self.whole)
        offset[self.axis], shape[self.axis] = self.start, self.rows
        return Box(0, tuple(offset), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the file, as torch has it."""
        if self.latent:
            nope, value = self.widths
            heads, rank = self.whole[0] // (nope + value), self.whole[1]
            return (heads, rank, nope) if self.latent == "k" else (heads, value, rank)
        if self.view:
            return self.view
        shape = self.box.shape
        if self.order is not None:
            shape = (*shape[: self.axis], len(self.order), *shape[self.axis + 1 :])
        return shape[1:] if self.flat else shape

    def to_file(self, ours: Tensor) -> Tensor:
        """The file's tensor, from the box of ours."""
        if self.latent:
            nope, value = self.widths
            keys, values = ours.unflatten(0, (-1, nope + value)).split([nope, value], 1)
            return (keys.mT if self.latent == "k" else values).contiguous()
        ours = ours if self.heads is None else turned(ours, self.heads)
        ours = ours if self.order is None else ours.index_select(self.axis, self.order)
        ours = ours[0] if self.flat else ours.reshape(self.view or ours.shape)
        return linear.to_file(ours, self.value)

    def to_ours(self, theirs: Tensor, whole: Tensor) -> None:
        """Fill the rows of our tensor from the file's."""
        if self.latent:
            nope, value = self.widths
            heads = whole.unflatten(0, (-1, nope + value))
            part = heads[:, :nope] if self.latent == "k" else heads[:, nope:]
            part.copy_(theirs.mT if self.latent == "k" else theirs)
            return
        if self.heads is not None:
            theirs = turned(theirs, self.heads.back())
        rows = whole.narrow(self.axis, self.start, self.rows)
        theirs = linear.to_ours(theirs, self.value)
        if self.order is not None:
            rows.index_copy_(self.axis, self.order, theirs.to(rows.dtype))
            return
        rows.copy_(theirs.view(rows.shape))


def entries(family: Family, arch: Architecture, cfg: ModelConfig) -> tuple[list[Entry], list[str]]:
    """The file's tensors in order, and names of Hugging Face's for which llama.cpp has none."""
    table = gguf.get_tensor_name_map(_enum(family.name), cfg.layers)
    found: list[Entry] = []
    missing: list[str] = []
    for ours, shape in model_shapes(cfg).items():
        value = linear.value_of(cfg, ours)
        if (parts := _own_parts(family, cfg, ours)) is not None:
            for name, start, rows, order, axis, view in parts:
                found.append(Entry(name, ours, shape, axis, start, rows, order=order, view=view, value=value))
            continue
        for entry, theirs in _parts(family, arch, cfg, ours, shape, table):
            if entry is None:
                missing.append(theirs)
            else:
                found.append(entry._replace(value=value))
    if cfg.tied and family.head:
        found.append(next(e for e in found if e.name == "token_embd.weight")._replace(name=HEAD))
    return found, list(dict.fromkeys(missing))


def _own_parts(family: Family, cfg: ModelConfig, ours: str) -> list[linear.Tensors] | None:
    """The parts of a tensor of a linear layer or of gated queries; None: Hugging Face's names decide."""
    found = ATTENTION.fullmatch(ours)
    if not found or not cfg.linear_layers:
        return None
    layer, leaf = int(found[1]), found[2]
    if not cfg.is_linear(layer):
        return [*linear.gated(cfg, layer)] if cfg.attention_gate and leaf == "qkv.weight" else None
    if cfg.linear.kind == "mamba2":
        return mamba.parts_of(cfg, layer, leaf)
    return linear.parts_of(cfg, layer, leaf, family.tiled)


def architecture_of(family: Family, cfg: ModelConfig) -> Architecture:
    """The entry of hf/architectures whose rules name all tensors of a model of this family."""
    by_name = {arch.model_type: arch for arch in ARCHITECTURES}
    shapes = model_shapes(cfg)
    for model_type in family.types:
        arch = by_name[model_type]
        try:
            if all(pieces(arch, cfg, ours, shape) for ours, shape in shapes.items()):
                return arch
        except AssertionError:  # other rows than these rules have
            continue
    raise AssertionError(f"{family.name}: no rules")


@cache
def _enum(name: str) -> Any:
    return next(kind for kind, said in gguf.MODEL_ARCH_NAMES.items() if said == name)


def _parts(
    family: Family, arch: Architecture, cfg: ModelConfig, ours: str, shape: tuple[int, ...], table: Any
) -> Iterator[tuple[Entry | None, str]]:
    """The file's tensors that make up one of ours, each with Hugging Face's name."""
    group = pieces(arch, cfg, ours, shape)
    seen = dict.fromkeys((STACKED.sub(".experts.", p.name), p.offset[p.axis], p.shape[p.axis]) for p in group)
    for theirs, start, rows in seen:
        entry = Entry("", ours, shape, group[0].axis, start, rows)
        layer = (re.findall(r"\.(\d+)\.", theirs) or [""])[0]
        if theirs.endswith("kv_b_proj.weight"):
            widths = cfg.mla.nope_dim, cfg.mla.v_dim
            for part in "kv":
                yield (
                    entry._replace(name=f"blk.{layer}.attn_{part}_b.weight", latent=part, widths=widths),
                    theirs,
                )
            continue
        if halved := _halves(theirs, ours):
            for i, leaf in enumerate(halved):
                half = entry._replace(start=start + i * rows // 2, rows=rows // 2)
                end = "bias" if ours.endswith("_bias") else "weight"
                kind = "_exps" if ".experts." in ours else "" if ".ffn." in ours else "_shexp"
                yield half._replace(name=f"blk.{layer}.ffn_{leaf}{kind}.{end}"), theirs
            continue
        if "gate_up_proj" in theirs:  # woven rows, which are not so in ours
            leaf, end = "gate" if not start else "up", "bias" if theirs.endswith("_bias") else "weight"
            yield entry._replace(name=f"blk.{layer}.ffn_{leaf}_exps.{end}"), theirs
            continue
        name = _name(theirs, table)
        if name and ".ffn." in ours:  # Granite-4's shared expert is the feed-forward of a dense model
            name = name.replace("_shexp.", ".")
        heads = _heads(family, cfg, theirs, int(layer) if layer else 0)
        flat = ours.endswith("shared_gate.weight")
        yield (entry._replace(name=name, heads=heads, flat=flat) if name else None), theirs


def _halves(theirs: str, ours: str) -> tuple[str, ...]:
    return next(
        (leaves for leaf, leaves in HALVES.items() if f".{leaf}." in theirs and "gate_up" in ours), ()
    )


def _name(theirs: str, table: Any) -> str | None:
    """llama.cpp's name. Parameters outside of linear layers have no .weight in Hugging Face's."""
    end = ".bias" if theirs.endswith(("_bias", ".bias")) else ".weight"
    stem = theirs.removesuffix("_bias").removesuffix(".bias").removesuffix(".weight")
    stem = re.sub(r"^(language_model\.model\.|model\.language_model\.)", "model.", stem)
    stem = re.sub(r"^backbone\.(layers\.\d+)\.mixer\.experts\.", r"model.\1.mlp.experts.", stem)
    found = table.get_name(stem.removeprefix("language_model."))
    return found and found + end


def _heads(family: Family, cfg: ModelConfig, theirs: str, layer: int) -> Heads | None:
    """How the rotated rows of this tensor change their order; None: not at all."""
    found = re.search(r"(?:self_attn|mixer)\.(q_proj|k_proj|q_b_proj|kv_a_proj_with_mqa)\.", theirs)
    if not found:
        return None
    here = of_layer(cfg, layer)
    if cfg.attention == "mla":
        if cfg.mla.interleave == family.pairs:
            return None
        alone = found[1] == "kv_a_proj_with_mqa"
        still = cfg.mla.kv_rank if alone else cfg.mla.nope_dim
        return Heads(1 if alone else cfg.heads, still, cfg.mla.rope_dim, 0, family.pairs)
    if cfg.rope.interleave == family.pairs:
        return None
    number = cfg.heads if found[1] == "q_proj" else here.kv_heads
    return Heads(number, 0, cfg.rotary_dim, cfg.head_dim - cfg.rotary_dim, family.pairs)
