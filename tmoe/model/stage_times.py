"""Seconds of a model's blocks, embedding and head in a pipeline, by the cost model, and the cut that follows.

The seconds are those of an H200 whatever the GPU, so the cut depends on the settings alone: a dry run, the
planner and every rank find the same one.

next: block_time.py, then parallel/pipeline_cut.py
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tmoe.config.axes import Axes
from tmoe.config.run import Config
from tmoe.config.sizes import FP32, compute_bytes, local_tokens, sum_bytes
from tmoe.model.block_time import RECOMPUTED, block_seconds, expert_kernels, head_seconds
from tmoe.model.count import block_shapes, numel
from tmoe.model.link_time import times
from tmoe.parallel.pipeline_cut import PARTS, Division, divide
from tmoe.parallel.pipeline_schedule import EXPERTS, StageCost, Table, homes, table

CONSTANTS = Path(__file__).with_name("h200.json")


def namespace(constants: Mapping[str, Mapping[str, Any]]) -> SimpleNamespace:
    """The constants by name, and `gate`: which experts a token chooses (reach.py)."""
    return SimpleNamespace(**{name: c["value"] for name, c in constants.items()}, gate="learned")


@functools.cache
def h200() -> SimpleNamespace:
    """The constants of an H200."""
    return namespace(json.loads(CONSTANTS.read_text()))


def block_cost(cfg: Config, axes: Axes, layer: int, m: SimpleNamespace) -> StageCost:
    """Seconds of a block in one micro-batch, with what is recomputed and the sums of gradients.

    Collectives of FSDP2 are not counted. Under adapters the products for the gradients of weights are left
    out.
    """
    skew = 1.0 if axes.ep == 1 else m.skew
    forward, backward = block_seconds(cfg, axes, layer, m, skew)
    again = sum(forward[part] for part in RECOMPUTED[cfg.parallel.checkpoint])
    sparse = cfg.model.is_moe(layer)
    weights = expert_kernels(cfg, axes, m, skew).weights if sparse else 0.0
    inputs = sum(backward.values()) - weights + again
    if cfg.lora.rank:
        return StageCost(sum(forward.values()), inputs - backward["projections"] / 2, 0.0)
    dense, experts = map(numel, block_shapes(cfg.model, layer))
    summed = sum_seconds(cfg, dense + experts / axes.ep, m)
    return StageCost(sum(forward.values()), inputs + summed, weights)


def sum_seconds(cfg: Config, elements: float, m: SimpleNamespace) -> float:
    """Seconds in which gradients of one micro-batch are added to the sums of a step."""
    several = cfg.train.accumulate > 1 and not cfg.lora.rank
    return several * 2 * sum_bytes(cfg) * elements / m.memory_rate


def ends_cost(cfg: Config, axes: Axes, m: SimpleNamespace) -> tuple[float, StageCost]:
    """Seconds of the embedding, and of the head with the loss, in one micro-batch.

    The head counts the blocks that predict further tokens, each with a further product.
    """
    moved = local_tokens(cfg, axes) * cfg.model.dim
    embedding = moved * (2 * compute_bytes(cfg) + 3 * FP32) / m.memory_rate
    norm = 3 * moved * compute_bytes(cfg) / m.memory_rate
    summed = sum_seconds(cfg, cfg.model.vocab * cfg.model.dim, m)
    head = StageCost(head_seconds(cfg, axes, m) + norm, 2 * norm + summed, 0.0)
    depth = cfg.model.mtp.depth
    block = block_cost(cfg, axes, cfg.model.layers, m) if depth else head
    return embedding, StageCost(*(a + depth * (a + b) for a, b in zip(head, block, strict=True)))


def message_seconds(cfg: Config, axes: Axes, m: SimpleNamespace) -> float:
    """Seconds to send a micro-batch's hidden states from one stage to the next."""
    moved = local_tokens(cfg, axes) * cfg.model.dim * compute_bytes(cfg)
    near = axes.world <= m.node
    return m.message + (times(m.collective, moved) if near else moved / m.nic_rate + m.nic_hop)


def kinds_of(cfg: Config) -> list[tuple]:
    """The kind of each block: blocks of one kind take the same time."""
    model = cfg.model
    return [(model.is_moe(i), model.mask_of(i), model.rope_of(i)) for i in range(model.layers)]


@functools.lru_cache(256)
def division(cfg: Config, axes: Axes) -> Division:
    """The blocks of each chunk and the pieces of the head, cut by seconds, or as --parallel.cut says.

    Raises ValueError, naming the flags, if the model cannot be cut into this number of chunks.
    """
    layers = cfg.model.layers
    if axes.pp == 1:
        return Division((range(layers),))
    p, m = cfg.parallel, h200()
    kinds = kinds_of(cfg)
    seconds = {kind: sum(block_cost(cfg, axes, kinds.index(kind), m)) for kind in set(kinds)}
    embedding, head = ends_cost(cfg, axes, m)
    home = homes(p.schedule, axes.pp, p.chunks_a_stage)
    # in thousandths of the mean block: whole numbers, and the same ones for many layouts
    unit = sum(seconds[kind] for kind in kinds) / layers / 1000
    costs = tuple(round(seconds[kind] / unit) for kind in kinds)
    ends = round(embedding / unit), round(sum(head) / unit)
    return divide(costs, home, *ends, divided=p.head == "divided", sizes=p.cut)


def stage_table(cfg: Config, axes: Axes, *, deferred: bool = False) -> Table:
    """The pipeline's table: which action each stage does on which chunk, in which order."""
    p, found = cfg.parallel, division(cfg, axes)
    cost = tuple(chunk_costs(cfg, axes, found)) if found.pieces else EXPERTS
    how = p.schedule, axes.pp, cfg.train.accumulate, p.chunks_a_stage
    return table(*how, deferred=deferred, cost=cost, heads=found.heads)


def chunk_costs(cfg: Config, axes: Axes, found: Division) -> Sequence[StageCost]:
    """Seconds of each chunk and of each piece of the head, in one micro-batch."""
    m, kinds = h200(), kinds_of(cfg)
    blocks = {kind: block_cost(cfg, axes, kinds.index(kind), m) for kind in set(kinds)}
    costs = [
        StageCost(*(sum(column) for column in zip(*(blocks[kinds[i]] for i in span), strict=True)))
        for span in found.spans
    ]
    _, head = ends_cost(cfg, axes, m)
    return [*costs, *(StageCost(*(n / PARTS * each for each in head)) for _, n in found.pieces)]
