"""What a run does about steps that are not finite."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tmoe.optim.adamw import _locals


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """ValueError naming every tensor of which this rank's part holds a NaN or an infinity."""
    pieces = [  # aminmax makes no copy, and NaN is both ends; one wait for all of them
        (name, torch.stack(torch.aminmax(piece)).isfinite().all())
        for name, part in zip(tensors, _locals(tensors), strict=True)
        for piece in part.detach().flatten().split(2**28)
        if piece.numel()
    ]
    finite = torch.stack([ok for _, ok in pieces]).tolist() if pieces else []
    if bad := dict.fromkeys(name for (name, _), ok in zip(pieces, finite, strict=True) if not ok):
        raise ValueError(
            f"NaN or infinity in {', '.join(bad)}: start from another checkpoint (--resume, --init)"
        )


class SkipGuard:
    """Counts steps skipped because loss or gradient norm was not finite, and says which losses are spikes.

    A step is skipped by not taking it. Multiplying its update by 0 would not do: 0 * NaN is NaN. A spike is a
    loss above SPIKE times the median of the last WINDOW finite ones, once there are WARM of them. It is
    taken, as clipping bounds it.
    """

    WINDOW = 64
    WARM = 8
    SPIKE = 2.0

    class TooMany(RuntimeError):
        """max_skips steps in a row were not finite; raised on every rank in the same step."""

    def __init__(self, max_skips: int, spikes: bool = True):
        """spikes: whether to look for them: not where losses lie around 0."""
        self.max_skips = max_skips
        self.spikes = spikes
        self.in_a_row = 0
        self.total = 0
        self.losses: deque[float] = deque(maxlen=self.WINDOW)

    def strange(self, finite: bool, loss: float) -> bool:
        """Counts a step; True if it should be looked at: its loss is a spike, or it was skipped.

        Every rank passes the same values.
        """
        known = self.spikes and len(self.losses) >= self.WARM
        spike = known and loss > self.SPIKE * statistics.median(self.losses)
        if math.isfinite(loss):  # the window outlives a NaN
            self.losses.append(loss)
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.total += not finite
        return spike or not finite

    def give_up(self, step: int) -> None:
        """Raises TooMany once max_skips steps in a row, of which `step` is the last, were not finite."""
        if self.in_a_row >= self.max_skips:
            raise self.TooMany(
                f"step {step}: loss or gradient norm was not finite {self.in_a_row} times in a row "
                f"(--optim.max-skips={self.max_skips}); resume from a checkpoint with a lower --optim.lr or "
                "other data"
            )

    def state_dict(self) -> dict[str, Any]:
        return dict(in_a_row=self.in_a_row, total=self.total, losses=list(self.losses))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row = state["in_a_row"]
        self.total = state["total"]
        self.losses.extend(state["losses"])
