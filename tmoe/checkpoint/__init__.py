"""Step folders: saving and loading them, what is in them, and the offline tools."""

from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.checkpoint.errors import MismatchError
from tmoe.checkpoint.manifest import CheckpointError, read_manifest, verify

__all__ = ["CheckpointError", "Checkpoints", "MismatchError", "read_manifest", "verify"]
