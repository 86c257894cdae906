"""The lines of metrics.jsonl: written, read and rewound."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tmoe.disk import written_whole

COMPACT = (",", ":")  # of json: a line holds layers x E counts


def read_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a metrics.jsonl one by one; None for one that cannot be read, as a kill may tear the last."""
    if not path.exists():
        return
    with open(path, errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
                yield line if isinstance(line["step"], int) and text.endswith("\n") else None
            except (ValueError, TypeError, KeyError, RecursionError):
                yield None


def append(file: BinaryIO, line: str) -> None:
    """The whole line or nothing of it: what a full disk cut short is taken back."""
    rest, end = line.encode(), os.fstat(file.fileno()).st_size
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        os.truncate(file.fileno(), end)
        raise


def rewind(path: Path, start_step: int, keep: Path | None = None) -> tuple[float, int]:
    """Leaves only whole lines of steps before `start_step` in `path`, atomically; if any goes, `keep` gets a copy of all first. Returns
    the last one's `seconds` (0 without any) and the number of lines dropped. Line by line: a long run's file may be larger than memory."""
    seconds, dropped = 0.0, 0
    if not path.exists():
        return seconds, dropped
    with written_whole(path) as file:
        for line in read_lines(path):
            if line is None or line["step"] >= start_step:
                dropped += 1
                continue
            if isinstance(spent := line.get("seconds"), float | int):
                seconds = spent or seconds
            file.write(json.dumps(line, separators=COMPACT) + "\n")
        if dropped and keep:
            shutil.copyfile(path, keep)
    return seconds, dropped
