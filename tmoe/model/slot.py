"""The place of a quantised weight in a model, which is filled with one weight at a time.

next: model/quantised.py, model/nf4.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.base.quantised import quantise, stored


class Slot(NamedTuple):
    """The buffers of a quantised weight."""

    name: str
    """the weight's, in a model that is not quantised"""
    module: Any
    """holds the buffers; `kind` is its kind, `dtype` the type of the weight that they replace"""
    buffers: str
    """the first part of the buffers' names"""

    @torch.no_grad()
    def put(self, weight: Tensor) -> None:
        """Quantises a weight into the buffers. ValueError for inf and NaN."""
        parts = quantise(weight, self.module.kind, self.name)
        for (part, _, _), values in zip(stored(self.module.kind, tuple(weight.shape)), parts, strict=True):
            getattr(self.module, f"{self.buffers}_{part}").copy_(values)
