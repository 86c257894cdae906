"""Runs ranks that are meant to fail: how each rank ended, when, and what it printed.

    def work(rank, world, factor): ...           # module level; the default gloo group exists
    ends = launch(2, work, 3.0, timeout=5)       # ends[1].code is -9 if rank 1 was killed

tests/lib/gloo.py collects results and ends its workers itself. The ranks of this file end like a process of
train.py: by returning, by an exception (traceback, exit code 1, threads joined) or by a signal. The
rendezvous store is in the calling process, as torchrun keeps it in its agent, and survives every rank.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

# Imported once, by the server that ranks are forked from: 0.1 s per rank instead of 3 s. No import starts a
# thread.
PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "tmoe",
    "benchmarks.inject",
)
_numbers = itertools.count()


@dataclass(frozen=True)
class End:
    """How a rank ended."""

    code: int | None  # exit code; negative: the signal; None: the rank had to be stopped from outside
    at: float  # time.monotonic() at its end
    said: str  # everything that it printed
    result: Any  # return value of its function; None if it did not return


def launch(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 100.0,
    limit: float = 300.0,
    waits: int | None = None,
) -> list[End]:
    """Runs fn(rank, world, *args) on `world` processes; no process is left when this returns.

    timeout: timeout of collectives, in seconds.
    limit: seconds after which ranks that still run are killed.
    waits: return as soon as this many ranks have ended (default: all), because a rank that was stopped never
        ends without help.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))  # no effect if a server already runs, as under pytest
    # Without GPUs: a forked process cannot use the driver that its parent has initialised.
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        forkserver.ensure_running()
    _imported()
    with tempfile.TemporaryDirectory() as folder:
        meet = (_store().port, f"launch{next(_numbers)}", folder, timeout)
        job = pickle.dumps((fn, args))
        workers = [context.Process(target=_work, args=(rank, world, *meet, job)) for rank in range(world)]
        for worker in workers:
            worker.start()
        try:
            moments = _await(workers, time.monotonic() + limit, world if waits is None else waits)
            return [_end(Path(folder), rank, workers[rank], moments) for rank in range(world)]
        finally:
            for worker in workers:
                _kill(worker)


@cache
def _imported() -> None:
    """Returns when the server has imported the modules that ranks need, so that `limit` excludes imports."""
    first = multiprocessing.get_context("forkserver").Process(target=int)
    first.start()
    first.join()


@cache
def _store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def _await(workers: list, deadline: float, count: int) -> dict[int, float]:
    """The times at which ranks ended, until `count` ranks have ended or the deadline has passed."""
    running = {worker.sentinel: rank for rank, worker in enumerate(workers)}
    moments: dict[int, float] = {}
    while len(moments) < count and (left := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(running), left):
            moments[running.pop(sentinel)] = time.monotonic()
    return moments


def _end(folder: Path, rank: int, worker: Any, moments: dict[int, float]) -> End:
    worker.join(0)
    output, result = folder / f"{rank}.out", folder / f"{rank}.result"
    return End(
        worker.exitcode if rank in moments else None,
        moments.get(rank, time.monotonic()),
        output.read_text(errors="replace") if output.exists() else "",
        pickle.loads(result.read_bytes()) if result.exists() else None,
    )


def _kill(worker: Any) -> None:
    """Kills the rank and all processes that it started: each rank leads its own process group."""
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        worker.kill()
    worker.join()


def _work(rank: int, world: int, port: int, key: str, folder: str, timeout: float, job: bytes) -> None:
    os.setsid()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    out = os.open(f"{folder}/{rank}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    store = dist.PrefixStore(key, dist.TCPStore("127.0.0.1", port, None, False))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    fn, args = pickle.loads(job)
    result = fn(rank, world, *args)
    Path(f"{folder}/{rank}.result").write_bytes(pickle.dumps(result))
    sys.stdout.flush()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
