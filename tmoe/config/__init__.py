"""Every setting of a run, the checks that need no process group, and the presets."""

from typing import TYPE_CHECKING

from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe.config.check import ConfigError
    from tmoe.config.linear_settings import LinearConfig
    from tmoe.config.model import MLAConfig, ModelConfig, MoEConfig, MTPConfig, RopeConfig
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
    "LinearConfig",
    "LogConfig",
    "MLAConfig",
    "MTPConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RopeConfig",
    "TrainConfig",
]
_OF_MODEL = ("MLAConfig", "MTPConfig", "MoEConfig", "ModelConfig", "RopeConfig")

__getattr__, __dir__ = lazy(
    __name__,
    dict.fromkeys(__all__, "tmoe.config.run")
    | dict.fromkeys(_OF_MODEL, "tmoe.config.model")
    | {"ConfigError": "tmoe.config.check", "LinearConfig": "tmoe.config.linear_settings"},
)
