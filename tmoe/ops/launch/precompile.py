"""Compiles every kernel that given layers launch into triton's cache, each once, in any number of processes.

Each kernel is compiled under a separate file lock, which the operating system releases if its holder dies. A
process that finds a lock taken compiles the next kernel and tries the first again later. Processes wait only
for files, so no collective can be left waiting. Kernels whose files are complete in the cache are only
checked. So after an interruption, or if files were lost or truncated, only the missing kernels are compiled.
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

from tmoe.base.private_torch import find_or_note
from tmoe.ops.launch.kernel_launch import compile_only

FileCacheManager: Any = find_or_note(
    "triton.runtime.cache.FileCacheManager", "truncated files in its cache are not replaced"
)


class WholeCache(FileCacheManager or object):  # pyrefly: ignore
    """Triton's cache, without kernels whose files were truncated by a power cut or removed by a cleaner.

    triton itself fails on some of these kernels at each start, and detects a truncated binary only when it
    loads the binary.
    """

    def get_group(self, filename: str) -> dict | None:
        """Like triton's get_group, but returns None for a kernel with a missing or truncated file."""
        try:
            group = super().get_group(filename) or {}
            json.loads(Path(group[filename]).read_text())
            binaries = [whole(path) for name, path in group.items() if name.endswith((".cubin", ".hsaco"))]
        except (KeyError, ValueError, OSError):
            return None
        return group if binaries and all(binaries) else None


def whole(path: str | Path) -> bool:
    """Whether a 64-bit ELF file is as long as its header says: its tables are at its end."""
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
    # the order differs between processes, so that they seldom want the same lock
    names = sorted(wanted, key=lambda key: hashlib.sha256(f"{os.getpid()}{key}".encode()).digest())
    while names:
        busy = [
            key
            for key in names
            if not _compile(wanted[key], folder / hashlib.sha256(key.encode()).hexdigest(), False)
        ]
        if len(busy) == len(names):  # other processes are compiling all of them: wait for one kernel
            key = busy.pop(0)
            _compile(wanted[key], folder / hashlib.sha256(key.encode()).hexdigest(), True)
        names = busy


def _compile(compile: Callable, path: Path, wait: bool) -> bool:
    """Compile a kernel under the lock at `path`, or load the binary that another process compiled.

    Returns False if the lock is taken and wait is False. If no lock file can be made, it runs without a lock:
    from a complete cache that is read-only, or belongs to another user, triton only reads.
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
    """Compiles this process's share; returns how many kernels it compiled, and how many there are in all."""
    compiled: list[int] = []
    wanted: dict[str, Callable] = {}
    before, cache = knobs.compilation.listener, knobs.cache.manager_class
    knobs.compilation.listener = lambda *, cache_hit, **_: None if cache_hit else compiled.append(1)
    # a cache manager that the user has set, for example for a network cache, is not replaced
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
    """Compile all kernels that the traces launch on arch; returns (number compiled, number wanted).

    arch: for example "cuda:90".
    traces: [(trace, *arguments)], from `traces_of` of ops/register.py or from a list.
    processes: number of processes that compile.

    The processes are forked, because they only compile and a fork does not import torch again. Call this
    function before threads and process groups exist.
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
            f"(use fewer processes: --processes 1), or a compiler that does not support {arch}"
        ) from None
    finally:
        for process, _ in started:
            # The process has ended, unless another process has failed. A killed process leaves usable locks
            # and cache files.
            process.terminate()
            process.join()
    return sum(compiled for compiled, _ in done), done[0][1]


def _tell(sender: Connection, arch: str, traces: Sequence[tuple]) -> None:
    """Runs in a child process: sends the result of `work`, or an error."""
    try:
        answer = work(arch, traces)
    except Exception as error:
        traceback.print_exc()
        # a new error, because a compiler's error may not be picklable
        answer = RuntimeError(f"compiling kernels for {arch}: {type(error).__name__}: {error}")
    sender.send(answer)
