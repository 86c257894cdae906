"""Files that are whole or absent: synced, renamed, hashed, and errors that name the path."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from tmoe.checkpoint.manifest import naming


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[TextIO]:
    """A file to write that takes the place of `path` at the end: a reader, or a crash, meets the old one or the new one."""
    aside = path.with_suffix(path.suffix + ".tmp")
    with naming(aside), open(aside, "w") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
