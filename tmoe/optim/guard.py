"""Guards a run against NaN and infinity: checks tensors, and counts steps that were not finite."""

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
    """Raises ValueError that names every tensor of which this rank's part contains NaN or infinity."""
    pieces = [  # aminmax makes no copy and returns NaN twice if there is a NaN; the host waits once for all
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


StepNumbers = tuple[Tensor, Tensor, Tensor, Tensor | None]  # loss, norm, whether both are finite, loss scale


def of_first_skipped(before: StepNumbers | None, now: StepNumbers) -> StepNumbers:
    """The numbers of a step of several updates: those of its first skipped update, or else of its last.

    before: of the step's updates up to now; None before the first. All are 0-dim on the device.
    """
    if before is None:
        return now
    fine = before[2] > 0
    loss, norm, finite = (torch.where(fine, new, old) for old, new in zip(before[:3], now[:3], strict=True))
    scale = None if before[3] is None or now[3] is None else torch.where(fine, now[3], before[3])
    return loss, norm, finite, scale


class SkipGuard:
    """Counts steps skipped because loss or gradient norm was not finite, and detects spikes of the loss.

    A skipped step is not taken at all. Multiplying its update by 0 would not work, because 0 * NaN is NaN. A
    spike is a loss above SPIKE times the median of the last WINDOW finite losses; the first WARM losses are
    never spikes. A step with a spike is taken, because clipping bounds its update.
    """

    WINDOW = 64
    WARM = 8
    SPIKE = 2.0

    class TooMany(RuntimeError):
        """Raised on every rank in the same step, after max_skips steps in a row that were not finite."""

    def __init__(self, max_skips: int, spikes: bool = True):
        """max_skips: steps in a row. spikes: whether to detect spikes; False where losses are around 0."""
        self.max_skips = max_skips
        self.spikes = spikes
        self.in_a_row = 0
        self.total = 0
        self.losses: deque[float] = deque(maxlen=self.WINDOW)

    def strange(self, finite: bool, loss: float, excused: bool = False) -> bool:
        """Counts a step. Returns True if the step deserves attention: its loss is a spike, or it was skipped.

        excused: a skipped step is none of `max_skips`, because the loss scale may become smaller.
        Every rank must call it with the same values.
        """
        known = self.spikes and len(self.losses) >= self.WARM
        spike = known and loss > self.SPIKE * statistics.median(self.losses)
        if math.isfinite(loss):  # a NaN does not enter the window
            self.losses.append(loss)
        self.in_a_row = 0 if finite or excused else self.in_a_row + 1
        self.total += not finite
        return spike or not (finite or excused)

    def give_up(self, step: int) -> None:
        """Raises TooMany if max_skips steps in a row, the last of them `step`, were not finite."""
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
