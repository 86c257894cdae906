"""Generates text with any model: the engine, its sampling, and `python -m tmoe.generate`."""

from typing import TYPE_CHECKING

from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe.generate.engine import Engine, Piece, Sample, Samples
    from tmoe.generate.sampler import Sampling

__all__ = [
    "Engine",
    "Piece",
    "Sample",
    "Samples",
    "Sampling",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Engine": "tmoe.generate.engine",
        "Piece": "tmoe.generate.engine",
        "Sample": "tmoe.generate.engine",
        "Samples": "tmoe.generate.engine",
        "Sampling": "tmoe.generate.sampler",
    },
)
