"""The loss scale of fp16: brings small gradients into fp16's range during the backward.

next: optim/guard.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tmoe.config.run import LARGEST_SCALE, TrainConfig


class LossScale:
    """The factor of the loss in the backward, and the rule by which it changes (Micikevicius et al. 2018).

    A step whose gradients overflow is skipped. If it is at least the `loss_scale_hysteresis`-th since the
    factor last doubled, the factor is halved. The factor doubles after `loss_scale_window` steps in a row
    without an overflow. This is Megatron's DynamicGradScaler with a growth of 2 and a backoff of 0.5. The
    rule is computed on the device, so that the host does not wait.

    factor: 0-dim fp32 on the device. If it is a power of two, then scaling changes only exponents, so results
        differ from those without a scale only where fp16 would underflow.
    """

    def __init__(self, cfg: TrainConfig, device: torch.device):
        self.cfg = cfg
        self.dynamic = cfg.loss_scale == 0
        self.least = cfg.min_loss_scale if self.dynamic else cfg.loss_scale
        first = cfg.initial_loss_scale if self.dynamic else cfg.loss_scale
        self.factor = torch.tensor(first, device=device)
        self.good = torch.zeros((), device=device)  # steps in a row without an overflow
        self.left = torch.tensor(float(cfg.loss_scale_hysteresis), device=device)

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Changes the factor after a step. finite: 1, or 0 if the step overflowed; equal on all ranks."""
        if not self.dynamic:
            return
        good = finite > 0
        self.good = (self.good + 1) * finite
        self.left = self.left - (1 - finite)
        grown = good & (self.good >= self.cfg.loss_scale_window)
        halved = ~good & (self.left <= 0)
        factor = self.factor.where(~grown, (2 * self.factor).clamp(max=LARGEST_SCALE))
        self.factor = factor.where(~halved, (factor / 2).clamp(min=self.least))
        self.good = self.good.where(~grown, 0.0)
        self.left = self.left.where(~grown, float(self.cfg.loss_scale_hysteresis))

    def state_dict(self) -> dict[str, Any]:
        """Three numbers; {} for a constant factor. The host waits for the device."""
        values = torch.stack([self.factor, self.good, self.left]).tolist() if self.dynamic else []
        return dict(zip(("factor", "good", "left"), values, strict=False))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a saved factor, within the present bounds.

        state: {} of a run that had no dynamic factor: the present factor stays.
        """
        if self.dynamic and state:
            self.factor.fill_(state["factor"]).clamp_(self.least, LARGEST_SCALE)
            self.good.fill_(state["good"])
            self.left.fill_(min(state["left"], self.cfg.loss_scale_hysteresis))
