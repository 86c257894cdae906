"""Computes from names and shapes which rank holds which box of each tensor, as model/parallelize.py shards.

A checkpoint loads into any layout, however its tensors are divided into files. If it is written in the layout
of the world that will read it, each rank finds its rows in its own files. tests/checkpoint/test_tools.py
compares these boxes with the files that real ranks save.

next: checkpoint/rewrite.py
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch.distributed.tensor import Shard

from tmoe.config.axes import Axes
from tmoe.config.check import MOST, ConfigError, Setting
from tmoe.parallel.mesh import shard_dim

# parameters of tmoe.moe.experts.Experts, or of a user's experts, and the optimizer's state for them
EXPERTS = re.compile(r"(.*\.)?experts\.(own\..+|[^.]+)")
MUON = "optim.momentum."  # names of its state: experts that it trains are whole on a rank
# every rank holds these buffers whole, in fp32 whatever the type of the weights
BUFFERS = re.compile(r"(.*\.)?router\.choice_bias")


class Box(NamedTuple):
    """Part of a tensor and the rank that holds it."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Layout(NamedTuple):
    """The boxes of one tensor, sorted by offset, and the description of their placement for a manifest.

    Each element is in exactly one box.
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

    Experts [E, ...] are split along E over ep, then over dp. Every other tensor is split along its first axis
    over all ranks. Buffers, tensors without a first axis (step counts) and tensors without elements belong to
    rank 0. Raises ConfigError if ep does not divide a tensor's experts.
    """
    ep = axes.ep
    modules: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if EXPERTS.fullmatch(name) and shape:
            if shape[0] % ep:
                raise ConfigError.of("ep", ep, f"must divide the {shape[0]} experts of {name}")
            modules.setdefault(name.rpartition(".")[0], []).append((shape[0] // ep, *shape[1:]))
    by_muon = {name.removeprefix(MUON).rpartition(".")[0] for name in shapes if name.startswith(MUON)}
    dims = {
        module: shard_dim(local, axes.dp, any(f".{module}".endswith(f".{path}") for path in by_muon))
        for module, local in modules.items()
    }
    layouts = {
        name: _layout(shape, axes, dims.get(name.rpartition(".")[0])) for name, shape in shapes.items()
    }
    return layouts | {name: _replicated(shape) for name, shape in shapes.items() if BUFFERS.fullmatch(name)}


def _layout(shape: tuple[int, ...], axes: Axes, dim: int | None) -> Layout:
    if not shape or 0 in shape:
        return _replicated(shape)
    world, dp, ep = axes.world, axes.dp, axes.ep
    if dim is None:
        boxes = [Box(rank, *_part(shape, 0, world, rank)) for rank in range(world)]
        placement = f"world={world}: {Shard(0)!r}"
    else:
        boxes = [_expert_box(shape, axes, dim, rank) for rank in range(world)]
        # torch's notation for how FSDP2 shards a tensor that is already sharded over another axis
        over_dp = f"_StridedShard(dim=0, sf={ep})" if dim == 0 and ep > 1 else repr(Shard(dim))
        placement = f"dp={dp}: {over_dp}, ep={ep}: {Shard(0)!r}"
    return Layout(
        placement, tuple(sorted((box for box in boxes if 0 not in box.shape), key=lambda box: box.offset))
    )


def _replicated(shape: tuple[int, ...]) -> Layout:
    """The layout of a tensor that every rank holds and rank 0 writes."""
    return Layout("replicated", (Box(0, (0,) * len(shape), shape),))


def _expert_box(shape: tuple[int, ...], axes: Axes, dim: int, rank: int) -> Box:
    """A rank's box of a tensor of experts, which are split over ep first, then over dp along `dim`."""
    of_dp, of_ep = divmod(rank, axes.ep)
    group = shape[0] // axes.ep
    offset, part = _part((group, *shape[1:]), dim, axes.dp, of_dp)
    return Box(rank, (offset[0] + of_ep * group, *offset[1:]), part)


def _part(
    shape: tuple[int, ...], dim: int, parts: int, index: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of the index-th part of torch.chunk(parts, dim).

    All parts have equal length, except that the last parts may be shorter or empty.
    """
    length = -(-shape[dim] // parts)
    start = min(index * length, shape[dim])
    offset = [0] * len(shape)
    offset[dim] = start
    part = list(shape)
    part[dim] = min(length, shape[dim] - start)
    return tuple(offset), tuple(part)
