"""The optimizer, its schedule, averages of weights, and the guard against bad steps."""

from tmoe.optim.adamw import build_optimizer
from tmoe.optim.ema import Ema
from tmoe.optim.learning_rate import lr_factor

__all__ = ["Ema", "build_optimizer", "lr_factor"]
