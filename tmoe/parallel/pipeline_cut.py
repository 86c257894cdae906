"""Cuts a model's blocks into the chunks of a pipeline, so that stages take equal time.

next: pipeline_schedule.py
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tmoe.parallel.pipeline_schedule import too_few_blocks

PARTS = 64  # a piece of the head has a whole number of parts of a micro-batch's tokens


class Division(NamedTuple):
    """How a pipeline divides the model.

    `spans`: the blocks of each chunk. `pieces`: rank and share of tokens, in parts of PARTS, of each piece of
    the head; (): the last chunk has the head.
    """

    spans: tuple[range, ...]
    pieces: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        sizes = ",".join(str(len(span)) for span in self.spans)
        stages = ", ".join(f"{rank} ({count / PARTS:.0%})" for rank, count in self.pieces)
        return f"{sizes} blocks" + (f" and the head on stages {stages}" if stages else "")

    @property
    def heads(self) -> tuple[int, ...]:
        """The rank of each piece of the head."""
        return tuple(rank for rank, _ in self.pieces)

    @property
    def all_spans(self) -> tuple[range, ...]:
        """The blocks of each chunk, then an empty span for each piece of the head."""
        return tuple(self.part(chunk)[0] for chunk in range(len(self.spans) + len(self.pieces)))

    def part(self, chunk: int) -> tuple[range, bool]:
        """The blocks of a chunk or of a piece of the head, and whether its end may have norm and head."""
        if chunk < len(self.spans):
            return self.spans[chunk], not self.pieces
        layers = self.spans[-1].stop
        return range(layers, layers), True

    def tokens(self, count: int) -> list[range]:
        """The tokens of each piece, of `count` tokens."""
        ends = [count * end // PARTS for end in itertools.accumulate((n for _, n in self.pieces), initial=0)]
        return [range(start, end) for start, end in itertools.pairwise(ends)]


@functools.lru_cache(1024)
def divide(
    costs: tuple[int, ...],
    home: tuple[int, ...],
    first: int,
    head: int,
    *,
    divided: bool = False,
    sizes: tuple[int, ...] = (),
) -> Division:
    """Divides blocks, embedding and head so that the busiest rank has least work.

    Among equal divisions, chunks are as even as possible. All numbers are whole, so every rank gets the same
    result.

    Args:
        costs: cost of each block, in any common unit.
        home: the rank of each chunk.
        first: cost of the embedding, in the first chunk.
        head: cost of the head and the loss, in the last chunk.
        divided: divides the head's tokens over the ranks that have time left.
        sizes: the number of blocks of each chunk; (): chosen here.

    Raises ValueError if there are fewer blocks than chunks.
    """
    if not sizes:
        ends = (0, 0) if divided else (first, head)
        start = [len(span) for span in cut(len(costs), len(home), costs, *ends)]
        sizes = tuple(_climb(start, lambda these: _work(these, costs, home, first, head, divided)))
    loads = _loads(sizes, costs, home, first)[0]
    ends = itertools.accumulate(sizes, initial=0)
    spans = tuple(range(start, end) for start, end in itertools.pairwise(ends))
    return Division(spans, _pieces(loads, head) if divided else ())


def _loads(
    sizes: Sequence[int], costs: Sequence[int], home: Sequence[int], first: int
) -> tuple[list[int], list[int]]:
    """The cost of each rank, and of each chunk, without the head."""
    sums = list(itertools.accumulate(costs, initial=0))
    ends = list(itertools.accumulate(sizes, initial=0))
    chunks = [sums[end] - sums[start] for start, end in itertools.pairwise(ends)]
    chunks[0] += first
    ranks = [0] * (1 + max(home))
    for rank, cost in zip(home, chunks, strict=True):
        ranks[rank] += cost
    return ranks, chunks


def _work(
    sizes: Sequence[int], costs: Sequence[int], home: Sequence[int], first: int, head: int, divided: bool
) -> tuple:
    """The numbers that a division of blocks should keep small, the most important first."""
    ranks, chunks = _loads(sizes, costs, home, first)
    if divided:
        # A rank above the level has no piece of the head.
        most = max(_level(ranks, head), max(ranks))
        return most, max(chunks), sum(n * n for n in chunks), tuple(sizes)
    ranks[home[-1]] += head
    chunks[-1] += head
    return max(ranks), sum(n * n for n in ranks), max(chunks), sum(n * n for n in chunks), tuple(sizes)


def _climb(sizes: list[int], work: Callable[[Sequence[int]], tuple]) -> list[int]:
    """Moves single blocks from one chunk to another while that improves `work`."""
    best = work(sizes)
    while True:
        found = None
        for a, b in itertools.permutations(range(len(sizes)), 2):
            if sizes[a] > 1:
                tried = list(sizes)
                tried[a], tried[b] = tried[a] - 1, tried[b] + 1
                if (value := work(tried)) < best:
                    best, found = value, tried
        if found is None:
            return sizes
        sizes = found


def _level(loads: Sequence[int], head: int) -> int:
    """The cost to which the head fills up the ranks with the least cost, rounded up."""
    below = 0
    for count, load in enumerate(sorted(loads)):
        if count and load * count - below >= head:
            return -(-(below + head) // count)
        below += load
    return -(-(below + head) // len(loads))


def _pieces(loads: Sequence[int], head: int) -> tuple[tuple[int, int], ...]:
    """Rank and parts of the head for each rank that has time for a part or more."""
    level = _level(loads, max(1, head))
    room = [max(0, level - load) for load in loads]
    parts = [PARTS * each // sum(room) for each in room]
    left = sorted(range(len(loads)), key=lambda r: (-(PARTS * room[r] % sum(room)), r))
    for rank in left[: PARTS - sum(parts)]:
        parts[rank] += 1
    return tuple((rank, count) for rank, count in enumerate(parts) if count)


def cut(
    layers: int, chunks: int, costs: Sequence[float] | None = None, first: float = 0, last: float = 0
) -> list[range]:
    """Divides a model's blocks into the `chunks` chunks of all ranks, so that the largest cost is least.

    Every chunk gets neighbouring blocks, at least one. If several cuts have the same largest cost, the cut
    with the least sum of squared costs is returned; among equal sums, the cut with fewer blocks in the first
    chunks, where ranks hold most micro-batches.

    Args:
        costs: cost of each block, at least 0, in any common unit (None: all equal).
        first: additional cost of the first chunk (embedding).
        last: additional cost of the last chunk (head and loss).
    """
    costs = [1] * layers if costs is None else list(costs)
    if chunks < 1 or chunks > layers:
        raise ValueError(too_few_blocks(layers, f"{chunks} chunks (--parallel.pp times --parallel.chunks)"))
    if len(costs) != layers:
        raise ValueError(f"{len(costs)} costs: must be one for each of --model.layers={layers} blocks")
    if not all(0 <= each < math.inf for each in (*costs, first, last)):
        raise ValueError(f"costs={costs}, first={first}, last={last}: must be finite and at least 0")
    sums = list(itertools.accumulate(costs, initial=0))

    def cost(chunk: int, start: int, stop: int) -> float:
        extra = (first if chunk == 0 else 0) + (last if chunk == chunks - 1 else 0)
        return sums[stop] - sums[start] + extra

    begin = _most_even(layers, chunks, cost, _cheapest(layers, chunks, cost))
    spans: list[range] = []
    stop = layers
    for at in reversed(begin):
        spans.append(range(at[stop], stop))
        stop = at[stop]
    return spans[::-1]


def _starts(chunk: int, stop: int) -> range:
    """Blocks at which a chunk may begin, if every chunk before it has at least one block."""
    return range(chunk, stop) if chunk else range(1)


def _cheapest(layers: int, chunks: int, cost: Callable[[int, int, int], float]) -> float:
    """The largest cost of a chunk in the best cut. cost: of a chunk, from its first block to its end.

    `dearest[j]` is the largest cost of a chunk in the best cut of the first j blocks. It grows with j, and
    the last chunk gets cheaper with a later start, so the best start is where the two costs cross.
    """
    dearest: list[float] = [0.0] * (layers + 1)
    for chunk in range(chunks):
        before, dearest = dearest, [math.inf] * (layers + 1)
        for stop in range(chunk + 1, layers + 1) if chunk < chunks - 1 else (layers,):
            options = _starts(chunk, stop)
            turn = bisect.bisect_left(
                options, True, key=lambda s, c=chunk, e=stop, b=before: b[s] >= cost(c, s, e)
            )
            near = options[max(0, turn - 1) : turn + 1]
            dearest[stop] = min(max(before[s] if chunk else 0, cost(chunk, s, stop)) for s in near)
    return dearest[layers]


def _most_even(
    layers: int, chunks: int, cost: Callable[[int, int, int], float], most: float
) -> list[list[int]]:
    """The start of each chunk for each end, in the cut with the least sum of squared costs.

    No chunk of that cut costs more than `most`.
    """
    least: list[float] = [0.0] + [math.inf] * layers
    begin: list[list[int]] = []
    for chunk in range(chunks):
        before, least, at = least, [math.inf] * (layers + 1), [0] * (layers + 1)
        for stop in range(chunk + 1, layers + 1):
            for start in reversed(_starts(chunk, stop)):
                if (part := cost(chunk, start, stop)) > most:
                    break
                if (total := before[start] + part * part) <= least[stop]:
                    least[stop], at[stop] = total, start
        begin.append(at)
    return begin
