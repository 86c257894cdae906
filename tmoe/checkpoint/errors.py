"""The errors of a checkpoint that is damaged or does not fit, in a few lines of text."""

from __future__ import annotations

from tmoe.base.listing import counted, listed


class CheckpointError(Exception):
    """A checkpoint could not be written, is damaged, or does not fit.

    The message names rank, path and reason.
    """


class MismatchError(CheckpointError, ValueError):
    """The tensors asked for are not the tensors saved.

    The message lists every difference, or each kind of difference if there are many.
    """


def refuse(what: str, problems: list[str], remedy: str = "") -> None:
    """Raises MismatchError if there are problems; it lists all of them, or each kind if there are many.

    what: the first line of the message, before the count.
    remedy: the last line, which says what to do.
    """
    if problems:
        message = listed(f"{what}: {counted(len(problems), 'difference')}", problems)
        raise MismatchError(f"{message}\n{remedy}" if remedy else message)
