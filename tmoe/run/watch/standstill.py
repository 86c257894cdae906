"""Ends a process whose step stands still, or whose error is not caught, even if its threads are blocked.

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

from tmoe.base import exit_message
from tmoe.parallel.mesh import patience

LEAVES = "_tmoe_leaves"  # marks an exception that, if it is not caught, ends the process at once
# What faulthandler raises if stderr belongs to a notebook, is closed, or does not exist.
NO_FILE = (OSError, AttributeError, RuntimeError, ValueError)


class Standstill:
    """The clock of the current step.

    give_up: called by `guard` with the seconds without progress, if they exceed the limit.
    """

    def __init__(self, give_up: Callable[[float], None]):
        self.give_up = give_up
        self.timeout = 0.0  # seconds that the step may take without progress; 0: no limit
        self.saving: Callable[[], bool] = lambda: False
        self.since: float | None = None  # time of the last progress in this step; None: the clock is stopped
        self.ended = threading.Event()
        self._saved = False  # whether a save was running at the last call of `guard`
        self._guarding = threading.Lock()
        self._armed = False  # whether faulthandler's only timer is ours and not the user's

    def enter(self) -> None:
        """Prepares the clock for the first step of a run, with a new event `ended`."""
        self.ended = threading.Event()
        self.since = None

    def begin(self, timeout: float, now: float) -> None:
        """Starts the clock of a step. now: time of the monotonic clock."""
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

        If the GPU waits for a peer and its queue is full, inductor's launches wait while holding Python's
        lock, and no Python thread runs. faulthandler's thread needs no lock, and ends the process in that
        case.
        """
        with self._guarding:
            if self.ended.is_set():
                return
            saves = self.saving()
            if self._saved and not saves and self.since is not None:
                # A save has ended: code that waited for its disk can continue now.
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
    """Prints where the watched thread is and what is known of the other ranks, then ends the process.

    If the thread is already ending by an exception, that is printed too. The process must be ended, because
    no exception reaches a thread that waits for a peer in gloo, or for a GPU whose kernels wait for a peer.

    words: returns what is known of all ranks, given the thread's exception or None. within: the most seconds
    that this function may take.
    """
    with open(os.devnull, "w") as nowhere:
        # A timer for the end, because these messages need files and pipes, which may be what hangs.
        faulthandler.dump_traceback_later(within, exit=True, file=nowhere)
        main = thread.ident or 0
        error: Any = sys._current_exceptions().get(main)
        error = error[1] if isinstance(error, tuple) else error  # Python 3.11
        lines = traceback.format_stack(sys._current_frames().get(main))
        lines += traceback.format_exception(error) if error else []
        try:
            lines.append(f"error: nothing has moved for {stood:.1f} s (--train.timeout)")
            print("".join(lines), file=sys.stderr, flush=True)
            known = words(error)
            print(known, file=sys.stderr)
            exit_message.leave(known.splitlines()[-1], behind=True)
        finally:
            _leave()


def leave_behind(error: BaseException) -> None:
    """Ends the process if the error is not caught, once its traceback is printed and threads have ended.

    CUDA's normal exit waits for its kernels, which may wait for a peer that is gone: four ranks that shared
    an H200 had printed everything after 21 s and were still running after 106.
    """
    # A mark on the error, not a reference to it: a reference would keep its frames, and the model in them.
    setattr(error, LEAVES, True)
    hook = sys.excepthook
    if hasattr(hook, LEAVES):
        return

    def escaped(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        hook(kind, value, trace)
        if any(hasattr(cause, LEAVES) for cause in _all_of(value)):
            atexit.register(_leave)

    setattr(escaped, LEAVES, True)
    sys.excepthook = escaped


def _all_of(error: BaseException) -> list[BaseException]:
    """The error, the errors from which or during which it was raised, and the errors in a group."""
    errors: list[BaseException] = []
    more: list[Any] = [error]
    while more:
        current = more.pop()
        if current is not None and all(current is not other for other in errors):
            errors.append(current)
            more += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
    return errors


def _leave() -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # a full disk must not keep the process alive
        os._exit(1)
