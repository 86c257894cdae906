"""tmoe: Mixture-of-Experts language models in plain PyTorch.

next: train.py, then config.py
"""

from tmoe import ops, parallel
from tmoe.config import Config, ModelConfig, MoEConfig
from tmoe.model import Transformer
from tmoe.moe import MoE
from tmoe.zoo import presets

__version__ = "0.1.0"
__all__ = ["Config", "MoE", "MoEConfig", "ModelConfig", "Transformer", "ops", "parallel", "presets"]
