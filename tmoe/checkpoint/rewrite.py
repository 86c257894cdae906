"""Writes a step folder from a stream of tensors, on one machine and without a process group.

A rewrite can be resumed. The tensors are divided into groups. A group is written into `DST.partial/group-I`,
one file for each rank of the new world; its own manifest is written last and marks the group as done. After a
kill, the finished groups are kept, and the same command writes the missing groups. When all are done, they
are read back and hashed, moved into one folder and described by one manifest. Then the folder gets its name.

Memory: a worker holds the chunks that the next boxes of one tensor still need, one box, and a copy of the box
or its fp64 sum. Measured: 2.5 tensors in a reshard and 5 in an average. Most time is spent on hashing
(contents read and written, files written and read back), so groups are written in parallel, as many as fit
into MEMORY.

next: parallel/layout.py, checkpoint/manifest.py
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import re
import resource
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from torch import Tensor

from tmoe.base import disk
from tmoe.base.listing import listed
from tmoe.checkpoint import dcp as shards
from tmoe.checkpoint import folders
from tmoe.checkpoint import manifest as files
from tmoe.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    ShardChunk,
    TensorEntry,
    read_chunk,
    read_manifest,
    verify,
)
from tmoe.parallel.layout import Box

Advance = Callable[[int], None]  # called with the bytes done since its last call, by any thread
MEMORY = 8 << 30  # most bytes that all workers together may hold, unless a single worker needs more
# Names that a killed rewrite may leave in its work folder.
OURS = re.compile(r"(group-\d+/)?(__\d+_\d+\.distcp|manifest\.json)|\.metadata|group-\d+/")
# Bytes of a box besides its elements: torch.save's frame (1.6 KB), its lines in manifest.json and .metadata.
FRAME = 4096


@dataclass(frozen=True)
class Output:
    """A tensor to write. boxes: the part that each rank of the new world holds.

    Each element is in one box.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: str
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """What to write.

    produce: produce(output) yields the contents of output.boxes in order, as CPU tensors of output.dtype.
    manifest: the result's manifest, without files, tensors and saved_ns.
    sources: everything else that determines the contents (hashes of the inputs), so that a rewrite never
        continues the remains of a different one.
    """

    outputs: tuple[Output, ...]
    produce: Callable[[Output], Iterator[Tensor]]
    manifest: Manifest
    sources: tuple[str, ...]

    @cached_property
    def key(self) -> str:
        """Equal for plans that write the same; it shows whether a finished group belongs to this plan."""
        return hashlib.sha256(repr((self.outputs, self.manifest, self.sources)).encode()).hexdigest()


def rewrite(plan: Plan, dst: Path) -> None:
    """Write the step folder `dst`, or continue what a killed call left in `dst.partial`.

    The name appears when everything is verified. If an error is raised, dst is not written, and finished
    groups are kept:
    CheckpointError, before the first byte, if dst exists, if dst.partial holds files that no rewrite left
        there, or if there is too little space; later, if another process writes it, or if what was written
        does not read back;
    OSError that names the file;
    any error that produce raises.
    """
    groups = divide(plan)
    key = plan.key
    check_space(plan, dst)
    with locked(dst) as work:
        parts = [work / f"group-{number}" for number in range(len(groups))]
        _clear(dst, keep=[part for part in parts if _is_done(part, key)])
        _write_groups(plan, groups, parts)
        _read_back(parts)
        _publish(plan, parts, work, dst)


# ---- before the first byte ----


def check_space(plan: Plan, dst: Path) -> tuple[int, int]:
    """(most bytes still to be written, bytes free).

    Raises CheckpointError if dst exists, dst.partial holds other files, or the bytes do not fit.
    """
    require_absent(dst)
    require_ours(dst, OURS.fullmatch)
    key = plan.key
    work = work_folder(dst)
    missing = [group for i, group in enumerate(divide(plan)) if not _is_done(work / f"group-{i}", key)]
    needed = sum(output.nbytes + FRAME * len(output.boxes) for group in missing for output in group)
    return room_for(needed, dst)


def room_for(needed: int, dst: Path) -> tuple[int, int]:
    """(needed, bytes free on the disk of dst); raises CheckpointError if they do not fit."""
    parent = next(parent for parent in dst.absolute().parents if parent.exists())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(
            f"{dst}: needs {decimal(needed)} ({needed} bytes), {parent} has {decimal(free)} ({free}) free"
        )
    return needed, free


def require_absent(dst: Path, kind: str = "folder") -> None:
    """CheckpointError if dst exists, cannot be made there, or lies inside a step folder.

    Retention would remove what lies in a step folder together with it.

    kind: "folder" or "file", what dst becomes.
    """
    if os.path.lexists(dst):
        raise CheckpointError(f"{dst}: exists already; name a new {kind}")
    if wrong := disk.unwritable_words(dst):
        raise CheckpointError(f"{dst}: {wrong}")
    if step := next(filter(files.is_step, Path(os.path.realpath(dst)).parents), None):
        wrong = f"{dst}: lies inside {step}, and would be removed with that step"
        raise CheckpointError(f"{wrong}; name a folder outside it")


def require_outside(dst: Path, sources: Sequence[Path]) -> None:
    """Raises ValueError if dst lies inside one of the folders that it is made from."""
    if inside := [src for src in sources if src.resolve() in Path(os.path.realpath(dst)).parents]:
        raise ValueError(
            f"{dst}: lies inside {inside[0]}, and would be removed with that step; name a folder outside it"
        )


def require_ours(dst: Path, is_ours: Callable[[str], object]) -> None:
    """Raises CheckpointError if `dst.partial` holds a name that this tool does not leave there.

    All of `dst.partial` may be removed, so it must hold no file of the user's.
    is_ours: called with a path relative to the folder, with / at its end for a folder.
    """
    work = work_folder(dst)
    if os.path.lexists(work) and not work.is_dir():
        raise CheckpointError(f"{work}: is no folder; move it away, or name another folder")
    for folder, folders_inside, files_inside in os.walk(work):
        inside = Path(folder).relative_to(work)
        names = [f"{inside / name}/" for name in folders_inside]
        names += [f"{inside / name}" for name in files_inside]
        for name in names:
            if not is_ours(name) or (work / name).is_symlink():
                raise CheckpointError(
                    f"{work}: holds {name}, which this command did not write; move it away, "
                    f"or name another folder"
                )


def work_folder(dst: Path) -> Path:
    return dst.with_name(f"{dst.name}.partial")


def divide(plan: Plan) -> list[list[Output]]:
    """Groups of tensors of about equal bytes.

    The number of groups is the number of files that a rank would have if training had saved them
    (checkpoint/dcp.py).
    """
    per_rank = sum(output.nbytes for output in plan.outputs) // plan.manifest.world
    count = min(shards.WRITERS, 1 + per_rank // shards.SMALL)
    groups: list[list[Output]] = [[] for _ in range(count)]
    held = [0] * count
    for output in sorted(plan.outputs, key=lambda output: (-output.nbytes, output.name)):
        least = held.index(min(held))
        groups[least].append(output)
        held[least] += output.nbytes
    return [group for group in groups if group]


@contextmanager
def locked(dst: Path) -> Iterator[Path]:
    """The work folder, locked by this process alone. If the process is killed, the lock is released."""
    work = work_folder(dst)
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{work}: another process is writing it") from None
        require_absent(dst)  # another process may have finished since the last check
        yield work
    finally:
        os.close(descriptor)
        with suppress(OSError):
            work.rmdir()  # fails, and is left, if the folder holds anything


@contextmanager
def keeping(dst: Path) -> Iterator[None]:
    """Surrounds the work on `dst`: an error also says that the finished part is kept."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        work = work_folder(dst)
        goes_on = f"; {work} keeps what is finished, the same command continues" if work.exists() else ""
        raise CheckpointError(f"{error}{goes_on}") from error


def _is_done(part: Path, key: str) -> bool:
    """Whether a group was finished by exactly this plan.

    Only sizes are checked: the contents of all groups are hashed at the end.
    """
    try:
        return read_manifest(part).info == {"plan": key} and not verify(part, share=None)
    except CheckpointError:
        return False


def _clear(dst: Path, keep: list[Path]) -> None:
    """Remove everything in the work folder except the groups to `keep`."""
    require_ours(dst, OURS.fullmatch)  # again, now that no other process can write here
    for path in set(work_folder(dst).iterdir()) - set(keep):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


# ---- writing ----


def _write_groups(plan: Plan, groups: list[list[Output]], parts: list[Path]) -> None:
    """Write the missing groups in parallel.

    If one fails, all other jobs stop at their next box.
    """
    todo = [number for number, part in enumerate(parts) if not part.exists()]
    largest = max((output.nbytes for number in todo for output in groups[number]), default=1)
    workers = max(1, min(shards.WRITERS, os.cpu_count() or 1, MEMORY // (5 * largest + 1)))
    # A worker opens a file for every rank; with 128 ranks, 8 workers would exceed the usual soft limit of
    # 1024.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    total = sum(output.nbytes for number in todo for output in groups[number])
    stop = threading.Event()
    with bar("writing", total) as advance, ThreadPoolExecutor(workers) as pool:

        def tell(count: int) -> None:
            advance(count)
            if stop.is_set():
                raise CheckpointError("stopped, for another group failed")

        jobs = [pool.submit(_write_group, plan, groups[i], i, parts[i], tell) for i in todo]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            stop.set()  # all other jobs end at their next box
            pool.shutdown(cancel_futures=True)
            raise


def _write_group(plan: Plan, outputs: list[Output], number: int, part: Path, tell: Advance) -> None:
    """Write one group's folder: one file for each rank, then the manifest that marks the group as done."""
    part.mkdir()
    try:
        opened: dict[int, disk.HashedFile] = {}
        with ExitStack() as stack:

            def shard(rank: int) -> disk.HashedFile:
                if rank not in opened:
                    opened[rank] = stack.enter_context(disk.HashedFile(part / f"__{rank}_{number}.distcp"))
                return opened[rank]

            tensors = {
                output.name: _write_tensor(output, plan.produce(output), shard, tell) for output in outputs
            }
        entries = {file.path.name: file.entry() for file in opened.values()}
        done = replace(plan.manifest, info={"plan": plan.key}, state={}, files=entries, tensors=tensors)
        files.write_manifest(part, done)
        disk.sync_folder(part)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)  # frees the space for the next attempt
        raise


def _write_tensor(
    output: Output, contents: Iterator[Tensor], shard: Callable[[int], disk.HashedFile], tell: Advance
) -> TensorEntry:
    """Write the boxes of one tensor into the files of their ranks."""
    chunks = []
    for box in output.boxes:
        tensor = next(contents)
        if (tuple(tensor.shape), tensor.dtype) != (box.shape, output.dtype):
            raise TypeError(f"{output.name}: {tensor.dtype} {tuple(tensor.shape)} was produced for {box}")
        chunks.append(files.write_chunk(shard(box.rank), tensor, box.offset))
        tell(tensor.nbytes)
        del tensor  # frees it before the next one is read
    return files.tensor_entry(output.shape, output.dtype, output.placement, chunks)


# ---- publishing ----


def _read_back(parts: list[Path]) -> None:
    """Hash what was written. A damaged group is removed, and CheckpointError names its files."""
    total = sum(size_on_disk(part) for part in parts)
    with bar("verifying", total) as advance:
        problems = {part: lines for part in parts if (lines := verify(part, advance=advance))}
    for part in problems:
        shutil.rmtree(part)
    if problems:
        named = [problem for lines in problems.values() for problem in lines]
        raise CheckpointError(
            listed("what was written does not read back (the same command writes it again):", named)
        )


def _publish(plan: Plan, parts: list[Path], work: Path, dst: Path) -> None:
    """Move the groups' files into one folder with one manifest, and give it its name."""
    manifests = [read_manifest(part) for part in parts]
    unsorted = {name: entry for manifest in manifests for name, entry in manifest.tensors.items()}
    tensors = {name: unsorted[name] for name in sorted(unsorted)}
    entries = {name: entry for manifest in manifests for name, entry in manifest.files.items()}
    entries[".metadata"] = shards.write_stock_metadata(work, tensors)
    whole = replace(plan.manifest, saved_ns=folders.next_saved_ns(dst.parent), files=entries, tensors=tensors)
    files.write_manifest(work, whole)
    for part, manifest in zip(parts, manifests, strict=True):
        for name in manifest.files:
            os.rename(part / name, work / name)
        shutil.rmtree(part)
    if problems := verify(work, share=None):
        raise CheckpointError(listed("", problems, indent=""))
    folders.publish(work, dst)


# ---- reading ----


def read_boxes(folder: Path, entry: TensorEntry, boxes: tuple[Box, ...]) -> Iterator[Tensor]:
    """The contents of `boxes`, in their order.

    Each chunk that overlaps a box is read and checked once, and released after its last box.
    """
    start = np.array([chunk.offset for chunk in entry.chunks]).reshape(len(entry.chunks), len(entry.shape))
    end = start + np.array([chunk.shape for chunk in entry.chunks]).reshape(start.shape)
    needed = [
        np.flatnonzero(((start < np.add(box.offset, box.shape)) & (end > box.offset)).all(1)).tolist()
        for box in boxes
    ]
    last = {index: i for i, indices in enumerate(needed) for index in indices}  # chunk -> its last box
    held: dict[int, Tensor] = {}
    dtype = files.dtype_of(entry.dtype)
    for i, (box, indices) in enumerate(zip(boxes, needed, strict=True)):
        for index in indices:
            if index not in held:
                held[index] = read_chunk(folder, entry.chunks[index], dtype)
        content = [_assemble(box, [(entry.chunks[index], held[index]) for index in indices], dtype)]
        for index in indices:
            if last[index] == i:
                del held[index]
        yield content.pop()  # so that this frame keeps no reference to the tensor


def read_whole(folder: Path, entry: TensorEntry) -> Tensor:
    """A whole tensor of a step folder, checked as it is read."""
    return next(read_boxes(folder, entry, (Box(0, (0,) * len(entry.shape), entry.shape),)))


def _assemble(box: Box, parts: list[tuple[ShardChunk, Tensor]], dtype: torch.dtype) -> Tensor:
    """The box, made from the chunks that cover it. It is a view if a single chunk covers it."""
    if len(parts) == 1:
        return _common(box, *parts[0])[1]
    whole = torch.empty(box.shape, dtype=dtype)
    for chunk, tensor in parts:
        target, source = _common(box, chunk, tensor)
        whole[target] = source
    return whole


def _common(box: Box, chunk: ShardChunk, tensor: Tensor) -> tuple[tuple[slice, ...], Tensor]:
    """The intersection of box and chunk: its slices in the box, and its elements."""
    sides = list(zip(box.offset, box.shape, chunk.offset, chunk.shape, strict=True))
    spans = [(max(a, b), min(a + m, b + n)) for a, m, b, n in sides]
    target = tuple(slice(low - a, high - a) for (low, high), a in zip(spans, box.offset, strict=True))
    source = tuple(slice(low - b, high - b) for (low, high), b in zip(spans, chunk.offset, strict=True))
    return target, tensor[source]


def size_on_disk(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(folder))


@contextmanager
def bar(text: str, total: int) -> Iterator[Advance]:
    """A progress bar of bytes on stderr if that is a terminal.

    Yields a function that adds the bytes done; any thread may call it.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=total)
        yield lambda count: progress.advance(task, count)
