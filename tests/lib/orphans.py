"""No process of a test outlives pytest, however pytest ends; a fixture fails a test that leaves a process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import gloo as gloo_module
import pytest

PR_SET_CHILD_SUBREAPER = 36


def end_with_pytest() -> None:
    """On SIGTERM and SIGHUP, ends all processes below this one, and then this one.

    SIGKILL cannot be caught; the processes that gloo.py and forked.py have forked then end when this one
    dies.
    """
    owner = os.getpid()

    def ended(number: int, _: object) -> None:
        if os.getpid() == owner:  # a process that a test forks inherits the handler
            end_descendants()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, ended)


def end_descendants() -> None:
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def no_orphans() -> Iterator[None]:
    """Fails the test if descendants are alive a minute after it; the minute lets them finish exiting.

    The kernel is asked to make this process, instead of init, the parent of such orphans.
    """
    gloo_module.start_server()  # the server and its resource tracker may stay
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = descendants()
    yield
    deadline = time.monotonic() + 60
    while (left := descendants() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"processes left over: {[Path(f'/proc/{pid}/cmdline').read_text() for pid in left]}"


def descendants() -> set[int]:
    """The processes below this one, without zombies."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:  # ended meanwhile
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    pids = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in pids} - pids
        pids = pids | more
        grown = bool(more)
    return pids - {os.getpid()}
