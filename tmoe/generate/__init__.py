"""Text out of every model: the engine, how it samples, and `python -m tmoe.generate`."""

from tmoe.generate.engine import Engine, Piece, Sample, Samples
from tmoe.generate.sampler import Sampling

__all__ = ["Engine", "Piece", "Sample", "Samples", "Sampling"]
