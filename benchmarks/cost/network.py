"""Predicts the seconds of a step's collectives, of FSDP2 and of kept experts, that compute does not hide.

This is a part of step_time.py; nothing is measured here.

next: points.py
"""

from collections import Counter
from types import SimpleNamespace

import numpy as np

from tmoe.config.axes import Axes
from tmoe.config.run import Config
from tmoe.config.sizes import FP32, compute_bytes
from tmoe.model.count import Shape, block_shapes, numel
from tmoe.model.link_time import all_to_all, ring
from tmoe.parallel.mesh import units
from tmoe.plan.memory import chunk_root, expert_shard, kept_whole, sharded
from tmoe.plan.muon_memory import whole_experts


def collective_seconds(
    cfg: Config, axes: Axes, span: range, m: SimpleNamespace, forward: float, backward: float
) -> tuple[float, float]:
    """(exposed, hidden) seconds of a step's collectives, for the chunk of these blocks.

    exposed: the time that compute does not hide.
    hidden: the time that compute does hide, as if all bytes were sent over NVLink: across nodes they are
        slower, but use as much of a GPU's memory bandwidth and units in total.

    forward, backward: seconds of a micro-batch's compute.
    """

    again = cfg.train.accumulate - 1
    # the first forward, the later forwards, all backwards except the last, and the last backward
    counts = (1, again, again, 1)
    computing = (forward, forward, backward, backward)
    bare = moving_seconds(cfg, axes, span, m)
    near = bare  # the times if all GPUs were in one node
    if axes.world > m.node:
        near = moving_seconds(cfg, axes, span, SimpleNamespace(**{**vars(m), "node": axes.world}))
    exposed = [exposed_seconds(*pair, m.fsdp_overlap) for pair in zip(bare, computing, strict=True)]
    hidden = [b and n * (1 - e / b) for b, n, e in zip(bare, near, exposed, strict=True)]
    return float(np.dot(counts, exposed)), float(np.dot(counts, hidden))


def moving_seconds(cfg: Config, axes: Axes, span: range, m: SimpleNamespace) -> list[float]:
    """Seconds of a chunk's collectives without any overlap.

    There are four: for the first forward of a step, a later forward, a backward before the last, the last.
    With --parallel.shard 1 and 2 dense weights are gathered once a step; with 2 their gradients are reduced
    in every micro-batch.
    """
    gather, regather, reduce = dense_seconds(cfg, axes, m, span)
    experts, reduce_experts = expert_seconds(cfg, axes, m, span)
    spread, summed = kept_seconds(cfg, axes, m, span)
    last = reduce + reduce_experts + summed + replica_seconds(cfg, axes, m, span)
    if cfg.parallel.shard < 3:
        each = reduce if cfg.parallel.shard == 2 else 0.0
        return [gather + experts + spread, experts, experts + each, experts + last]
    return [gather + experts + spread, gather + experts, regather + experts, regather + experts + last]


def dense_seconds(
    cfg: Config, axes: Axes, m: SimpleNamespace, span: range | None = None
) -> tuple[float, float, float]:
    """Seconds of FSDP2 for weights other than experts: all-gathers of forward and backward, reduce-scatters.

    All-gathers are counted for a micro-batch, reduce-scatters for a step. span: the blocks of one chunk;
    None: all. In the backward the root is still gathered. Reduce-scatters are in fp32.
    """
    model = cfg.model
    span = range(model.layers) if span is None else span
    width = compute_bytes(cfg)
    (root, _), *blocks = padded_units(cfg, axes, span)
    kinds = {model.is_moe(layer): layer for layer in span}
    sizes = {kind: width * numel(block_shapes(model, layer)[0]) for kind, layer in kinds.items()}
    together = units([sizes[model.is_moe(layer)] for layer in span])
    # how often each size occurs, since most blocks have the same size
    dense = Counter(sum(blocks[i][0] for i in unit) for unit in together)

    def once(size: int) -> float:
        return sum(count * ring(size * n, axes.shard, 1, m) for n, count in dense.items())

    rooted = [ring(size * root, axes.shard, 1, m) if root else 0.0 for size in (width, FP32)]
    return once(width) + rooted[0], once(width), once(FP32) + rooted[1]


def expert_seconds(
    cfg: Config, axes: Axes, m: SimpleNamespace, span: range | None = None
) -> tuple[float, float]:
    """The seconds of `dense_seconds` for experts: all-gathers of a pass, reduce-scatters; 0 if kept."""
    span = range(cfg.model.layers) if span is None else span
    blocks = [] if kept_whole(cfg, axes, span) else padded_units(cfg, axes, span)[1:]
    sizes = Counter(n for _, n in blocks if n)
    gather, reduce = (
        sum(count * ring(size * n, axes.sharers, axes.ep, m) for n, count in sizes.items())
        for size in (compute_bytes(cfg), FP32)
    )
    return gather, reduce


def replica_seconds(cfg: Config, axes: Axes, m: SimpleNamespace, span: range) -> float:
    """Seconds of a step in which replicas sum their fp32 shards of these blocks' gradients."""
    if axes.replicate == 1:
        return 0.0
    units = padded_units(cfg, axes, span)
    pieces = Counter(n for dense, experts in units for n in (dense / axes.shard, experts / axes.sharers) if n)
    return sum(2 * count * ring(FP32 * n, axes.replicate, axes.shard, m) for n, count in pieces.items())


def kept_seconds(cfg: Config, axes: Axes, m: SimpleNamespace, span: range) -> tuple[float, float]:
    """Seconds of a step for experts that ranks keep whole: (all-gathers, communication of gradients).

    Gradients are sent in the compute type, and as fp32 if micro-batches are summed. They are sent directly to
    the rank that sums them (parallel/shared_copies.py): unlike in a ring, all members of a node send their
    gradients out of the node.
    """
    width = compute_bytes(cfg)
    layers = span if kept_whole(cfg, axes, span) else []
    sparse = [layer for layer in layers if cfg.model.is_moe(layer)]
    if not sparse:
        return 0.0, 0.0
    n = numel(block_shapes(cfg.model, sparse[0])[1]) / axes.ep
    sent = width if cfg.train.accumulate == 1 else FP32
    gathering = ring(width * n, axes.sharers, axes.ep, m)
    return len(sparse) * gathering, len(sparse) * all_to_all(sent * n, axes.sharers, axes.ep, m)


def exposed_seconds(moving: float, computing: float, overlap: float) -> float:
    """Seconds of communication that compute does not hide. overlap: the largest share that it can hide."""
    return moving - min(min(overlap, 1.0) * moving, computing)


def padded_groups(cfg: Config, axes: Axes, span: range | None = None) -> list[tuple[float, int]]:
    """(elements, ranks that share them) that FSDP2 communicates, of dense parameters and of a rank's experts.

    The number of elements is the fullest rank's shard times the number of ranks.
    """
    units = padded_units(cfg, axes, range(cfg.model.layers) if span is None else span)
    dense, experts = (sum(numbers) for numbers in zip(*units, strict=True))
    return [(dense, axes.shard), (experts, axes.sharers)]


def padded_units(cfg: Config, axes: Axes, span: range) -> list[tuple[int, int]]:
    """(dense, experts of a rank) elements that FSDP2 communicates, for the root and each of these blocks."""
    model = cfg.model
    kinds = {}
    for layer in span:
        if (kind := model.is_moe(layer)) not in kinds:
            dense, experts = block_shapes(model, layer)
            kinds[kind] = _moved(dense, experts, axes, whole_experts(cfg, layer))
    return [_moved(chunk_root(cfg, axes, span), [], axes), *(kinds[model.is_moe(layer)] for layer in span)]


def _moved(dense: list[Shape], experts: list[Shape], axes: Axes, whole: bool = False) -> tuple[int, int]:
    return axes.shard * sharded(dense, axes.shard), axes.sharers * expert_shard(experts, axes, whole)
