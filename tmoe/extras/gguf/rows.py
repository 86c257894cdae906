"""The order of rotated rows: neighbours (2i, 2i + 1) or halves (i, i + half).

next: extras/gguf/names.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Heads(NamedTuple):
    """Rows of heads one after another; in each head some rows are still, some rotate, the rest are still."""

    number: int
    before: int
    rotated: int
    after: int
    pairs: bool
    """the order they get: neighbours; else halves"""

    def back(self) -> Heads:
        return self._replace(pairs=not self.pairs)


def turned(rows: Tensor, heads: Heads) -> Tensor:
    """The same rows [number (before + rotated + after), ...] with the rotated ones in the other order."""
    width = heads.before + heads.rotated + heads.after
    each = rows.reshape(heads.number, width, *rows.shape[1:])
    before, inside, after = each.split([heads.before, heads.rotated, heads.after], 1)
    half = heads.rotated // 2
    parts = (2, half) if heads.pairs else (half, 2)
    inside = inside.unflatten(1, parts).transpose(1, 2).flatten(1, 2)
    return torch.cat([before, inside, after], 1).reshape(rows.shape)
