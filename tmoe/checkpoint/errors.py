"""Errors of checkpoints that do not fit, in few lines."""

from __future__ import annotations

from tmoe.checkpoint.manifest import CheckpointError


class MismatchError(CheckpointError, ValueError):
    """The tensors asked for are not the tensors saved; the message lists every difference, or every kind of them."""
