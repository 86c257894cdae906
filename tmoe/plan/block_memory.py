"""Bytes that one block, the loss and the exchange of tokens hold on a rank, in closed form.

T, here, are the tokens of one rank: under tp and cp a part of each of its sequences. Inside attention a rank
has more tokens and fewer heads: tp gathers the tokens of its group, cp by keys the keys of whole sequences.

next: tmoe/log/metrics.py
"""

from __future__ import annotations

from tmoe.config.axes import Axes
from tmoe.config.float8 import fits, shared_in_float8
from tmoe.config.run import Config
from tmoe.model.count import block_shapes, qk_width, v_width
from tmoe.model.loss import chunk_rows
from tmoe.moe.exchange.dispatch import pairs_bound
from tmoe.moe.exchange.symm import hides
from tmoe.moe.select.capacity import capacity
from tmoe.ops.loss import logprob
from tmoe.ops.loss.cross_entropy import aligned

FP32 = 4  # bytes: master parameters, gradients after reduction, both moments, the moving average
INT32 = 4
VECTORS = 12  # numbers a token: log-prob, entropy, log-sum-exp, their gradients, what a loss takes
NODE = 8  # GPUs of a host that reach each other's memory


def compute_bytes(cfg: Config) -> int:
    return {"bf16": 2, "fp32": 4}[cfg.train.dtype]


def local_tokens(cfg: Config, axes: Axes) -> int:
    """Tokens T of a rank in a micro-batch."""
    return cfg.train.batch * cfg.train.seq // axes.parts


def layer_bytes(cfg: Config, axes: Axes, layer: int, checkpoint: str = "none") -> int:
    """Bytes that autograd keeps of one block: of attention, then of the feed-forward of its kind.

    checkpoint: the part that is recomputed in the backward, of which only the input is kept.

    This is for a compiled block: inductor recomputes pointwise results in the backward, but keeps operands of
    matrix products. Within 2% of the saved tensors of such blocks (tests/run/test_memory.py,
    test_block_memory.py); eager blocks keep 1.3 to 2 times as much.
    """
    model, width = cfg.model, compute_bytes(cfg)
    T, D = local_tokens(cfg, axes), model.dim

    # the residual stream, operand of qkv itself unless a norm stands between: its output, root mean square
    norm = T * (D * width + FP32)  # a norm behind a branch keeps what that gave
    around_attention, around_feed_forward = model.norms_of(layer)
    attention = T * D * width + around_attention * norm
    latent = model.attention == "mla"
    attention += (latent_elements(cfg, axes) if latent else grouped_elements(cfg, axes, layer)) * width
    attention += statistics(cfg, axes, layer) * FP32

    feed_forward = T * D * width + around_feed_forward * norm
    feed_forward += moe_bytes(cfg, axes) if model.is_moe(layer) else 3 * T * model.ffn_dim * width

    feed_forward += slice_bytes(cfg, axes) if model.is_moe(layer) else 0

    stream = T * D * width
    if checkpoint == "block":
        return stream
    if checkpoint == "attention":
        return stream + feed_forward
    if checkpoint == "moe":
        return attention + stream
    return attention + feed_forward


def statistics(cfg: Config, axes: Axes, layer: int) -> int:
    """Elements in fp32 that attention keeps: logsumexp, and root mean squares of the norms inside it."""
    model, tp = cfg.model, axes.tp
    T = local_tokens(cfg, axes)
    kept = T * model.heads  # 1/tp of the heads for tp times the tokens
    if model.attention == "mla":
        return kept + T * (1 + (model.mla.q_rank > 0))
    H, G = model.heads // tp, max(1, model.kv_heads_in(model.window_of(layer)) // tp)
    if model.qk_norm in ("head", "rotated"):
        kept += T * tp * (H + G)
    if model.qk_norm == "full":  # under tp q and k themselves in fp32: mean squares come of all ranks
        kept += T * tp * (2 + ((H + G) * model.head_dim if tp > 1 else 0))
    return kept


def grouped_elements(cfg: Config, axes: Axes, layer: int) -> int:
    """Elements in the compute type that grouped-query attention keeps between its norm and its result.

    The result, operand of the output projection, is among them.
    """
    model, C, V = cfg.model, cfg.model.head_dim, cfg.model.value_dim
    own, cp = local_tokens(cfg, axes) * axes.tp, axes.cp  # tokens that tp gathers
    window = model.window_of(layer)
    H, G = model.heads // axes.tp, max(1, model.kv_heads_in(window) // axes.tp)  # of this rank
    by_keys = cp > 1 and cfg.parallel.cp_by == "keys"
    # Attention pads v and the result, except in flex attention, and where it calls cuDNN.
    masked = by_keys or cfg.train.isolate_documents or model.sinks_in(window) or 0 < window < cfg.train.seq
    padded = V < C and not masked
    read = C if padded else V  # channels of a value, and of a result, as attention has them
    gate = H * V * model.attention_gate
    kept = own * (H * V + gate)  # the result, and what it was before a gate multiplied it
    if axes.tp > 1:
        kept += ((H + G) * C + G * V + gate) * model.dim  # the rows of qkv's weight, copied together
    # q, k, v as one product gives them: v is a view into it, unless it travels, is padded or has a factor;
    # QK-norm reads q and k there. So is the gate, which else is kept alone.
    turned = model.qk_norm != "none" or model.rope_of(layer) is not None
    copied = padded or model.value_multiplier != 1.0
    whole = model.qk_norm != "none" or (cp == 1 and not (turned and copied))
    kept += own * ((H + G) * C + G * V + gate if whole else gate)
    if cp == 1:  # q and k after RoPE and norms; v and the result that are not as they came
        return kept + own * ((H + G) * C * turned + G * read * copied + H * C * padded)
    if by_keys:
        return kept + own * H * C + own * cp * G * (C + V)  # keys and values of all tokens
    # all tokens of 1/cp of the heads: q, k, v, and the result before it travels home
    return kept + own * (H + key_copies(H, G, cp) * G) * (C + read)


def key_copies(H: int, G: int, cp: int) -> int:
    """How often cp by heads repeats G key heads so that each rank has those of its query heads."""
    if G % cp == 0:
        return 1
    return cp // G if cp % G == 0 else H // G


def latent_elements(cfg: Config, axes: Axes) -> int:
    """Elements in the compute type that latent attention keeps between its norm and its result.

    The result, operand of the output projection, is among them.
    """
    mla, tp, cp = cfg.model.mla, axes.tp, axes.cp
    T = local_tokens(cfg, axes)
    own = T * tp  # tokens that tp gathers
    by_keys = cp > 1 and cfg.parallel.cp_by == "keys"
    by_heads = cp > 1 and not by_keys
    H = cfg.model.heads // tp
    latent = mla.kv_rank + mla.rope_dim  # what keys and values are made of
    queries, values = H * qk_width(cfg.model), H * v_width(cfg.model)

    # the output of one product, which the latents' norms read; under tp queries are a product of their own
    kept = T * ((mla.q_rank or (queries if tp == 1 else 0)) + latent)
    # latents after their norms, operands of the next products: under tp as they came
    if tp == 1:
        kept += T * (mla.q_rank + (0 if by_keys else mla.kv_rank))
    elif mla.q_rank or not by_keys:
        kept += own * (mla.q_rank + latent)
    if tp > 1 and not mla.q_rank:
        kept += queries * cfg.model.dim  # the rows of their weight, copied
    if by_keys:
        kept += own * cp * latent
    seen = own * cp if by_keys else own  # tokens whose keys and values are here
    kept += own * queries + seen * queries  # q and k, joined of their parts with and without position
    # Attention pads v and the result, except in flex attention, and where it calls cuDNN.
    narrow = mla.v_dim < qk_width(cfg.model)
    if narrow and not by_keys and not cfg.train.isolate_documents:
        kept += own * 2 * queries
    elif by_heads:  # v, and the result before it travels home
        kept += own * 2 * values
    else:
        # the product of keys and values: v is a view into it
        kept += seen * H * (mla.nope_dim + mla.v_dim)
    return kept + own * values


def moe_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes that autograd keeps of one MoE feed-forward beyond the norm's output that it reads."""
    moe, D, width = cfg.model.moe, cfg.model.dim, compute_bytes(cfg)
    ep, etp = travelling(cfg, axes)
    T, K = local_tokens(cfg, axes), moe.slots
    W = cfg.model.expert_dim
    kept = T * moe.outputs * FP32  # the router's logits
    kept += 2 * T * moe.latent_dim * width  # what latent experts read and give, both operands of products
    if moe.jitter:
        kept += 2 * T * D * FP32  # its input after jitter, operand of an fp32 product, and the factors
    # shared experts: gate, up, and their product, which is recomputed where one op does them and the routed
    # experts
    kept += (2 if runs_beside(cfg, axes) else 3) * T * moe.shared_dim * width
    # H: under etp 1/etp of the width, of etp times the pairs
    kept += (
        (pairs_bound(T, moe.top_k, ep, moe.experts // ep) or T * moe.top_k) * moe.halves * moe.ffn_dim * width
    )
    if uses_symm(cfg, axes):
        # weights and ids; the backward pushes x again, and sorts the slots again
        return kept + T * K * (FP32 + INT32)
    if moe.pad:  # slots of one pair each, filled or not, and which slots are a token's
        R, K = etp * moe.experts * capacity(T, K, moe), 1
        kept += R * W * width + T * moe.top_k * 2 * INT32
    else:
        R = etp * rows_received(T, moe.top_k, ep)
        if moe.weigh != "activation":
            return kept + sorted_bytes(cfg, axes, R)
        kept += R * W * width if ep * etp > 1 else 0  # rows received; else they are read in place
    return kept + R * K * (FP32 + 3 * INT32)  # weight, id, place and order of each slot


def left_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes that one MoE layer's backward keeps for the gradients of its experts' matrices (schedule v).

    dH and the weighted activation of the pairs, copies of the rows and of their results' gradients, weights,
    and the rows' order.
    """
    moe, W, width = cfg.model.moe, cfg.model.expert_dim, compute_bytes(cfg)
    T = local_tokens(cfg, axes)
    R = rows_received(T, moe.top_k, axes.ep)
    pairs = pairs_bound(T, moe.top_k, axes.ep, moe.experts // axes.ep) or R * moe.slots
    return ((moe.halves + 1) * pairs * moe.ffn_dim + 2 * R * W) * width + R * moe.slots * (FP32 + 2 * INT32)


def sorted_bytes(cfg: Config, axes: Axes, R: int) -> int:
    """Bytes that autograd keeps of R rows received where weights apply before or after the experts.

    A row for each pair: what the experts read, and what its weight multiplies. Then the weights, and numbers.
    """
    moe, width = cfg.model.moe, compute_bytes(cfg)
    N = axes.etp * local_tokens(cfg, axes) * moe.top_k  # as many pairs come as go, if experts are evenly used
    slots = N if axes.ep > 1 else R * moe.top_k
    pairs = 2 * slots * cfg.model.expert_dim * width + slots * FP32
    # of each pair its row and slot, and the op's weight of 1, id, place and order; of each slot its id
    return pairs + slots * (2 * INT32 + FP32 + 3 * INT32)


def travelling(cfg: Config, axes: Axes) -> tuple[int, int]:
    """Ranks that a layer's tokens travel to (ep), and that divide an expert (etp), by `adaptive_r`.

    "auto" is taken for the layout's own.
    """
    r = cfg.parallel.adaptive_r
    if r == 0:
        return 1, 1
    return axes.ep, r if isinstance(r, int) else axes.etp


def gathered_expert_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes of all experts of a layer and of their gradients, while its backward runs with adaptive_r 0."""
    moe = cfg.model.moe
    elements = (moe.halves + 1) * moe.experts * moe.ffn_dim * cfg.model.expert_dim
    here = cfg.parallel.adaptive_r == 0 and axes.ep > 1
    return 2 * elements * compute_bytes(cfg) if here else 0


def slice_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes of a rank's slice of its experts of one layer, a copy that etp makes; 0 without etp."""
    moe = cfg.model.moe
    ep, etp = travelling(cfg, axes)
    elements = (moe.halves + 1) * moe.experts // ep * (moe.ffn_dim // etp) * cfg.model.expert_dim
    return elements * compute_bytes(cfg) if etp > 1 else 0


def uses_symm(cfg: Config, axes: Axes) -> bool:
    """Whether `--parallel.dispatch` comes to symm, given hosts of NODE GPUs that share NVLink."""
    near = 1 < axes.ep <= NODE and axes.etp == 1
    moe = cfg.model.moe
    by_tokens = cfg.parallel.adaptive_r != 0 and cfg.parallel.dispatch != "nccl"
    return near and by_tokens and not moe.bias and not moe.pad and moe.weigh == "activation"


def runs_beside(cfg: Config, axes: Axes) -> bool:
    """Whether shared experts run inside the symm dispatcher's op, while its rows travel."""
    moe = cfg.model.moe
    hidden = hides(axes.ep, compute_bytes(cfg), moe.shared_dim) and not moe.latent_dim
    in_float8 = shared_in_float8(cfg.train.float8, cfg.model.dim, moe.shared_dim)
    return uses_symm(cfg, axes) and cfg.parallel.wire != "fp8" and hidden and not in_float8


def exchange_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes that `reserve` of moe/exchange/symm.py takes, once for all layers.

    Of T*ep rows: x, dy, y and sums, and the ids, weights and gradients of the weights of their K slots.
    """
    if not uses_symm(cfg, axes):
        return 0
    rows = axes.ep * local_tokens(cfg, axes)
    W, width = cfg.model.expert_dim, compute_bytes(cfg)
    packed = W * width // 2 + FP32 if cfg.parallel.wire == "fp8" else 0
    return rows * (4 * (W * width + packed) + 3 * cfg.model.moe.slots * FP32)


def rows_received(T: int, top_k: int, ep: int) -> int:
    """Rows R that arrive when every rank sends T tokens with uniform routing, one row per (token, rank).

    A given rank holds none of a token's K experts with probability (1 - 1/ep)^K, where experts are many more
    than K.
    """
    return round(T * ep * (1.0 - (1.0 - 1.0 / ep) ** top_k))


def loss_bytes(cfg: Config, axes: Axes) -> int:
    """Most bytes that the loss holds at one time, in its forward or in its backward.

    Forward: a chunk of logits, which become their gradient; the head's gradient in fp32; a copy of the head
        where rows are added to it for alignment.
    Backward: that gradient, and its scaled copy in the compute type.
    Always: hidden states before and after the final norm, and their gradient. A loss made of log-probs
        (`ops.token_loss`, `ops.logprobs`) has VECTORS numbers a token as well.
    """
    width = compute_bytes(cfg)
    if not by_log_probs(cfg):
        return _head_bytes(cfg, axes, chunk_rows(cfg.model.vocab, gpu=True))
    rows = logprob.chunk_rows(aligned(cfg.model.vocab, width), width)
    return _head_bytes(cfg, axes, rows) + VECTORS * FP32 * local_tokens(cfg, axes)


def by_log_probs(cfg: Config) -> bool:
    """Whether the task's loss is made of log-probs; else it is the fused cross-entropy."""
    return cfg.task in ("preference", "grpo") or (cfg.task == "sft" and cfg.sft.dft)


def _head_bytes(cfg: Config, axes: Axes, rows: int) -> int:
    """Bytes of a loss that holds logits of `rows` tokens at a time."""
    T, V, width = local_tokens(cfg, axes), cfg.model.vocab, compute_bytes(cfg)
    columns = aligned(V, width)
    table = columns * cfg.model.dim
    copy = table if columns > V else 0
    head = FP32 * table + width * max(min(rows, T) * columns + copy, table)
    return 3 * T * cfg.model.dim * width + head


def backward_bytes(cfg: Config, axes: Axes, layer: int) -> int:
    """Temporaries of one block's backward: gradients of saved tensors, what is recomputed, later windows.

    Under tp the gathered input of the projections and its gradient, of all the group's tokens.
    """
    whole = layer_bytes(cfg, axes, layer)
    again = 2 * whole - layer_bytes(cfg, axes, layer, cfg.parallel.checkpoint)
    gathered = 2 * (axes.tp - 1) * local_tokens(cfg, axes) * cfg.model.dim * compute_bytes(cfg)
    experts = gathered_expert_bytes(cfg, axes) if cfg.model.is_moe(layer) else 0
    return again + gathered + experts + window_bytes(cfg, axes, layer) + cast_bytes(cfg, axes, layer)


def cast_bytes(cfg: Config, axes: Axes, layer: int) -> int:
    """Bytes of the float8 copies that one layer's two products of the backward read (--train.float8).

    dx: the gradient of the result, and the weight; dW: that gradient again, by columns, and the input. The
    widest layer of the block counts.
    """
    if cfg.train.float8 == "none":
        return 0
    T, (dense, _) = local_tokens(cfg, axes), block_shapes(cfg.model, layer)
    wide = [shape for shape in dense if len(shape) == 2 and fits(*shape)]
    return max((T * (2 * rows + columns) + rows * columns for rows, columns in wide), default=0)


def window_bytes(cfg: Config, axes: Axes, layer: int) -> int:
    """Bytes that the windows after the first add to a block's backward, empty or not.

    They are H, and with symm dH and the activations too, beside those of the first window.
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
    # under etp 1/etp of the width, of etp times the pairs
    columns = 2 * moe.halves + 1 if symm else moe.halves
    return columns * pairs * moe.ffn_dim * compute_bytes(cfg)
