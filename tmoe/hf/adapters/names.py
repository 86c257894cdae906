"""The modules that PEFT names, and the rows of tmoe's matrices that each of them holds.

next: hf/adapters/read.py
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from tmoe.config.model import ModelConfig
from tmoe.hf.rules import Architecture, TensorPiece, pieces
from tmoe.model.lora import EXPERTS, matrices_of
from tmoe.model.shapes import model_shapes
from tmoe.model.transformer import Transformer

WEIGHT = ".weight"


class Place(NamedTuple):
    """Rows of one of tmoe's matrices that one of their modules, or one stack of experts, holds."""

    matrix: str
    """tmoe's name, "blocks.0.attention.qkv" or "blocks.0.moe.experts.down" """
    start: int
    """the first row of the matrix"""
    rows: int
    every: int
    """their rows: every `every`-th, from row `first` on, up to row `end`; end 0: to the last one"""
    first: int
    expert: int | None
    """the expert, if theirs holds one alone"""
    width: int
    """columns of the matrix"""
    transposed: bool
    """whether theirs is stored as [in, out]"""
    end: int = 0

    @property
    def theirs(self) -> slice:
        """The rows of their matrix that belong to this place."""
        return slice(self.first, self.end or None, self.every)


class Names(NamedTuple):
    """All modules and stacks that hold matrices which can have an adapter, in one form of the names."""

    linears: dict[str, tuple[Place, ...]]
    """module, "model.layers.0.self_attn.q_proj" -> its places"""
    stacks: dict[str, dict[str, tuple[Place, ...]]]
    """module of experts, "model.layers.0.mlp.experts" -> parameter, "gate_up_proj" -> its places"""


class Sites(NamedTuple):
    """The names of a model's modules in the two forms that transformers has had."""

    matrices: dict[str, tuple[int, ...]]
    """tmoe's matrices that can have an adapter: [out, in], or of experts [E, out, in]"""
    published: Names
    """as in the published files, and as transformers 4 holds them: experts are often one by one"""
    held: Names
    """as transformers 5 holds them: experts are stacks"""
    modules: frozenset[str]
    """all modules and parameters of the held form, those without an adapter included"""


def matrix_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of the matrices that can have an adapter: [out, in], of experts [E, out, in]."""
    with torch.device("meta"):
        found = matrices_of(Transformer(cfg))
    parts = {name: getattr(one.owner, one.leaf) for name, one in found.items()}
    return {name: tuple(getattr(part, "weight", part).shape) for name, part in parts.items()}


def parameter(matrix: str, part: str) -> str:
    """The name of a parameter of a matrix's adapter. part: "a" or "b"."""
    return f"{matrix}{'_' if EXPERTS.search(matrix) else '.'}{part}"


def layer_of(name: str) -> str:
    """The number of the block in a tensor's name; "" if it is in no block."""
    found = re.search(r"(?<=\.)\d+(?=\.)", name)
    return found[0] if found else ""


def sites_of(arch: Architecture, cfg: ModelConfig) -> Sites:
    """The modules of an architecture's model, and the matrices that they hold."""
    matrices = matrix_shapes(cfg)
    published, held = Names({}, {}), Names({}, {})
    modules: set[str] = set()
    for ours, shape in model_shapes(cfg).items():
        matrix = ours.removesuffix(WEIGHT)
        for names, as_held in ((published, ()), (held, (layer_of(ours),))):
            found = pieces(arch, cfg, ours, shape, as_held)
            if as_held:
                modules |= {piece.name.removesuffix(WEIGHT) for piece in found}
            if matrix in matrices:
                _add(names, matrix, found)
    return Sites(matrices, published, held, frozenset(modules))


def _add(names: Names, matrix: str, found: list[TensorPiece]) -> None:
    places: dict[str, list[Place]] = {}
    whole = {piece.name for piece in found if len(piece.shape) == 3 and not piece.stacked}
    for piece in found:
        if piece.framed or piece.inner:
            continue
        rows = (piece.offset[piece.axis], piece.shape[piece.axis])
        expert = piece.offset[0] if piece.stacked else None
        theirs = piece.every, piece.first + piece.lead, expert, piece.shape[-1], piece.transposed
        end = piece.lead + rows[1] if piece.total else 0
        place = Place(matrix, *rows, *theirs, end)
        places.setdefault(piece.name, []).append(place)
    for name, group in places.items():
        if name in whole:
            module, _, leaf = name.rpartition(".")
            names.stacks.setdefault(module, {})[leaf] = tuple(group)
        elif name.endswith(WEIGHT):
            names.linears[name.removesuffix(WEIGHT)] = tuple(group)
