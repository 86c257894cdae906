"""Keeps what only looks at a run (W&B, TensorBoard, bar, picture, trace, terminal) from ending it.

next: tmoe/log/progress.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, TypeVar

T = TypeVar("T")
LONGEST = 300  # characters of an error's own words in a line


class Onlooker:
    """One thing that only looks at the run: `onlooker(look)` calls `look` and returns what it does.

    The first time that `look` raises anything, one line tells. Then and from then on the answer is None, and
    `look` is not called again. Only KeyboardInterrupt passes: the user's second Ctrl-C. SystemExit does not:
    a library may raise it (rich does when the reader of its pipe is gone), and the other ranks would wait for
    this one.

    fails: what the line says went wrong, "PATH: could not be written" for example. say: prints the line.
    leave: called once, before the line, to put right what a failed one leaves behind (a hidden cursor). It
        may fail too.
    """

    def __init__(self, fails: str, say: Callable[[str], Any], leave: Callable[[], Any] | None = None) -> None:
        self.fails = fails
        self.say = say
        self.leave = leave
        self.works = True

    def __call__(self, look: Callable[[], T]) -> T | None:
        if not self.works:
            return None
        try:
            return look()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self.works:  # else `look` has called this onlooker itself, and the line is out
                self.works = False
                if self.leave is not None:
                    Onlooker(self.fails, lambda _: None)(self.leave)
                self.say(f"{self.fails}, training continues without it: {reason(error)}")
        return None


def reason(error: BaseException) -> str:
    """Why, in one line: the system's words for an OSError that has them, else the type and its own words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    try:
        words = " ".join(str(error).split())
    except Exception:  # even its words may fail
        words = ""
    words = words if len(words) <= LONGEST else f"{words[:LONGEST]}..."
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def say(text: str, to: TextIO | None = None) -> None:
    """Prints a line to stdout (or `to`) at once; what cannot be printed is lost.

    It cannot be on a full disk, a closed terminal, a pipe without a reader, a stream that W&B has wrapped, or
    if it holds a name that is no text.
    """
    with suppress(Exception):
        print(text, file=to, flush=True)


def settle_output() -> None:
    """Before Python ends: throws away what stdout and stderr cannot take.

    Else Python's own last flush would fail, and change the exit code to 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            with suppress(Exception):  # no stream at all, or none with a file
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
