"""Parts of the fault cases: the two systems, the work of the ranks, and injections that suit both systems.

next: launch.py
"""

from __future__ import annotations

import builtins
import io
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tmoe.base import disk
from tmoe.checkpoint import dcp as shards
from tmoe.checkpoint import manifest
from tmoe.checkpoint.checkpoints import Checkpoints, read_manifest

Tensors = dict[str, torch.Tensor]
FULL = 40_000  # bytes that the full disk still accepts: less than a rank's shard


class Tmoe:
    name = "tmoe"

    def __init__(self, folder: Path, keep: int = 0, background: bool = False, threads: int = 1) -> None:
        shards.SMALL = 1 << 14  # gives a rank several shard files and threads, although the tensors are small
        self.store = Checkpoints(folder, keep=keep, mode="async" if background else "sync", info={})

    def save(self, step: int, tensors: Tensors) -> None:
        self.store.save(step, tensors, {"step": step}, {})

    def poll(self) -> None:
        self.store.poll()

    def finish(self) -> None:
        self.store.finish()

    def latest(self) -> Path | None:
        return self.store.find("auto")

    def load(self, path: Path, tensors: Tensors) -> None:
        self.store.load(path, tensors)

    @staticmethod
    def reseal(step: Path) -> None:
        """Makes the manifest agree with changed files, as an attacker would."""
        old = read_manifest(step)
        for name in old.files:
            with disk.HashedFile(step / "copy") as copy:
                copy.write((step / name).read_bytes())
            old.files[name] = copy.entry()
            (step / "copy").unlink()
        (step / manifest.NAME).unlink()
        manifest.write_manifest(step, old)

    commit_mark = manifest.NAME


class Stock:
    name = "stock DCP"

    def __init__(self, folder: Path, keep: int = 0, background: bool = False, threads: int = 1) -> None:
        self.folder = folder
        self.background = background
        self.threads = threads
        self.pending: Future | None = None

    def save(self, step: int, tensors: Tensors) -> None:
        self.finish()
        path = self.folder / f"step-{step}"
        writer = FileSystemWriter(path, thread_count=self.threads)
        if self.background:
            self.pending = cast(Future, dcp.async_save(tensors, storage_writer=writer))
        else:
            dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())

    def poll(self) -> None:
        if self.pending is not None and self.pending.done():
            self.finish()

    def finish(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def latest(self) -> Path | None:
        steps = [p for p in self.folder.glob("step-*") if (p / ".metadata").exists()]
        return max(steps, key=lambda p: int(p.name.removeprefix("step-")), default=None)

    def load(self, path: Path, tensors: Tensors) -> None:
        dcp.load(tensors, checkpoint_id=path, no_dist=not dist.is_initialized())

    @staticmethod
    def reseal(step: Path) -> None:
        """Does nothing: no file has a hash to forge."""

    commit_mark = ".metadata"


System = type[Tmoe] | type[Stock]

# ---- the work of the ranks ----


def tensors(value: float) -> Tensors:
    """A sharded matrix of 128 KiB, a sharded vector, a replicated one; on a single process, plain tensors."""
    full = {"model.w": torch.full((512, 64), value), "model.b": torch.full((512,), value)}
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        full = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in full.items()}
    return full | {"model.norm": torch.full((16,), value)}


def values(found: Tensors) -> list[float]:
    """The distinct numbers in all tensors: a single one if the tensors are of one save."""
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in found.values()]
    return torch.cat([t.flatten() for t in whole]).unique().tolist()


def save(
    rank: int,
    world: int,
    system: System,
    folder: Path,
    steps: dict[int, float],
    sabotage: Callable[[int], None] | None = None,
    background: bool = False,
    threads: int = 1,
) -> tuple[str | None, int]:
    """Saves {step: value}, the last one with sabotage.

    Returns the error that was raised, if any, and the number of polls after the last save until then.
    """
    store = system(folder, background=background, threads=threads)
    polls = 0
    *before, last = steps.items()
    try:
        for step, value in before:
            store.save(step, tensors(value))
            store.finish()
        if sabotage:
            sabotage(rank)
        store.save(last[0], tensors(last[1]))
        while background and polls < 50:
            time.sleep(0.05)
            polls += 1
            store.poll()
        store.finish()
    except BaseException as error:  # DCP's CheckpointException is not a subclass of Exception
        return say(error), polls
    return None, polls


def save_or_die(rank: int, world: int, *args: Any) -> None:
    """Saves as a trainer does: an error ends the process."""
    if why := save(rank, world, *args)[0]:
        raise RuntimeError(why)


def load(
    rank: int, world: int, system: System, folder: Path, blind: str = ""
) -> tuple[str | None, list[float], str]:
    """Resumes; returns (step, distinct values found, error).

    blind: rank 1 cannot open files whose path contains this text.
    """
    if blind and rank == 1:
        hide(blind)
    store = system(folder)
    loaded = tensors(0.0)
    path = None
    try:
        path = store.latest()
        if path is not None:
            store.load(path, loaded)
    except BaseException as error:
        return path.name if path else None, values(loaded), say(error)
    return path.name if path else None, values(loaded), ""


def load_path(
    rank: int, world: int, system: System, path: Path, asked: Tensors | None = None
) -> tuple[str, Tensors]:
    loaded = asked or tensors(0.0)
    try:
        system(path.parent).load(path, loaded)
        return "", loaded
    except BaseException as error:
        return say(error), loaded


def say(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # str(error) is a page of tracebacks
        return "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
    return f"{type(error).__name__}: {error}"


# ---- injections; they suit both systems, because both use torch.save, open and os ----


def kill_in_writer(rank: int) -> None:
    """Rank 1 is killed when it opens its first shard, after rank 0 has written its own."""
    real = builtins.open

    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(".distcp") and set(mode) & set("wx"):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(path, mode, *args, **kwargs)

    if rank == 1:
        builtins.open = io.open = opened  # type: ignore[assignment]


def fill_disk(rank: int) -> None:
    if rank == 1:  # python ignores SIGXFSZ, so a write beyond the limit fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))


def fill_disk_of_helpers(rank: int) -> None:
    """On rank 1, every thread except the main thread finds no space.

    The main thread is slow, so that helper threads get work.
    """
    real = torch.save
    main = threading.main_thread()

    def failing(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not main:
            raise OSError(28, "No space left on device", "shard")
        time.sleep(0.3)
        real(*args, **kwargs)

    if rank == 1:
        torch.save = failing


def hide(text: str) -> None:
    """Hides files whose path contains `text` from this process."""
    real = builtins.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
        if text in str(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *args, **kwargs)

    builtins.open = io.open = opened  # type: ignore[assignment]


def flip(file: Path, position: int) -> None:
    """Flips one bit of the byte at a position."""
    with open(file, "r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 0x40]))


def die_at(count: int, work: Callable[[], None]) -> bool:
    """Runs `work` in a fork that is killed at its count-th write, sync, rename, mkdir, unlink or rmdir.

    Returns whether it was killed.
    """
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status > 0:
            raise RuntimeError(f"the work failed before its point {count}")
        return status < 0
    _dying(killer(count), work)


def _dying(done: Callable[[], None], work: Callable[[], None]) -> NoReturn:
    class Guarded(io.BufferedWriter):
        def write(self, data: Any) -> int:
            done()
            return super().write(data)

    real = builtins.open

    def opened(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "b" in mode and set(mode) & set("wxa"):
            return Guarded(io.FileIO(path, mode.replace("b", "")))
        return real(path, mode, *args, **kwargs)

    builtins.open = io.open = opened  # type: ignore[assignment]
    for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, partial(_after, done, getattr(os, name)))
    try:
        work()
        os._exit(0)
    except BaseException:
        os._exit(1)


def killer(last: int) -> Callable[[], None]:
    """A function whose `last`-th call kills the process."""
    left = [last]

    def tick() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return tick


def _after(first: Callable[[], None], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    first()
    return call(*args, **kwargs)
