"""Predicts the seconds of one block's forward and backward, by part, without FSDP2.

The planner (benchmarks/cost) adds up a step of these seconds, and stages of a pipeline are cut by them.

next: link_time.py
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from tmoe.config.axes import Axes
from tmoe.config.run import Config
from tmoe.config.sizes import FP32, compute_bytes, local_tokens
from tmoe.model.block_bytes import key_copies
from tmoe.model.count import attention_shapes, block_shapes, qk_width, rule_flops, v_width
from tmoe.model.link_time import all_to_all, ring, times
from tmoe.model.reach import reached
from tmoe.model.reach import rows as rows_of
from tmoe.moe.fp8_choice import casts_of_a_step, gain
from tmoe.moe.moe_bytes import runs_beside, slice_bytes

# FLOPs of flash attention over the FLOPs that MFU counts: the backward has five products, not four.
FLASH = 7 / 6
# Rate of a linear layer's rule as a share of that of products: an H200's kernels at the widths of
# qwen3-next-80b-a3b (benchmarks/results/delta/h200.jsonl:1, forward and backward, FLOPs by count.rule_flops).
RULE_SHARE = 0.07

Parts = dict[str, float]  # seconds by part

EXCHANGES = ("exchange", "tp exchange", "cp exchange", "etp exchange")
RECOMPUTED = {  # parts whose forward runs again in the backward, by --parallel.checkpoint
    "none": (),
    "attention": ("projections", "attention", "tp exchange", "cp exchange"),
    "moe": ("experts", "exchange", "etp exchange"),
    "block": ("projections", "attention", "experts", *EXCHANGES, "glue"),
}


class Kernels(NamedTuple):
    """Seconds of the kernels of a layer's experts: products, and sums over the rows of each token."""

    forward: float
    inputs: float
    """products for the gradients of rows"""
    weights: float
    """products for the gradients of weights"""
    rows: float
    """one sum over a token's rows; the forward and the backward each have one"""


def block_seconds(
    cfg: Config, axes: Axes, layer: int, m: SimpleNamespace, skew: float
) -> tuple[Parts, Parts]:
    """(forward, backward) seconds of one micro-batch by part, for the block `layer`."""
    model, width = cfg.model, compute_bytes(cfg)
    T = local_tokens(cfg, axes)
    projections = sum(product(*shape, width, m) for shape in products(cfg, axes, layer))
    attention = attention_seconds(cfg, axes, layer, m)
    sparse = model.is_moe(layer)
    experts = expert_seconds(cfg, axes, m, skew) if sparse else (0.0, 0.0)
    exchange = exchange_seconds(cfg, axes, m) if sparse else 0.0
    slices = etp_seconds(cfg, axes, m) if sparse else 0.0
    mixes = model.mixes(layer)
    tp, cp = (tp_seconds(cfg, axes, m), cp_seconds(cfg, axes, m)) if mixes else ((0.0, 0.0), (0.0, 0.0))
    wide = model.moe.shared_dim if sparse else model.ffn_dim * model.is_dense(layer)
    # The forward reads gate and up and writes their product. The backward reads gate, up and the product's
    # gradient, and writes the recomputed product and both gradients.
    passes = m.glue_passes / (1 if model.branch_of(layer) is None else 2)
    glue = (passes * model.dim + 9 * wide) * T * width / m.memory_rate
    forward = {
        "projections": projections,
        "attention": attention * 2 / 7,
        "experts": experts[0],
        "exchange": exchange / 2,
        "tp exchange": tp[0],
        "cp exchange": cp[0],
        "etp exchange": slices / 2,
        "glue": glue / 3,
    }
    backward = {
        "projections": 2 * projections,
        "attention": attention * 5 / 7,
        "experts": experts[1],
        "exchange": exchange / 2,
        "tp exchange": tp[1],
        "cp exchange": cp[1],
        "etp exchange": slices / 2,
        "glue": glue * 2 / 3,
    }
    return forward, backward


def products(cfg: Config, axes: Axes, layer: int) -> list[tuple[int, int, int]]:
    """(rows, inner, columns) of a rank's products in a block's forward, without the experts'.

    With tp, attention's projections have tp times the tokens and 1/tp of the heads, but at least one key
    head. With cp by keys, a rank computes latent attention's keys and values for whole sequences.
    """
    model, tp = cfg.model, axes.tp
    T, D, H = local_tokens(cfg, axes), model.dim, model.heads // tp
    gathered = T * tp
    if not model.mixes(layer):
        dense = []
    elif model.is_linear(layer):
        n = model.linear
        dense = [(T, D, n.mixed + n.value_width), (T, D, n.gate_rows), (T, n.value_width, D)]
    elif model.attention == "mla":
        mla = model.mla
        queries, latent = H * qk_width(model), mla.kv_rank + mla.rope_dim
        seen = gathered * (axes.cp if cfg.parallel.cp_exchange == "keys" else 1)
        if mla.q_rank:
            dense = [(T, D, mla.q_rank + latent), (gathered, mla.q_rank, queries)]
        elif tp == 1:
            dense = [(T, D, queries + latent)]
        else:
            dense = [(gathered, D, queries), (T, D, latent)]
        dense += [(seen, mla.kv_rank, H * (mla.nope_dim + mla.v_dim)), (gathered, H * mla.v_dim, D)]
    else:
        C, V, G = model.head_dim, model.value_dim, max(1, model.kv_heads_in(model.window_of(layer)) // tp)
        dense = [(gathered, D, (H + G) * C + G * V), (gathered, H * V, D)]
    others = list(block_shapes(model, layer)[0])
    for shape in attention_shapes(model, layer):
        others.remove(shape)
    return dense + [(T, *shape) for shape in others if len(shape) == 2]


def tp_seconds(cfg: Config, axes: Axes, m: SimpleNamespace) -> tuple[float, float]:
    """(forward, backward) seconds of attention's communication under tp in one layer, none of it hidden.

    Before the projections, x or the latents of all tokens are gathered; after them, the sums over heads are
    computed. The backward communicates the gradients of both, and gathers x again, because x is not kept.
    """
    model, tp = cfg.model, axes.tp
    if tp == 1:
        return 0.0, 0.0
    tokens = local_tokens(cfg, axes) * tp * compute_bytes(cfg)

    def moved(channels: int) -> float:
        return ring(tokens * channels, tp, 1, m)

    x = moved(model.dim)
    if model.attention == "mla":
        mla = model.mla
        latents = moved(mla.q_rank + mla.kv_rank + mla.rope_dim)
        forward, backward = (x, x) if mla.q_rank else (2 * x, 3 * x)
        return m.tp_factor * (forward + latents), m.tp_factor * (backward + latents)
    return m.tp_factor * 2 * x, m.tp_factor * 3 * x


def cp_seconds(cfg: Config, axes: Axes, m: SimpleNamespace) -> tuple[float, float]:
    """(forward, backward) seconds of attention's communication under cp in one layer, none of it hidden.

    Keys: one gather of keys and values, or of latents. Heads: an all-to-all of q, k and v, and one of
    the result. The backward communicates their gradients.
    """
    model, tp, cp = cfg.model, axes.tp, axes.cp
    if cp == 1:
        return 0.0, 0.0
    channel = local_tokens(cfg, axes) * tp * compute_bytes(cfg)  # bytes of one channel of a rank's tokens
    H, latent = model.heads // tp, model.attention == "mla"
    G = H if latent else max(1, model.kv_heads // tp)
    if cfg.parallel.cp_exchange == "keys":
        channels = model.mla.kv_rank + model.mla.rope_dim if latent else 2 * G * model.head_dim
        seconds = ring(channel * cp * channels, cp, tp, m)
    else:
        keys, qk, v = G * key_copies(H, G, cp), qk_width(model), v_width(model)
        seconds = sum(all_to_all(channel * n, cp, tp, m) for n in (H * qk, keys * qk, keys * v, H * v))
    return (m.cp_factor * seconds,) * 2


def etp_seconds(cfg: Config, axes: Axes, m: SimpleNamespace) -> float:
    """Seconds of etp's communication in one layer, forward and backward, and of the copies that it needs.

    Communicated are the rows of the group's ranks before the experts, the sums of rows after them, and the
    gradients of both. Copied are each rank's slices of the experts, and their gradients into whole matrices.
    """
    etp, width = axes.etp, compute_bytes(cfg)
    if etp == 1:
        return 0.0
    D = cfg.model.expert_dim
    rows = etp * rows_of(cfg, axes, m)
    moving = 4 * all_to_all(rows * D * width, etp, axes.ep, m)
    copied = 4 * 3 * rows * D * width + (2 + 2 + etp) * slice_bytes(cfg, axes)
    return m.etp_factor * moving + copied / m.memory_rate + m.exchange["nccl"]["fixed"]


def attention_seconds(cfg: Config, axes: Axes, layer: int, m: SimpleNamespace) -> float:
    """Seconds of one layer's attention, forward and backward; tp and cp divide its heads and queries.

    The kernel is cuDNN's plain causal kernel or flex attention's, each with a curve of rates over the heads'
    channels. A window costs flex attention as much as some additional tokens would. A linear layer's rule has
    RULE_SHARE of the products' rate.
    """
    model = cfg.model
    S = cfg.train.seq
    if not model.mixes(layer):
        return 0.0
    if model.is_linear(layer):
        return 3 * rule_flops(model) * local_tokens(cfg, axes) / (RULE_SHARE * m.product_rate)
    window = model.window_of(layer)
    windowed = 0 < window < S
    by_keys = axes.cp > 1 and cfg.parallel.cp_exchange == "keys"
    plain = not (cfg.train.isolate_documents or windowed or model.sinks or by_keys)
    widths = qk_width(model) + v_width(model)
    seen = min(window + m.window_more, S) if windowed else S
    curve = m.attention_rate if plain else m.isolated_attention_rate
    rate = np.interp(widths / 2, *zip(*curve, strict=True))
    flops = FLASH * 6 * model.heads * widths * (seen - seen**2 / (2 * S)) * cfg.train.batch * S
    return float(flops / rate) / axes.parts


def head_seconds(cfg: Config, axes: Axes, m: SimpleNamespace) -> float:
    """Seconds of the head and the loss of one micro-batch; its gradients are computed in the forward."""
    T, width, model = local_tokens(cfg, axes), compute_bytes(cfg), cfg.model
    products = 2 if cfg.lora.rank else 3  # the head is frozen under adapters
    head = products * product(T, model.vocab, model.dim, width, m)
    return head + m.logit_bytes * T * model.vocab / m.memory_rate


def kernel(flops: float, moved: float, m: SimpleNamespace) -> float:
    """Seconds of a kernel with these FLOPs and bytes moved."""
    arithmetic = flops / m.product_rate
    traffic = moved / m.memory_rate
    return max(arithmetic, traffic) + m.kernel_overlap * min(arithmetic, traffic)


def product(rows: int, inner: int, columns: int, width: int, m: SimpleNamespace) -> float:
    """Seconds of [rows, inner] times [inner, columns].

    Each of the backward's two products moves and multiplies as much.
    """
    return kernel(2 * rows * inner * columns, width * (rows * inner + inner * columns + rows * columns), m)


def expert_seconds(cfg: Config, axes: Axes, m: SimpleNamespace, skew: float) -> tuple[float, float]:
    """(forward, backward) seconds of one layer's experts on the busiest rank."""
    forward, inputs, weights, rows = expert_kernels(cfg, axes, m, skew)
    return forward + rows + m.layer_fixed / 3, inputs + weights + rows + m.layer_fixed * 2 / 3


def expert_kernels(cfg: Config, axes: Axes, m: SimpleNamespace, skew: float) -> Kernels:
    """The kernels of docs/kernels.md; under etp they have 1/etp of the width and etp times the pairs.

    The gradients of weights are separate, because a pipeline with schedule v defers them.
    """
    moe = cfg.model.moe
    ep, etp = axes.ep, axes.etp
    D = cfg.model.expert_dim
    F = moe.ffn_dim // etp
    width = compute_bytes(cfg)
    T = local_tokens(cfg, axes)
    rows = etp * rows_of(cfg, axes, m)
    N = skew * etp * T * moe.top_k  # routed pairs
    flops = 2 * N * D * F  # FLOPs of a product with F columns
    # numbers of elements: rows, pre-activations, activations, one matrix of all experts of the rank
    x = N * D
    n = moe.halves  # matrices in the first product: 2 for gate and up, 1 for up alone
    h = n * N * F
    a = N * F
    w = moe.experts // ep * D * F
    sum_rows = kernel(0, width * (x + rows * D), m)
    up = kernel(n * flops, width * (x + n * w + h + a), m)
    down = kernel(flops, width * (a + w + x), m)
    dh = kernel(flops, width * (x + w + h + h + a), m)
    dx = kernel(n * flops, width * (h + n * w + x), m)
    dw_down = kernel(flops, width * (a + x + w), m)
    dw_up = kernel(n * flops, width * (h + x + n * w), m)
    slower = 1.0 if ep == 1 else exchange_of(cfg, axes, m)["experts"]
    in_fp8, others = up + down + dh + dx, dw_down + dw_up + 2 * sum_rows
    # what a measured layer in fp8 saves is taken off these products, also where gradients of weights save it
    share = max(0.0, 1 - (1 - gain(cfg, axes).layer) * (1 + others / in_fp8))
    times = share * (up + down), share * (dh + dx), dw_down + dw_up, sum_rows
    return Kernels(*(slower * t for t in times))


def code_seconds(cfg: Config, axes: Axes, m: SimpleNamespace) -> float:
    """Seconds of a step for the casts of one layer's matrices to fp8 (--train.fp8), by the measured layer."""
    share = gain(cfg, axes)
    if not share.cast:
        return 0.0
    plain = replace(cfg, train=replace(cfg.train, fp8="none", fp8_everywhere=False))
    layer = sum(expert_seconds(plain, axes, m, 1.0))
    return casts_of_a_step(cfg, axes) * share.cast * layer


def exchange_of(cfg: Config, axes: Axes, m: SimpleNamespace) -> dict:
    """The constants of the backend that --parallel.dispatch selects."""
    backend = cfg.parallel.dispatch
    if backend == "auto":
        far = axes.ep > m.node or axes.etp > 1
        moe = cfg.model.moe
        far = far or moe.bias or moe.weigh != "activation"
        backend = "nccl" if far else m.exchange["auto"]
    return m.exchange[backend]


def exchange_seconds(cfg: Config, axes: Axes, m: SimpleNamespace) -> float:
    """Seconds of one layer's exchange, forward and backward.

    Each transfer sends one row for each pair of a token and another rank.
    """
    ep = axes.ep
    if ep == 1:
        return 0.0
    if cfg.parallel.dispatch == "auto" and ep > m.node > 1 < cfg.model.moe.top_k:
        return two_level_seconds(cfg, axes, m)
    T = local_tokens(cfg, axes)
    D = cfg.model.expert_dim
    width = compute_bytes(cfg)
    local = min(ep, m.node)
    how = exchange_of(cfg, axes, m)
    rows = rows_of(cfg, axes, m)
    wire = times(how["curve"], rows * (local - 1) / ep * D * width)
    if ep > local:
        away = rows * (ep - local) / ep * D * width
        wire = max(wire, away / m.nic_rate + (ep // local - 1) * m.nic_hop)
    # Rows are read and written before they are sent. On their return they are read, widened and added to the
    # token's sum.
    copied = (2 * width + width + FP32 + 3 * FP32) * rows * D + (2 * FP32 + width) * T * D
    # a shared expert hides the transfer of x in the forward and of dy in the backward
    moves = how["moves"] - 2 * (how is m.exchange.get("symm") and runs_beside(cfg, axes))
    return moves * wire + how["copies"] * 2 * copied / m.memory_rate + how["fixed"]


def two_level_seconds(cfg: Config, axes: Axes, m: SimpleNamespace) -> float:
    """Seconds of one layer's exchange across nodes by moe/exchange/two_level.py, forward and backward.

    One row for each (token, node) is sent first, then one for each (token, rank). `hops_overlap` is the share
    of the shorter hop that runs during the longer: 0 for two_level.py, whose second hop begins after the
    first. The work for counts and plan is assumed to take twice the time of the one-level exchange.
    """
    ep, T = axes.ep, local_tokens(cfg, axes)
    D, width = cfg.model.expert_dim, compute_bytes(cfg)
    nodes, how = ep // m.node, m.exchange["nccl"]
    # of hop 1 and hop 2, with the rows that stay
    hops, rows = T * reached(cfg.model.moe, nodes, ep, m.gate), rows_of(cfg, axes, m)
    away = hops * (nodes - 1) / nodes
    network = away * D * width / m.nic_rate + (nodes - 1) * m.nic_hop
    links = times(how["curve"], rows * (m.node - 1) / m.node * D * width)
    # copies as in the one-level exchange at both ends of both hops; hop 2's rows are also reordered
    copied = (2 * width + width + FP32 + 3 * FP32) * (hops + rows) * D + (2 * FP32 + width) * (T + hops) * D
    copied += 4 * width * rows * D
    both = network + links - m.hops_overlap * min(network, links)
    return how["moves"] * both + how["copies"] * 2 * copied / m.memory_rate + 2 * how["fixed"]
