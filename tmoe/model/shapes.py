"""Names and shapes of a model's tensors, without building it on a device."""

from __future__ import annotations

import torch

from tmoe.config.model import ModelConfig


def model_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every parameter and buffer of the Transformer."""
    from tmoe.model.transformer import Transformer  # late: a table of names needs no compiler

    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in Transformer(cfg).state_dict().items()}
