"""Pipeline schedules as tables of each rank's actions, in order, and a simulation of the time they need.

A model is split into pp * chunks chunks of neighbouring blocks. A rank runs a list of actions
(op, chunk, micro-batch):

    F  forward                          needs F of the previous chunk
    B  backward                         needs B (or I) of the next chunk, and this chunk's F
    I  backward without W's part        needs the same as B; the gradients of experts' weights are deferred
    W  the gradients deferred by an I   needs I; no other action waits for a W, so it fills gaps

    1f1b         chunk c on rank c        forward and backward in turn; bubble (pp-1) / (M+pp-1)
    interleaved  chunk c on rank c % pp   M a multiple of pp; bubble (pp-1) / (chunks*M+pp-1)
    v            down and up again        two chunks a rank; the first and the last chunk share rank 0

M is the number of micro-batches. Every rank makes the whole table, which is a pure function of its arguments.
So a receiver knows in which order its neighbour sends (`messages`): no message carries a tag, and no rank
asks another. `simulate` proves that a table leaves out no action, repeats none, and has no deadlock.

next: tokens.py
"""

import bisect
import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

Schedule = Literal["1f1b", "interleaved", "v"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)

# Pairs (a, b) by which v orders actions that are ready: a forward is due `a` times F's duration after the
# forward of the previous chunk, a backward `b` times I's duration after that of the next chunk. With these
# three pairs, tables were as short as with the best of 42 such pairs, for 2 to 16 ranks, 1 to 64
# micro-batches, and W of 15, 27 and 0 percent of the work.
PACES = ((4.0, 2.0), (4.0, 3.0), (3.0, 1.5))


class Action(NamedTuple):
    """One action of a rank.

    op: F, B, I or W.
    chunk: number of the chunk in the whole model, from 0.
    micro: number of the micro-batch.
    """

    op: str
    chunk: int
    micro: int


class Message(NamedTuple):
    """A tensor that one chunk sends to another.

    kind: F (hidden states) or B (their gradient).
    chunk: number of the chunk that receives it.
    micro: number of the micro-batch.
    """

    kind: str
    chunk: int
    micro: int


class StageCost(NamedTuple):
    """Durations of F, of I and of W in one chunk, in any common unit; B lasts as long as I and W together."""

    forward: float
    inputs: float
    weights: float


class Table(NamedTuple):
    """`ranks`: the actions of each rank, in order; `home`: the rank of each chunk."""

    ranks: tuple[tuple[Action, ...], ...]
    home: tuple[int, ...]


class Simulation(NamedTuple):
    """The cost of a table. `held`, `kept` and `stashed` have a number for each rank."""

    time: float  # from the first action to the end of the last
    bubble: float  # share of all ranks' time in which they are idle
    held: tuple[int, ...]  # most forwards at a time whose backward has not run, in chunks
    kept: tuple[int, ...]  # most W at a time that wait, in chunks
    stashed: tuple[int, ...]  # most messages at a time that have arrived before they are used


EVEN = StageCost(
    1, 1, 1
)  # all matrix products cost the same, and the gradients of a product are two products
EXPERTS = StageCost(100, 155, 45)  # only the experts' weights wait: a sixth of the work of a Qwen3-like layer


@functools.lru_cache(128)
def table(
    schedule: str,
    pp: int,
    micros: int,
    chunks: int = 1,
    *,
    deferred: bool = False,
    cost: StageCost = EXPERTS,
    limit: int | None = None,
    waiting: int | None = None,
) -> Table:
    """The actions of each of pp ranks for `micros` micro-batches and `chunks` chunks a rank.

    Args:
        schedule: "1f1b", "interleaved" or "v".
        deferred: defers the experts' weight gradients (I and W in place of B).
        cost: durations in a chunk, which order the actions of v and the deferred W; the same on every rank.
        limit: in v, most forwards that wait for their backward on a rank, in chunks; None is 2 * pp, which
            is as many layers as 1F1B's first rank holds.
        waiting: most W that wait on a rank, each with its inputs and their gradients; None is pp * chunks.
            With twice as many v's bubble was a quarter smaller; with more it did not shrink further.

    Raises ValueError that names the flags (`validate`).
    """
    validate(schedule, pp, micros, chunks)
    limit = 2 * pp if limit is None else limit
    waiting = pp * chunks if waiting is None else waiting
    if limit < 2 or waiting < 1:
        raise ValueError(
            f"limit={limit}, waiting={waiting}: limit must be at least 2, and waiting at least 1"
        )
    home = homes(schedule, pp, chunks)
    if schedule == "v":
        orders = (_v_order(home, micros, cost, pace) for pace in PACES)
        candidates = [_Filling(home, micros, deferred, limit, waiting).run(cost, order) for order in orders]
        return min(candidates, key=lambda made: made[0])[1]
    rows = _1f1b(pp, micros) if schedule == "1f1b" else _interleaved(pp, micros, chunks)
    if not deferred:
        return Table(tuple(map(tuple, rows)), home)
    order = [0.0] * (2 * len(home) * micros)
    for row in rows:
        for place, (op, chunk, micro) in enumerate(row):
            order[(chunk + (op == "B") * len(home)) * micros + micro] = place
    return _Filling(home, micros, deferred, None, waiting).run(cost, order)[1]


def validate(schedule: str, pp: int, micros: int, chunks: int, layers: int | None = None) -> None:
    """Raises ValueError that names flag, value and valid values, unless these settings have a table.

    layers: number of layers of the model, where known.
    """
    for flag, value in (
        ("--parallel.pp", pp),
        ("--train.accumulate", micros),
        ("--parallel.chunks", chunks),
    ):
        if type(value) is not int or value < 1:
            raise ValueError(f"{flag}={value!r}: must be a whole number from 1 on")
    if schedule not in SCHEDULES:
        raise ValueError(f"--parallel.schedule={schedule}: valid: {', '.join(SCHEDULES)}")
    prefix = f"--parallel.schedule={schedule} with --parallel."
    if schedule != "1f1b" and pp == 1:
        raise ValueError(f"{prefix}pp=1: valid: --parallel.pp from 2 on, or --parallel.schedule 1f1b")
    if schedule == "1f1b" and chunks != 1:
        raise ValueError(f"{prefix}chunks={chunks}: valid: 1, or --parallel.schedule interleaved")
    if schedule == "interleaved" and chunks == 1:
        raise ValueError(f"{prefix}chunks=1: valid: --parallel.chunks from 2 on, or --parallel.schedule 1f1b")
    if schedule == "v" and chunks != 2:
        raise ValueError(f"{prefix}chunks={chunks}: valid: 2")
    if schedule == "interleaved" and micros % pp:
        below = micros // pp * pp
        near = f"{below} or {below + pp}" if below else f"{pp}"
        raise ValueError(
            f"{prefix}pp={pp}: --train.accumulate={micros} must be a multiple of pp; valid: {near}"
        )
    if layers is not None and pp * chunks > layers:
        raise ValueError(_too_few_blocks(layers, f"--parallel.pp={pp} x --parallel.chunks={chunks}"))


def _too_few_blocks(layers: int, wanted: str) -> str:
    return (
        f"{wanted}: more chunks than --model.layers={layers}; "
        f"valid: --parallel.pp times --parallel.chunks at most {layers}"
    )


def homes(schedule: str, pp: int, chunks: int) -> tuple[int, ...]:
    """The rank of each chunk of the model."""
    whole = range(pp * chunks)
    return tuple(min(c, pp * chunks - 1 - c) if schedule == "v" else c % pp for c in whole)


def messages(table: Table) -> dict[tuple[int, int], tuple[Message, ...]]:
    """The messages of every used edge (source, target), in the order of sending.

    Chunks on the same rank need no message.
    """
    by_edge: dict[tuple[int, int], list[Message]] = {}
    for source, row in enumerate(table.ranks):
        for action in row:
            message = result(action, len(table.home))
            if message and (target := table.home[message.chunk]) != source:
                by_edge.setdefault((source, target), []).append(message)
    return {edge: tuple(sent) for edge, sent in by_edge.items()}


def result(action: Action, chunks: int) -> Message | None:
    """The message with an action's result for another chunk; None if no chunk needs the result."""
    op, chunk, micro = action
    if op == "F" and chunk + 1 < chunks:
        return Message("F", chunk + 1, micro)
    if op in "BI" and chunk:
        return Message("B", chunk - 1, micro)
    return None


def simulate(table: Table, cost: StageCost | Sequence[StageCost] = EVEN, latency: float = 0) -> Simulation:
    """Simulates the run of a table.

    cost: durations in every chunk, or a list with the durations in each chunk.
    latency: time of a message between ranks, during which both ranks can work.

    Raises ValueError where an action is missing, occurs twice or is on another rank than its chunk, and where
    ranks wait for each other.
    """
    count = len(table.home)
    micros = _check_actions(table)
    costs = [cost] * count if isinstance(cost, StageCost) else list(cost)
    if len(costs) != count:
        raise ValueError(f"{len(costs)} costs for {count} chunks: give one for all, or one for each")
    run = _Run(table, costs, latency)
    runnable = list(range(len(table.ranks)))
    while runnable:
        rank = runnable.pop()
        while (begun := run.step(rank)) is not None:
            runnable += begun
    run.require_done()
    return run.simulation(micros)


class _Run:
    """A simulated run of a table: each rank's progress, the arrived messages, and what each rank holds."""

    def __init__(self, table: Table, costs: list[StageCost], latency: float):
        pp = len(table.ranks)
        self.table = table
        self.costs = costs
        self.latency = latency
        self.seconds = [dict(F=f, B=i + w, I=i, W=w) for f, i, w in costs]
        self.there: dict[Message, float] = {}  # time at which a message arrives
        self.last: dict[int, float] = {}  # time at which the last chunk's F of a micro-batch ended
        self.place = [0] * pp
        self.now: list[float] = [0] * pp
        self.flying = [0] * pp
        self.left = [0] * pp
        self.held = [0] * pp  # the maximum of `flying` so far
        self.kept = [0] * pp  # the maximum of `left` so far
        self.stash: list[list[tuple[float, int]]] = [[] for _ in range(pp)]

    def ready(self, action: Action) -> float | None:
        """Time at which all inputs of an action are available; None: not known yet."""
        op, chunk, micro = action
        if op == "W" or (op == "F" and chunk == 0):
            return 0
        if op != "F" and chunk == len(self.table.home) - 1:
            return self.last.get(micro)
        return self.there.get(Message("F" if op == "F" else "B", chunk, micro))

    def step(self, rank: int) -> list[int] | None:
        """Runs a rank's next action.

        Returns the ranks to which it sends its result; None if the rank has no action left, or must wait.
        """
        row = self.table.ranks[rank]
        home = self.table.home
        if self.place[rank] == len(row):
            return None
        op, chunk, micro = action = row[self.place[rank]]
        come = self.ready(action)
        if come is None:
            return None
        start = max(self.now[rank], come)
        self.now[rank] = start + self.seconds[chunk][op]
        self.place[rank] += 1
        self.hold(rank, op)
        before = chunk - 1 if op == "F" else chunk + 1
        if op != "W" and 0 <= before < len(home) and home[before] != rank:
            self.stash[rank] += [(come, 1), (start, -1)]
        if op == "F" and chunk == len(home) - 1:
            self.last[micro] = self.now[rank]
        message = result(action, len(home))
        if message is None:
            return []
        target = home[message.chunk]
        self.there[message] = self.now[rank] + (self.latency if target != rank else 0)
        return [target] if target != rank else []

    def hold(self, rank: int, op: str) -> None:
        """Updates the counts of forwards without a backward (`flying`) and of waiting W (`left`)."""
        self.flying[rank] += dict(F=1, W=0).get(op, -1)
        self.left[rank] += dict(I=1, W=-1).get(op, 0)
        self.held[rank] = max(self.held[rank], self.flying[rank])
        self.kept[rank] = max(self.kept[rank], self.left[rank])

    def require_done(self) -> None:
        """ValueError where ranks wait for each other."""
        rows = self.table.ranks
        if stuck := [r for r, place in enumerate(self.place) if place < len(rows[r])]:
            waits = [f"rank {r} before {'{}{} of {}'.format(*rows[r][self.place[r]])}" for r in stuck]
            raise ValueError(f"a deadlock: {', '.join(waits)}")

    def simulation(self, micros: int) -> Simulation:
        time, work, pp = max(self.now), micros * sum(map(sum, self.costs)), len(self.now)
        # a use sorts before an arrival at the same time: (time, -1) before (time, 1)
        stashed = [
            max(itertools.accumulate((step for _, step in sorted(steps)), initial=0)) for steps in self.stash
        ]
        bubble = (pp * time - work) / (pp * time) if time else 0.0
        return Simulation(time, bubble, tuple(self.held), tuple(self.kept), tuple(stashed))


def _check_actions(table: Table) -> int:
    """The number of micro-batches in a table.

    ValueError unless a chunk's rank runs F and B, or F, I and W, of each micro-batch exactly once.
    """
    seen: dict[tuple[int, int], str] = {}
    for rank, row in enumerate(table.ranks):
        for op, chunk, micro in row:
            if table.home[chunk] != rank:
                raise ValueError(
                    f"{op}{chunk} of {micro} on rank {rank}: chunk {chunk} is rank {table.home[chunk]}'s"
                )
            seen[chunk, micro] = seen.get((chunk, micro), "") + op
    micros = 1 + max(micro for _, micro in seen)
    for key in itertools.product(range(len(table.home)), range(micros)):
        if seen.get(key) not in ("FB", "FIW"):
            raise ValueError(
                f"chunk {key[0]} of micro-batch {key[1]}: {seen.get(key)}; valid: FB or FIW, in this order"
            )
    return micros


def _1f1b(pp: int, micros: int) -> list[list[Action]]:
    """Forwards until the first backward is ready, then one of each in turn: rank r holds at most pp - r."""
    return [
        _one_of_each(
            [Action("F", r, m) for m in range(micros)], [Action("B", r, m) for m in range(micros)], pp - r - 1
        )
        for r in range(pp)
    ]


def _interleaved(pp: int, micros: int, chunks: int) -> list[list[Action]]:
    """Narayanan et al. 2021: a rank runs its chunks in turn, each for a group of pp micro-batches."""

    def passes(op: str, rank: int) -> list[Action]:
        order = range(chunks) if op == "F" else reversed(range(chunks))
        turns = itertools.product(range(0, micros, pp), order, range(pp))
        return [Action(op, c * pp + rank, first + m) for first, c, m in turns]

    return [
        _one_of_each(passes("F", r), passes("B", r), 2 * (pp - r - 1) + (chunks - 1) * pp) for r in range(pp)
    ]


def _one_of_each(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then a forward and a backward in turn, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    turns = zip(forwards[ahead:], backwards, strict=False)
    return [*forwards[:ahead], *itertools.chain(*turns), *backwards[len(forwards) - ahead :]]


def _v_order(home: tuple[int, ...], micros: int, cost: StageCost, pace: tuple[float, float]) -> list[float]:
    """The priority of every action: a rank runs the action with the least number among its ready actions.

    A micro-batch is due when the ranks have done the work of all micro-batches before it. Returns a number
    for every action: F of all micro-batches for every chunk, then B in the same order.
    """
    count, (f, i, w) = len(home), cost
    forward, backward, round_ = pace[0] * f, pace[1] * i, 2 * (f + i + w)
    starts = [forward * c for c in range(count)]
    starts += [forward * count + backward * (count - 1 - c) for c in range(count)]
    return [start + round_ * m for start in starts for m in range(micros)]


class _Filling:
    """Makes a table: a free rank runs the first of its ready actions in `order`, or a W if none is ready.

    order: priorities as `_v_order` returns them; if gradients are deferred, I takes the place of B.
    limit: most forwards that wait for their backward on a rank. A chunk of the first half (the way down of a
        V) leaves one such place free. So a chunk on the way up never waits for memory: the backward of the
        last chunk follows at once and frees the place for the chunk before it, and so on. This prevents a
        deadlock. None: the numbers in `order` are positions in a rank's row, and a rank waits for the action
        of the next position, or runs a W.

    An action is one number, its index in `order`, because thousands of tuples would be slower.
    """

    def __init__(self, home: tuple[int, ...], micros: int, deferred: bool, limit: int | None, waiting: int):
        pp = 1 + max(home)
        self.home = home
        self.micros = micros
        self.deferred = deferred
        self.limit = limit
        self.waiting = waiting
        self.forwards = micros * len(home)
        self.down = self.forwards // 2 if limit else 0  # lower numbers are forwards on the way down
        self.most = limit or 2 * self.forwards
        self.ready: list[list[list[tuple[float, int]]]] = [[[], [], []] for _ in range(pp)]  # F down, F up, B
        self.rows: list[list[tuple[str, int]]] = [[] for _ in range(pp)]
        self.later: list[deque[int]] = [deque() for _ in range(pp)]  # W that wait
        self.busy = [0.0] * pp
        self.flying = [0] * pp
        self.taken = [0] * pp
        self.ends: list[tuple[float, int, int]] = []  # (end, rank, action) of running actions; -1 is a W

    def run(self, cost: StageCost, order: Sequence[float]) -> tuple[float, Table]:
        """Returns the time that the table needs, and the table."""
        backward = cost.inputs + (0 if self.deferred else cost.weights)
        for m in range(self.micros):
            self.add(self.home[0], order[m], m)
        now = 0.0
        awake = {self.home[0]}
        while True:
            for rank in sorted(awake):
                if self.busy[rank] > now:
                    continue
                queue = self.next_of(rank)
                if queue and (self.limit or queue[0][0] == self.taken[rank]):
                    key = self.take(rank, queue)
                    self.start(rank, key, now + (backward if key >= self.forwards else cost.forward))
                elif self.later[rank]:
                    self.rows[rank].append(("W", self.later[rank].popleft()))
                    self.start(rank, -1, now + cost.weights)
            if not self.ends:
                break
            now = self.ends[0][0]
            awake = self.end(now, order)
        assert sum(self.taken) == 2 * self.forwards, "a rank waits for ever"
        made = tuple(tuple(Action(op, *divmod(key, self.micros)) for op, key in row) for row in self.rows)
        return now, Table(made, self.home)

    def add(self, rank: int, place: float, key: int) -> None:
        """Notes that an action is ready on a rank."""
        kind = 2 if key >= self.forwards else 0 if key < self.down else 1
        heapq.heappush(self.ready[rank][kind], (place, key))

    def next_of(self, rank: int) -> list[tuple[float, int]] | None:
        """The queue whose first action a rank runs next, within the limits of memory; None: no such queue."""
        if len(self.later[rank]) >= self.waiting:
            return None
        best: list[tuple[float, int]] | None = None
        free = self.most - self.flying[rank]
        for queue in self.ready[rank][2 if free < 1 else 1 if free < 2 else 0 :]:
            if queue and (best is None or queue[0] < best[0]):
                best = queue
        return best

    def take(self, rank: int, queue: list[tuple[float, int]]) -> int:
        """Moves the queue's first action into the rank's row, and returns the action."""
        _, key = heapq.heappop(queue)
        self.taken[rank] += 1
        if key < self.forwards:
            self.flying[rank] += 1
            self.rows[rank].append(("F", key))
        else:
            self.flying[rank] -= 1
            self.rows[rank].append(("I" if self.deferred else "B", key - self.forwards))
            if self.deferred:
                self.later[rank].append(key - self.forwards)
        return key

    def start(self, rank: int, key: int, end: float) -> None:
        """Notes that the rank is busy with an action until `end`."""
        self.busy[rank] = end
        heapq.heappush(self.ends, (end, rank, key))

    def end(self, now: float, order: Sequence[float]) -> set[int]:
        """Ends all actions that end at `now`, before any rank chooses its next action.

        Returns the ranks that may have a new action to run.
        """
        awake = set()
        while self.ends and self.ends[0][0] == now:
            _, rank, key = heapq.heappop(self.ends)
            awake.add(rank)
            if (then := self.after(key)) is not None:
                target = self.home[then % self.forwards // self.micros]
                awake.add(target)
                self.add(target, order[then], then)
        return awake

    def after(self, key: int) -> int | None:
        """The action that needs this action's result; None after a W and after the first chunk's B."""
        if key < 0 or self.forwards <= key < self.forwards + self.micros:
            return None
        if key >= self.forwards:
            return key - self.micros
        # the last chunk's F is followed by its own B
        return key + (self.micros if key + self.micros < self.forwards else self.forwards)


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
        raise ValueError(_too_few_blocks(layers, f"{chunks} chunks (--parallel.pp times --parallel.chunks)"))
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
