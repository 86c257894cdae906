"""The cache of keys and values, in pages of 128 tokens, for every kind of attention.

A sequence has a table of pages: its token t is in page table[t // 128]. Answers to one prompt share the pages
that the prompt fills.

next: generate/pages.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.config.model import ModelConfig
from tmoe.generate.upload import upload
from tmoe.model.linear import State

PAGE = 128  # tokens; flex attention's block


class LayerCache(NamedTuple):
    """One block's part of the cache. Unwritten places hold any finite values: no query attends to them."""

    k_PTGC: Tensor
    v_PTGC: Tensor  # latent attention: a view of k, without the rotated channels

    def put(self, places_N: Tensor, k_NGC: Tensor, v_NGC: Tensor | None) -> None:
        """Writes tokens to their places, page * PAGE + place in the page; v: None where it is a view of k."""
        self.k_PTGC.flatten(0, 1).index_copy_(0, places_N, k_NGC)
        if v_NGC is not None:
            self.v_PTGC.flatten(0, 1).index_copy_(0, places_N, v_NGC)

    def get(self, places_N: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, G, C] at these places."""
        return self.k_PTGC.flatten(0, 1)[places_N], self.v_PTGC.flatten(0, 1)[places_N]


class Cache:
    """A cache of `pages` pages in every block.

    Grouped attention caches its keys, normed and rotated, and its values. Latent attention caches the latent
    and the rotated key that all heads share, as one head of kv_rank + rope_dim channels.
    """

    def __init__(self, cfg: ModelConfig, pages: int, device: torch.device, dtype: torch.dtype):
        self.pages = pages
        self.shared = cfg.attention == "mla"
        self.layers: list[LayerCache | None] = []  # None: a block without attention, which keeps no keys
        self.device = device
        self.states: list[State] = []  # of linear blocks, for each slot; see generate/states.py
        for layer in range(cfg.layers):
            if not cfg.attends(layer):
                self.layers.append(None)
                continue
            heads, width, values = layer_widths(cfg, layer)
            k = torch.zeros(pages, PAGE, heads, width, device=device, dtype=dtype)
            v = k[..., :values] if self.shared else k.new_zeros(pages, PAGE, heads, values)
            self.layers.append(LayerCache(k, v))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies the first page of each pair into the second."""
        if not pairs:
            return
        source, target = upload(pairs, self.device).T
        for k, v in (layer for layer in self.layers if layer is not None):
            k[target] = k[source]
            if not self.shared:
                v[target] = v[source]


def layer_widths(cfg: ModelConfig, layer: int) -> tuple[int, int, int]:
    """Numbers of heads that a block caches, of channels of a key, and of channels of a value."""
    if cfg.attention == "mla":
        return 1, cfg.mla.kv_rank + cfg.mla.rope_dim, cfg.mla.kv_rank
    return cfg.kv_heads_in(cfg.window_of(layer)), cfg.head_dim, cfg.value_dim


def bytes_a_token(cfg: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that all blocks together cache for one token; linear blocks have states (generate/states.py)."""
    shared = cfg.attention == "mla"
    full = (layer for layer in range(cfg.layers) if cfg.attends(layer))
    widths = (layer_widths(cfg, layer) for layer in full)
    held = sum(heads * (width if shared else width + values) for heads, width, values in widths)
    return held * dtype.itemsize


def bytes_a_sequence(cfg: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one sequence's states in all linear blocks: the rule's in fp32, inputs of the convolution."""
    n = cfg.linear
    wide = torch.promote_types(dtype, torch.float32).itemsize
    state = n.value_heads * n.key_dim * n.value_dim * wide
    return cfg.linear_layers * (state + (n.conv - 1) * n.mixed * dtype.itemsize)


def bytes_of_states(cfg: ModelConfig, slots: int, dtype: torch.dtype) -> int:
    """Most bytes of the states of a call: of its slots, and of as many prompts."""
    return 2 * slots * bytes_a_sequence(cfg, dtype)
