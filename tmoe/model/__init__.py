"""The Transformer, its loss, and the code that lays it out over a mesh."""

from typing import TYPE_CHECKING

from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe.model.transformer import Transformer

__all__ = [
    "Transformer",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Transformer": "tmoe.model.transformer",
    },
)
