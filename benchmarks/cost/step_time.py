"""Predicts the time of a training step from counted FLOPs, bytes and measured constants.

A step is the sum of these parts, of the busiest rank:

    kernel                max(FLOPs/rate, bytes/rate) + kernel_overlap * min(the same two)
    projections           three products for every matrix of attention, shared experts, dense feed-forward
                          and router
    attention             2/7 of its FLOPs forward, 5/7 backward (flash: scores are made again), at rates by
                          the heads' width
    experts               six products over the T*K routed pairs of the busiest rank, two sums over a token's
                          rows
    loss                  the head's three products, and each logit's traffic
    exchange              a row for each (token, rank) to experts and back, forward and backward; waiting for
                          others; two movements fewer where a shared expert runs beside them; across nodes a
                          row for each (token, node) over the network first (--parallel.dispatch auto)
    glue                  everything else in a block: passes over [T, D], and activations between a dense
                          feed-forward's or shared expert's products
    recomputed            forwards that activation checkpointing runs again
    copies                traffic around FSDP2's collectives, and gradients that add up
    optimizer             traffic of AdamW and the gradient norm
    exposed all-gathers   what of FSDP2's all-gathers and reduce-scatters compute does not hide
    slowed                what compute loses beside those that it does hide, by the time of their bytes on
                          NVLink

Across nodes a group's ring enters each node through the network cards of its members there: dense parameters
through all eight, a rank's own experts (ep 8) through one. What runs at the same time is not modelled to
share links, nor are failures, stragglers or checkpoints. What an exchange costs in a layer, and how much of
the gathers of dense parameters hides, was measured on four GPUs with dp 1; what compute loses beside them on
two, with dp 2. A global batch grows with the GPUs: whether it still trains well is not in these numbers.

`m`, here and in network.py, are the constants by name (constants.py).

next: network.py
"""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from benchmarks.cost.network import collective_seconds, padded_groups, times
from tmoe.config.axes import Axes
from tmoe.config.run import Config
from tmoe.model.count import block_shapes, flops_per_token, mfu, numel, qk_width, root_shapes, v_width
from tmoe.moe.two_level import expected_rows_across
from tmoe.run.block_memory import (
    FP32,
    compute_bytes,
    rows_received,
    runs_beside,
)
from tmoe.run.memory import kept_whole, memory_per_rank, peak_bytes

RECOMPUTED = {  # parts whose forward runs again in the backward, by --parallel.checkpoint
    "none": (),
    "attention": ("projections", "attention"),
    "moe": ("experts", "exchange"),
    "block": ("projections", "attention", "experts", "exchange", "glue"),
}
# FLOPs that flash attention does over those that MFU counts: five products in the backward, not four.
FLASH = 7 / 6


class Prediction(NamedTuple):
    """One step of one layout."""

    parts: dict[str, float]
    """seconds, by what they are spent on"""
    tokens: int
    """of the global batch"""
    gpus: int
    mfu: float | None
    peak_bytes: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s_gpu(self) -> float:
        return self.tokens / self.seconds / self.gpus

    @property
    def exposed(self) -> float:
        """Share of the step in which a GPU waits for bytes of other GPUs."""
        return (self.parts["exchange"] + self.parts["exposed all-gathers"]) / self.seconds


def predict(cfg: Config, axes: Axes, m: SimpleNamespace, skew: float | None = None) -> Prediction:
    """One step of `cfg` on a mesh of these axes.

    skew: pairs of the busiest rank over the mean; None: m.skew if ep > 1.
    """
    model = cfg.model
    T = cfg.train.batch * cfg.train.seq
    again = cfg.train.accumulate
    width = compute_bytes(cfg)

    # Compute, and the collectives beside it.
    busiest = 1.0 if axes.ep == 1 else m.skew if skew is None else skew
    forward, backward = passes(cfg, axes.ep, m, busiest)
    recomputed = sum(forward[part] for part in RECOMPUTED[cfg.parallel.checkpoint])
    hiding_forward, hiding_backward = (sum(p.values()) - p["exchange"] for p in (forward, backward))
    hiding_backward += recomputed
    exposed, beside = collective_seconds(cfg, axes, m, hiding_forward, hiding_backward)

    # Bytes that are copied around the collectives.
    groups = parameter_groups(cfg, axes)
    own = sum(elements / size for elements, size in groups)
    keeps = kept_whole(cfg, axes)
    # an all-gather reads fp32 shards and writes them in the compute type, then copies what arrived into
    # place; twice
    moved = padded_groups(cfg, axes)[: 1 if keeps else 2]
    shared = [(elements, size) for elements, size in moved if size > 1]
    copied = sum(
        again * 2 * ((FP32 + width) * n / size + 2 * width * n) + (width + FP32) * n for n, size in shared
    )
    if keeps:  # what arrives of the gradients is read, and a sum written
        copied += (width + FP32 / axes.dp) * groups[1][0]
    # gradients in the compute type add up in fp32 over micro-batches, if there are several, before any is
    # reduced
    added = sum(n for n, _ in groups) * ((again > 1) * (width + FP32) + (again - 1) * (width + 2 * FP32))

    parts = {part: again * (forward[part] + backward[part]) for part in forward}
    parts["recomputed"] = again * recomputed
    parts["copies"] = (m.copy_factor * copied + added) / m.memory_rate
    parts["optimizer"] = (m.optimizer_bytes + 3 * FP32 * (cfg.optim.ema > 0)) * own / m.memory_rate
    if cfg.optim.offload:  # both moments, in and out at the same time
        parts["optimizer"] = max(parts["optimizer"], 2 * FP32 * own / m.host_rate)
    parts["exposed all-gathers"] = exposed
    parts["slowed"] = m.slowed * beside

    tokens = axes.readers * T * again
    rate = T * again / sum(parts.values())
    used = mfu(flops_per_token(model, cfg.train.seq), rate, m.peak if cfg.train.dtype == "bf16" else None)
    memory = m.memory_factor * peak_bytes(memory_per_rank(cfg, axes))
    return Prediction(parts, tokens, axes.world, used, memory)


def passes(
    cfg: Config, ep: int, m: SimpleNamespace, skew: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a micro-batch's forward and backward by part, without FSDP2."""
    model = cfg.model
    width = compute_bytes(cfg)
    T = cfg.train.batch * cfg.train.seq
    moe_layers = sum(map(model.is_moe, range(model.layers)))
    matrices = [s for layer in range(model.layers) for s in block_shapes(model, layer)[0] if len(s) == 2]
    projections = sum(product(T, rows, columns, width, m) for rows, columns in matrices)
    attention = sum(attention_seconds(cfg, layer, m) for layer in range(model.layers))
    head = 3 * product(T, model.vocab, model.dim, width, m) + m.logit_bytes * T * model.vocab / m.memory_rate
    experts = expert_seconds(cfg, ep, m, skew)
    exchange = exchange_seconds(cfg, ep, m)
    layers = range(model.layers)
    wide = sum(model.moe.shared_dim if model.is_moe(layer) else model.ffn_dim for layer in layers)
    # The forward reads gate and up and writes their product. The backward reads these and the product's
    # gradient, and makes the product again and both gradients.
    glue = (m.glue_passes * model.layers * model.dim + 9 * wide) * T * width / m.memory_rate
    forward = {
        "projections": projections,
        "attention": attention * 2 / 7,
        "experts": moe_layers * experts[0],
        "loss": head,  # its gradient is made while the logits exist
        "exchange": moe_layers * exchange / 2,
        "glue": glue / 3,
    }
    backward = {
        "projections": 2 * projections,
        "attention": attention * 5 / 7,
        "experts": moe_layers * experts[1],
        "loss": 0.0,
        "exchange": moe_layers * exchange / 2,
        "glue": glue * 2 / 3,
    }
    return forward, backward


def attention_seconds(cfg: Config, layer: int, m: SimpleNamespace) -> float:
    """Seconds of one layer's attention, forward and backward.

    They are those of cuDNN's plain causal kernel or of flex attention's, each with a curve of rates over the
    heads' channels. A window costs flex attention as much as some tokens more would.
    """
    model = cfg.model
    S = cfg.train.seq
    window = model.window_of(layer)
    windowed = 0 < window < S
    plain = not (cfg.train.isolate_documents or windowed or model.sinks)
    widths = qk_width(model) + v_width(model)
    seen = min(window + m.window_more, S) if windowed else S
    curve = m.attention_rate if plain else m.isolated_attention_rate
    rate = np.interp(widths / 2, *zip(*curve, strict=True))
    flops = FLASH * 6 * model.heads * widths * (seen - seen**2 / (2 * S)) * cfg.train.batch * S
    return float(flops / rate)


def parameter_groups(cfg: Config, axes: Axes) -> list[tuple[float, int]]:
    """(elements, ranks that share them): dense parameters over the world, the experts of a rank over dp."""
    blocks = [block_shapes(cfg.model, layer) for layer in range(cfg.model.layers)]
    dense = numel(root_shapes(cfg.model)) + sum(numel(dense) for dense, _ in blocks)
    return [(dense, axes.shard), (sum(numel(experts) for _, experts in blocks) / axes.ep, axes.dp)]


def kernel(flops: float, moved: float, m: SimpleNamespace) -> float:
    """Seconds of a kernel of so many FLOPs and bytes."""
    arithmetic = flops / m.product_rate
    traffic = moved / m.memory_rate
    return max(arithmetic, traffic) + m.kernel_overlap * min(arithmetic, traffic)


def product(rows: int, inner: int, columns: int, width: int, m: SimpleNamespace) -> float:
    """Seconds of [rows, inner] times [inner, columns].

    The backward's two products move and multiply as much each.
    """
    return kernel(2 * rows * inner * columns, width * (rows * inner + inner * columns + rows * columns), m)


def expert_seconds(cfg: Config, ep: int, m: SimpleNamespace, skew: float) -> tuple[float, float]:
    """(forward, backward) seconds of one layer's experts on the busiest rank.

    They are those of the kernels of docs/kernels.md.
    """
    moe = cfg.model.moe
    D = cfg.model.dim
    F = moe.ffn_dim
    width = compute_bytes(cfg)
    T = cfg.train.batch * cfg.train.seq
    rows = T if ep == 1 else rows_received(T, moe.top_k, ep)
    N = skew * T * moe.top_k  # routed pairs
    one = 2 * N * D * F  # FLOPs of a product with F columns
    # elements: rows, pre-activations, activations, one matrix of all experts that are here
    x = N * D
    h = 2 * N * F
    a = N * F
    w = moe.experts // ep * D * F
    sum_rows = kernel(0, width * (x + rows * D), m)
    up = kernel(2 * one, width * (x + 2 * w + h + a), m)
    down = kernel(one, width * (a + w + x), m)
    dh = kernel(one, width * (x + w + h + h + a), m)
    dx = kernel(2 * one, width * (h + 2 * w + x), m)
    dw_down = kernel(one, width * (a + x + w), m)
    dw_up = kernel(2 * one, width * (h + x + 2 * w), m)
    slower = 1.0 if ep == 1 else exchange_of(cfg, ep, m)["experts"]
    forward = up + down + sum_rows
    backward = dh + dx + dw_down + dw_up + sum_rows
    return slower * forward + m.layer_fixed / 3, slower * backward + m.layer_fixed * 2 / 3


def exchange_of(cfg: Config, ep: int, m: SimpleNamespace) -> dict:
    """The constants of the backend that --parallel.dispatch comes to."""
    backend = cfg.parallel.dispatch
    if backend == "auto":
        backend = "nccl" if ep > m.node or cfg.model.moe.bias else m.exchange["auto"]
    return m.exchange[backend]


def exchange_seconds(cfg: Config, ep: int, m: SimpleNamespace) -> float:
    """Seconds of one layer's movements, forward and backward.

    Each moves a row for each (token, rank) that leaves.
    """
    if ep == 1:
        return 0.0
    if cfg.parallel.dispatch == "auto" and ep > m.node > 1 < cfg.model.moe.top_k:
        return two_level_seconds(cfg, ep, m)
    T = cfg.train.batch * cfg.train.seq
    D = cfg.model.dim
    width = compute_bytes(cfg)
    local = min(ep, m.node)
    how = exchange_of(cfg, ep, m)
    rows = rows_received(T, cfg.model.moe.top_k, ep)
    wire = times(how["curve"], rows * (local - 1) / ep * D * width)
    if ep > local:
        away = rows * (ep - local) / ep * D * width
        wire = max(wire, away / m.nic_rate + (ep // local - 1) * m.nic_hop)
    # Rows are read and written before they leave. Where they come home they are read, widened and added to
    # the token's sum.
    copied = (2 * width + width + FP32 + 3 * FP32) * rows * D + (2 * FP32 + width) * T * D
    # beside a shared expert x of the forward and dy of the backward
    moves = how["moves"] - 2 * (how is m.exchange.get("symm") and runs_beside(cfg, Axes(ep=ep)))
    return moves * wire + how["copies"] * 2 * copied / m.memory_rate + how["fixed"]


def two_level_seconds(cfg: Config, ep: int, m: SimpleNamespace) -> float:
    """The same across nodes by moe/two_level.py.

    A row for each (token, node) moves, then one for each (token, rank); the hops follow each other. What is
    done for counts and plan is assumed to take twice the flat one's time.
    """
    T, top_k = cfg.train.batch * cfg.train.seq, cfg.model.moe.top_k
    D, width = cfg.model.dim, compute_bytes(cfg)
    nodes, how = ep // m.node, m.exchange["nccl"]
    away = expected_rows_across(T, top_k, ep, nodes).two_level
    held, rows = away * nodes / (nodes - 1), rows_received(T, top_k, ep)  # of hop 1 and hop 2, with one's own
    network = away * D * width / m.nic_rate + (nodes - 1) * m.nic_hop
    links = times(how["curve"], rows * (m.node - 1) / m.node * D * width)
    # as for the flat one at either end of both hops, and rows of hop 2 are put into the flat one's order
    copied = (2 * width + width + FP32 + 3 * FP32) * (held + rows) * D + (2 * FP32 + width) * (T + held) * D
    copied += 4 * width * rows * D
    return how["moves"] * (network + links) + how["copies"] * 2 * copied / m.memory_rate + 2 * how["fixed"]
