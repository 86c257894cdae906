"""Runs a function on several gloo processes, each forked from one server that has already imported torch.

    def work(rank, world, factor):                          # module level, in the test's own file
        x = torch.full((3,), float(rank)) * factor
        dist.all_reduce(x)                                  # the default process group exists
        return x

    def test_sum(gloo):                                     # fixture of conftest.py: `run` below
        for x in gloo(4, work, 2.0): assert x.eq(12.0).all()

Compare results in the test rather than in `work`: pytest explains only asserts of the test process. The
output of a rank is captured with the test's output.

Measured on 2 cores: the server starts in 4 s, once, while pytest collects tests. A call then takes
0.07 s with 2 ranks, 0.2 s with 4, 0.35 s with 8. Workers kept alive between calls would take 0.03 s. They
were rejected: DTensor caches sharding decisions under meshes that compare equal, so a second test would
use the destroyed process groups of the first. Dynamo, RNGs and environment would have to be reset as well.
"""

from __future__ import annotations

import faulthandler
import functools
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from tmoe.config.check import ConfigError

# Importing these starts no thread (counted in /proc/self/task), so forking afterwards is safe.
PRELOAD = (
    "early",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "numpy",
    "pytest",
    "tyro",
    "tmoe",
    "train",
    "matplotlib.backends.backend_agg",
    "tmoe.log.report",
    "settled",
)
# shorter than a call's timeout, so that a stuck collective reports its line before the call ends
COLLECTIVE_TIMEOUT_S = 100
SETTLE_S = 0.3  # seconds after the first failure to wait for reports that have already been sent
SEED = 1234

_calls = itertools.count()


class WorkerError(AssertionError):
    """A rank died, did not return in time, or raised something that cannot be sent."""


def shared(seconds: float) -> float:
    """The time limit in seconds on shared cores for work that takes `seconds` on unshared cores.

    The factor is the number of programs per core, in the last minute or now, and at least 1.
    """
    running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    return seconds * max(1.0, max(os.getloadavg()[0], running) / (os.cpu_count() or 1))


def start_server() -> None:
    """Starts the process that workers are forked from, if it is not running yet.

    Returns before that process has finished its imports.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    # The GPU is hidden, because importing torch's compiler initialises the CUDA driver, which a forked
    # process cannot use (seen on 2.11: "CUDA error: initialization error" from AdamW.step on CPU tensors).
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        forkserver.ensure_running()


def run(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """`[fn(rank, world, *args) for rank in range(world)]`, each call in its own process of one gloo group.

    fn is a module-level function; args and results are pickled (return plain tensors, not DTensors).
    A rank starts with seed 1234, one thread, no GPU, and no state of earlier calls. No process outlives the
    call.

    Raises the error of the first failing rank, with its traceback in a note; or WorkerError, which names the
    ranks that died or did not return within `timeout` seconds (their stacks are then in the captured
    stderr).
    """
    start_server()
    imported()
    key = f"run{next(_calls)}"
    job = pickle.dumps((fn, args))
    workers, inboxes = [], []
    try:
        for rank in range(world):
            inbox, outbox = multiprocessing.Pipe(duplex=False)
            worker = _context().Process(target=_work, args=(outbox, rank, world, _store().port, key, job))
            worker.start()
            outbox.close()  # the worker then has the only copy, so its death is read as end of file
            workers.append(worker)
            inboxes.append(inbox)
        return _collect(workers, inboxes, time.monotonic() + timeout, timeout)
    finally:
        for worker in workers:
            _kill(worker)
        for inbox in inboxes:
            inbox.close()


def _context() -> multiprocessing.context.ForkServerContext:
    return multiprocessing.get_context("forkserver")


@functools.cache
def imported() -> None:
    """Returns when the server has imported the workers' modules, so that `timeout` does not count imports."""
    first = _context().Process(target=int)
    first.start()
    first.join()


@functools.cache
def _store() -> dist.TCPStore:
    """The rendezvous of all calls of this test session; each call has its own prefix."""
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def _collect(workers: list, inboxes: list[Connection], deadline: float, timeout: float) -> list[Any]:
    """The results by rank. A failed rank stays alive without sending, so that no peer fails because of it."""
    open_ranks = {inbox: rank for rank, inbox in enumerate(inboxes)}
    results = {}
    errors = []
    dead = []
    while open_ranks and (ready := wait(list(open_ranks), max(0.0, deadline - time.monotonic()))):
        for inbox in ready:
            rank = open_ranks.pop(inbox)
            try:
                ok, moment, value = pickle.loads(inbox.recv_bytes())
            except EOFError:
                dead.append(rank)
                continue
            if ok:
                results[rank] = value
            else:
                errors.append((moment, rank, value))
        if errors or dead:
            deadline = min(deadline, time.monotonic() + SETTLE_S)
    if dead:
        raise WorkerError("; ".join(_obituary(workers[rank], rank) for rank in sorted(dead)))
    if errors:
        raise _first(errors)
    if open_ranks:
        raise WorkerError(_stuck(workers, sorted(open_ranks.values()), timeout))
    return [results[rank] for rank in range(len(workers))]


def _first(errors: list[tuple[float, int, tuple[bytes | None, str]]]) -> BaseException:
    """The earliest error; CLOCK_MONOTONIC is one clock for all processes of a machine."""
    _, rank, (pickled, trace) = min(errors, key=lambda error: error[:2])
    try:
        error = pickle.loads(pickled)
    except Exception:
        return WorkerError(f"rank {rank}:\n{trace}")
    error.add_note(f"raised on rank {rank}:\n{trace}")
    return error


def _obituary(worker: multiprocessing.process.BaseProcess, rank: int) -> str:
    worker.join(60)
    code = worker.exitcode
    how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
    return f"rank {rank} died {how}"


def _stuck(workers: list, ranks: list[int], timeout: float) -> str:
    for rank in ranks:
        os.kill(workers[rank].pid, signal.SIGUSR1)  # faulthandler prints the rank's stack
        time.sleep(0.05)  # one rank after the other, or the stacks would be interleaved
    return f"ranks {ranks} of {len(workers)} did not return within {timeout:g} s; their stacks are in stderr"


def _kill(worker: multiprocessing.process.BaseProcess) -> None:
    """Kills a worker and the processes that it started.

    The worker leads its own process group, unless it died before it could create the group.
    """
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        worker.kill()
    worker.join()
    worker.close()


def _work(outbox: Connection, rank: int, world: int, port: int, key: str, job: bytes) -> None:
    _prepare_process()
    try:
        store = dist.PrefixStore(key, dist.TCPStore("127.0.0.1", port, None, False))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        )
        fn, args = pickle.loads(job)
        report = pickle.dumps((True, time.monotonic(), fn(rank, world, *args)))
    except BaseException as error:
        report = pickle.dumps((False, time.monotonic(), (_pickled(error), traceback.format_exc())))
    sys.stdout.flush()
    outbox.send_bytes(report)
    signal.pause()  # the process group stays complete until every rank has reported; `run` then kills all


def _pickled(error: BaseException) -> bytes | None:
    try:
        return pickle.dumps(error)
    except Exception:
        return None


def read_errors_as_a_command_prints_them() -> None:
    """Makes str() of a ConfigError give the line of a command in tests; `spelt("name")` is Python's."""
    ConfigError.__str__ = lambda error: error.spelt("flag")


def _prepare_process() -> None:
    os.setsid()
    read_errors_as_a_command_prints_them()  # as conftest.py does
    faulthandler.enable()  # a rank that dies by SIGSEGV prints its stacks
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # no helper processes: world times cores would be useless
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def _die_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)
