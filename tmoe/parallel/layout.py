"""Tells from names and shapes which rank holds which box of each tensor, as model/parallelize.py shards.

A checkpoint loads into any layout, whatever its files hold. Written in the layout of the world that will read
it, each rank finds its rows in its own files. tests/checkpoint/test_tools.py compares with what real ranks
save.

next: checkpoint/rewrite.py
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch.distributed.tensor import Shard

from tmoe.config.axes import Axes
from tmoe.config.check import MOST, ConfigError, Setting
from tmoe.parallel.mesh import shard_dim

# parameters of tmoe.moe.experts.Experts, or of somebody's own, and what the optimizer keeps for them
EXPERTS = re.compile(r"(.*\.)?experts\.(own\..+|[^.]+)")
# every rank holds it whole, in fp32 whatever the weights are
BUFFERS = re.compile(r"(.*\.)?router\.choice_bias")


class Box(NamedTuple):
    """Part of a tensor and the rank that holds it."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Layout(NamedTuple):
    """The boxes of one tensor by offset, and how a manifest words their placement.

    Each element is in one box.
    """

    placement: str
    boxes: tuple[Box, ...]


def axes_of_flags(world: int, ep: int) -> Axes:
    """Axes of the ranks that will load files, from the flags --world and --ep of an offline tool.

    Raises ConfigError where the world is too large or ep does not divide it.
    """
    if world < 1 or ep < 1 or world % ep:
        both = f"{world} {Setting('ep', ep)}"
        raise ConfigError.of("world", both, "both at least 1, and ep must divide the world")
    if world > MOST["world"]:
        raise ConfigError.of("world", world, f"must be at most {MOST['world']}")
    return Axes(dp=world // ep, ep=ep)


def lay_out(shapes: dict[str, tuple[int, ...]], axes: Axes) -> dict[str, Layout]:
    """Layout of every tensor, by name; rank = dp index * ep + ep index.

    Experts [E, ...] are cut along E over ep, then over dp; everything else along its first axis over all
    ranks. Buffers and what has no first axis (step counts) or no elements lie with rank 0.
    Raises ConfigError where ep does not divide a tensor's experts.
    """
    ep = axes.ep
    modules: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if EXPERTS.fullmatch(name) and shape:
            if shape[0] % ep:
                raise ConfigError.of("ep", ep, f"must divide the {shape[0]} experts of {name}")
            modules.setdefault(name.rpartition(".")[0], []).append((shape[0] // ep, *shape[1:]))
    dims = {module: shard_dim(local, axes.dp) for module, local in modules.items()}
    found = {name: _layout(shape, axes, dims.get(name.rpartition(".")[0])) for name, shape in shapes.items()}
    return found | {name: _replicated(shape) for name, shape in shapes.items() if BUFFERS.fullmatch(name)}


def _layout(shape: tuple[int, ...], axes: Axes, dim: int | None) -> Layout:
    if not shape or 0 in shape:
        return _replicated(shape)
    world, dp, ep = axes.world, axes.dp, axes.ep
    if dim is None:
        boxes = [Box(rank, *_part(shape, 0, world, rank)) for rank in range(world)]
        placement = f"world={world}: {Shard(0)!r}"
    else:
        boxes = [_expert_box(shape, axes, dim, rank) for rank in range(world)]
        # in torch's words of how FSDP2 places what another axis cut before it
        over_dp = f"_StridedShard(dim=0, sf={ep})" if dim == 0 and ep > 1 else repr(Shard(dim))
        placement = f"dp={dp}: {over_dp}, ep={ep}: {Shard(0)!r}"
    return Layout(
        placement, tuple(sorted((box for box in boxes if 0 not in box.shape), key=lambda box: box.offset))
    )


def _replicated(shape: tuple[int, ...]) -> Layout:
    """Every rank holds it; rank 0 writes it."""
    return Layout("replicated", (Box(0, (0,) * len(shape), shape),))


def _expert_box(shape: tuple[int, ...], axes: Axes, dim: int, rank: int) -> Box:
    """Its experts are cut over ep first, then over dp along `dim`."""
    of_dp, of_ep = divmod(rank, axes.ep)
    group = shape[0] // axes.ep
    offset, held = _part((group, *shape[1:]), dim, axes.dp, of_dp)
    return Box(rank, (offset[0] + of_ep * group, *offset[1:]), held)


def _part(
    shape: tuple[int, ...], dim: int, parts: int, index: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of the index-th of torch.chunk(parts, dim).

    Lengths are equal; the last ones are shorter, or empty.
    """
    length = -(-shape[dim] // parts)
    start = min(index * length, shape[dim])
    offset = [0] * len(shape)
    offset[dim] = start
    part = list(shape)
    part[dim] = min(length, shape[dim] - start)
    return tuple(offset), tuple(part)
