"""Every setting of a run, the checks that need no process group, and the presets."""

from tmoe.config.check import ConfigError
from tmoe.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from tmoe.config.run import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "LogConfig",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RopeConfig",
    "TrainConfig",
]
