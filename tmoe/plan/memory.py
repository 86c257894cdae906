"""Bytes that a rank holds, by purpose, in closed form: the model is not built, and no process is started.

The result estimates the memory that FSDP2 and autograd hold, term by term, so that a reader can find the term
that is too large.

next: tmoe/plan/block_memory.py
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import torch

from tmoe.config.axes import Axes
from tmoe.config.check import Setting, require
from tmoe.config.model import ModelConfig
from tmoe.config.run import Config
from tmoe.config.sizes import FP32, compute_bytes, local_tokens, master_bytes, moment_bytes, sum_bytes
from tmoe.model.block_bytes import further_loss_bytes, loss_bytes
from tmoe.model.count import Shape, numel, root_shapes
from tmoe.model.freeze import frozen_pattern, matching
from tmoe.model.lora import AdapterCounts, adapter_counts
from tmoe.model.stage_times import division, stage_table
from tmoe.model.transformer import Transformer
from tmoe.moe.fp8_choice import code_bytes, planned_arch
from tmoe.moe.moe_bytes import exchange_bytes, left_bytes, travelling, uses_symm
from tmoe.parallel.mesh import keeps_whole, shard_dim, units
from tmoe.parallel.pipeline_schedule import Table
from tmoe.plan.block_memory import backward_bytes, layer_bytes
from tmoe.plan.frozen_codes import freed
from tmoe.plan.muon_memory import muon_elements, muon_scratch, whole_experts
from tmoe.plan.nf4_memory import in_nf4, nf4_sizes, parameter_shapes, values_bytes, with_nf4
from tmoe.plan.rollout_memory import several_micros, with_rollout


def memory_per_rank(cfg: Config, axes: Axes) -> dict[str, int]:
    """Bytes that the fullest rank of a mesh of GPUs holds, by purpose. `peak_bytes` adds them up.

    parameters, gradients, moments, ema: sharded, in fp32 unless optim.masters (parameters and gradients) or
        optim.states (moments) is narrower. moments are AdamW's two, or Muon's one, 0 with optim.offload. ema
        is 0 where no average is kept. Gradients that need no reduction stay in the compute type, unless
        micro-batches add up. These are the gradients of parameters that a rank holds whole: the experts if no
        other rank shares them, and all parameters if a rank is alone on its stage.
    gathered: in the compute type, the root, and two each of FSDP2's units of blocks and of the experts: one
        in use and one prefetched. For parameters that a rank holds or keeps whole: the working copies of all
        blocks.
    accumulated: with more than one micro-batch, gradients that are kept unreduced until the last
        micro-batch, in the type of optim.sums.
    activations: the tensors that autograd keeps from a forward to its backward, for balanced routing: of one
        micro-batch, or of all micro-batches that a stage has in flight.
    working: temporaries of the backward, in the loss or in a block, whichever is more; messages of a stage.
    exchange: the memory of this rank that peers access with the symm dispatcher. torch's allocator does not
        count it.
    reference, rollout, pool: only with --task grpo. reference: the trained weights that --grpo.kl keeps,
        fp32, sharded. rollout: weights gathered for a rollout, in the compute type, and the temporaries of
        its passes. pool: keys and values.
    away: moments that are not on the GPU during a rollout.

    Raises ConfigError if ep does not divide the experts, ValueError if the pipeline cannot be cut.
    """
    return max(memory_of_stages(cfg, axes), key=peak_bytes)


def held_at_most(cfg: Config, axes: Axes) -> int:
    """Most bytes of tensors that the fullest rank holds at one time: the memory that a GPU must have."""
    return peak_bytes(memory_per_rank(cfg, axes))


def memory_of_stages(cfg: Config, axes: Axes) -> list[dict[str, int]]:
    """The bytes of `memory_per_rank` for a rank of each pipeline stage, by stage."""
    model = cfg.model
    divides = not any(map(model.is_moe, range(model.layers))) or model.moe.experts % axes.ep == 0
    wrong = f"must divide {Setting('model.moe.experts', model.moe.experts)}"
    require(divides, "parallel.ep", axes.ep, wrong)
    if axes.pp == 1:
        whole = model.numbered
        return [_stage(cfg, axes, [whole], blocks_bytes(cfg, axes, whole))]
    order = plan(cfg, axes)
    spans = chunk_spans(cfg, axes)
    stages = []
    for stage, kept in enumerate(in_flight(cfg, axes, order, spans)):
        own = [span for span, home in zip(spans, order.places, strict=True) if home == stage]
        stages.append(_stage(cfg, axes, own, kept))
    return stages


def chunk_spans(cfg: Config, axes: Axes) -> tuple[range, ...]:
    """The blocks of each chunk of the model, then an empty span for each piece of a divided head.

    Blocks that predict further tokens are in the last chunk; the head is then not divided.
    """
    *others, last = division(cfg, axes).all_spans
    return *others, range(last.start, last.stop + cfg.model.mtp.depth)


def has_head(cfg: Config, axes: Axes, span: range) -> bool:
    """Whether a chunk has norm and head."""
    return span.stop >= cfg.model.layers and (not span or not division(cfg, axes).pieces)


def plan(cfg: Config, axes: Axes) -> Table:
    """The pipeline's table: which action each stage does on which chunk, in which order."""
    return stage_table(cfg, axes, deferred=defers(cfg, axes))


def defers(cfg: Config, axes: Axes) -> bool:
    """Whether gradients of experts' matrices are deferred, as `obstacle` of model/stages.py decides."""
    model, p = cfg.model, cfg.parallel
    whole = axes.replicate == 1 and (axes.sharers == 1 or kept_whole(cfg, axes))
    plain = axes.etp == 1 and p.adaptive_r != 0 and model.moe.weigh == "activation" and not cfg.lora.rank
    sparse = any(map(model.is_moe, range(model.layers)))
    return p.schedule == "v" and axes.pp > 1 and sparse and whole and plain and not uses_symm(cfg, axes)


def in_flight(cfg: Config, axes: Axes, order: Table, spans: Sequence[range]) -> list[int]:
    """Most bytes that autograd keeps on each stage at one time, for forwards whose backward has not run.

    They are a chunk's blocks, and its result unless that is the loss. A piece of the head keeps nothing. If
    gradients of experts' matrices are deferred, the tensors that these gradients need are kept as well.
    """
    result = local_tokens(cfg, axes) * cfg.model.dim * compute_bytes(cfg)
    sizes = [blocks_bytes(cfg, axes, span) + result * (not has_head(cfg, axes, span)) for span in spans]
    layers = [sum(map(cfg.model.is_moe, span)) for span in spans]
    left = [count * left_bytes(cfg, axes) for count in layers] if defers(cfg, axes) else [0] * len(spans)
    begun, waits = dict(F=1, B=-1, I=-1, W=0, H=0), dict(F=0, B=0, I=1, W=-1, H=0)
    found = []
    for row in order.ranks:
        held = most = 0
        for action in row:
            held += begun[action.op] * sizes[action.chunk] + waits[action.op] * left[action.chunk]
            most = max(most, held)
        found.append(most)
    return found


def blocks_bytes(cfg: Config, axes: Axes, span: range) -> int:
    """Bytes that autograd keeps for these blocks from a micro-batch's forward to its backward."""
    kinds = {layer: kind_of(cfg.model, layer) for layer in span}
    some = {kind: layer for layer, kind in kinds.items()}
    bytes_of = {kind: layer_bytes(cfg, axes, layer, cfg.parallel.checkpoint) for kind, layer in some.items()}
    losses = max(0, span.stop - cfg.model.layers) * further_loss_bytes(cfg, axes)
    return losses + sum(bytes_of[kind] for kind in kinds.values())


def kind_of(model: ModelConfig, layer: int) -> tuple[bool, bool, int | str, bool]:
    """The properties on which a block's bytes depend.

    MoE or dense, with or without RoPE, its window (LINEAR for a linear block), and whether it predicts a
    further token.
    """
    ropes = model.rope_of(layer) is not None
    return model.is_moe(layer), ropes, model.mask_of(layer), layer >= model.layers


def chunk_root(cfg: Config, axes: Axes, span: range) -> list[Shape]:
    """Shapes of a chunk's parameters outside blocks: the table on the first, norm and head on the last."""
    model = cfg.model
    if span == model.numbered:
        return root_shapes(model)
    entry: Shape = (model.vocab, model.dim)  # of the embedding, of the head, or of a table's copy
    first: list[Shape] = [entry] if span.start == 0 else []
    tables = 1 + (model.two_tables and not model.tied)
    last: list[Shape] = [*[entry] * tables, (model.dim,)] if has_head(cfg, axes, span) else []
    return first + last


def second_table(cfg: Config, axes: Axes, spans: Sequence[range]) -> list[Shape]:
    """A table's second copy on a stage of these chunks, which is in no optimizer (model/stages.py)."""
    model = cfg.model
    ends = any(span.start == 0 for span in spans) and any(has_head(cfg, axes, span) for span in spans)
    return [(model.vocab, model.dim)] if model.two_tables and len(spans) > 1 and ends else []


class Numbers(NamedTuple):
    """Elements of one block on a rank, and bytes of its backward."""

    dense_piece: int  # this rank's share of the dense parameters
    expert_piece: int
    dense: int  # all dense parameters
    experts: int  # all experts of the rank's expert group
    backward: int


class StageBytes(NamedTuple):
    """The numbers that a chunk adds to its stage's rank, in elements; `working` in bytes."""

    own: int  # this rank's share of all parameters
    held: int  # the part of `own` that no other rank shares
    whole: int  # the parameters whose gradients are kept unreduced
    copies: int  # working copies that stay for the whole run
    root: int  # gathered weights outside of blocks
    passing: int  # the most that FSDP2 gathers for a block
    working: int  # temporaries of the backward and the loss


def _numbers(cfg: Config, axes: Axes, layer: int) -> Numbers:
    dense, experts = parameter_shapes(cfg, layer)
    return Numbers(
        sharded(dense, axes.shard),
        expert_shard(experts, axes, whole_experts(cfg, layer)),
        numel(dense),
        numel(experts) // axes.ep,
        backward_bytes(cfg, axes, layer),
    )


def _chunk(cfg: Config, axes: Axes, span: range, blocks: Sequence[Numbers]) -> StageBytes:
    """A rank's part of one chunk; blocks: the Numbers of its blocks."""
    shard, sharers = axes.shard, axes.sharers
    width = compute_bytes(cfg)
    alone = axes.stage == 1
    unshared = sharers * axes.replicate == 1
    root = chunk_root(cfg, axes, span)
    keeps = kept_whole(cfg, axes, span)
    own = sharded(root, shard) + sum(block.dense_piece + block.expert_piece for block in blocks)
    experts = [block.experts for block in blocks]
    held = own if alone else sum(experts) if unshared else 0

    # The elements that FSDP2 gathers for each block: its unit of blocks, and experts that are not kept whole.
    together = [[i] for i in range(len(span))] if alone else units([width * block.dense for block in blocks])
    padded = [block.dense_piece * shard for block in blocks]  # as FSDP2 gathers them
    passing = [sum(padded[i] for i in unit) for unit in together for _ in unit]
    shared = [0 if keeps or unshared else sharers * block.expert_piece for block in blocks]
    return StageBytes(
        own=own,
        held=held,
        whole=numel(root) + sum(block.dense for block in blocks) + sum(experts),
        copies=sum(experts) * keeps + held * (width < master_bytes(cfg)),
        root=0 if alone else sharded(root, shard) * shard,
        passing=0 if alone else max(map(sum, zip(passing, shared, strict=True)), default=0),
        working=_working(cfg, axes, span, blocks, passing, shared, keeps),
    )


def _working(
    cfg: Config,
    axes: Axes,
    span: range,
    blocks: Sequence[Numbers],
    passing: Sequence[int],
    shared: Sequence[int],
    keeps: bool,
) -> int:
    """Bytes of a chunk's backward or of the loss, whichever is more.

    passing, shared: for each block, the dense elements of its unit and the expert elements that FSDP2
    gathers.
    keeps: whether the chunk's experts stay whole.
    """
    width = compute_bytes(cfg)
    alone = axes.stage == 1
    in_place = adds_in_place(cfg, axes, keeps)
    # Gradients in the compute type, and buffers that are sent: FSDP2's in fp32; for kept experts, another
    # layer's gradients and the gradients that are received. Frozen weights have none.
    of_experts = width * (not in_place) + 2 * width * keeps
    gradients = [
        (width + FP32 * (not alone)) * unreduced + of_experts * block.experts + FP32 * fsdp
        for unreduced, block, fsdp in zip(passing, blocks, shared, strict=True)
    ]
    if cfg.lora.rank:
        gradients = [0] * len(blocks)
    # The head's gradient is kept in the compute type until the root reduces it. In place, it is in its sum.
    head = 0 if cfg.lora.rank or (alone and in_place) else width * cfg.model.vocab * cfg.model.dim
    if not span:
        return head + loss_bytes(cfg, axes)
    most = max(number + block.backward for number, block in zip(gradients, blocks, strict=True))
    most += values_bytes(cfg, span)
    if not has_head(cfg, axes, span):
        return most
    return max(head + most, loss_bytes(cfg, axes))


def adds_in_place(cfg: Config, axes: Axes, keeps: bool) -> bool:
    """Whether ops add the gradients of experts to the sums of micro-batches (ops/gradient_sums.py).

    There is then no gradient in the compute type. keeps: ranks that share experts keep them whole. autograd
    gets gradients whose sums are in bf16.
    """
    whole = keeps or axes.sharers * axes.replicate == 1
    by_op = cfg.parallel.adaptive_r != 0 and travelling(cfg, axes)[1] == 1
    by_op = by_op and cfg.model.moe.weigh == "activation" and not frozen_pattern(cfg)
    return several_micros(cfg, axes) and whole and by_op and sum_bytes(cfg) == FP32


def _stage(cfg: Config, axes: Axes, spans: Sequence[range], kept: int) -> dict[str, int]:
    """Bytes, by purpose, of a rank whose stage has these chunks, if autograd keeps `kept` bytes."""
    model = cfg.model
    width = compute_bytes(cfg)
    several, master, sums = several_micros(cfg, axes), master_bytes(cfg), sum_bytes(cfg)
    kinds = {layer: kind_of(model, layer) for span in spans for layer in span}
    some = {kind: layer for layer, kind in kinds.items()}  # blocks are of few kinds
    numbers = {kind: _numbers(cfg, axes, layer) for kind, layer in some.items()}
    chunks = [_chunk(cfg, axes, span, [numbers[kinds[layer]] for layer in span]) for span in spans]
    own, held, whole, copies, gathered_root, *_ = (sum(column) for column in zip(*chunks, strict=True))
    passing = max(chunk.passing for chunk in chunks)
    working = max(chunk.working for chunk in chunks)
    # one message received and one sent, of hidden states and of their gradients
    messages = 4 * local_tokens(cfg, axes) * model.dim * width if axes.pp > 1 else 0
    trained = own - sharded(second_table(cfg, axes, spans), axes.shard)
    codes = code_bytes(cfg, axes, chain(*spans))
    parts = {
        "parameters": master * own,
        "gradients": master * (own - held) + (sums if several else width) * held,
        "moments": 0 if cfg.optim.offload else moment_bytes(cfg, trained),
        "ema": FP32 * trained if cfg.optim.ema else 0,
        "gathered": width * (copies + gathered_root + 2 * passing) + codes,
        "accumulated": sums * whole if several else 0,
        "activations": kept,
        "working": max(working + messages, muon_scratch(cfg, axes, spans)),
        "exchange": exchange_bytes(cfg, axes),
    }
    root = [shape for span in spans for shape in chunk_root(cfg, axes, span)]
    parts = without_frozen(kept_for_a_step(parts, cfg, axes, root, list(kinds)), cfg, axes, spans)
    parts = without_values(parts, cfg, axes, spans)
    parts = with_adapters(parts, cfg, axes, spans)
    if not cfg.optim.offload:  # one moment less for what Muon trains
        parts["moments"] -= moment_bytes(cfg, muon_elements(cfg, axes, spans)) // 2
    frozen = frozen_on_a_rank(cfg, axes, spans)
    masters = held if width == master else frozen.held
    return with_nf4(with_rollout(parts, cfg, axes, whole, masters, own - frozen.own), cfg, spans)


def without_frozen(parts: dict[str, int], cfg: Config, axes: Axes, spans: Sequence[range]) -> dict[str, int]:
    """The same parts without frozen parameters, chosen by --optim.freeze or because there are adapters.

    Frozen parameters have no gradient, moments or master weights.
    """
    if not frozen_pattern(cfg):
        return parts
    dense, experts, own, held = frozen_on_a_rank(cfg, axes, spans)
    several, width = several_micros(cfg, axes), compute_bytes(cfg)
    master, sums = master_bytes(cfg), sum_bytes(cfg)
    again = second_table(cfg, axes, spans) if matching(frozen_pattern(cfg), ["embedding.weight"]) else []
    trained = own - numel(again) // axes.shard
    less = {
        "parameters": (master - width) * own,
        "gradients": master * (own - held) + (sums if several else width) * held,
        "moments": 0 if cfg.optim.offload else moment_bytes(cfg, trained),
        "gathered": width * held * (width < master),  # parameters held whole need no working copy
        "accumulated": sums * (dense + experts // axes.ep) if several else 0,
        # an average is kept of adapters alone, but also of what --optim.freeze freezes
        "ema": FP32 * trained if cfg.lora.rank and cfg.optim.ema else 0,
    }
    return {name: size - less.get(name, 0) for name, size in parts.items()}


def with_adapters(parts: dict[str, int], cfg: Config, axes: Axes, spans: Sequence[range]) -> dict[str, int]:
    """The same parts with the adapters: fp32, with gradients, moments and copies like other trained weights.

    activations: the r numbers between an adapter's two products, for each token or routed pair.
    """
    if not cfg.lora.rank:
        return parts
    of_spans = [adapter_counts(cfg.model, cfg.lora, span) for span in spans if span]
    dense, experts, *_ = (sum(column) for column in zip(*of_spans, strict=True))
    several, width, sums = several_micros(cfg, axes), compute_bytes(cfg), sum_bytes(cfg)
    local = experts // axes.ep
    own = dense // axes.shard + local // axes.sharers
    unshared = axes.sharers * axes.replicate == 1
    held = own if axes.stage == 1 else local if unshared else 0
    layers = sum(map(len, spans))
    whole = local if unshared or kept_whole(cfg, axes) else 2 * local // layers  # else two layers' at a time
    copies = (0 if width == FP32 else own) if axes.stage == 1 else whole + 2 * dense // layers
    more = {
        "parameters": FP32 * own,
        "gradients": FP32 * (own - held) + (sums if several else width) * held,
        "moments": 0 if cfg.optim.offload else moment_bytes(cfg, own),
        "ema": FP32 * own if cfg.optim.ema else 0,
        "gathered": width * copies,
        "accumulated": sums * (dense + local) if several else 0,
        "activations": sum(adapter_activations(cfg, axes, found) for found in of_spans),
    }
    return {name: size + more.get(name, 0) for name, size in parts.items()}


def adapter_activations(cfg: Config, axes: Axes, found: AdapterCounts) -> int:
    """Bytes that autograd keeps for the adapters of some blocks: their inner products, r numbers a row."""
    if cfg.parallel.checkpoint == "block":
        return 0
    moe, T = cfg.model.moe, local_tokens(cfg, axes)
    return compute_bytes(cfg) * T * (found.ranks + found.moe_ranks * moe.slots)


def without_values(parts: dict[str, int], cfg: Config, axes: Axes, spans: Sequence[range]) -> dict[str, int]:
    """The same parts without values of frozen experts for which codes in fp8 stand, but for one layer's.

    A rank that holds its experts alone moves the values to the host; copies of shared experts are freed.
    """
    unshared, less, layer = axes.sharers * axes.replicate == 1, dict(parameters=0, gathered=0), 0
    for span in spans:
        if unshared or kept_whole(cfg, axes, span):
            found = freed(cfg, axes, span, planned_arch(cfg))
            less["parameters" if unshared else "gathered"] += compute_bytes(cfg) * found.all
            layer = max(layer, compute_bytes(cfg) * found.layer)
    less["gathered"] -= layer
    return {name: size - less.get(name, 0) for name, size in parts.items()}


class FrozenElements(NamedTuple):
    """Frozen elements of a rank's blocks."""

    dense: int
    experts: int
    """`dense` and `experts` count all frozen elements of the stage, before sharding"""
    own: int
    """the frozen elements that this rank stores"""
    held: int
    """the part of `own` that no rank shares: the rank computes with it in place"""


def frozen_on_a_rank(cfg: Config, axes: Axes, spans: Sequence[range]) -> FrozenElements:
    """The frozen elements on a rank of the stage that has these chunks."""
    if not frozen_pattern(cfg):
        return FrozenElements(0, 0, 0, 0)
    found = [
        frozen_elements(cfg.model, frozen_pattern(cfg), span, has_head(cfg, axes, span)) for span in spans
    ]
    dense, experts = (sum(numbers) for numbers in zip(*found, strict=True))
    if in_nf4(cfg):
        sizes = [nf4_sizes(cfg.model, span) for span in spans if span]
        dense -= sum(size.dense for size in sizes)
        experts -= sum(size.experts for size in sizes)
    own = dense // axes.shard + experts // (axes.ep * axes.sharers)
    unshared = axes.sharers * axes.replicate == 1
    held = own if axes.stage == 1 else experts // axes.ep if unshared else 0
    return FrozenElements(dense, experts, own, held)


@functools.lru_cache(64)
def frozen_elements(model: ModelConfig, pattern: str, span: range, head: bool) -> tuple[int, int]:
    """Frozen elements of these blocks, and of embedding, norm and head if they are there: dense, experts."""
    with torch.device("meta"):
        part = Transformer(model, range(span.start, min(span.stop, model.layers)), head)
    sizes = {name: p.numel() for name, p in part.named_parameters()}
    frozen = matching(pattern, sizes)
    experts = sum(sizes[name] for name in frozen if ".experts." in name)
    return sum(sizes[name] for name in frozen) - experts, experts


def kept_for_a_step(
    parts: dict[str, int], cfg: Config, axes: Axes, root: list[Shape], layers: list[int]
) -> dict[str, int]:
    """The same parts for --parallel.shard 1 or 2; 3 leaves them unchanged (parallel/zero.py).

    1 and 2: all dense weights are gathered, not two units of blocks. 2: between micro-batches a rank keeps
    its shard of their gradients, not the whole gradients.

    root, layers: shapes of a rank's dense weights outside of its blocks, and its blocks.
    """
    if cfg.parallel.shard == 3 or axes.stage == 1:
        return parts
    blocks = [parameter_shapes(cfg, layer)[0] for layer in layers]
    width, shard = compute_bytes(cfg), axes.shard
    padded = [sharded(shapes, shard) * shard for shapes in blocks]
    together = units([width * numel(shapes) for shapes in blocks])
    largest = max(sum(padded[i] for i in unit) for unit in together)  # a stage always has blocks
    parts["gathered"] += width * max(0, sum(padded) - 2 * largest)
    if cfg.parallel.shard == 2 and several_micros(cfg, axes):
        whole, own = (sum(of(s) for s in [root, *blocks]) for of in (numel, lambda s: sharded(s, shard)))
        parts["accumulated"] -= sum_bytes(cfg) * whole - master_bytes(cfg) * own
    return parts


def peak_bytes(memory: dict[str, int]) -> int:
    """Largest sum of `memory_per_rank`'s terms that are in memory at the same time.

    Sharded gradients are created block by block while the backward frees activations (and unreduced
    gradients), so the larger of the two counts, not their sum. An update and a rollout alternate. CUDA's
    context, NCCL's buffers and the allocator's fragments are not included.
    """
    always = sum(memory[name] for name in ("parameters", "moments", "ema", "exchange"))
    always += memory.get("reference", 0)
    update = memory["gathered"] + memory["working"]
    update += max(memory["activations"] + memory["accumulated"], memory["gradients"])
    rollout = memory.get("rollout", 0) + memory.get("pool", 0) - memory.get("away", 0)
    return always + max(update, rollout)


def sharded(shapes: list[Shape], ranks: int) -> int:
    """Elements on the fullest rank.

    FSDP2 cuts dimension 0 into equal pieces, rounded up. The last pieces are short, but are padded to the
    same length when they are sent.
    """
    return sum(-(-rows // ranks) * prod(rest) for rows, *rest in shapes)


def expert_shard(shapes: list[Shape], axes: Axes, whole: bool = False) -> int:
    """Elements on the fullest rank: L = E/ep experts, cut over their sharers along mesh.py's shard_dim."""
    local = [(rows // axes.ep, *rest) for rows, *rest in shapes]
    by_row = shard_dim(local, axes.sharers, whole) == 1
    return sum(sharded([(M, L, *N) if by_row else (L, M, *N)], axes.sharers) for L, M, *N in local)


def kept_whole(cfg: Config, axes: Axes, span: range | None = None) -> bool:
    """Whether ranks that share experts keep the experts of these blocks whole; None: of all blocks.

    Each chunk of a pipeline decides separately. With replicas FSDP2 has all experts.
    """
    span = cfg.model.numbered if span is None else span
    if not span:
        return False
    sparse = next((layer for layer in span if cfg.model.is_moe(layer)), span.start)
    count = sum(map(cfg.model.is_moe, span))  # of equal blocks
    elements = count * (numel(parameter_shapes(cfg, sparse)[1]) // axes.ep)
    if cfg.lora.rank:
        elements += adapter_counts(cfg.model, cfg.lora, span).experts // axes.ep
    experts = [cfg.model.moe.experts // axes.ep]
    size = compute_bytes(cfg) * elements
    return axes.replicate == 1 and keeps_whole(axes.sharers, experts, size, cfg.parallel.gathered_gib)


def padding(cfg: Config, axes: Axes) -> float:
    """The factor by which padding enlarges FSDP2's gathers and reductions of a rank's experts.

    It is more than 1 if FSDP2 cuts the experts unevenly, because each piece is as long as the longest when it
    is sent. In a pipeline it is the largest factor of a chunk.
    """
    most = 1.0
    for span in filter(None, chunk_spans(cfg, axes)):
        shapes = [parameter_shapes(cfg, layer)[1] for layer in span]
        if axes.sharers > 1 and any(shapes) and not kept_whole(cfg, axes, span):
            whole = [whole_experts(cfg, layer) for layer in span]
            pieces = [expert_shard(experts, axes, one) for experts, one in zip(shapes, whole, strict=True)]
            moved = axes.sharers * sum(pieces)
            most = max(most, moved / (sum(map(numel, shapes)) / axes.ep))
    return most
