"""The learning rate over a run."""

from __future__ import annotations

import math

import torch

from tmoe.config.run import OptimConfig

MOST_WARMUP = 100  # most steps of a warm-up, if no setting gives its length


def warmup_of(steps: int, cfg: OptimConfig) -> int:
    """Steps of warm-up in a run of `steps`.

    The number is `warmup`, or the share `warmup_fraction` of the steps up to the decay's end. If `warmup` is
    None and no share is set, it is a tenth of these steps, and at most MOST_WARMUP.
    """
    end = cfg.decay_steps or steps
    if cfg.warmup is None and not cfg.warmup_fraction:
        return min(MOST_WARMUP, min(steps, end) // 10)
    return cfg.warmup or round(cfg.warmup_fraction * end)


def lr_factor(step: int, steps: int, cfg: OptimConfig) -> float:
    """Share of the peak learning rate in step 0 ... steps-1 of a run.

    During warm-up the factor is (step + 1) / warmup, so no step is wasted on 0 and the last warm-up step has
    factor 1. Then it decays to m = min_lr. x grows from 0 at the start of the decay to 1 at `steps`, or at
    `decay_steps` if that is set. (No step before that end reaches x = 1, so no step is wasted if m is 0.)
    After the end the factor is m.

        cosine         m + (1 - m)(1 + cos(pi x))/2
        linear, wsd    1 - (1 - m) x; wsd from step (1 - decay_fraction) end on
    """
    end = cfg.decay_steps or steps
    warmup = warmup_of(steps, cfg)
    if step < warmup:
        return (step + 1) / warmup
    if cfg.schedule == "constant":
        return 1.0
    start = max(warmup, (1 - cfg.decay_fraction) * end) if cfg.schedule == "wsd" else warmup
    x = min(max((step - start) / max(end - start, 1), 0.0), 1.0)
    left = (1 + math.cos(math.pi * x)) / 2 if cfg.schedule == "cosine" else 1 - x
    return cfg.min_lr + (1 - cfg.min_lr) * left


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups to `lr`, times the group's `lr_factor` if it has this key."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
