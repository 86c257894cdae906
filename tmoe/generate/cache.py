"""Keys and values of the tokens that slots have passed, for every kind of attention.

next: generate/forward.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.config.model import ModelConfig


class Layer(NamedTuple):
    """One block's part. Positions above a slot's last token hold anything finite: no query sees them."""

    k_BTGC: Tensor
    v_BTGC: Tensor  # latent attention: a view of k, without the channels that turn


class Cache:
    """Room for `capacity` tokens of each of `slots` sequences, in every block.

    Grouped attention caches its keys, normed and rotated, and its values. Latent attention caches the latent
    beside the rotated key that all heads share: one head of kv_rank + rope_dim channels.
    """

    def __init__(self, cfg: ModelConfig, slots: int, capacity: int, device: torch.device, dtype: torch.dtype):
        self.slots = slots
        self.capacity = capacity
        heads, width, values = layer_widths(cfg)
        self.layers: list[Layer] = []
        for _ in range(cfg.layers):
            k = torch.zeros(slots, capacity, heads, width, device=device, dtype=dtype)
            shared = cfg.attention == "mla"
            v = k[..., :values] if shared else torch.zeros_like(k)
            self.layers.append(Layer(k, v))

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Gives slot `target` the first tokens of slot `source`."""
        for k, v in self.layers:
            k[target, :tokens] = k[source, :tokens]
            if v.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
                v[target, :tokens] = v[source, :tokens]


def layer_widths(cfg: ModelConfig) -> tuple[int, int, int]:
    """Heads that a block caches, channels of a key, channels of a value."""
    if cfg.attention == "mla":
        return 1, cfg.mla.kv_rank + cfg.mla.rope_dim, cfg.mla.kv_rank
    return cfg.kv_heads, cfg.head_dim, cfg.head_dim


def bytes_a_token(cfg: ModelConfig, dtype: torch.dtype) -> int:
    """What all blocks together cache of one token."""
    heads, width, values = layer_widths(cfg)
    held = width if cfg.attention == "mla" else width + values
    return cfg.layers * heads * held * dtype.itemsize
