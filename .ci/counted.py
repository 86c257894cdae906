"""Runs a command, ends every process that it leaves, and prints the CPU seconds of all processes.

    python .ci/counted.py make check

On SIGTERM, SIGINT and SIGHUP it also ends all processes below the command: they get SIGTERM, and SIGKILL
after GRACE_S. On Linux this process adopts orphans (PR_SET_CHILD_SUBREAPER), so none is missed or uncounted.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 10.0


class Stopped(Exception):
    """A signal reached this process; its number is the argument."""


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    began = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        command = subprocess.Popen(sys.argv[1:])
        pid = code = 0
        while pid != command.pid:  # adopted orphans are waited for here as well
            pid, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
    except Stopped as stopped:
        code = -stopped.args[0]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end(at_once=code < 0)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    print(
        f"CPU seconds of all processes: {seconds:.0f}; wall time: {time.monotonic() - began:.0f} s",
        flush=True,
    )
    raise SystemExit(code if code >= 0 else 128 - code)


def _stop(number: int, frame: object) -> None:
    raise Stopped(number)


def end(at_once: bool) -> None:
    """Returns when no process is left below this one. at_once: send SIGTERM without waiting GRACE_S."""
    signals = [signal.SIGTERM, signal.SIGKILL]
    for number in signals if at_once else [None, *signals]:
        limit = time.monotonic() + GRACE_S
        for pid in below() if number else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while below() and time.monotonic() < limit:
            time.sleep(0.05)


def below() -> list[int]:
    """The processes below this one.

    Processes that have ended are reaped first, so that their seconds count.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z" or int(parent) == os.getpid():  # this process's zombies must still be reaped
                parents[int(stat.parent.name)] = int(parent)
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


if __name__ == "__main__":
    main()
