"""The journal of a rank's collectives since the last vote: each call in words, and a checksum per group.

Ranks of one process group must call the same collectives, of equal sizes. Ranks of different groups need not:
the rows that one group reads may hold more sequences than those of another. Therefore calls are compared only
within the group of the collective.

`attach` replaces the methods of the process group itself. All functions of torch.distributed, and all
wrappers of these functions, call them.

next: run/watch/failure_messages.py
"""

from __future__ import annotations

import hashlib
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from functools import cache, wraps
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import c10d_logger, distributed_c10d

from tmoe.parallel import agree

# Methods of a process group, and the names of the functions that users call.
METHODS = dict(
    allreduce="all_reduce",
    allreduce_coalesced="all_reduce_coalesced",
    allgather="all_gather",
    allgather_coalesced="all_gather_coalesced",
    _allgather_base="all_gather_into_tensor",  # torch 2.11
    all_gather_single="all_gather_into_tensor",  # torch 2.13
    all_gather_single_coalesced="all_gather_into_tensor_coalesced",
    allgather_into_tensor_coalesced="all_gather_into_tensor_coalesced",
    reduce_scatter="reduce_scatter",
    _reduce_scatter_base="reduce_scatter_tensor",
    reduce_scatter_single="reduce_scatter_tensor",
    reduce_scatter_single_coalesced="reduce_scatter_tensor_coalesced",
    reduce_scatter_tensor_coalesced="reduce_scatter_tensor_coalesced",
    alltoall="all_to_all",
    alltoall_base="all_to_all_single",
    all_to_all_single="all_to_all_single",
    broadcast="broadcast",
    reduce="reduce",
    gather="gather",
    scatter="scatter",
    barrier="barrier",
)
UNEVEN = {"all_to_all_single", "all_to_all", "gather", "scatter"}  # sizes may differ between ranks
DTYPES = {t: str(t).removeprefix("torch.") for t in vars(torch).values() if isinstance(t, torch.dtype)}
AMONG = " among ranks "  # between a call and its group, if the group is a part of the world
NOTHING = "nothing yet"
# Files whose frames are between a call site and the process group.
INSIDE = {distributed_c10d.__file__, c10d_logger.__file__, agree.__file__}


Heard = Callable[[str, dist.ProcessGroup, tuple, Any], None]
"""called with a collective's name, group, the arguments of the group's method and its caller's frame"""
Originals = dict[str, Any]
"""methods of the process group, by name, as its class had them"""


def attach(heard: Heard) -> Originals:
    """Makes every collective call `heard` before it runs, until `detach` is called with the result."""
    # The attribute of the class is kept; the result of getattr would not bind again.
    originals = {name: vars(dist.ProcessGroup)[name] for name in METHODS if name in vars(dist.ProcessGroup)}
    for name in originals:
        setattr(dist.ProcessGroup, name, _announced(METHODS[name], getattr(dist.ProcessGroup, name), heard))
    return originals


def detach(originals: Originals) -> None:
    """Restores the methods that `attach` returned."""
    for name, original in originals.items():
        setattr(dist.ProcessGroup, name, original)


def _announced(name: str, call: Callable[..., Any], heard: Heard) -> Callable[..., Any]:
    @wraps(call)
    def collective(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        heard(name, group, args, sys._getframe(1))
        return call(group, *args, **kwargs)

    return collective


class Journal:
    """The calls of one rank since the last vote.

    lines: each call in words. If a call's group is a part of the world, its words end with the group's ranks.
    """

    def __init__(self, rank: int, world: int):
        self.rank = rank
        self.world = world
        self._groups: dict[str, tuple[int, ...]] = {}  # the ranks of each process group, by its name
        self.begin()

    def begin(self) -> None:
        """Clears all calls."""
        self.lines: list[str] = []
        self._checksums: dict[tuple[int, ...], int] = {}  # of the calls of each group, in order

    def note(self, name: str, group: dist.ProcessGroup, args: tuple, frame: Any) -> bool:
        """Records a call. Returns whether its tensors are on the CPU (or it has none).

        name: the name that users call. args: of the process group's method. frame: of the caller.
        """
        tensors = _first_tensors(args)
        options = args[-1] if args else None
        ranks = self._ranks(group)
        words = f"{name} {_operands(name, tensors, options)}at {_call_site(frame)}"
        self._checksums[ranks] = zlib.crc32(words.encode(), self._checksums.get(ranks, 0))
        self.lines.append(words if len(ranks) == self.world else f"{words}{AMONG}{spell(ranks)}")
        return not tensors or tensors[0].is_cpu

    def share(self) -> int:
        """This rank's share of a sum over all ranks, which is 0 if the members of every group agree.

        The first member of a group of n adds n - 1 times the digest of its calls, each other member -1 times.
        If one differs, the sum is 0 only by chance, once in 2^38. It stays below 2^63 for 100,000 ranks.
        """
        total = 0
        for ranks, checksum in self._checksums.items():
            digest = hashlib.blake2b(f"{ranks} {checksum}".encode(), digest_size=5).digest()
            factor = len(ranks) - 1 if self.rank == ranks[0] else -1
            total += factor * (int.from_bytes(digest) >> 2) if len(ranks) > 1 else 0
        return total

    def _ranks(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """The ranks of a group, in ascending order; only this rank for a group that torch does not know."""
        name = group.group_name
        if name not in self._groups:
            try:
                ranks = tuple(sorted(dist.get_process_group_ranks(group)))
            except KeyError:
                ranks = tuple(range(self.world)) if group.size() == self.world else (self.rank,)
            self._groups[name] = ranks
        return self._groups[name]


def parting(journals: Mapping[int, list[str]], skipped: bool = True) -> str | None:
    """Describes where ranks of one group called different collectives; None if they called the same.

    journals: lines of each rank, as in `Journal`. skipped: whether a call that a rank has not made is a
        difference as well. It is not a difference if that rank may be gone.

    The members of each group are compared by the calls of all groups that contain all of them, so that the
    first difference is where one of them took another path. Two calls that differ are reported before a call
    that one rank lacks, and a small group before a large one.
    """
    parsed = {line: _group_of(line) for line in {line for lines in journals.values() for line in lines}}
    differences: list[tuple[tuple[bool, int, int], dict[str, list[int]]]] = []
    for group in set(parsed.values()):
        wider = {
            line for line, line_group in parsed.items() if not line_group or (group and line_group >= group)
        }
        shared = {
            rank: [line for line in lines if line in wider]
            for rank, lines in journals.items()
            if not group or rank in group
        }
        longest = max(map(len, shared.values()), default=0)
        for at in range(longest):
            calls: dict[str, list[int]] = {}
            for rank, lines in shared.items():
                calls.setdefault(lines[at] if at < len(lines) else NOTHING, []).append(rank)
            lacks = len(calls.keys() - {NOTHING}) < 2
            if len(calls) > 1:
                if skipped or not lacks:
                    differences.append(((lacks, len(shared), at), calls))
                break
    if not differences:
        return None
    (_, _, at), calls = min(differences, key=lambda difference: difference[0])
    which = "; ".join(f"rank {', '.join(map(str, ranks))}: {line}" for line, ranks in calls.items())
    return f"the ranks' collectives part at number {at + 1}: {which}"


def spell(ranks: tuple[int, ...]) -> str:
    """Ranks in words, short for regular ranges: "0, 5", "0 to 6", "0 to 12 by 4"."""
    step = ranks[1] - ranks[0] if len(ranks) > 2 else 0
    if step < 1 or ranks != tuple(range(ranks[0], ranks[-1] + 1, step)):
        return ", ".join(map(str, ranks))
    return f"{ranks[0]} to {ranks[-1]}" + (f" by {step}" if step > 1 else "")


def _group_of(line: str) -> frozenset[int]:
    """The ranks that a journal's line names; an empty set for a call of the whole world."""
    _, among, words = line.rpartition(AMONG)
    if not among:
        return frozenset()
    if even := re.fullmatch(r"(\d+) to (\d+)(?: by (\d+))?", words):
        return frozenset(range(int(even[1]), int(even[2]) + 1, int(even[3] or 1)))
    return frozenset(map(int, words.split(", ")))


def _first_tensors(args: tuple) -> list[Tensor]:
    """The tensors of a collective's first argument: its outputs, or tensors that are reduced in place."""
    tensors = args[0] if args else []
    while isinstance(tensors, list) and tensors and isinstance(tensors[0], list):
        tensors = tensors[0]
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _operands(name: str, tensors: list[Tensor], options: Any) -> str:
    """The facts that are equal on all ranks of a group: number of elements, type, operation, root."""
    words = ""
    if tensors and name not in UNEVEN:
        words = f"of {sum([t.numel() for t in tensors])} {DTYPES[tensors[0].dtype]} "
    if (operation := getattr(options, "reduceOp", None)) is not None:
        words += f"{operation.op.name.lower()} "
    if (root := getattr(options, "rootRank", None)) is not None:
        words += f"root {root} "
    return words


def _call_site(frame: Any) -> str:
    """Where torch.distributed was called: file, line and function."""
    while frame.f_code.co_filename in INSIDE:
        frame = frame.f_back
    return _place(frame.f_code, frame.f_lineno)


@cache
def _place(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line} {code.co_name}"
