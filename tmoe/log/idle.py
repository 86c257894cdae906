"""Names the experts that get no token for IDLE steps, once each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

IDLE = 50  # steps without a token, after which an expert is named
SHOWN = 8  # experts of a block, and blocks, that a note names


class IdleExperts:
    """For how many steps each expert has had no token, read from the lines of the log.

    blocks: the block of each MoE layer. experts: how many of a layer's columns are experts with weights.
    """

    def __init__(self, blocks: Sequence[int], experts: int) -> None:
        self.blocks = blocks
        self.step = 0  # of the last line
        self.steps_LE = np.zeros((len(blocks), experts), np.int64)
        self.named_LE = np.zeros((len(blocks), experts), bool)

    def begin(self, step: int) -> None:
        """Steps up to this one are done; those without a line count for nothing."""
        self.step = max(self.step, step)

    def see(self, step: int, counts_LE: Sequence[Sequence[int]]) -> str | None:
        """Takes a line: routed pairs of all ranks since the line before, by layer and expert.

        Returns a note on the experts that now have been without a token for IDLE steps, None without any. A
        layer without a single pair counts for nothing.
        """
        counts = np.asarray(counts_LE)[:, : self.steps_LE.shape[1]]
        passed, self.step = step - self.step, step
        if counts.shape != self.steps_LE.shape or passed <= 0:
            return None
        routed = counts.sum(1, keepdims=True) > 0
        self.steps_LE += passed * routed
        self.steps_LE[counts > 0] = 0
        found = (self.steps_LE >= IDLE) & ~self.named_LE
        self.named_LE |= found
        return self._note(found) if found.any() else None

    def _note(self, found_LE: np.ndarray) -> str:
        layers = np.flatnonzero(found_LE.any(1)).tolist()
        parts = [f"block {self.blocks[i]}: {_some(np.flatnonzero(found_LE[i]).tolist())}" for i in layers]
        more = f"; and {len(parts) - SHOWN} more blocks" if len(parts) > SHOWN else ""
        count = int(found_LE.sum())
        what = "1 expert has" if count == 1 else f"{count} experts have"
        return f"{what} had no token for {IDLE} steps: {'; '.join(parts[:SHOWN])}{more} (docs/balance.md)"


def _some(numbers: list[int]) -> str:
    """`expert 3`, `experts 0, 2`, `experts 0, 1, 2, ... and 9 more`."""
    listed = ", ".join(map(str, numbers[:SHOWN]))
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return f"expert{'s' * (len(numbers) > 1)} {listed}{more}"
