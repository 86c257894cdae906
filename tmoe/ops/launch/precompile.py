"""Compiles every kernel that given layers launch into triton's cache, each once, in any number of processes.

A kernel is compiled under a file lock of its own, which the system releases when its holder dies; a process
that finds a lock taken goes on with the next kernel and comes back. Processes wait for nothing but files, so
no collective can be left waiting. Kernels that the cache already holds whole are only looked at, so a
half-written cache, or one that lost or tore files, costs only what is missing.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from triton import knobs

from tmoe.base.private_torch import take
from tmoe.ops.launch.launch import compile_only

FileCacheManager: Any = take(
    "triton.runtime.cache.FileCacheManager", "torn files in its cache are not replaced"
)


class WholeCache(FileCacheManager or object):  # pyrefly: ignore
    """Triton's cache, without kernels whose files were torn by a power cut or removed by a cleaner.

    triton itself fails on some of them at each start, and finds out about a torn binary when it is loaded.
    """

    def get_group(self, filename: str) -> dict | None:
        """As triton's, but None for a kernel with a missing or torn file."""
        try:
            group = super().get_group(filename) or {}
            json.loads(Path(group[filename]).read_text())
            binaries = [whole(path) for name, path in group.items() if name.endswith((".cubin", ".hsaco"))]
        except (KeyError, ValueError, OSError):
            return None
        return group if binaries and all(binaries) else None


def whole(path: str | Path) -> bool:
    """Whether an ELF file of 64 bits reaches as far as its header says: its tables come last."""
    with open(path, "rb") as file:
        head = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(head) < 64 or head[:4] != b"\x7fELF":
        return False
    programs, sections = struct.unpack_from("<2Q", head, 32)
    sizes = struct.unpack_from("<4H", head, 54)
    return size >= max(programs + sizes[0] * sizes[1], sections + sizes[2] * sizes[3])


def compile_under_locks(wanted: dict[str, Callable], folder: Path) -> None:
    """Run every compile of wanted {key: compile}; returns when all kernels are in the cache."""
    # each process in an order of its own
    names = sorted(wanted, key=lambda key: hashlib.sha256(f"{os.getpid()}{key}".encode()).digest())
    while names:
        busy = [
            key
            for key in names
            if not _compile(wanted[key], folder / hashlib.sha256(key.encode()).hexdigest(), False)
        ]
        if len(busy) == len(names):  # all are being compiled by other processes: wait for one
            key = busy.pop(0)
            _compile(wanted[key], folder / hashlib.sha256(key.encode()).hexdigest(), True)
        names = busy


def _compile(compile: Callable, path: Path, wait: bool) -> bool:
    """Compile, or load what another process compiled, under the lock; False if it is taken and wait is false.

    It goes without a lock where there can be none: in a cache that is whole and read-only, or another user's,
    triton only reads.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(path.open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError:
            pass
        compile()
        return True


def work(arch: str, traces: Sequence[tuple]) -> tuple[int, int]:
    """One process's share: how many kernels it compiled itself, and how many there are."""
    compiled: list[int] = []
    wanted: dict[str, Callable] = {}
    before, cache = knobs.compilation.listener, knobs.cache.manager_class
    knobs.compilation.listener = lambda *, cache_hit, **_: None if cache_hit else compiled.append(1)
    # a cache of the user's own, on a network say, is left as it is
    if FileCacheManager and cache in (None, FileCacheManager):
        knobs.cache.manager_class = WholeCache
    folder = Path(knobs.cache.dir) / "tmoe-locks"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with compile_only(arch, lambda name, key, compile: wanted.setdefault(key, compile)):
            for run, *args in traces:
                run(*args)
            compile_under_locks(wanted, folder)
    finally:
        knobs.compilation.listener, knobs.cache.manager_class = before, cache
    return len(compiled), len(wanted)


def precompile(arch: Any, traces: Sequence[tuple], processes: int) -> tuple[int, int]:
    """Compile all kernels that the traces launch on arch, in this many processes: (compiled, wanted).

    arch: "cuda:90" or the like. traces: [(trace, *arguments)], by `traces_of` of
    ops/register.py or from a list.

    The processes are forked: they only compile, and a fork does not import torch again. Call it before
    threads and process groups exist.
    """
    if processes == 1:
        return work(arch, traces)
    context = get_context("fork")
    started = []
    for _ in range(processes):  # no Pool: it waits for ever for a process that was killed
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_tell, args=(sender, arch, traces), daemon=True)
        process.start()
        sender.close()
        started.append((process, receiver))
    done = []
    try:
        for _, receiver in started:
            answer = receiver.recv()
            if isinstance(answer, BaseException):
                raise answer
            done.append(answer)
    except EOFError:
        raise RuntimeError(
            f"a process that compiled kernels for {arch} died: out of memory "
            f"(fewer take less: --processes 1), or a compiler that does not know {arch}"
        ) from None
    finally:
        for process, _ in started:
            # it has ended, unless another has failed; a killed one leaves usable locks and cache files
            process.terminate()
            process.join()
    return sum(compiled for compiled, _ in done), done[0][1]


def _tell(sender: Connection, arch: str, traces: Sequence[tuple]) -> None:
    """A child process: send what `work` returns, or an error in its place."""
    try:
        answer = work(arch, traces)
    except Exception as error:
        traceback.print_exc()
        # not the error itself: a compiler's may not survive the pipe
        answer = RuntimeError(f"compiling kernels for {arch}: {type(error).__name__}: {error}")
    sender.send(answer)
