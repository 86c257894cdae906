"""Keeps optional outputs of a run (W&B, TensorBoard, bar, picture, trace, terminal) from ending it.

next: tmoe/log/progress.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, TypeVar

T = TypeVar("T")
LONGEST = 300  # most characters of an error's own text in a line


class Onlooker:
    """One optional output of a run: `onlooker(look)` calls `look` and returns its result.

    The first time that `look` raises an error, one line reports it. That call and all later ones return None,
    and `look` is not called again. Only KeyboardInterrupt, the user's second Ctrl-C, is raised. SystemExit is
    not: a library may raise it (rich does when the reader of its pipe is gone), and the other ranks would
    wait for this one.

    Args:
        fails: the line's description of the failure, "PATH: could not be written" for example.
        say: prints the line.
        leave: called once, before the line, to clean up after the failed output (a hidden cursor). It may
            fail too.
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
            if self.works:  # else `look` has called this object itself, and the line was printed then
                self.works = False
                if self.leave is not None:
                    Onlooker(self.fails, lambda _: None)(self.leave)
                self.say(f"{self.fails}, training continues without it: {reason(error)}")
        return None


def reason(error: BaseException) -> str:
    """An error in one line: the system's text of an OSError that has one, else the type and its own text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    try:
        words = " ".join(str(error).split())
    except Exception:  # an error whose text raises
        words = ""
    words = words if len(words) <= LONGEST else f"{words[:LONGEST]}..."
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def say(text: str, to: TextIO | None = None) -> None:
    """Prints a line to stdout (or `to`) at once; a line that cannot be printed is lost.

    Printing may fail on a full disk, a closed terminal, a pipe without a reader, a stream that W&B has
    wrapped, or for a path that is not valid text.
    """
    with suppress(Exception):
        print(text, file=to, flush=True)


def settle_output() -> None:
    """Discards output that stdout and stderr cannot take; called before Python ends.

    Otherwise Python's own last flush would fail, and change the exit code to 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            with suppress(Exception):  # there is no stream, or it has no file
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
