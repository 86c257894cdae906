"""The validation losses of saved steps, in a run folder's validations.json, and which step has the lowest.

A step's own manifest cannot hold its loss: it is written before the validation.

next: checkpoint/checkpoints.py
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from tmoe.base.disk import written_whole
from tmoe.config.check import fits

NAME = "validations.json"
log = logging.getLogger(__name__)


def number_of(path: Path) -> int:
    """The step of a published step folder, step-N, also where its second save was interrupted."""
    return int(path.name.split(".")[0].removeprefix("step-"))


def best_of(losses: Mapping[int, float], steps: Iterable[Path]) -> Path | None:
    """The step folder with the lowest loss, the earlier one of equals; None where none has a loss."""
    known = [path for path in steps if number_of(path) in losses]
    return min(known, key=lambda path: (losses[number_of(path)], number_of(path)), default=None)


def read_losses(folder: Path) -> dict[int, float]:
    """Step to validation loss of a checkpoints folder; empty without a file that can be read."""
    try:
        told = json.loads(_file(folder).read_text())["val_loss"]
        return {int(step): float(loss) for step, loss in told.items() if fits(loss, float)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def write_losses(folder: Path, losses: Mapping[int, float]) -> None:
    """Replaces the file of a checkpoints folder. A failure is a warning: no step is lost by it."""
    path = _file(folder)
    told = {str(step): loss for step, loss in sorted(losses.items())}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as file:
            file.write(json.dumps(dict(val_loss=told), indent=2) + "\n")
    except OSError as error:
        log.warning("%s could not be written: %s", path, error)


def _file(folder: Path) -> Path:
    """The file next to a checkpoints folder, which itself holds steps alone."""
    return folder.absolute().parent / NAME
