"""The errors of a checkpoint that is damaged or does not fit, in a few lines of text."""

from __future__ import annotations

from tmoe.base.listing import counted, listed


class CheckpointError(Exception):
    """A checkpoint could not be written, is damaged, or does not fit.

    The message names rank, path and reason.
    """


class MismatchError(CheckpointError, ValueError):
    """The tensors asked for are not the tensors saved.

    The message lists every difference, or every kind of difference where there are many.
    """


def refuse(what: str, problems: list[str], remedy: str = "") -> None:
    """MismatchError if there is a problem; it lists all of them, or every kind where there are many.

    remedy: a last line, what to do about it.
    """
    if problems:
        message = listed(f"{what}: {counted(len(problems), 'difference')}", problems)
        raise MismatchError(f"{message}\n{remedy}" if remedy else message)
