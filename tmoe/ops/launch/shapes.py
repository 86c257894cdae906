"""Describes the work of a rank by shapes, from which each op makes traces of its kernels.

`collect` of ops/register.py keeps, for each op, a function from such shapes to traces.

Shapes contain sizes, types and choices, but no settings, because ops do not depend on a configuration.
commands/warmup.py makes shapes from a configuration.

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
    by_log_probs: bool  # whether the loss is computed from log-probs
    states: torch.dtype = torch.float32  # of AdamW's moments; uint8: in blocks of 8 bits
    masters: torch.dtype = torch.float32  # of the weights that AdamW writes
    muon: bool = False  # whether Muon trains some of them


class PassShapes(NamedTuple):
    """Rows that a rank's experts compute in one call of moe_mlp."""

    rows: int
    slots: int  # slots of a row
    pairs: int | None  # most (row, expert) pairs for which memory is allocated; None: rows * slots


class LinearShapes(NamedTuple):
    """The rule and the convolution of a linear layer, for any number of tokens."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int  # tokens of the convolution
    dtype: torch.dtype
    trained: bool  # False: a forward without gradients
    correct: bool = True  # see delta_rule
    conv_bias: bool = False


class RouterShapes(NamedTuple):
    """A router's choice."""

    outputs: int
    chosen: int  # number of outputs chosen for a token
    renormalize: bool
    sinkhorn: bool


class ExchangeShapes(NamedTuple):
    """The exchange of rows between the ranks of an expert group."""

    ranks: int
    slots: int
    fp8: bool
    alone: bool  # kernels exchange the rows; False: they do so only together with shared experts
    shared_dim: int  # width of shared experts that run at the same time; 0: none
    shared_halves: int = 2  # 1: their activation has no gate


class LayerShapes(NamedTuple):
    """An MoE layer of one rank, for a number of its tokens."""

    tokens: int
    dim: int
    dtype: torch.dtype
    trained: bool  # False: a forward without gradients
    summed: bool  # weight gradients may be added to fp32 sums: a step has several micro-batches
    width: int  # width of the experts' input rows
    ffn_dim: int  # width of this rank's part of an expert
    experts: int  # number of this rank's experts
    activation: str
    biased: bool
    passes: tuple[PassShapes, ...]
    moved: tuple[int, int] | None  # (rows, slots of a row) that are sorted by expert before the experts
    router: RouterShapes
    exchange: ExchangeShapes | None
    adapters: tuple[tuple[int, int], ...] = ()  # ranks of gate_up's and down's adapters that some layer has
    fp8: bool = False  # products of experts are in fp8


class AttentionShapes(NamedTuple):
    """Attention of one layer over the cache, for one token."""

    queries: int  # number of query heads
    keys: int  # number of key heads
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
    ffn_dims: tuple[int, ...]  # widths of shared experts and dense blocks
    fused: bool  # one kernel for several modules, as in model/rounding.py
    in_blocks: bool  # attention in flex attention's order
    filters: Any  # of the draw: `Filters` of ops/decode/sample.py
    adapted: tuple[tuple[int, int, int], ...] = ()  # columns, rows and rank of dense layers with adapters
    norm_offset: bool = False  # norms multiply by 1 + weight
    ffn_halves: int = 2  # 1: the activation of shared experts and dense blocks has no gate
