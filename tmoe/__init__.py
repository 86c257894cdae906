"""tmoe: Mixture-of-Experts language models in plain PyTorch.

next: train.py, then config/run.py
"""

from typing import TYPE_CHECKING

from tmoe.base import moved
from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe import hf, ops, parallel
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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Config": "tmoe.config.run",
        "Engine": "tmoe.generate.engine",
        "MoE": "tmoe.moe.layer",
        "MoEConfig": "tmoe.config.model",
        "ModelConfig": "tmoe.config.model",
        "Samples": "tmoe.generate.engine",
        "Sampling": "tmoe.generate.sampler",
        "Transformer": "tmoe.model.transformer",
        "balancing_loss": "tmoe.moe.layer",
        "presets": "tmoe.config.presets",
    },
)

moved.install()
