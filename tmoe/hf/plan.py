"""What becomes of each tensor of a Hugging Face folder: read, a copy, carried, or refused by name.

Import, direct start and export all take this one plan. So they accept the same folders, and refuse the others
in the same words.

next: hf/files.py
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tmoe.config.model import ModelConfig
from tmoe.hf.config import architecture, read_config, text_settings
from tmoe.hf.files import DTYPES, Folder
from tmoe.hf.rules import HF, Architecture, Piece, ahead, copies, divide, held_by_shape, their_shapes


class Reading(NamedTuple):
    """A folder's tensors as this model has them.

    Every tensor of the files is in one of pieces, copies, extra and problems.
    """

    arch: Architecture
    cfg: ModelConfig
    pieces: dict[str, list[Piece]]
    """our tensors and the boxes of theirs that fill them, each element once"""
    copies: dict[str, str]
    """tensors that repeat another one, and that one: they are not read, an export writes them again"""
    extra: list[str]
    """tensors that are carried: computed from the config, or of blocks behind the model's last"""
    problems: list[str]
    """a line for each tensor that is missing, unknown, or of a wrong shape or type"""
    held: set[str]
    """numbers of the layers that are as transformers 5 holds them, as shapes alone say"""

    def written(self) -> dict[str, list[Piece]]:
        """Our tensors and all boxes that an export writes from them, copies included."""
        again = {original: name for name, original in self.copies.items()}
        return {
            ours: [
                *group,
                *(piece._replace(name=again[piece.name]) for piece in group if piece.name in again),
            ]
            for ours, group in self.pieces.items()
        }


def plan_folder(folder: Folder) -> Reading:
    """The plan of a folder. What is wrong with its tensors is in `problems`.

    ConfigError for settings that tmoe does not compute.
    """
    arch, cfg = architecture(folder.config), read_config(folder.config)
    plan = _plan(folder.config, folder.shapes, held_by_shape(arch, cfg, folder.shapes))
    problems = folder.compare(plan.arch, their_shapes(plan.written()), plan.extra)
    return plan._replace(problems=problems)


def plan_layout(config: HF, types: dict[str, str], held: Collection[str]) -> Reading:
    """The plan of a folder that is not there, from its config.json and its tensors' names and types.

    held: as in its Reading.
    """
    plan = _plan(config, types, {*held})
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


def _plan(config: HF, present: dict, held: set[str]) -> Reading:
    arch = architecture(config)
    cfg = read_config(config)
    found, extra = divide(arch, cfg, present, ahead(text_settings(arch, config)), held)
    return Reading(arch, cfg, found, copies(cfg, present), extra, [], held)
