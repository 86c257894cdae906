"""Parameters, FLOPs and bytes of a configuration in closed form: nothing is built, no process is needed.

Parameter counts follow the shapes of tmoe/model/transformer.py, which a test compares with the built model.
Memory is an estimate of what FSDP2 and autograd hold, term by term, so that a reader can find the term that
is too large.

next: tmoe/run/metrics.py
"""

from __future__ import annotations

from math import prod

from tmoe.config.axes import Axes
from tmoe.config.check import require
from tmoe.config.run import Config
from tmoe.model.count import Shape, block_shapes, numel, qk_width, root_shapes, v_width
from tmoe.model.loss import chunk_rows
from tmoe.moe.dispatch import pairs_bound
from tmoe.moe.symm import hides
from tmoe.ops.cross_entropy import aligned
from tmoe.parallel.mesh import keeps_whole, shard_dim, units

FP32 = 4  # bytes: master parameters, gradients after reduction, both moments, the moving average
INT32 = 4
NODE = 8  # GPUs of a host that reach each other's memory


def memory_per_rank(cfg: Config, axes: Axes) -> dict[str, int]:
    """Bytes that the fullest rank of a mesh of GPUs holds, by purpose. `peak_bytes` adds them up.

    parameters, gradients, moments, ema: fp32, sharded. moments are AdamW's two, 0 with optim.offload. ema is
        0 where no average is kept. Gradients that need no reduction stay in the compute type, unless
        micro-batches add up: those of what a rank holds whole, which is the experts where dp is 1, and all in
        a world of 1.
    gathered: in the compute type, the root, and two each of FSDP2's units of blocks and of the experts: one
        at work and one prefetched. Of what a rank holds or keeps whole, the working copies of all blocks.
    accumulated: with more than one micro-batch, gradients that wait unreduced in fp32 until the last one.
    activations: what autograd keeps from a micro-batch's forward to its backward, for balanced routing.
    working: temporaries of the backward, in the loss or in a block, whichever is more.
    exchange: the peers' window into this rank with the symm dispatcher, which torch's allocator does not see.

    Raises ConfigError if ep does not divide the experts.
    """
    model = cfg.model
    dp, ep, shard = axes.dp, axes.ep, axes.shard
    require(
        not any(map(model.is_moe, range(model.layers))) or model.moe.experts % ep == 0,
        f"--parallel.ep={ep}: must divide --model.moe.experts={model.moe.experts}",
    )
    width = compute_bytes(cfg)
    alone = axes.world == 1
    keeps = kept_whole(cfg, axes)
    blocks = [block_shapes(model, layer) for layer in range(model.layers)]
    root = root_shapes(model)

    # Elements: this rank's share of all parameters, and of each block its parts whole.
    own = sharded(root, shard) + sum(sharded(d, shard) + expert_shard(e, axes) for d, e in blocks)
    dense = [numel(shapes) for shapes, _ in blocks]
    padded = [sharded(shapes, shard) * shard for shapes, _ in blocks]  # as FSDP2 gathers them
    experts = [numel(shapes) // ep for _, shapes in blocks]
    held = own if alone else sum(experts) if dp == 1 else 0  # by this rank alone

    # What passes through FSDP2's hands at each block: its unit of blocks, and experts that are not kept.
    together = [[i] for i in range(model.layers)] if alone else units([width * n for n in dense])
    passing = [sum(padded[i] for i in unit) for unit in together for _ in unit]
    shared = [0 if keeps or dp == 1 else dp * expert_shard(shapes, axes) for _, shapes in blocks]
    gathered = sum(experts) if keeps else 0
    if not alone:
        gathered += sharded(root, shard) * shard
        gathered += 2 * max(map(sum, zip(passing, shared, strict=True)))

    # Activations, and what the backward of a block holds besides.
    kept = [layer_bytes(cfg, ep, layer, cfg.parallel.checkpoint) for layer in range(model.layers)]
    backward = [backward_bytes(cfg, ep, layer) for layer in range(model.layers)]
    # Gradients in the compute type, and what travels: FSDP2's in fp32; of kept experts, another layer's
    # gradients and those that arrive.
    gradients = [
        (width + FP32 * (not alone)) * unreduced + (width + 2 * width * keeps) * n + FP32 * fsdp
        for unreduced, n, fsdp in zip(passing, experts, shared, strict=True)
    ]
    head = width * model.vocab * model.dim  # its gradient waits in the compute type until the root reduces it
    parts = {
        "parameters": FP32 * own,
        "gradients": FP32 * (own - held) + (width if cfg.train.accumulate == 1 else FP32) * held,
        "moments": 0 if cfg.optim.offload else 2 * FP32 * own,
        "ema": FP32 * own if cfg.optim.ema else 0,
        "gathered": width * (gathered + (held if width < FP32 else 0)),
        "accumulated": FP32 * (numel(root) + sum(dense) + sum(experts)) if cfg.train.accumulate > 1 else 0,
        "activations": sum(kept),
        "working": max(loss_bytes(cfg), head + max(map(sum, zip(gradients, backward, strict=True)))),
        "exchange": exchange_bytes(cfg, ep),
    }
    return kept_for_a_step(parts, cfg, axes, root, [shapes for shapes, _ in blocks])


def kept_for_a_step(
    parts: dict[str, int], cfg: Config, axes: Axes, root: list[Shape], blocks: list[list[Shape]]
) -> dict[str, int]:
    """The same parts as --parallel.shard has them, which 3 leaves as they are (parallel/zero.py).

    1 and 2: all dense weights are gathered, not two units of blocks. 2: of their gradients a rank's shard
    waits between micro-batches, not the whole.

    root, blocks: shapes of a rank's dense weights, outside of its blocks and of each block.
    """
    if cfg.parallel.shard == 3 or axes.stage == 1:
        return parts
    width, shard = compute_bytes(cfg), axes.shard
    padded = [sharded(shapes, shard) * shard for shapes in blocks]
    together = units([width * numel(shapes) for shapes in blocks])
    largest = max(sum(padded[i] for i in unit) for unit in together)
    parts["gathered"] += width * max(0, sum(padded) - 2 * largest)
    if cfg.parallel.shard == 2 and cfg.train.accumulate > 1:
        parts["accumulated"] -= FP32 * sum(numel(s) - sharded(s, shard) for s in [root, *blocks])
    return parts


def peak_bytes(memory: dict[str, int]) -> int:
    """Largest sum of `memory_per_rank`'s terms that live at the same time.

    Sharded gradients appear block by block while the backward frees activations (and unreduced gradients), so
    the larger of the two counts, not their sum. CUDA's context, NCCL's buffers and the allocator's fragments
    come on top.
    """
    always = sum(memory[name] for name in ("parameters", "moments", "ema", "gathered", "working", "exchange"))
    return always + max(memory["activations"] + memory["accumulated"], memory["gradients"])


def require_room(cfg: Config, axes: Axes, room: int) -> None:
    """Raises ConfigError where a rank of `room` bytes surely cannot hold its part.

    Its part is parameters, gradients and moments, which every step has at one time, or half of what
    `peak_bytes` estimates; with eval_only its parameters. Between that and the full estimate the run is
    tried: the estimate is for balanced routing.
    """
    parts = memory_per_rank(cfg, axes)
    if cfg.eval_only:
        need, what = parts["parameters"], "parameters"
    else:
        state = sum(parts[name] for name in ("parameters", "gradients", "moments"))
        half = peak_bytes(parts) // 2
        need, what = max((state, "parameters, gradients and moments"), (half, "half of a step"))
    require(
        need <= room,
        f"--parallel.dp={axes.dp} --parallel.ep={axes.ep}: a rank has {room / 2**30:.1f} GiB of memory "
        f"and needs {need / 2**30:.1f} for {what}; use more ranks, a smaller --model or --train.batch, "
        "--parallel.checkpoint or --optim.offload (--dry-run lists the parts)",
    )


def compute_bytes(cfg: Config) -> int:
    return {"bf16": 2, "fp32": 4}[cfg.train.dtype]


def sharded(shapes: list[Shape], ranks: int) -> int:
    """Elements on the fullest rank.

    FSDP2 cuts dimension 0 into equal pieces, rounded up. The last ones are short, but travel as long as the
    others.
    """
    return sum(-(-rows // ranks) * prod(rest) for rows, *rest in shapes)


def expert_shard(shapes: list[Shape], axes: Axes) -> int:
    """Elements on the fullest rank: L = E/ep experts, cut over dp along mesh.py's shard_dim."""
    local = [(rows // axes.ep, *rest) for rows, *rest in shapes]
    by_row = shard_dim(local, axes.dp) == 1
    return sum(sharded([(M, L, *N) if by_row else (L, M, *N)], axes.dp) for L, M, *N in local)


def kept_whole(cfg: Config, axes: Axes) -> bool:
    """Whether ranks that share experts keep them whole."""
    elements = sum(numel(block_shapes(cfg.model, layer)[1]) // axes.ep for layer in range(cfg.model.layers))
    experts = [cfg.model.moe.experts // axes.ep]
    return keeps_whole(axes.dp, experts, compute_bytes(cfg) * elements, cfg.parallel.whole_gib)


def padding(cfg: Config, axes: Axes) -> float:
    """How many times a rank's experts FSDP2 moves when it gathers them, or reduces their gradients.

    More than 1 where it cuts them unevenly, as each piece travels as long as the longest.
    """
    shapes = [block_shapes(cfg.model, layer)[1] for layer in range(cfg.model.layers)]
    if axes.dp == 1 or not any(shapes) or kept_whole(cfg, axes):
        return 1.0
    moved = sum(axes.dp * expert_shard(experts, axes) for experts in shapes)
    return moved / (sum(map(numel, shapes)) / axes.ep)


def layer_bytes(cfg: Config, ep: int, layer: int, checkpoint: str = "none") -> int:
    """Bytes that autograd keeps of one block: of attention, then of the feed-forward of its kind.

    checkpoint: the part that is recomputed in the backward, of which only the input is kept.

    This is for a compiled block: inductor recomputes pointwise results in the backward, but keeps operands of
    matrix products. Within 2% of the saved tensors of such blocks (tests/run/test_memory.py); eager blocks
    keep 1.3 to 2 times as much.
    """
    model, width = cfg.model, compute_bytes(cfg)
    T = cfg.train.batch * cfg.train.seq
    D, H, G, C = model.dim, model.heads, model.kv_heads, model.head_dim

    # Attention: elements a token in the compute type, and statistics a token in fp32.
    elements = 2 * D  # its norm: the input (the residual stream) and the output, operand of qkv
    statistics = H + 1  # logsumexp of every head, the root mean square of the norm
    if model.attention == "mla":
        elements += latent_elements(cfg)
        statistics += 1 + (model.mla.q_rank > 0)  # of the latents' norms
    else:
        # q, k, v as one product gives them: v is a view into it, QK-norm reads q and k there
        elements += (H + 2 * G) * C
        elements += (H + G) * C  # q and k after RoPE
    elements += H * v_width(model)  # attention's result, operand of the output projection
    attention = T * (elements * width + statistics * FP32)

    feed_forward = T * (2 * D * width + FP32)  # its norm: input, output and root mean square
    feed_forward += moe_bytes(cfg, ep) if model.is_moe(layer) else 3 * T * model.ffn_dim * width

    stream = T * D * width
    if checkpoint == "block":
        return stream
    if checkpoint == "attention":
        return stream + feed_forward
    if checkpoint == "moe":
        return attention + stream
    return attention + feed_forward


def latent_elements(cfg: Config) -> int:
    """Elements a token that latent attention keeps between its input and its result."""
    mla = cfg.model.mla
    queries = cfg.model.heads * qk_width(cfg.model)
    # the output of one product, which the latents' norms read
    kept = (mla.q_rank or queries) + mla.kv_rank + mla.rope_dim
    kept += mla.q_rank + mla.kv_rank  # latents after their norms, operands of the next products
    kept += 2 * queries  # q and k, joined of their parts with and without position
    if cfg.train.isolate_documents or mla.v_dim >= qk_width(cfg.model):
        # the product of keys and values: v is a view into it
        return kept + cfg.model.heads * (mla.nope_dim + mla.v_dim)
    # v and the result, as wide as q and k: attention pads them, except where it calls cuDNN
    return kept + 2 * queries


def moe_bytes(cfg: Config, ep: int) -> int:
    """Bytes that autograd keeps of one MoE feed-forward beyond the norm's output that it reads."""
    moe, D, width = cfg.model.moe, cfg.model.dim, compute_bytes(cfg)
    T, K = cfg.train.batch * cfg.train.seq, moe.top_k
    R = rows_received(T, K, ep)
    kept = T * moe.experts * FP32  # the router's logits
    if moe.jitter:
        kept += 2 * T * D * FP32  # its input after jitter, operand of an fp32 product, and the factors
    # shared experts: gate, up, and their product, which is recomputed where one op does them and the routed
    # experts
    kept += (2 if runs_beside(cfg, ep) else 3) * T * moe.shared_dim * width
    kept += (pairs_bound(T, K, ep, moe.experts // ep) or T * K) * 2 * moe.ffn_dim * width  # H
    if uses_symm(cfg, ep):
        # weights and ids; the backward pushes x again, and sorts the slots again
        return kept + T * K * (FP32 + INT32)
    kept += R * D * width if ep > 1 else 0  # rows received; with ep=1 the norm's output is read in place
    return kept + R * K * (FP32 + 3 * INT32)  # weight, id, place and order of each slot


def uses_symm(cfg: Config, ep: int) -> bool:
    """Whether `--parallel.dispatch` comes to symm, given hosts of NODE GPUs that share NVLink."""
    return 1 < ep <= NODE and cfg.parallel.dispatch != "nccl" and not cfg.model.moe.bias


def runs_beside(cfg: Config, ep: int) -> bool:
    """Whether shared experts run inside the symm dispatcher's op, while its rows travel."""
    hidden = hides(ep, compute_bytes(cfg), cfg.model.moe.shared_dim)
    return uses_symm(cfg, ep) and cfg.parallel.wire != "fp8" and hidden


def exchange_bytes(cfg: Config, ep: int) -> int:
    """Bytes that `reserve` of moe/symm.py takes, once for all layers.

    Of T*ep rows: x, dy, y and sums, and the ids, weights and gradients of the weights of their K slots.
    """
    if not uses_symm(cfg, ep):
        return 0
    rows = ep * cfg.train.batch * cfg.train.seq
    D, width = cfg.model.dim, compute_bytes(cfg)
    packed = D * width // 2 + FP32 if cfg.parallel.wire == "fp8" else 0
    return rows * (4 * (D * width + packed) + 3 * cfg.model.moe.top_k * FP32)


def rows_received(T: int, top_k: int, ep: int) -> int:
    """Rows R that arrive when every rank sends T tokens with uniform routing, one row per (token, rank).

    A given rank holds none of a token's K experts with probability (1 - 1/ep)^K, where experts are many more
    than K.
    """
    return round(T * ep * (1.0 - (1.0 - 1.0 / ep) ** top_k))


def loss_bytes(cfg: Config) -> int:
    """Most bytes that the loss holds at one time, in its forward or in its backward.

    Forward: a chunk of logits, which become their gradient; the head's gradient in fp32; a copy of the head
        where rows are added to it for alignment.
    Backward: that gradient, and its scaled copy in the compute type.
    Always: hidden states before and after the final norm, and their gradient.
    """
    T, V, width = cfg.train.batch * cfg.train.seq, cfg.model.vocab, compute_bytes(cfg)
    columns = aligned(V, width)
    table = columns * cfg.model.dim
    copy = table if columns > V else 0
    head = FP32 * table + width * max(min(chunk_rows(V, gpu=True), T) * columns + copy, table)
    return 3 * T * cfg.model.dim * width + head


def backward_bytes(cfg: Config, ep: int, layer: int) -> int:
    """Temporaries of one block's backward: gradients of saved tensors, what is recomputed, later windows."""
    whole = layer_bytes(cfg, ep, layer)
    return 2 * whole - layer_bytes(cfg, ep, layer, cfg.parallel.checkpoint) + window_bytes(cfg, ep, layer)


def window_bytes(cfg: Config, ep: int, layer: int) -> int:
    """Bytes that the windows after the first add to a block's backward, empty or not.

    They are H, and with symm dH and the activations too, beside those of the first window.
    """
    moe = cfg.model.moe
    T = cfg.train.batch * cfg.train.seq
    if ep == 1 or not cfg.model.is_moe(layer):
        return 0
    symm = uses_symm(cfg, ep)
    L = moe.experts // ep
    slots = T * ep * min(moe.top_k, L) if symm else rows_received(T, moe.top_k, ep) * moe.top_k
    pairs = pairs_bound(T, moe.top_k, ep, L) or slots
    if pairs >= slots:  # one window
        return 0
    return (5 if symm else 2) * pairs * moe.ffn_dim * compute_bytes(cfg)
