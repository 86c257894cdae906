"""Predicts the time of a training step from counted FLOPs, bytes and measured constants.

A step is the sum of these parts, on the busiest rank:

    kernel                max(FLOPs/rate, bytes/rate) + kernel_overlap * min(FLOPs/rate, bytes/rate)
    projections           three products for every matrix of attention, shared experts, dense feed-forward
                          and router; under tp, attention's products have 1/tp of the heads
    attention             2/7 of its FLOPs forward, 5/7 backward (flash: scores are recomputed), at rates that
                          depend on the heads' width
    experts               six products over the T*K routed pairs of the busiest rank, two sums over a token's
                          rows; with --train.fp8 they take the share of bf16's time that the nearest measured
                          layer took (ops/experts/fp8_table.json), without a measurement all of it
    loss                  the head's three products, and each logit's traffic
    exchange              a row for each (token, rank) to experts and back, forward and backward; waiting for
                          other ranks; two transfers fewer where a shared expert hides them; across nodes a
                          row for each (token, node) over the network first (--parallel.dispatch auto)
    tp exchange           tokens gathered before attention's projections, and sums over heads after them
    cp exchange           keys and values, or latents, of whole sequences; or heads for tokens and back
    etp exchange          rows of the ranks that divide experts, their sums, and copies of the slices
    glue                  everything else in a block: passes over [T, D], and activations between a dense
                          feed-forward's or shared expert's products
    codes                 casts of the experts' matrices to fp8 (--train.fp8), as measured
    recomputed            forwards that activation checkpointing runs again
    copies                traffic around FSDP2's collectives, and sums of gradients
    optimizer             traffic of AdamW and the gradient norm
    exposed all-gathers   time of FSDP2's all-gathers and reduce-scatters, and of sums over replicas, that
                          compute does not hide
    slowed                time that compute loses to the collectives that it hides, proportional to their time
                          on NVLink
    beside receives       time that a stage's kernels lose while one of its receives waits on the GPU:
                          products of experts `held` of their time, other kernels `others_held`
    pipeline bubble       time that the busiest stage waits: the table is simulated with each chunk's seconds;
                          with schedule v, gradients of experts' weights wait for idle moments if they can

With pp, the other parts are those of the busiest stage, receives counted, and the optimizer's are those of
the stage with the most parameters. The additions of tp, cp, etp and pp use constants of their axis
(constants.py, OF_AXIS), which record whether they were measured; until they are, these parts are assumed not
to be hidden.

Across nodes, a group's ring enters each node through the network cards of its members there: dense parameters
use all eight cards, a rank's own experts (ep 8) one. Not modelled are: simultaneous transfers that share
links, failures, stragglers, checkpoints. The cost of an exchange in a layer, and the hidden share of the
gathers of dense parameters, were measured on four GPUs with dp 1; the time that compute loses to these
gathers was measured on two GPUs with dp 2. A global batch grows with the number of GPUs: these numbers do not
say whether it still trains well.

In this file, network.py and tmoe/model/block_time.py, `m` is the namespace of constants by name
(constants.py).

next: tmoe/model/block_time.py, then pipeline.py
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from benchmarks.cost.network import collective_seconds, padded_groups
from benchmarks.cost.pipeline import Timed, run
from tmoe.config.axes import Axes
from tmoe.config.model import ModelConfig
from tmoe.config.run import Config
from tmoe.config.sizes import FP32, compute_bytes, moment_bytes, sum_bytes
from tmoe.model.block_time import (
    EXCHANGES,
    RECOMPUTED,
    Kernels,
    Parts,
    block_seconds,
    code_seconds,
    expert_kernels,
    head_seconds,
    kernel,
)
from tmoe.model.count import block_shapes, flops_per_token, mfu, numel
from tmoe.model.link_time import times
from tmoe.model.stage_times import division, message_seconds
from tmoe.ops.newton_schulz import flops
from tmoe.parallel.pipeline_cut import PARTS
from tmoe.parallel.pipeline_schedule import StageCost
from tmoe.parallel.shared_copies import WAVES
from tmoe.plan.memory import (
    adds_in_place,
    chunk_root,
    chunk_spans,
    has_head,
    held_at_most,
    kept_whole,
    plan,
)
from tmoe.plan.muon_memory import muon_shapes, product_bytes

# Number of a pipeline's micro-batches that are simulated, as a multiple of pp. Each further micro-batch takes
# as long as the previous ones, and no stage holds more.
STEADY = 4


class Chunk(NamedTuple):
    """The time of a chunk of the model."""

    parts: Parts
    """seconds of a step, by part"""
    forward: float
    """seconds of a micro-batch's forward"""
    weights: float
    """seconds of the gradients of experts' weights in its backward, which schedule v defers"""
    lost: StageCost
    """seconds that a micro-batch's kernels lose if a receive waits during all of them"""

    def cost(self, micros: int) -> StageCost:
        """Seconds of one micro-batch, when a step has this many."""
        backward = sum(self.parts.values()) / micros - self.forward
        return StageCost(self.forward, backward - self.weights, self.weights)


class Prediction(NamedTuple):
    """The predicted step of one layout."""

    parts: Parts
    """seconds, by part"""
    tokens: int
    """tokens of the global batch"""
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
        waits = (*EXCHANGES, "exposed all-gathers", "pipeline bubble")
        return sum(self.parts[name] for name in waits) / self.seconds


def predict(
    cfg: Config,
    axes: Axes,
    m: SimpleNamespace,
    skew: float | None = None,
    *,
    held: float | None = None,
    ahead: bool = False,
) -> Prediction:
    """Predicts one step of `cfg` on a mesh of these axes.

    skew: pairs of the busiest rank over the mean; None: m.skew if ep > 1.
    held: bytes of the fullest rank, if they are known.
    ahead: the stages of a pipeline post each receive one message ahead of need (`Point.ahead`).
    """
    again = cfg.train.accumulate
    busiest = 1.0 if axes.ep == 1 else m.skew if skew is None else skew
    spans = chunk_spans(cfg, axes)
    same: dict[tuple, Chunk] = {}  # chunks of the same kinds of blocks take the same time
    pieces = division(cfg, axes).pieces
    for span in filter(None, spans):
        if (kind := chunk_kind(cfg.model, span)) not in same:
            same[kind] = chunk_seconds(cfg, axes, span, m, busiest)
    chunks = [same[chunk_kind(cfg.model, span)] for span in filter(None, spans)]
    chunks += [head_chunk(cfg, axes, m, count / PARTS, chunks[0].parts) for _, count in pieces]
    short = steady(cfg, axes)
    if axes.pp == 1:
        parts, lost, bubble = chunks[0].parts, 0.0, 0.0
        spans_of_stages = [spans]
    else:
        order = plan(short, axes)
        spans_of_stages = [
            [s for s, home in zip(spans, order.places, strict=True) if home == r] for r in range(axes.pp)
        ]
        works = [
            [chunk.parts for chunk, home in zip(chunks, order.places, strict=True) if home == r]
            for r in range(axes.pp)
        ]
        timed = pipeline_seconds(cfg, axes, chunks, message_seconds(cfg, axes, m), ahead)
        work = [sum(sum(parts.values()) for parts in stage) for stage in works]
        busy = [a + b for a, b in zip(work, timed.lost, strict=True)]
        slowest = busy.index(max(busy))
        parts = {name: sum(parts[name] for parts in works[slowest]) for name in works[slowest][0]}
        lost, bubble = timed.lost[slowest], timed.time - busy[slowest]
    parts["optimizer"] = max(optimizer_seconds(cfg, axes, stage, m) for stage in spans_of_stages)
    parts["beside receives"] = lost
    parts["pipeline bubble"] = bubble

    tokens = axes.readers * cfg.train.batch * cfg.train.seq * again
    rate = tokens / axes.world / sum(parts.values())
    used = mfu(flops_per_token(cfg.model, cfg.train.seq), rate, m.peak if cfg.train.dtype != "fp32" else None)
    if held is None:
        held = held_at_most(short, axes)
    return Prediction(parts, tokens, axes.world, used, held)


def steady(cfg: Config, axes: Axes) -> Config:
    """The same settings with at most STEADY * pp micro-batches; further ones only add time in proportion."""
    most = STEADY * axes.pp
    if axes.pp == 1 or cfg.train.accumulate <= most:
        return cfg
    return replace(cfg, train=replace(cfg.train, accumulate=most))


def pipeline_seconds(cfg: Config, axes: Axes, chunks: Sequence[Chunk], latency: float, ahead: bool) -> Timed:
    """The time of all micro-batches; those beyond the steady ones each take the mean time of the last pp."""
    again, most = cfg.train.accumulate, steady(cfg, axes).train.accumulate
    costs, lost = [chunk.cost(again) for chunk in chunks], [chunk.lost for chunk in chunks]

    def timed(micros: int) -> Timed:
        short = replace(cfg, train=replace(cfg.train, accumulate=micros))
        return run(plan(short, axes), costs, lost, latency, ahead=ahead)

    last = timed(most)
    if most == again:
        return last
    before, more = timed(most - axes.pp), (again - most) / axes.pp
    losses = (b + more * (b - a) for a, b in zip(before.lost, last.lost, strict=True))
    return Timed(last.time + more * (last.time - before.time), tuple(losses))


def chunk_seconds(cfg: Config, axes: Axes, span: range, m: SimpleNamespace, busiest: float) -> Chunk:
    """The time of one chunk, without the optimizer."""
    again = cfg.train.accumulate
    forward, backward = passes(cfg, axes, span, m, busiest)
    recomputed = sum(forward[part] for part in RECOMPUTED[cfg.parallel.checkpoint])
    hiding_forward, hiding_backward = (
        sum(seconds for name, seconds in p.items() if name not in EXCHANGES) for p in (forward, backward)
    )
    hiding_backward += recomputed
    exposed, beside = collective_seconds(cfg, axes, span, m, hiding_forward, hiding_backward)

    parts = {part: again * (forward[part] + backward[part]) for part in forward}
    sparse = sum(map(cfg.model.is_moe, span))
    parts["codes"] = sparse * code_seconds(cfg, axes, m)
    parts["recomputed"] = again * recomputed
    parts["copies"] = copy_seconds(cfg, axes, span, m)
    parts["exposed all-gathers"] = exposed
    parts["slowed"] = m.slowed * beside
    products = expert_kernels(cfg, axes, m, busiest) if sparse else Kernels(0.0, 0.0, 0.0, 0.0)
    runs_again = products.forward * ("experts" in RECOMPUTED[cfg.parallel.checkpoint])
    waves = WAVES if axes.sharers > 1 and kept_whole(cfg, axes, span) else 1
    loses = float(np.interp(waves, *zip(*m.held, strict=True)))
    own = StageCost(products.forward, products.inputs + runs_again, products.weights)
    own = StageCost(*(sparse * seconds for seconds in own))
    # everything but the experts' products: attention, dense products, the loss, passes over rows
    others = hiding_forward - own.forward, hiding_backward - own.inputs - own.weights
    lost = StageCost(
        loses * own.forward + m.others_held * others[0],
        loses * own.inputs + m.others_held * others[1],
        loses * own.weights,
    )
    return Chunk(parts, sum(forward.values()), sparse * products.weights, lost)


def head_chunk(cfg: Config, axes: Axes, m: SimpleNamespace, share: float, parts: Parts) -> Chunk:
    """The time of a piece of a divided head.

    share: of a micro-batch's tokens. parts: those of another chunk, whose names are used.
    """
    again, span = cfg.train.accumulate, range(cfg.model.layers, cfg.model.layers)
    loss = share * head_seconds(cfg, axes, m)
    moving = collective_seconds(cfg, axes, span, m, loss, 0.0)
    found = dict.fromkeys(parts, 0.0) | {
        "loss": again * loss,
        "copies": copy_seconds(cfg, axes, span, m),
        "exposed all-gathers": moving[0],
        "slowed": m.slowed * moving[1],
    }
    return Chunk(found, loss, 0.0, StageCost(m.others_held * loss, 0.0, 0.0))


def chunk_kind(model: ModelConfig, span: range) -> tuple:
    """A key that is equal for two chunks with the same seconds and bytes."""
    kinds = tuple((model.is_moe(layer), model.mask_of(layer)) for layer in span)
    return kinds, span.start == 0, span.stop == model.layers


def copy_seconds(cfg: Config, axes: Axes, span: range, m: SimpleNamespace) -> float:
    """Seconds of a step for copies before and after a chunk's collectives, and for sums of gradients."""
    again, width, shard = cfg.train.accumulate, compute_bytes(cfg), cfg.parallel.shard
    groups = parameter_groups(cfg, axes, span)
    keeps = kept_whole(cfg, axes, span)
    # an all-gather reads fp32 shards and writes them in the compute type, then copies the received bytes into
    # place; this happens twice in a micro-batch, or for dense weights once in a step (--parallel.shard 1, 2)
    dense, experts = padded_groups(cfg, axes, span)
    gathers, reduces = (2 * again, 1) if shard == 3 else (1, again if shard == 2 else 1)
    moved = [(*dense, gathers, reduces)]
    moved += [] if keeps else [(*experts, 2 * again, 1)]
    copied = sum(
        gathers * ((FP32 + width) * n / size + 2 * width * n) + reduces * (width + FP32) * n
        for n, size, gathers, reduces in moved
        if size > 1
    )
    if keeps:  # the received gradients are read, and their sum is written
        copied += (width + FP32 / axes.sharers) * groups[1][0]
    # if there are several micro-batches, gradients in the compute type are summed in fp32 before they are
    # reduced; with --parallel.shard 2 the shards of dense gradients are summed after it
    (whole, ranks), (local, _) = groups
    sums = sum_bytes(cfg)
    converted = (again > 1) * (width + FP32) * (sums == FP32)  # the first gradient
    each = converted + (again - 1) * (width + 2 * sums)
    # ops that add to sums write fp32 where a product's time has a gradient in the compute type, and read fp32
    # from the second micro-batch on
    by_op = (again > 1) * (FP32 - width) + (again - 1) * (2 * FP32 - width)
    in_place = adds_in_place(cfg, axes, keeps)
    reduced_first = shard == 2 and ranks > 1
    of_dense = by_op if in_place and axes.stage == 1 else each
    added = local * (by_op if in_place else each)
    added += 3 * FP32 * (again - 1) * whole / ranks if reduced_first else whole * of_dense

    return (m.copy_factor * copied + added) / m.memory_rate


def passes(cfg: Config, axes: Axes, span: range, m: SimpleNamespace, skew: float) -> tuple[Parts, Parts]:
    """Seconds of a micro-batch's forward and backward by part, without FSDP2, for the blocks in `span`."""
    kinds = layers_by_kind(cfg.model, span)
    blocks = [(len(layers), block_seconds(cfg, axes, layers[0], m, skew)) for layers in kinds.values()]
    forward, backward = (
        {part: sum(n * both[direction][part] for n, both in blocks) for part in blocks[0][1][direction]}
        for direction in (0, 1)
    )
    forward["loss"] = backward["loss"] = 0.0
    if has_head(cfg, axes, span):
        forward["loss"] = head_seconds(cfg, axes, m)
    return forward, backward


def layers_by_kind(model: ModelConfig, span: range) -> dict[tuple[bool, int | str], list[int]]:
    """The blocks of a span by the kind that decides their seconds."""
    kinds: dict[tuple[bool, int | str], list[int]] = {}
    for layer in span:
        kinds.setdefault((model.is_moe(layer), model.mask_of(layer)), []).append(layer)
    return kinds


def optimizer_seconds(cfg: Config, axes: Axes, spans: Sequence[range], m: SimpleNamespace) -> float:
    """Seconds of AdamW, of Muon and of the gradient norm over a rank's parameters of these chunks.

    Gradients of unsharded parameters are in the compute type, as when m.optimizer_bytes was measured, unless
    micro-batches are summed: then both read them in the sums' type. (Gradients of sharded parameters always
    are in fp32; that is not counted.) Moments and weights in bf16 or 8 bits are counted as if they were fp32:
    their step moves fewer bytes and computes more (decision 105). Muon's passes over memory are
    counted as AdamW's; its products are added, divided by the ranks that share its matrices, and so is the
    exchange of dense matrices.
    """
    groups = [group for span in spans for group in parameter_groups(cfg, axes, span)]
    local_elements = sum(elements / size for elements, size in groups)
    added = sum(n for n, size in groups if size == 1) if cfg.train.accumulate > 1 else 0
    moved = (m.optimizer_bytes + 3 * FP32 * (cfg.optim.ema > 0)) * local_elements
    moved += 2 * (sum_bytes(cfg) - compute_bytes(cfg)) * added
    seconds = moved / m.memory_rate
    if cfg.optim.offload:  # both moments are copied in and out at the same time
        seconds = max(seconds, moment_bytes(cfg, 1024) / 1024 * local_elements / m.host_rate)
    return seconds + muon_seconds(cfg, axes, spans, m)


def muon_seconds(cfg: Config, axes: Axes, spans: Sequence[range], m: SimpleNamespace) -> float:
    """Seconds of Newton-Schulz, and of sending dense matrices to their owners and back.

    A fused matrix is counted as one, which is up to 1% less.
    """
    seconds, width = 0.0, product_bytes(cfg)
    for span in spans:
        dense, experts = muon_shapes(cfg.model, cfg.optim.muon, cfg.optim.freeze, span)
        for shapes, ranks in ((dense, axes.shard), (experts, axes.ep * axes.sharers)):
            for *stack, rows, columns in shapes:
                each = flops(rows, columns, cfg.optim.muon_iterations) * prod(stack) / ranks
                moved = 6 * cfg.optim.muon_iterations * width * prod(stack) * rows * columns / ranks
                seconds += kernel(each, moved, m)
        sent = 2 * width * sum(rows * columns for rows, columns in dense) / axes.shard
        near = axes.shard <= m.node
        seconds += (axes.shard > 1 and sent) and (times(m.collective, sent) if near else sent / m.nic_rate)
    return seconds


def parameter_groups(cfg: Config, axes: Axes, span: range | None = None) -> list[tuple[float, int]]:
    """(elements, ranks that share them): dense parameters, shared by a replica's ranks; a rank's experts.

    span: the blocks of one chunk; None: all.
    """
    span = range(cfg.model.layers) if span is None else span
    model = cfg.model
    dense, experts = numel(chunk_root(cfg, axes, span)), 0
    for layer in {model.is_moe(layer): layer for layer in span}.values():  # one layer of each kind
        count = sum(model.is_moe(other) == model.is_moe(layer) for other in span)
        ours, spread = block_shapes(model, layer)
        dense, experts = dense + count * numel(ours), experts + count * numel(spread)
    return [(dense, axes.shard), (experts / axes.ep, axes.sharers)]
