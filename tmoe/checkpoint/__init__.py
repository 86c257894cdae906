"""Step folders: saving and loading them, showing what they hold, and the offline tools."""

from typing import TYPE_CHECKING

from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe.checkpoint.checkpoints import Checkpoints
    from tmoe.checkpoint.errors import MismatchError
    from tmoe.checkpoint.manifest import CheckpointError, read_manifest, verify

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "MismatchError",
    "read_manifest",
    "verify",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "CheckpointError": "tmoe.checkpoint.manifest",
        "Checkpoints": "tmoe.checkpoint.checkpoints",
        "MismatchError": "tmoe.checkpoint.errors",
        "read_manifest": "tmoe.checkpoint.manifest",
        "verify": "tmoe.checkpoint.manifest",
    },
)
