"""What a rank launches, as values from which each op makes traces of its kernels.

`collect` of ops/register.py keeps a function of such a value for each op.

A value has sizes, types and choices, and no setting: an op knows nothing of a configuration. Values are made
from a configuration by commands/warmup.py.

next: ops/register.py
"""

from typing import Any, NamedTuple

import torch


class StepShapes(NamedTuple):
    """A training step without its layers: loss, sums of gradients, optimizer."""

    vocab: int
    dim: int
    ignore: int  # the target that does not count
    dtype: torch.dtype
    by_log_probs: bool  # whether the loss is made of log-probs


class PassShapes(NamedTuple):
    """Rows that go through a rank's experts in one call of moe_mlp."""

    rows: int
    slots: int  # of a row
    pairs: int | None  # of rows and experts, for which there is memory; None: rows * slots


class RouterShapes(NamedTuple):
    """A router's choice."""

    outputs: int
    chosen: int  # of the outputs, for a token
    renormalize: bool
    sinkhorn: bool


class ExchangeShapes(NamedTuple):
    """Rows between the ranks of an expert group."""

    ranks: int
    slots: int
    fp8: bool
    alone: bool  # rows are exchanged by kernels; else only beside shared experts, if there are some
    shared_dim: int  # width of shared experts that run beside it; 0: none


class LayerShapes(NamedTuple):
    """An MoE layer of one rank, for a number of its tokens."""

    tokens: int
    dim: int
    dtype: torch.dtype
    trained: bool  # False: a forward without gradients
    width: int  # of the rows that experts take
    ffn_dim: int  # of this rank's part of an expert
    experts: int  # of this rank
    activation: str
    biased: bool
    passes: tuple[PassShapes, ...]
    moved: tuple[int, int] | None  # rows, slots of a row, that are sorted by expert first
    router: RouterShapes
    exchange: ExchangeShapes | None


class AttentionShapes(NamedTuple):
    """Attention of one layer to the cache, for one token."""

    queries: int  # heads
    keys: int  # heads
    key_dim: int
    value_dim: int
    window: int | None
    sinks: bool
    latent: bool  # a value is a view of its key
    scale: float
    norm: str  # of queries and keys, as in ops/decode/heads.py
    norm_eps: float
    rotary_dim: int  # 0: no rotation
    interleave: bool
    value_multiplier: float


class DecodeShapes(NamedTuple):
    """A step of a rollout for one token of each slot, without its experts."""

    vocab: int
    dim: int
    dtype: torch.dtype
    layers: tuple[AttentionShapes, ...]
    ffn_dims: tuple[int, ...]  # of shared experts and dense blocks
    fused: bool  # one kernel for several modules, as in model/rounding.py
    in_blocks: bool  # attention in flex attention's order
    filters: Any  # of the draw: `Filters` of ops/decode/sample.py
