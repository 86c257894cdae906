"""Generates text with any model: the engine, its sampling, and `python -m tmoe.generate`."""

from typing import TYPE_CHECKING

from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe.generate.engine import Engine, Piece, Sample, Samples
    from tmoe.generate.live import Live, LivePiece, State, Ticket
    from tmoe.generate.requests import Details, Tops
    from tmoe.generate.sampler import Sampling

__all__ = [
    "Details",
    "Engine",
    "Live",
    "LivePiece",
    "Piece",
    "Sample",
    "Samples",
    "Sampling",
    "State",
    "Ticket",
    "Tops",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Details": "tmoe.generate.requests",
        "Engine": "tmoe.generate.engine",
        "Live": "tmoe.generate.live",
        "LivePiece": "tmoe.generate.live",
        "Piece": "tmoe.generate.engine",
        "Sample": "tmoe.generate.engine",
        "Samples": "tmoe.generate.engine",
        "Sampling": "tmoe.generate.sampler",
        "State": "tmoe.generate.live",
        "Ticket": "tmoe.generate.live",
        "Tops": "tmoe.generate.requests",
    },
)
