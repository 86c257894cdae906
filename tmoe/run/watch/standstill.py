"""Ends a process whose step stands still, or whose error nothing catches, wherever its threads wait.

next: run/watch/__init__.py
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from tmoe.base import last_line
from tmoe.parallel.mesh import patience

LEAVES = "_tmoe_leaves"  # marks an exception that, if nothing catches it, ends the process at once
# What faulthandler raises for a notebook's stderr, a closed one, none.
NO_FILE = (OSError, AttributeError, RuntimeError, ValueError)


class Standstill:
    """The clock of the step under way.

    give_up: called by `guard` with the seconds for which nothing moved, where these are above the limit.
    """

    def __init__(self, give_up: Callable[[float], None]):
        self.give_up = give_up
        self.timeout = 0.0  # seconds that the step may stand still; 0: no limit
        self.saving: Callable[[], bool] = lambda: False
        self.since: float | None = None  # when anything last moved in this step; None: the clock stands
        self.ended = threading.Event()
        self._saved = False  # whether a save was under way at the last look
        self._guarding = threading.Lock()
        self._armed = False  # whether faulthandler's only timer is ours: it may be the user's

    def enter(self) -> None:
        """Before the first step of a run: its event `ended` is a new one."""
        self.ended = threading.Event()
        self.since = None

    def begin(self, timeout: float, now: float) -> None:
        """Starts the clock of a step. now: of the monotonic clock."""
        self.timeout = timeout
        self.since = now

    def moved(self) -> None:
        if self.since is not None:
            self.since = time.monotonic()

    def pause(self) -> None:
        """Stops the clock until the next step begins."""
        with self._guarding:
            self.since = None
            self._disarm()

    def end(self) -> None:
        self.ended.set()
        self.pause()

    def guard(self) -> None:
        """Ends this process if its step stands still; faulthandler's timer does so if this thread cannot.

        Where the GPU waits for a peer and its queue is full, inductor's launches wait with Python's lock
        held, and no thread of Python runs. faulthandler's thread needs no lock and ends the process then.
        """
        with self._guarding:
            if self.ended.is_set():
                return
            saves = self.saving()
            if self._saved and not saves and self.since is not None:
                # A save has ended: what waited for its disk may go on now.
                self.since = time.monotonic()
            self._saved = saves

            moved = self.since if self.timeout else None
            limit = max(self.timeout, patience().total_seconds()) if saves else self.timeout
            stood = 0.0 if moved is None else time.monotonic() - moved
            self._disarm()
            if moved is not None and stood <= limit:
                with suppress(OverflowError, *NO_FILE):  # OverflowError: a timeout of centuries
                    faulthandler.dump_traceback_later(limit, exit=True)
                    self._armed = True
        if stood > limit:
            self.give_up(stood)

    def _disarm(self) -> None:
        if self._armed:
            faulthandler.cancel_dump_traceback_later()
        self._armed = False


def end_process(stood: float, thread: threading.Thread, words: Callable[[Any], str], within: float) -> None:
    """Says where the watched thread is and what is known of the other ranks, then ends the process.

    If the thread is already ending by an exception, that is said too. The process has to be ended: no
    exception reaches a thread that waits for a peer in gloo, or for a GPU whose kernels wait for one.

    words: what is known of all ranks, of the thread's exception or None. within: seconds that all this takes
    at most.
    """
    with open(os.devnull, "w") as nowhere:
        # A timer for the end, as to say all this reads files and writes into pipes, which may be what hangs.
        faulthandler.dump_traceback_later(within, exit=True, file=nowhere)
        main = thread.ident or 0
        error: Any = sys._current_exceptions().get(main)
        error = error[1] if isinstance(error, tuple) else error  # Python 3.11
        said = traceback.format_stack(sys._current_frames().get(main))
        said += traceback.format_exception(error) if error else []
        try:
            said.append(f"error: nothing has moved for {stood:.1f} s (--train.timeout)")
            print("".join(said), file=sys.stderr, flush=True)
            known = words(error)
            print(known, file=sys.stderr)
            last_line.leave(known.splitlines()[-1], behind=True)
        finally:
            _leave()


def leave_behind(error: BaseException) -> None:
    """Ends the process if nothing catches the error, after its traceback and what threads have to end.

    CUDA's own end waits for kernels, and those for a peer that does not come: four ranks that shared an H200
    had said all after 21 s and were still there after 106.
    """
    # A mark on the error, not a reference to it: that would keep its frames, and the model in them.
    setattr(error, LEAVES, True)
    hook = sys.excepthook
    if hasattr(hook, LEAVES):
        return

    def escaped(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        hook(kind, value, trace)
        if any(hasattr(of, LEAVES) for of in _all_of(value)):
            atexit.register(_leave)

    setattr(escaped, LEAVES, True)
    sys.excepthook = escaped


def _all_of(error: BaseException) -> list[BaseException]:
    """The error, the errors that it was raised from or while handling, and those that a group holds."""
    found: list[BaseException] = []
    more: list[Any] = [error]
    while more:
        one = more.pop()
        if one is not None and all(one is not other for other in found):
            found.append(one)
            more += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return found


def _leave() -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # a full disk must not keep the process
        os._exit(1)
