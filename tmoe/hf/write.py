"""Write a Hugging Face folder from tensors that stream by: file by file, resumable, read back, then renamed.

A safetensors file is written into `DST.partial`. When it is synced, `FILE.done` beside it says what every
byte of it should be. A killed export keeps the files that have one, and the same command writes the others.
When all are there, they are read back and compared with their hashes. The small files (settings, tokenizer)
follow, and the folder gets its name.

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
from tmoe.hf.files import Layout, Writer

# Bytes of a tensor beside its elements, at most: its lines in the header and in the index.
HEADER = 512
DONE = ".done"


@dataclass(frozen=True)
class Export:
    """What to write.

    produce: produce(names) yields each of these tensors with its name, in any order, in its type in `layout`.
    sizes: bytes of each tensor.
    others: the small files.
    sources: whatever else decides the contents, so that an export never goes on with what another one left.
    """

    layout: Layout
    shapes: dict[str, tuple[int, ...]]
    sizes: dict[str, int]
    produce: Callable[[set[str]], Iterator[tuple[str, Tensor]]]
    others: dict[str, Callable[[], bytes]]
    sources: tuple[str, ...]

    @cached_property
    def key(self) -> str:
        """Equal for exports that write the same: it tells whether a finished file belongs to this export."""
        return hashlib.sha256(repr((self.layout, self.shapes, self.sources)).encode()).hexdigest()


def check_room(plan: Export, dst: Path) -> tuple[int, int]:
    """(bytes still to be written at most, bytes free).

    CheckpointError if dst exists, dst.partial holds files of something else, or the bytes do not fit.
    """
    require_absent(dst)
    _require_ours(plan, dst)
    missing = [names for file, names in plan.layout.items() if _record(plan, work_folder(dst) / file) is None]
    return room_for(sum(plan.sizes[name] + HEADER for names in missing for name in names), dst)


def write_folder(plan: Export, dst: Path) -> None:
    """Write `dst`, or go on with what a killed call left in `dst.partial`.

    The name appears when everything is verified. Raises, and leaves dst absent and finished files in place:
    CheckpointError where dst exists, dst.partial holds what no such call left there, another process
        writes it, or what was written does not read back;
    OSError that names the file;
    whatever produce raises.
    """
    with locked(dst) as work:
        kept = {file for file in plan.layout if _record(plan, work / file)}
        _require_ours(plan, dst)  # again, now that no other process can write here
        left = set(work.iterdir()) - {work / name for file in kept for name in (file, file + DONE)}
        # Small files go first: _require_ours knows them only while all the others are there.
        for path in sorted(left, key=lambda path: path.name in plan.layout):
            path.unlink()
        todo = [file for file in plan.layout if file not in kept]
        with bar("writing", sum(plan.sizes[name] for file in todo for name in plan.layout[file])) as advance:
            for file in todo:
                _write_tensors(plan, work, file, advance)
        _read_back(plan, work)
        for name, content in plan.others.items():
            _write_small(work / name, content())
        for file in plan.layout:
            (work / (file + DONE)).unlink()
        folders.sync_folder(work)
        require_absent(dst)
        work.rename(dst)
        folders.sync_folder(dst.parent)


def _require_ours(plan: Export, dst: Path) -> None:
    """CheckpointError if `dst.partial` holds a file that is not this export's.

    Small files are written last. Without all the other files they belong to the user: a model half
    downloaded, for example.
    """
    names = {name for file in plan.layout for name in (file, file + DONE)}
    if all((work_folder(dst) / file).is_file() for file in plan.layout):
        names |= plan.others.keys()
    require_ours(dst, names.__contains__)


def _record(plan: Export, path: Path) -> list[tuple[int, int, str]] | None:
    """What the file should hold: (start, size, SHA-256) of all its parts.

    None unless this very plan finished it.
    """
    try:
        told: Any = json.loads(path.with_name(path.name + DONE).read_text())
        return told["parts"] if told["key"] == plan.key and told["size"] == path.stat().st_size else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_tensors(plan: Export, work: Path, file: str, advance: Advance) -> None:
    """Write one safetensors file, and then its record."""
    kinds = plan.layout[file]
    writer = Writer(
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
        (work / file).unlink(missing_ok=True)  # makes room for the next attempt
        raise
    told = dict(key=plan.key, size=(work / file).stat().st_size, parts=writer.parts)
    _write_small(work / (file + DONE), json.dumps(told).encode())
    folders.sync_folder(work)


def _read_back(plan: Export, work: Path) -> None:
    """Hash what was written. A damaged file loses its record, and CheckpointError names it."""
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
