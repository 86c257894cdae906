"""Seconds that a step's collectives take: what FSDP2 and ranks that keep experts whole move, and what compute does not hide of it.

For model/transformer.py, whose constants `m` are (h200.json); no measurement of its own.
"""

import math
from types import SimpleNamespace

import numpy as np

from tmoe.config.run import Config
from tmoe.model.count import block_shapes, numel, root_shapes
from tmoe.parallel.mesh import units
from tmoe.run.memory import FP32, compute_bytes, expert_shard, kept_whole, sharded


def collective_seconds(
    cfg: Config, dp: int, ep: int, m: SimpleNamespace, forward: float, backward: float
) -> tuple[float, float]:
    """Seconds of a step's collectives that stand in the open beside so much compute of a micro-batch, and those of the others' bytes,
    had they gone over NVLink alone: across nodes they come slower, and take as much of a GPU's memory and units in all."""

    def moving(m: SimpleNamespace) -> list[float]:
        gather, regather, reduce = fsdp_seconds(cfg, dp, ep, m)
        spread, summed = kept_seconds(cfg, dp, ep, m)
        return [gather + spread, gather, regather, regather + reduce + summed]

    again = cfg.train.accumulate - 1
    counts, computing = (1, again, again, 1), (forward, forward, backward, backward)
    bare, near = moving(m), moving(SimpleNamespace(**{**vars(m), "node": dp * ep}))
    exposed = [exposed_seconds(*pair, m.fsdp_overlap) for pair in zip(bare, computing, strict=True)]
    hidden = [b and n * (1 - e / b) for b, n, e in zip(bare, near, exposed, strict=True)]
    return float(np.dot(counts, exposed)), float(np.dot(counts, hidden))


def fsdp_seconds(cfg: Config, dp: int, ep: int, m: SimpleNamespace) -> tuple[float, float, float]:
    """Seconds of a micro-batch's all-gathers in the forward and in the backward (the root stays), and of a step's
    reduce-scatters in fp32."""
    model, width, world = cfg.model, compute_bytes(cfg), dp * ep

    def once(size: int) -> float:
        return sum(ring(size * n, world, 1, m) for n in dense) + sum(
            ring(size * n, dp, ep, m) for n in experts
        )

    (root, _), *blocks = padded_units(cfg, dp, ep)
    sizes = [width * numel(block_shapes(model, layer)[0]) for layer in range(model.layers)]
    dense = [sum(blocks[i][0] for i in unit) for unit in units(sizes)]
    experts = [] if kept_whole(cfg, dp, ep) else [n for _, n in blocks if n]
    return (
        once(width) + ring(width * root, world, 1, m),
        once(width),
        once(FP32) + ring(FP32 * root, world, 1, m),
    )


def kept_seconds(cfg: Config, dp: int, ep: int, m: SimpleNamespace) -> tuple[float, float]:
    """Seconds of a step's gathering of such experts, and of the way of their gradients, in the compute type but for sums of micro-batches.

    Gradients go straight to the rank that sums them (parallel/gathered_copies.py): unlike a ring, all members of a node send theirs out.
    """
    width, layers = compute_bytes(cfg), range(cfg.model.layers if kept_whole(cfg, dp, ep) else 0)
    experts = [n / ep for n in (numel(block_shapes(cfg.model, layer)[1]) for layer in layers) if n]
    sent = width if cfg.train.accumulate == 1 else FP32
    return sum(ring(width * n, dp, ep, m) for n in experts), sum(
        all_to_all(sent * n, dp, ep, m) for n in experts
    )


def ring(whole: float, size: int, stride: int, m: SimpleNamespace) -> float:
    """Seconds to gather (or to reduce and scatter) `whole` bytes in a group of `size` ranks, `stride` apart."""
    if size == 1:
        return 0.0
    local = min(size, max(1, m.node // stride))  # members in a node
    nodes = math.ceil(size / local)
    sent = whole * (size - 1) / size
    seconds = times(m.collective, sent) if local > 1 else 0.0
    if nodes > 1:
        seconds = (
            max(seconds, sent / (local * m.nic_rate)) + (nodes - 1) * m.nic_hop + (size - nodes) * m.link_hop
        )
    return seconds


def all_to_all(whole: float, size: int, stride: int, m: SimpleNamespace) -> float:
    """Seconds until each of `size` ranks, `stride` apart, has every other's piece of its `whole` bytes."""
    local = min(size, max(1, m.node // stride))  # members in a node
    seconds = times(m.collective, whole * (local - 1) / size) if local > 1 else 0.0
    if size > local:
        seconds = (
            max(seconds, whole * (size - local) / size / m.nic_rate)
            + (math.ceil(size / local) - 1) * m.nic_hop
        )
    return seconds


def times(curve: list[list[float]], moved: float) -> float:
    """Seconds on a curve of (bytes, seconds), straight between its points and beyond the last."""
    sizes, seconds = zip(*curve, strict=True)
    if moved <= sizes[-1]:
        return float(np.interp(moved, sizes, seconds))
    return seconds[-1] + (moved - sizes[-1]) * (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])


def exposed_seconds(moving: float, computing: float, overlap: float) -> float:
    return moving - min(min(overlap, 1.0) * moving, computing)


def padded_groups(cfg: Config, dp: int, ep: int) -> list[tuple[float, int]]:
    """(elements, ranks that share them) as FSDP2 moves them, of dense parameters and of a rank's experts: the fullest rank's piece, as often as there are ranks."""
    units = padded_units(cfg, dp, ep)
    return [(sum(dense for dense, _ in units), dp * ep), (sum(experts for _, experts in units), dp)]


def padded_units(cfg: Config, dp: int, ep: int) -> list[tuple[int, int]]:
    """(dense, experts of a rank) elements that FSDP2 moves, of the root and of each block."""
    blocks = [
        (root_shapes(cfg.model), []),
        *(block_shapes(cfg.model, layer) for layer in range(cfg.model.layers)),
    ]
    return [
        (dp * ep * sharded(dense, dp * ep), dp * expert_shard(experts, dp, ep)) for dense, experts in blocks
    ]
