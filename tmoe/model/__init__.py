"""The Transformer, its loss, and the plan that lays it out over a mesh."""

from tmoe.model.transformer import Transformer

__all__ = ["Transformer"]
