"""Sizes that follow from the settings: bytes of a number, tokens of a rank; for the estimates of memory.

next: tmoe/moe/moe_bytes.py
"""

from __future__ import annotations

from tmoe.config.axes import Axes
from tmoe.config.run import Config

FP32 = 4  # bytes: master parameters, gradients after reduction, both moments, the moving average
INT32 = 4


def compute_bytes(cfg: Config) -> int:
    return {"bf16": 2, "fp32": 4}[cfg.train.dtype]


def local_tokens(cfg: Config, axes: Axes) -> int:
    """Number of tokens T of a rank in a micro-batch."""
    return cfg.train.batch * cfg.train.seq // axes.parts
