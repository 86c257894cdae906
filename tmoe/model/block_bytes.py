"""Bytes that attention and the loss hold on a rank, in closed form.

T is the number of tokens of one rank: under tp and cp a part of each of its sequences. Inside attention a
rank has more tokens and fewer heads: tp gathers the tokens of its group, cp by keys the keys of whole
sequences.

next: tmoe/plan/block_memory.py
"""

from __future__ import annotations

from tmoe.config.axes import Axes
from tmoe.config.run import Config
from tmoe.config.sizes import FP32, compute_bytes, local_tokens
from tmoe.model.count import qk_width, v_width
from tmoe.model.loss import chunk_rows
from tmoe.moe.fp8_choice import planned_arch
from tmoe.ops.delta import chunks, gpu
from tmoe.ops.loss import logprob
from tmoe.ops.loss.cross_entropy import aligned

VECTORS = 12  # per token: log-prob, entropy, log-sum-exp, their gradients, inputs of a loss


def attention_elements(cfg: Config, axes: Axes, layer: int) -> int:
    """Elements in the compute type that a block's attention keeps between its norm and its result.

    They include the result, which is the operand of the output projection. 0 in a block without attention.
    """
    if not cfg.model.mixes(layer):
        return 0
    if cfg.model.is_linear(layer):
        return linear_elements(cfg, axes)
    latent = cfg.model.attention == "mla"
    return latent_elements(cfg, axes) if latent else grouped_elements(cfg, axes, layer)


def linear_elements(cfg: Config, axes: Axes) -> int:
    """`attention_elements` of a linear layer.

    They are qkvz and ba; queries, keys and values after the convolution; the former two at length 1, unless
    the layer is Mamba-2; the rule's result, and the gated result. cp adds the heads that a rank gets, and the
    results that it gets back; tp copies rows of weights.
    """
    n = cfg.model.linear
    rows = n.mixed + n.value_width + n.gate_rows
    normed = 0 if n.kind == "mamba2" else 2 * n.key_width
    kept = local_tokens(cfg, axes) * (rows + n.mixed + normed + 2 * n.value_width)
    if axes.cp > 1:
        kept += local_tokens(cfg, axes) * (n.mixed + n.gate_rows + n.value_width)
    return kept + (rows // axes.tp * cfg.model.dim if axes.tp > 1 else 0)


def rule_bytes(cfg: Config, axes: Axes, layer: int) -> int:
    """Bytes of temporaries in the backward of a linear layer's rule; 0 for another layer.

    They are those of the kernels where kernels are used, else those of the plain form.
    """
    if not cfg.model.is_linear(layer):
        return 0
    n, correct = cfg.model.linear, cfg.model.linear.kind != "mamba2"
    if not with_kernels(cfg):
        numbers = FP32 * chunks.temporaries(n.value_heads, n.key_dim, n.value_dim, correct)
        return local_tokens(cfg, axes) * numbers
    heads = n.value_heads, n.key_heads, n.key_dim, n.value_dim
    return local_tokens(cfg, axes) * gpu.temporaries(heads, True, correct)


def with_kernels(cfg: Config) -> bool:
    """Whether kernels compute the rule of linear layers on the GPU of a planned run."""
    n = cfg.model.linear
    fits = gpu.fits(n.key_dim, n.value_dim, cfg.train.dtype == "bf16", n.kind != "mamba2")
    return fits and planned_arch(cfg) in gpu.MEASURED


def statistics(cfg: Config, axes: Axes, layer: int) -> int:
    """Elements in fp32 that attention keeps: logsumexp, and root mean squares of its inner norms.

    In a linear layer: decays and beta, root mean squares, and what the rule's kernels keep. In Mamba-2 also
    the gated result before its norm.
    """
    model, tp = cfg.model, axes.tp
    T = local_tokens(cfg, axes)
    if not model.mixes(layer):
        return 0
    if model.is_linear(layer):
        n = model.linear
        if n.kind == "mamba2":
            return T * (n.value_width + 2 * n.value_heads + n.key_heads)
        # decays, beta, root mean squares; with kernels also the sums of decays and T (ops/delta/gpu.py)
        kernels = 1 + gpu.LENGTH if with_kernels(cfg) else 0
        return T * (n.value_heads * (3 + kernels) + 2 * n.key_heads)
    kept = T * model.heads  # 1/tp of the heads for tp times the tokens
    if model.attention == "mla":
        return kept + T * (1 + (model.mla.q_rank > 0))
    H, G = model.heads // tp, max(1, model.kv_heads_in(model.window_of(layer)) // tp)
    if model.qk_norm in ("head", "rotated"):
        kept += T * tp * (H + G)
    if model.qk_norm == "full":  # under tp q and k in fp32: mean squares are summed over ranks
        kept += T * tp * (2 + ((H + G) * model.head_dim if tp > 1 else 0))
    return kept


def grouped_elements(cfg: Config, axes: Axes, layer: int) -> int:
    """Elements in the compute type that grouped-query attention keeps between its norm and its result.

    They include the result, which is the operand of the output projection.
    """
    model, C, V = cfg.model, cfg.model.head_dim, cfg.model.value_dim
    tokens, cp = local_tokens(cfg, axes) * axes.tp, axes.cp  # tokens that tp gathers
    window = model.window_of(layer)
    H, G = model.heads // axes.tp, max(1, model.kv_heads_in(window) // axes.tp)  # of this rank
    by_keys = cp > 1 and cfg.parallel.cp_exchange == "keys"
    # Attention pads v and the result, except in flex attention and in calls of cuDNN.
    masked = by_keys or cfg.train.isolate_documents or model.sinks_in(window) or 0 < window < cfg.train.seq
    padded = V < C and not masked
    read = C if padded else V  # channels of a value, and of a result, inside attention
    gate = H * V * model.attention_gate
    kept = tokens * (H * V + gate)  # the result, and the result before the gate
    if axes.tp > 1:
        kept += ((H + G) * C + G * V + gate) * model.dim  # copy of the rows of qkv's weight
    # q, k, v as the result of one product: v is a view into it, unless it is sent, padded or has a factor.
    # QK-norm reads q and k from it. The gate is part of it too; otherwise the gate is kept alone.
    turned = model.qk_norm != "none" or model.rope_of(layer) is not None
    copied = padded or model.value_multiplier != 1.0
    whole = model.qk_norm != "none" or (cp == 1 and not (turned and copied))
    kept += tokens * ((H + G) * C + G * V + gate if whole else gate)
    if cp == 1:  # q and k after RoPE and norms; v and the result if they are copies
        return kept + tokens * ((H + G) * C * turned + G * read * copied + H * C * padded)
    if by_keys:
        return kept + tokens * H * C + tokens * cp * G * (C + V)  # keys and values of all tokens
    # q, k, v and the result before its exchange: all tokens of 1/cp of the heads
    return kept + tokens * (H + key_copies(H, G, cp) * G) * (C + read)


def key_copies(H: int, G: int, cp: int) -> int:
    """How often cp by heads repeats G key heads, so that each rank has the key heads of its query heads."""
    if G % cp == 0:
        return 1
    return cp // G if cp % G == 0 else H // G


def latent_elements(cfg: Config, axes: Axes) -> int:
    """Elements in the compute type that latent attention keeps between its norm and its result.

    They include the result, which is the operand of the output projection.
    """
    mla, tp, cp = cfg.model.mla, axes.tp, axes.cp
    T = local_tokens(cfg, axes)
    tokens = T * tp  # tokens that tp gathers
    by_keys = cp > 1 and cfg.parallel.cp_exchange == "keys"
    by_heads = cp > 1 and not by_keys
    H = cfg.model.heads // tp
    latent = mla.kv_rank + mla.rope_dim  # the inputs of keys and values
    queries, values = H * qk_width(cfg.model), H * v_width(cfg.model)

    # the output of one product, which the latents' norms read; under tp queries are a separate product
    kept = T * ((mla.q_rank or (queries if tp == 1 else 0)) + latent)
    # latents after their norms, operands of the next products; under tp gathered
    if tp == 1:
        kept += T * (mla.q_rank + (0 if by_keys else mla.kv_rank))
    elif mla.q_rank or not by_keys:
        kept += tokens * (mla.q_rank + latent)
    if tp > 1 and not mla.q_rank:
        kept += queries * cfg.model.dim  # copy of the rows of their weight
    if by_keys:
        kept += tokens * cp * latent
    seen = tokens * cp if by_keys else tokens  # tokens whose keys and values are on this rank
    kept += tokens * queries + seen * queries  # q and k, concatenated from their parts
    # Attention pads v and the result, except in flex attention and in calls of cuDNN.
    narrow = mla.v_dim < qk_width(cfg.model)
    if narrow and not by_keys and not cfg.train.isolate_documents:
        kept += tokens * 2 * queries
    elif by_heads:  # v, and the result before its exchange
        kept += tokens * 2 * values
    else:
        # the product of keys and values: v is a view into it
        kept += seen * H * (mla.nope_dim + mla.v_dim)
    return kept + tokens * values


def loss_bytes(cfg: Config, axes: Axes) -> int:
    """Most bytes that the loss holds at one time, in its forward or in its backward.

    Forward: a chunk of logits, which become their gradient; the head's gradient in fp32; a copy of the head
        if rows are added to it for alignment.
    Backward: the head's gradient, and its scaled copy in the compute type. Under adapters the head is frozen
        and has no gradient.
    Always: hidden states before and after the final norm, and their gradient. A loss computed from log-probs
        (`ops.token_loss`, `ops.logprobs`) also holds VECTORS numbers per token.
    """
    width = compute_bytes(cfg)
    if not by_log_probs(cfg):
        return _head_bytes(cfg, axes, chunk_rows(cfg.model.vocab, gpu=True))
    rows = logprob.chunk_rows(aligned(cfg.model.vocab, width), width)
    return _head_bytes(cfg, axes, rows) + VECTORS * FP32 * local_tokens(cfg, axes)


def further_loss_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes that the loss of one depth of --model.mtp keeps for its backward.

    They are the gradients of hidden states and head, which the forward computes.
    """
    table = 0 if cfg.model.mtp.detach else FP32 * cfg.model.vocab * cfg.model.dim
    return table + local_tokens(cfg, axes) * cfg.model.dim * compute_bytes(cfg)


def by_log_probs(cfg: Config) -> bool:
    """Whether the task's loss is computed from log-probs; otherwise it is the fused cross-entropy."""
    return cfg.task in ("preference", "grpo") or (cfg.task == "sft" and cfg.sft.dft)


def _head_bytes(cfg: Config, axes: Axes, rows: int) -> int:
    """Bytes of a loss that holds logits of `rows` tokens at a time."""
    T, V, width = local_tokens(cfg, axes), cfg.model.vocab, compute_bytes(cfg)
    columns = aligned(V, width)
    table = columns * cfg.model.dim
    copy = table if columns > V else 0
    logits = min(rows, T) * columns + copy
    head = width * logits if cfg.lora.rank else FP32 * table + width * max(logits, table)
    return 3 * T * cfg.model.dim * width + head
