"""Writes a Hugging Face folder from a stream of tensors: file by file, resumable, read back, then renamed.

Each safetensors file is written into `DST.partial`. Once it is synced, a record `FILE.done` in the same
folder holds the hashes of all its bytes. If an export is killed, files with a record are kept, and the same
command writes the remaining files. When all files exist, they are read back and compared with their hashes.
Then the small files (tokenizer, and at last config.json, without which no program loads the folder) are
written, and the folder is renamed to its final name.

next: hf/files.py, checkpoint/rewrite.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from tmoe.base import disk as folders
from tmoe.base.disk import HashedFile
from tmoe.base.listing import listed
from tmoe.checkpoint.manifest import CheckpointError
from tmoe.checkpoint.rewrite import Advance, bar, locked, require_absent, require_ours, room_for, work_folder
from tmoe.hf.files import Layout, SafetensorsWriter
from tmoe.hf.foreign import ADAPTER, CONFIG

# Most bytes that a tensor needs besides its elements: its lines in the header and in the index.
HEADER = 512
DONE = ".done"
DESCRIBES = (CONFIG, ADAPTER)  # a folder without both is loaded by no program


@dataclass(frozen=True)
class Export:
    """The contents of the folder to write.

    layout: for each file its tensors and their dtypes.
    shapes: shape of each tensor.
    sizes: bytes of each tensor.
    produce: produce(names) yields each of these tensors with its name, in any order, in its type in `layout`.
    others: the small files.
    sources: everything else that decides the contents, so that an export never continues with the files of
        another export.
    """

    layout: Layout
    shapes: dict[str, tuple[int, ...]]
    sizes: dict[str, int]
    produce: Callable[[set[str]], Iterator[tuple[str, Tensor]]]
    others: dict[str, Callable[[], bytes]]
    sources: tuple[str, ...]

    @cached_property
    def key(self) -> str:
        """Equal for exports with the same contents; it decides whether a finished file is of this export."""
        return hashlib.sha256(repr((self.layout, self.shapes, self.sources)).encode()).hexdigest()


def check_room(plan: Export, dst: Path) -> tuple[int, int]:
    """Returns (most bytes that must still be written, bytes free).

    CheckpointError if dst exists, dst.partial holds files that are not of an export, or the bytes do not fit.
    """
    require_absent(dst)
    _require_ours(plan, dst)
    missing = [names for file, names in plan.layout.items() if _record(plan, work_folder(dst) / file) is None]
    return room_for(sum(plan.sizes[name] + HEADER for names in missing for name in names), dst)


def write_folder(plan: Export, dst: Path) -> None:
    """Write `dst`, or continue from the files that a killed call left in `dst.partial`.

    The folder gets its name when everything is verified. On an error dst stays absent and finished files are
    kept. Raises
    CheckpointError if dst exists, if dst.partial holds files that are not of an export, if another process
        writes it, or if the files read back differ from what was written;
    OSError that names the file;
    the errors of produce.
    """
    with locked(dst) as work:
        finished = {file for file in plan.layout if _record(plan, work / file)}
        _require_ours(plan, dst)  # again, now that no other process can write here
        left = set(work.iterdir()) - {work / name for file in finished for name in (file, file + DONE)}
        # Small files are removed first: _require_ours accepts them only while all other files exist.
        for path in sorted(left, key=lambda path: path.name in plan.layout):
            path.unlink()
        todo = [file for file in plan.layout if file not in finished]
        with bar("writing", sum(plan.sizes[name] for file in todo for name in plan.layout[file])) as advance:
            for file in todo:
                _write_tensors(plan, work, file, advance)
        _read_back(plan, work)
        for name in sorted(plan.others, key=lambda name: name in DESCRIBES):
            _write_small(work / name, plan.others[name]())
        for file in plan.layout:
            (work / (file + DONE)).unlink()
        folders.sync_folder(work)
        require_absent(dst)
        work.rename(dst)
        folders.sync_folder(dst.parent)


def _require_ours(plan: Export, dst: Path) -> None:
    """CheckpointError if `dst.partial` holds a file that is not this export's.

    Small files are written last. If any other file is missing, small files therefore belong to the user, for
    example to a model that is partly downloaded.
    """
    names = {name for file in plan.layout for name in (file, file + DONE)}
    if all((work_folder(dst) / file).is_file() for file in plan.layout):
        names |= plan.others.keys()
    require_ours(dst, names.__contains__)


def _record(plan: Export, path: Path) -> list[tuple[int, int, str]] | None:
    """The record of a finished file: (start, size, SHA-256) of all its parts.

    None unless an export with the same plan finished it.
    """
    try:
        done: Any = json.loads(path.with_name(path.name + DONE).read_text())
        return done["parts"] if done["key"] == plan.key and done["size"] == path.stat().st_size else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_tensors(plan: Export, work: Path, file: str, advance: Advance) -> None:
    """Write one safetensors file, and then its record."""
    kinds = plan.layout[file]
    writer = SafetensorsWriter(
        work / file, {name: (kind, plan.shapes[name]) for name, kind in kinds.items()}, plan.sizes
    )
    try:
        try:
            for name, tensor in plan.produce(set(kinds)):
                writer.write(name, tensor)
                advance(plan.sizes[name])
        finally:
            writer.close()
    except BaseException:
        (work / file).unlink(missing_ok=True)  # frees its space for the next attempt
        raise
    record = dict(key=plan.key, size=(work / file).stat().st_size, parts=writer.parts)
    _write_small(work / (file + DONE), json.dumps(record).encode())
    folders.sync_folder(work)


def _read_back(plan: Export, work: Path) -> None:
    """Hash the written files. The record of a damaged file is removed, and CheckpointError names the file."""
    problems = []
    with bar("verifying", sum((work / file).stat().st_size for file in plan.layout)) as advance:
        for file in plan.layout:
            if not _holds(work / file, _record(plan, work / file) or [], advance):
                problems.append(f"{work / file}: SHA-256 differs from what was written")
                (work / (file + DONE)).unlink()
    if problems:
        raise CheckpointError(
            listed("what was written does not read back (the same command writes it again):", problems)
        )


def _holds(path: Path, parts: list[tuple[int, int, str]], advance: Advance) -> bool:
    """Whether the file consists of these parts and nothing else."""
    buffer = memoryview(bytearray(1 << 20))
    end = 0
    with open(path, "rb", buffering=0) as stream:
        for start, size, sha256 in sorted(parts):
            digest = hashlib.sha256()
            left = size
            while left and (count := stream.readinto(buffer[:left])):
                digest.update(buffer[:count])
                advance(count)
                left -= count
            if start != end or left or digest.hexdigest() != sha256:
                return False
            end = start + size
        return not stream.read(1)


def _write_small(path: Path, content: bytes) -> None:
    with HashedFile(path) as file:
        file.write(content)
    if path.read_bytes() != content:
        raise CheckpointError(f"{path}: does not read back as it was written")
