"""Sizes that follow from the settings: bytes of a number, tokens of a rank; for the estimates of memory.

next: tmoe/moe/moe_bytes.py
"""

from __future__ import annotations

from tmoe.config.axes import Axes
from tmoe.config.run import Config

FP32 = 4  # bytes: the moving average; by default also master parameters, reduced gradients and moments
INT32 = 4


def compute_bytes(cfg: Config) -> int:
    return 4 if cfg.train.dtype == "fp32" else 2


def master_bytes(cfg: Config) -> int:
    """Bytes of a trained weight, and of its gradient after the reduction over ranks."""
    return {"bf16": 2, "fp32": 4}[cfg.optim.masters]


def sum_bytes(cfg: Config) -> int:
    """Bytes of an element in a sum of gradients over micro-batches."""
    return {"bf16": 2, "fp32": 4}[cfg.optim.sums]


def moment_bytes(cfg: Config, elements: int) -> int:
    """Bytes of AdamW's two moments of these elements. Moments in 8 bits have an fp32 scale for each 256."""
    in_8_bits = 2 * elements + elements // 32
    return {"fp32": 8 * elements, "bf16": 4 * elements, "int8": in_8_bits}[cfg.optim.states]


def local_tokens(cfg: Config, axes: Axes) -> int:
    """Number of tokens T of a rank in a micro-batch."""
    return cfg.train.batch * cfg.train.seq // axes.parts
