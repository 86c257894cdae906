"""RMSNorm of the residual stream and of heads, with a factor of w, or of 1 + w.

next: model/transformer.py
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tmoe.config.model import ModelConfig


class OffsetNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * (1 + weight), in fp32, rounded once (Qwen3-Next, Gemma)."""

    start_at_zero = ("weight",)  # parallel/init_weights.py

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = F.rms_norm(wide, self.normalized_shape, None, self.eps)
        return (y * (1 + self.weight.to(wide.dtype))).to(x.dtype)


def norm_of(cfg: ModelConfig, width: int) -> nn.RMSNorm:
    """A norm over `width` channels, by `norm_eps` and `norm_offset`."""
    return (OffsetNorm if cfg.norm_offset else nn.RMSNorm)(width, cfg.norm_eps)


def factor_of(norm: nn.RMSNorm) -> Tensor:
    """The factor of a norm: its weight, or 1 + weight in fp32 or wider."""
    weight = cast(Tensor, norm.weight)
    if not isinstance(norm, OffsetNorm):
        return weight
    return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))
