"""Plans each tensor of a Hugging Face folder: it is read, is a copy, is kept for an export, or is refused.

Import, direct start and export all use this plan. So they accept the same folders, and refuse other folders
with the same message.

next: hf/files.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from tmoe.config.model import ModelConfig, MTPConfig
from tmoe.hf.config import architecture, read_config, text_settings
from tmoe.hf.files import DTYPES, Folder
from tmoe.hf.rules import (
    HF,
    LAYER,
    Architecture,
    TensorPiece,
    ahead,
    copies,
    divide,
    held_by_shape,
    require_names,
    their_shapes,
)

OFF = MTPConfig()


class Reading(NamedTuple):
    """The plan of a folder: how its tensors fill those of the model.

    Every tensor of the files is in exactly one of pieces, copies, extra and problems.
    """

    arch: Architecture
    cfg: ModelConfig
    pieces: dict[str, list[TensorPiece]]
    """tmoe's tensors, and the boxes of Hugging Face's tensors that fill each element of them once"""
    copies: dict[str, str]
    """tensor -> the tensor that it repeats; it is not read, and an export writes it again"""
    extra: list[str]
    """tensors that are only kept for an export: computed from the config, or of blocks after the last"""
    problems: list[str]
    """a line for each tensor that is missing, unknown, or of a wrong shape or type"""
    held: set[str]
    """numbers of the layers whose tensors are laid out as transformers 5 holds them, found by shapes alone"""

    def written(self) -> dict[str, list[TensorPiece]]:
        """tmoe's tensors and all boxes that an export writes from them, copies included."""
        again = {
            name: [n for n, original in self.copies.items() if original == name]
            for name in {*self.copies.values()}
        }
        return {
            ours: [
                *group,
                *(piece._replace(name=name) for piece in group for name in again.get(piece.name, ())),
            ]
            for ours, group in self.pieces.items()
        }


def plan_folder(folder: Folder, mtp: MTPConfig = OFF) -> Reading:
    """The plan of a folder. Faults of its tensors are listed in `problems`.

    mtp: the blocks that predict further tokens of the model, which config.json does not decide.
    ConfigError for settings that tmoe does not compute.
    """
    arch, cfg = architecture(folder.config), read_config(folder.config)
    plan = _plan(folder.config, folder.shapes, held_by_shape(arch, cfg, folder.shapes), mtp)
    problems = folder.compare(plan.arch, their_shapes(plan.written()), plan.extra)
    own = [name for name, original in plan.copies.items() if not folder.repeats(name, original)]
    shares = "a block that predicts further tokens is trained only if it shares it (else --model.mtp.depth 0)"
    problems += [f"{name}: is not {plan.copies[name]}; {shares}" for name in own]
    return plan._replace(problems=problems)


def plan_layout(config: HF, types: dict[str, str], held: Collection[str], mtp: MTPConfig = OFF) -> Reading:
    """The plan of a folder that no longer exists, from its config.json and its tensors' names and types.

    held: as in the folder's Reading. mtp: as of `plan_folder`.
    """
    plan = _plan(config, types, {*held}, mtp)
    expected = their_shapes(plan.written())
    problems = [f"{name}: not in the original's files" for name in expected if name not in types]
    problems += [
        f"{name}: {types[name]} in the original's files; valid are {', '.join(DTYPES)}"
        for name in expected
        if types.get(name, "F32") not in DTYPES
    ]
    known = expected.keys() | set(plan.extra)
    problems += [f"{name}: {plan.arch.model_type} has no such tensor" for name in types if name not in known]
    return plan._replace(problems=problems)


def blocks_said(config: HF, names: Iterable[str]) -> int:
    """Number of blocks that predict further tokens, by config.json, or one by names that begin with mtp."""
    said = ahead(text_settings(architecture(config), config))
    return said or int(any(name.startswith("mtp.") for name in names))


def blocks_there(config: HF, names: Collection[str]) -> int:
    """Number of blocks that predict further tokens of which a folder with these tensors has any."""
    said, layers = blocks_said(config, names), read_config(config).layers
    if any(name.startswith("mtp.") for name in names):
        return said
    places = tuple(f"{LAYER.format(layer=layers + i)}." for i in range(said))
    return sum(any(name.startswith(place) for name in names) for place in places)


def _plan(config: HF, present: dict, held: set[str], mtp: MTPConfig) -> Reading:
    arch = architecture(config)
    cfg = replace(read_config(config), mtp=mtp)
    there = blocks_said(config, present)
    require_names(arch, cfg, there, text_settings(arch, config))
    pieces, extra = divide(arch, cfg, present, there, held)
    return Reading(arch, cfg, pieces, copies(cfg, present), extra, [], held)
