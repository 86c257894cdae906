"""Bytes that an MoE layer and its exchange hold on a rank, in closed form.

T is the number of tokens of one rank: under tp and cp a part of each of its sequences.

next: tmoe/model/block_bytes.py
"""

from __future__ import annotations

from tmoe.config.axes import Axes
from tmoe.config.float8_settings import shared_in_float8
from tmoe.config.gpus import NODE
from tmoe.config.run import Config
from tmoe.config.sizes import FP32, INT32, compute_bytes, local_tokens
from tmoe.moe.exchange.dispatch import pairs_bound
from tmoe.moe.exchange.symm import hides
from tmoe.moe.fp8_choice import narrow_gradients, planned, planned_arch
from tmoe.moe.select.capacity import capacity
from tmoe.ops.experts.fp8_codes import KeptH
from tmoe.ops.experts.pair_order import Metadata


def moe_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes that autograd keeps of one MoE feed-forward beyond the norm's output that it reads."""
    moe, D, width = cfg.model.moe, cfg.model.dim, compute_bytes(cfg)
    ep, etp = travelling(cfg, axes)
    T, K = local_tokens(cfg, axes), moe.slots
    W = cfg.model.expert_dim
    kept = T * moe.outputs * FP32  # the router's logits
    kept += 2 * T * moe.latent_dim * width  # input and output of latent experts, operands of products
    if moe.jitter:
        kept += 2 * T * D * FP32  # input after jitter, operand of an fp32 product, and the factors
    # shared experts: gate, up, and their product, which is recomputed if one op runs the shared and the
    # routed experts
    kept += (moe.shared_halves + (not runs_beside(cfg, axes))) * T * moe.shared_dim * width
    # H: under etp 1/etp of the width, for etp times the pairs
    kept += h_bytes(cfg, axes, pairs_bound(T, moe.top_k, ep, moe.experts // ep) or T * moe.top_k)
    if uses_symm(cfg, axes):
        # weights and ids; the backward sends x again, and sorts the slots again
        return kept + T * K * (FP32 + INT32)
    if moe.pad:  # one slot per pair, filled or not, and each token's slots
        R, K = etp * moe.experts * capacity(T, K, moe), 1
        kept += R * W * width + T * moe.top_k * 2 * INT32
    else:
        R = etp * rows_received(T, moe.top_k, ep)
        if moe.weigh != "activation":
            return kept + sorted_bytes(cfg, axes, R)
        kept += R * W * width if ep * etp > 1 else 0  # received rows; without an exchange none
    return kept + R * K * (FP32 + 3 * INT32)  # weight, id, place and order of each slot


def h_bytes(cfg: Config, axes: Axes, pairs: int) -> int:
    """Bytes of H, gate and up of this many pairs of one layer: with --train.fp8 codes and scales."""
    moe, ep = cfg.model.moe, travelling(cfg, axes)[0]
    if planned(cfg, axes):
        return KeptH.size(pairs, (moe.experts // ep, cfg.model.expert_dim, moe.ffn_dim), moe.activation)
    return pairs * moe.halves * moe.ffn_dim * compute_bytes(cfg)


def left_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes that one MoE layer's backward keeps for the gradients of its experts' matrices (schedule v).

    These are dH and the weighted activation of the pairs, copies of the rows and of their results' gradients,
    weights, and the order of the rows.
    """
    moe, W, width = cfg.model.moe, cfg.model.expert_dim, compute_bytes(cfg)
    T = local_tokens(cfg, axes)
    R = rows_received(T, moe.top_k, axes.ep)
    pairs = pairs_bound(T, moe.top_k, axes.ep, moe.experts // axes.ep) or R * moe.slots
    return ((moe.halves + 1) * pairs * moe.ffn_dim + 2 * R * W) * width + R * moe.slots * (FP32 + 2 * INT32)


def sorted_bytes(cfg: Config, axes: Axes, R: int) -> int:
    """Bytes that autograd keeps of R rows received if weights are applied before or after the experts.

    For each pair: the row that the experts read, and the row that its weight multiplies. In addition the
    weights and the row and slot numbers.
    """
    moe, width = cfg.model.moe, compute_bytes(cfg)
    N = axes.etp * local_tokens(cfg, axes) * moe.top_k  # an even load: as many pairs received as sent
    slots = N if axes.ep > 1 else R * moe.top_k
    pairs = 2 * slots * cfg.model.expert_dim * width + slots * FP32
    # per pair: its row and slot, and the op's weight of 1, id, place and order; per slot: its id
    return pairs + slots * (2 * INT32 + FP32 + 3 * INT32)


def travelling(cfg: Config, axes: Axes) -> tuple[int, int]:
    """How many ranks a layer's tokens are sent to (ep), and how many divide an expert (etp), by `adaptive_r`.

    "auto" counts as the layout without adaptive_r.
    """
    r = cfg.parallel.adaptive_r
    if r == 0:
        return 1, 1
    return axes.ep, r if isinstance(r, int) else axes.etp


def gathered_expert_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes of all experts of a layer and of their gradients, while its backward runs with adaptive_r 0.

    Under adapters experts have no gradients.
    """
    moe = cfg.model.moe
    elements = (moe.halves + 1) * moe.experts * moe.ffn_dim * cfg.model.expert_dim
    gathers = cfg.parallel.adaptive_r == 0 and axes.ep > 1
    return (1 if cfg.lora.rank else 2) * elements * compute_bytes(cfg) if gathers else 0


def slice_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes of the copy that etp makes of a rank's slice of its experts of one layer; 0 without etp."""
    moe = cfg.model.moe
    ep, etp = travelling(cfg, axes)
    elements = (moe.halves + 1) * moe.experts // ep * (moe.ffn_dim // etp) * cfg.model.expert_dim
    return elements * compute_bytes(cfg) if etp > 1 else 0


def uses_symm(cfg: Config, axes: Axes) -> bool:
    """Whether `--parallel.dispatch` selects symm, assuming that a node's GPUs share NVLink."""
    near = 1 < axes.ep <= (cfg.node or NODE) and axes.etp == 1
    moe = cfg.model.moe
    by_tokens = cfg.parallel.adaptive_r != 0 and cfg.parallel.dispatch != "nccl"
    plain = not moe.bias and not moe.pad and moe.weigh == "activation"
    return near and by_tokens and plain and not cfg.lora.rank


def coded_row_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes that --train.fp8 adds to one MoE layer's backward: codes of dH, and of rows of dy with scales.

    In addition dH has more bytes than the codes of H, which a forward keeps. Rows that came packed over
    symm's wire are in its buffers.
    """
    if not planned(cfg, axes):
        return 0
    moe, T, K = cfg.model.moe, local_tokens(cfg, axes), cfg.model.moe.top_k
    pairs = rows_of_pairs(cfg, axes)
    if uses_symm(cfg, axes):
        rows = 0 if cfg.parallel.dispatch_dtype == "fp8" else axes.ep * T
    elif moe.pad:
        rows = moe.experts * capacity(T, moe.slots, moe)
    else:
        rows = rows_received(T, K, axes.ep)
    elements = pairs * moe.halves * moe.ffn_dim
    more = elements * compute_bytes(cfg) - h_bytes(cfg, axes, pairs)
    return elements + more + rows * (cfg.model.expert_dim + FP32)


def rows_of_pairs(cfg: Config, axes: Axes) -> int:
    """Rows of one call of the experts: a row for each pair of a token and an expert."""
    T, K = local_tokens(cfg, axes), cfg.model.moe.top_k
    return pairs_bound(T, K, axes.ep, cfg.model.moe.experts // axes.ep) or T * K


def turned_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes of transposed codes that the backward of trained experts holds beyond a backward in bf16.

    The gradient of down has those of dy and of the activation next to the activation, that of gate_up those
    of dH and x. Without them the widest moment is that of dx's rows. Experts have whole blocks of 128 rows.
    """
    if not planned(cfg, axes) or not narrow_gradients(cfg, axes, planned_arch(cfg)):
        return 0
    pairs = rows_of_pairs(cfg, axes)
    moe, D, width = cfg.model.moe, cfg.model.expert_dim, compute_bytes(cfg)
    F, padded = moe.ffn_dim, 128 * Metadata.capacity(pairs, moe.experts // axes.ep, 128)
    most = max(pairs * F * width + padded * (D + F), padded * (moe.halves * F + D))
    return max(0, most - pairs * max(D, F) * width)


def runs_beside(cfg: Config, axes: Axes) -> bool:
    """Whether shared experts run inside the symm dispatcher's op, while its rows are sent."""
    moe = cfg.model.moe
    width = (moe.shared_halves + 1) * moe.shared_dim // 3  # without a gate there are two products, not three
    hidden = hides(axes.ep, compute_bytes(cfg), width) and not moe.latent_dim
    in_float8 = shared_in_float8(cfg.train.float8, cfg.model.dim, moe.shared_dim)
    return uses_symm(cfg, axes) and cfg.parallel.dispatch_dtype != "fp8" and hidden and not in_float8


def exchange_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes that `reserve` of moe/exchange/symm.py allocates, once for all layers.

    For T*ep rows: x, dy, y and sums, and the ids, weights and gradients of the weights of their K slots.
    """
    if not uses_symm(cfg, axes):
        return 0
    rows = axes.ep * local_tokens(cfg, axes)
    W, width = cfg.model.expert_dim, compute_bytes(cfg)
    packed = W * width // 2 + FP32 if cfg.parallel.dispatch_dtype == "fp8" else 0
    return rows * (4 * (W * width + packed) + 3 * cfg.model.moe.slots * FP32)


def rows_received(T: int, top_k: int, ep: int) -> int:
    """Rows R that arrive when every rank sends T tokens with uniform routing, one row per (token, rank).

    A given rank holds none of a token's K experts with probability (1 - 1/ep)^K, if there are many more
    experts than K.
    """
    return round(T * ep * (1.0 - (1.0 - 1.0 / ep) ** top_k))


def window_bytes(cfg: Config, axes: Axes, layer: int) -> int:
    """Bytes that the windows after the first add to a block's backward, empty or not.

    They are H, and with symm also dH and the activations, in addition to those of the first window.
    """
    moe, ep = cfg.model.moe, travelling(cfg, axes)[0]
    T = local_tokens(cfg, axes)
    if ep == 1 or not cfg.model.is_moe(layer):
        return 0
    symm = uses_symm(cfg, axes)
    L = moe.experts // ep
    slots = T * ep * min(moe.slots, L) if symm else rows_received(T, moe.top_k, ep) * moe.slots
    pairs = pairs_bound(T, moe.top_k, ep, L) or slots
    if pairs >= slots:  # one window
        return 0
    # under etp 1/etp of the width, for etp times the pairs
    columns = moe.halves + 1 if symm else 0
    return h_bytes(cfg, axes, pairs) + columns * pairs * moe.ffn_dim * compute_bytes(cfg)
