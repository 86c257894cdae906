"""tmoe: Mixture-of-Experts language models in plain PyTorch.

next: train.py, then config/run.py
"""

import importlib
from types import ModuleType

from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.config.presets import presets
from tmoe.config.run import Config
from tmoe.generate.engine import Engine, Samples
from tmoe.generate.sampler import Sampling
from tmoe.model.transformer import Transformer
from tmoe.moe.layer import MoE, balancing_loss

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Engine",
    "MoE",
    "MoEConfig",
    "ModelConfig",
    "Samples",
    "Sampling",
    "Transformer",
    "balancing_loss",
    "hf",
    "ops",
    "parallel",
    "presets",
]


def __getattr__(name: str) -> ModuleType:
    if name == "hf":  # at first use: training needs none of it, and it takes most of a second
        return importlib.import_module("tmoe.hf")
    raise AttributeError(f"module 'tmoe' has no attribute {name!r}")
