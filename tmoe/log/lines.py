"""The lines of metrics.jsonl: written, read and rewound."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tmoe.base.disk import written_whole

# In every line: steps are counted from 1, as on the screen and in checkpoints/step-N. Lines of older runs
# lack it and count from 0; they are read as if they did not.
COUNTED = {"from": 1}
COMPACT = (",", ":")  # json's separators without spaces: a line holds layers x E counts


def read_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a metrics.jsonl one by one, steps from 1 on; None for one that cannot be read.

    The last may be torn, where the run was killed.
    """
    if not path.exists():
        return
    with open(path, errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
                line["step"] += 1 - line.pop("from", 0)
                yield line if isinstance(line["step"], int) and text.endswith("\n") else None
            except (ValueError, TypeError, KeyError, RecursionError):
                yield None


def read_steps(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The steps of a metrics.jsonl, each with the number, from 1 on, of its first line in the file.

    A line that follows one of its own step and shares no other key with it joins it: the loss of a validation
    has a line of its own, {"step", "val_loss"}. Runs of older versions have it in the step's line. Two lines
    of one step with the same numbers stay two. Lines that cannot be read are left out.
    """
    first = 0
    joined: dict[str, Any] | None = None
    for number, line in enumerate(read_lines(path), start=1):
        if line is None:
            continue
        if joined is not None and joined["step"] == line["step"] and joined.keys() & line.keys() == {"step"}:
            joined |= line
            continue
        if joined is not None:
            yield first, joined
        first = number
        joined = line
    if joined is not None:
        yield first, joined


def append(file: BinaryIO, rest: bytes) -> None:
    """Writes all of a line, or of a record, or nothing: what a full disk cut short is taken back.

    Raises OSError if it could not be written.
    """
    end = os.fstat(file.fileno()).st_size
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        os.truncate(file.fileno(), end)
        raise


def rewind(
    path: Path,
    done: int,
    keep: Path | None = None,
    seen: Callable[[dict[str, Any]], object] = lambda line: None,
) -> tuple[float, int]:
    """Leaves only whole lines of the first `done` steps in `path`, atomically, as this version writes them.

    If any line goes, `keep` gets a copy of all of them first. Returns `seconds` of the last line that stays
    (0 without any), and the number of lines dropped. Works line by line: a long run's file may be larger than
    memory. seen: called with each line that stays.
    """
    seconds = 0.0
    dropped = 0
    if not path.exists():
        return seconds, dropped
    with written_whole(path) as file:
        for line in read_lines(path):
            if line is None or line["step"] > done:
                dropped += 1
                continue
            if isinstance(spent := line.get("seconds"), float | int):
                seconds = spent or seconds
            seen(line)
            file.write(json.dumps(line | COUNTED, separators=COMPACT) + "\n")
        if dropped and keep:
            shutil.copyfile(path, keep)
    return seconds, dropped
