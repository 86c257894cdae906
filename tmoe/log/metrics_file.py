"""Writes, reads and rewinds the lines of metrics.jsonl."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tmoe.base.disk import written_whole

# Every line has this entry: steps are counted from 1, as on the screen and in checkpoints/step-N. Lines of
# older runs lack the entry and count from 0; their numbers are converted when the lines are read.
COUNTED = {"from": 1}
COMPACT = (",", ":")  # json's separators without spaces, because a line holds layers x E counts


def read_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yields the lines of a metrics.jsonl in order, with steps counted from 1; None for an unreadable line.

    The last line may be incomplete if the run was killed.
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
    """Yields the steps of a metrics.jsonl, each with the line number (from 1) of its first line.

    The loss of a validation has its own line, {"step", "val_loss"}; runs of older versions have it in the
    step's line. So a line is merged into the previous line if both are of one step and share no other key.
    Two lines of one step with the same keys remain two. Unreadable lines are left out.
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
    """Appends a whole line or record, or nothing: if a full disk cuts the write short, its bytes are removed.

    Raises OSError if the bytes could not be written.
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
    """Keeps only the complete lines of the first `done` steps in `path`, atomically, in this version's form.

    If any line is dropped, all lines are first copied to `keep`. Returns the `seconds` of the last line kept
    (0 if none is kept) and the number of lines dropped. The file is processed line by line, because a long
    run's file may be larger than memory.
    seen: called with each line that is kept.
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
