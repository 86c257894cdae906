"""Parameters and FLOPs of a model in closed form, from its settings.

next: plan/memory.py
"""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

from tmoe.config.linear_settings import CHUNK
from tmoe.config.model import ModelConfig

Shape = tuple[int, ...]


class ParameterCounts(NamedTuple):
    """Numbers of parameters: all, those that one token uses, and those of them that multiply."""

    total: int
    active: int
    """with K experts of a layer instead of E; all other parameters, embedding and head included"""
    active_flops: int
    """active without the input embedding (a look-up), but with the output head (tied or not), once more for
    each depth of --model.mtp"""


def attention_shapes(model: ModelConfig, layer: int) -> list[Shape]:
    """Shapes of one block's attention parameters; none in a block without attention."""
    if not model.mixes(layer):
        return []
    if model.is_linear(layer):
        return linear_shapes(model)
    window = model.window_of(layer)
    D, H, G, C, V = model.dim, model.heads, model.kv_heads_in(window), model.head_dim, model.value_dim
    if model.attention == "mla":
        mla = model.mla
        queries = H * qk_width(model)
        shapes: list[Shape] = [
            (mla.kv_rank,),
            (H * (mla.nope_dim + mla.v_dim), mla.kv_rank),
            (D, H * mla.v_dim),
            ((mla.q_rank or queries) + mla.kv_rank + mla.rope_dim, D),
        ]
        return [*shapes, (mla.q_rank,), (queries, mla.q_rank)] if mla.q_rank else shapes
    norms = {"none": [], "full": [(H * C,), (G * C,)]}.get(model.qk_norm, [(C,), (C,)])
    rows = (H + G) * C + (G + H * model.attention_gate) * V
    biases = [(rows,)] * model.qkv_bias + [(D,)] * model.o_bias + [(H,)] * model.sinks_in(window)
    return [(rows, D), (D, H * V), *norms, *biases]


def linear_shapes(model: ModelConfig) -> list[Shape]:
    """Shapes of a linear layer's parameters."""
    n, D = model.linear, model.dim
    H, rows = n.value_heads, n.mixed + n.value_width
    shapes: list[Shape] = [(n.mixed, n.conv), (H,), (H,), (D, n.value_width)]
    if n.kind == "mamba2":
        return [*shapes, (rows + n.gate_rows, D), (H,), (n.value_width,), *[(n.mixed,)] * n.conv_bias]
    return [*shapes, (rows, D), (n.gate_rows, D), (n.value_dim,)]


def rule_flops(model: ModelConfig) -> float:
    """FLOPs of the rule for one token of a linear layer, in the forward, in chunks of C = 64 tokens.

    For each of H heads: 6 K V for the products with the state and its update; 2 C (3 K + 2 V) for k k^T,
    q k^T, T k, T v and the sum over the chunk's values; 2 C^2 / 3 for the triangular solve. Mamba-2's rule,
    without the correction: 4 K V, and 2 C (K + V) for q k^T and the sum over the chunk's values.
    """
    n, C = model.linear, CHUNK
    K, V = n.key_dim, n.value_dim
    if n.kind == "mamba2":
        return n.value_heads * (4.0 * K * V + 2 * C * (K + V))
    return n.value_heads * (6 * K * V + 2 * C * (3 * K + 2 * V) + 2 * C * C / 3)


def qk_width(model: ModelConfig) -> int:
    """Channels of a query and key head."""
    return model.mla.nope_dim + model.mla.rope_dim if model.attention == "mla" else model.head_dim


def v_width(model: ModelConfig) -> int:
    """Channels of a value head."""
    return model.mla.v_dim if model.attention == "mla" else model.value_dim


def block_shapes(model: ModelConfig, layer: int) -> tuple[list[Shape], list[Shape]]:
    """Shapes of one block's parameters: (dense, experts); only the experts are sharded over ep."""
    D = model.dim
    moe = model.moe
    dense = [(D,)] * sum(model.norms_of(layer)) + attention_shapes(model, layer)
    if layer >= model.layers:  # predicts a further token: three norms, and the projection of two inputs
        dense += [(D,), (D,), (D,), (D, 2 * D)]
    if not model.feeds(layer):
        return dense, []
    if not model.is_moe(layer):
        return [*dense, (moe.shared_halves * model.ffn_dim, D), (D, model.ffn_dim)], []
    width = moe.cosine_dim if moe.score == "cosine" else D
    dense.append((moe.outputs, width))
    if moe.score == "cosine":
        dense += [(width, D), (width,), (1,)]
    if moe.router_bias:
        dense.append((moe.outputs,))
    if moe.shared_dim:
        dense += [(moe.shared_halves * moe.shared_dim, D), (D, moe.shared_dim)]
    if moe.shared_gate:
        dense.append((1, D))
    if moe.latent_dim:
        dense += [(moe.latent_dim, D), (D, moe.latent_dim)]
    E, F, W = moe.experts, moe.ffn_dim, model.expert_dim
    rows = moe.halves * F
    return dense, [(E, rows, W), (E, W, F), *[(E, rows), (E, W)] * moe.bias]


def root_shapes(model: ModelConfig) -> list[Shape]:
    """Embedding, head unless tied, final norm."""
    table = (model.vocab, model.dim)
    return [table, (model.dim,)] if model.tied else [table, table, (model.dim,)]


def numel(shapes: list[Shape]) -> int:
    """Number of elements of all these shapes."""
    return sum(prod(shape) for shape in shapes)


def count_parameters(model: ModelConfig) -> ParameterCounts:
    """Exact number of parameters of `Transformer(model)`."""
    total = active = numel(root_shapes(model))
    for layer in model.numbered:
        dense, experts = block_shapes(model, layer)
        total += numel(dense) + numel(experts)
        active += numel(dense) + numel(experts) // model.moe.experts * model.moe.top_k
    embedding = 0 if model.tied else model.vocab * model.dim  # a tied table still multiplies, as the head
    heads = model.mtp.depth * model.vocab * model.dim  # each depth multiplies by the head once more
    return ParameterCounts(total, active, active - embedding + heads)


def flops_per_token(model: ModelConfig, seq: int, frozen: bool = False) -> float:
    """FLOPs of forward and backward for one token of a sequence of `seq`.

    frozen: all weights are frozen, under adapters, whose products are not counted: 4 replaces 6 below.

    Without windows: 6*active_flops + 6*layers*H*C*S. Blocks that predict further tokens are counted.

    Parameters: a parameter that multiplies costs one multiply-add, 2 FLOPs, in the forward, and twice that in
        the backward (the gradients of its input and of itself): 6 (Kaplan et al. 2020, section 2.1).
    Attention: it has no parameters. q.k and the sum over v are 2*C FLOPs each per head and visible position,
        so 4*H*C*S over a whole sequence. A causal token sees S/2 positions on average: 2*H*C*S forward, times
        3 with the backward: 6*H*C*S a layer. With a window of W < S it sees W - W^2/(2S) on average: the
        first W tokens see W/2, all later tokens W. Latent attention's C is the mean of its query and value
        widths.

    Linear layers: they read no positions. Their rule adds 3 times rule_flops, for forward and backward.

    Recomputation (flash attention's backward, activation checkpointing) is not counted. Document borders do
    not lower the count.
    """
    full = (layer for layer in model.numbered if model.attends(layer))
    windows = [min(model.window_of(layer) or seq, seq) for layer in full]
    visible = sum(W - W * W / (2 * seq) for W in windows)
    widths = qk_width(model) + v_width(model)
    each = 4.0 if frozen else 6.0
    attention = 6.0 * model.heads * widths * visible
    rule = 3.0 * rule_flops(model) * model.linear_layers
    return each * count_parameters(model).active_flops + attention + rule


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by `torch.cuda.get_device_name()`; None if it is unknown.

    It is known for H100 and H200 as SXM modules (NVIDIA's data sheet prints 1979 TFLOP/s with sparsity).
    Their PCIe and NVL cards have lower clocks and a MIG slice has fewer units: an MFU computed with this
    number would be wrong, so the function returns None for them.
    """
    sxm = re.search(r"\bG?H[12]00\b", device_name) and not re.search(r"PCIe|NVL|MIG", device_name)
    return 989.4e12 if sxm else None


def mfu(flops_per_token: float, tokens_per_s: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B), 0 to 1; None if the peak is unknown.

    tokens_per_s, peak: values of one GPU.
    """
    return flops_per_token * tokens_per_s / peak if peak else None
