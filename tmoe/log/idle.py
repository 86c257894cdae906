"""Names the experts that have had no token for IDLE steps, each expert once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

IDLE = 50  # steps without a token after which an expert is named
SHOWN = 8  # number of experts of a block, and of blocks, that a note names


class IdleExperts:
    """Counts for each expert the steps without a token, from the lines of the log.

    blocks: block number of each MoE layer.
    experts: number of columns of a layer that are experts with weights.
    """

    def __init__(self, blocks: Sequence[int], experts: int) -> None:
        self.blocks = blocks
        self.step = 0  # step of the last line
        self.steps_LE = np.zeros((len(blocks), experts), np.int64)
        self.named_LE = np.zeros((len(blocks), experts), bool)

    def begin(self, step: int) -> None:
        """Skips the steps up to `step`, which are done; a skipped step without a line is not counted."""
        self.step = max(self.step, step)

    def see(self, step: int, counts_LE: Sequence[Sequence[int]]) -> str | None:
        """Reads a line: routed pairs of all ranks since the previous line, by layer and expert.

        Returns a note that names the experts that have now had no token for IDLE steps, or None if there are
        none. A layer without any routed pair is not counted.
        """
        counts = np.asarray(counts_LE)[:, : self.steps_LE.shape[1]]
        passed, self.step = step - self.step, step
        if counts.shape != self.steps_LE.shape or passed <= 0:
            return None
        routed = counts.sum(1, keepdims=True) > 0
        self.steps_LE += passed * routed
        self.steps_LE[counts > 0] = 0
        new_LE = (self.steps_LE >= IDLE) & ~self.named_LE
        self.named_LE |= new_LE
        return self._note(new_LE) if new_LE.any() else None

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
