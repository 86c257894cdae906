"""The validation losses of saved steps, in a run folder's validations.json, and the step with the lowest.

The loss cannot be in the step's own manifest, because that is written before the validation.

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
    """The number of a published step folder step-N, also of one whose second save was interrupted."""
    return int(path.name.split(".")[0].removeprefix("step-"))


def best_of(losses: Mapping[int, float], steps: Iterable[Path]) -> Path | None:
    """The step folder with the lowest loss, the earlier one if two are equal; None if no step has a loss."""
    known = [path for path in steps if number_of(path) in losses]
    return min(known, key=lambda path: (losses[number_of(path)], number_of(path)), default=None)


def read_losses(folder: Path) -> dict[int, float]:
    """Step to validation loss for a checkpoints folder; empty if the file is missing or unreadable."""
    try:
        losses = json.loads(_file(folder).read_text())["val_loss"]
        return {int(step): float(loss) for step, loss in losses.items() if fits(loss, float)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def write_losses(folder: Path, losses: Mapping[int, float]) -> None:
    """Replaces the file of a checkpoints folder.

    A failure is only a warning, because no step is lost by it.
    """
    path = _file(folder)
    by_step = {str(step): loss for step, loss in sorted(losses.items())}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as file:
            file.write(json.dumps(dict(val_loss=by_step), indent=2) + "\n")
    except OSError as error:
        log.warning("%s could not be written: %s", path, error)


def _file(folder: Path) -> Path:
    """The file, next to the checkpoints folder because that folder holds nothing but steps."""
    return folder.absolute().parent / NAME
