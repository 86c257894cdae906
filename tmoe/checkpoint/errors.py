"""Errors of checkpoints that do not fit, in few lines."""

from __future__ import annotations

from tmoe.checkpoint.manifest import CheckpointError
from tmoe.listing import listed


class MismatchError(CheckpointError, ValueError):
    """The tensors asked for are not the tensors saved; the message lists every difference, or every kind of them."""


def refuse(what: str, problems: list[str]) -> None:
    """MismatchError with every problem, or every kind of them where they are many, if there is one."""
    if problems:
        raise MismatchError(listed(f"{what}: {len(problems):,} differences", problems))
