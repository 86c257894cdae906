"""Matrices that ranks hold by rows: each is sent to one owner, which computes and sends each rank its rows.

A rank sends its rows twice in a step, to the owner and, of the matrices that it owns, back. All ranks choose
the same owners, so that each has about the same work.

next: optim/muon.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

WAVE = 2**27  # elements of the matrices that an owner holds at a time, unless one matrix has more


def rows_group(p: Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold a matrix by rows; None if each matrix of the parameter is whole on its rank.

    With replicas they are the ranks of one replica. ValueError for a parameter that is cut otherwise.
    """
    if not isinstance(p, DTensor):
        return None
    sizes = [p.device_mesh.size(i) for i in range(p.device_mesh.ndim)]
    axes = [i for i, at in enumerate(p.placements) if hasattr(at, "dim") and sizes[i] > 1]
    cut = {p.placements[i].dim % p.ndim for i in axes}
    if not axes or (cut == {0} and p.ndim > 2):
        return None
    if cut != {0} or len(axes) > 1:
        raise ValueError(f"Muon: a weight {list(p.shape)} placed {p.placements}, valid: cut along axis 0")
    return p.device_mesh.get_group(axes[0])


def height(rows: int, ranks: int, rank: int) -> int:
    """Rows of a rank's part, as torch.chunk cuts."""
    each = -(-rows // ranks)
    return max(0, min(each, rows - rank * each))


def waves(sizes: Sequence[int], ranks: int) -> Iterator[list[int]]:
    """Numbers of consecutive matrices, so that an owner holds about WAVE elements at a time.

    sizes: elements of each.
    """
    wave: list[int] = []
    held = 0
    for i, size in enumerate(sizes):
        if wave and held + size > WAVE * ranks:
            yield wave
            wave, held = [], 0
        wave.append(i)
        held += size
    if wave:
        yield wave


def owners_of(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """The owner of each matrix: the costliest first, each to the rank with the least work so far."""
    load = [0] * ranks
    owner = [0] * len(shapes)
    cost = [rows * columns * min(rows, columns) for rows, columns in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -cost[i]):
        owner[i] = min(range(ranks), key=load.__getitem__)
        load[owner[i]] += cost[i]
    return owner


def at_owners(
    local: Sequence[Tensor],
    shapes: Sequence[tuple[int, int]],
    compute: Callable[[list[int], list[Tensor]], list[Tensor]],
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """This rank's rows of `compute` of each whole matrix.

    A collective of the group, of two exchanges; None: this rank alone.

    local: this rank's rows of each matrix, all of one type. shapes: of the whole matrices.
    compute: from the numbers of some matrices, and these matrices, to a matrix of equal shape and type for
        each.
    """
    if group is None:
        return compute(list(range(len(local))), list(local))
    ranks = group.size()
    owner = owners_of(shapes, ranks)
    order = sorted(range(len(local)), key=owner.__getitem__)  # by owner
    own = [i for i in order if owner[i] == group.rank()]
    tall = [[height(shapes[i][0], ranks, r) for i in own] for r in range(ranks)]  # of each rank's rows
    sizes = [[h * shapes[i][1] for h, i in zip(rows, own, strict=True)] for rows in tall]
    received = [sum(of_rank) for of_rank in sizes]
    sent = [0] * ranks
    for i in order:
        sent[owner[i]] += local[i].numel()

    there = _exchanged(torch.cat([local[i].reshape(-1) for i in order]), sent, received, group)
    by_rank = [part.split(of_rank) for part, of_rank in zip(there.split(received), sizes, strict=True)]
    full = [torch.cat(parts).view(shapes[i]) for i, *parts in zip(own, *by_rank, strict=True)]
    done = [m.split(heights) for m, *heights in zip(compute(own, full), *tall, strict=True)]
    back = [part.reshape(-1) for parts in zip(*done, strict=True) for part in parts]
    flat = _exchanged(torch.cat(back) if back else there[:0], received, sent, group)
    found = dict(zip(order, flat.split([local[i].numel() for i in order]), strict=True))
    return [found[i].view(rows.shape) for i, rows in enumerate(local)]


def _exchanged(t: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """The elements that all ranks send this rank. sent, received: their numbers, by rank."""
    found = t.new_empty(sum(received))
    dist.all_to_all_single(found, t, received, sent, group=group)
    return found
