"""Pipeline schedules as tables of each rank's actions, in order, and a simulation of the time they need.

A model is split into pp * chunks chunks of neighbouring blocks. A rank runs a list of actions
(op, chunk, micro-batch):

    F  forward                          needs F of the previous chunk
    B  backward                         needs B (or I) of the next chunk, and this chunk's F
    I  backward without W's part        needs the same as B; the gradients of experts' weights are deferred
    W  the gradients deferred by an I   needs I; no other action waits for a W, so it fills gaps
    H  a piece of the head, both ways   needs F of the last chunk of blocks, whose B needs all pieces

    1f1b         chunk c on rank c        forward and backward in turn; bubble (pp-1) / (M+pp-1)
    interleaved  chunk c on rank c % pp   M a multiple of pp; bubble (pp-1) / (chunks*M+pp-1)
    v            down and up again        two chunks a rank; the first and the last chunk share rank 0

The head and its loss are part of the last chunk, unless they are divided (`Table.heads`): each piece then has
some tokens of every micro-batch, and is one more chunk, on a rank that has time for it.

M is the number of micro-batches. Every rank makes the whole table, which is a pure function of its arguments.
So a receiver knows in which order its neighbour sends (`messages`): no message carries a tag, and no rank
asks another. `simulate` proves that a table leaves out no action, repeats none, and has no deadlock.

next: tokens.py
"""

import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Self, get_args

Schedule = Literal["1f1b", "interleaved", "v"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)

# Pairs (a, b) by which v orders actions that are ready: a forward is due `a` times F's duration after the
# forward of the previous chunk, a backward `b` times I's duration after that of the next chunk. With these
# three pairs, tables were as short as with the best of 42 such pairs, for 2 to 16 ranks, 1 to 64
# micro-batches, and W of 15, 27 and 0 percent of the work.
PACES = ((4.0, 2.0), (4.0, 3.0), (3.0, 1.5))


class Action(NamedTuple):
    """One action of a rank.

    op: F, B, I, W or H.
    chunk: number of the chunk in the whole model, from 0; pieces of the head follow the chunks of blocks.
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
    piece: of a gradient for the last chunk of blocks, the piece of the head that computed it.
    """

    kind: str
    chunk: int
    micro: int
    piece: int = 0


class StageCost(NamedTuple):
    """Durations of F, of I and of W in one chunk, in any common unit; B lasts as long as I and W together."""

    forward: float
    inputs: float
    weights: float


class Table(NamedTuple):
    """`ranks`: the actions of each rank, in order; `home`: the rank of each chunk.

    `heads`: the rank of each piece of the head; (): the last chunk has the head.
    """

    ranks: tuple[tuple[Action, ...], ...]
    home: tuple[int, ...]
    heads: tuple[int, ...] = ()

    @property
    def places(self) -> tuple[int, ...]:
        """The rank of each chunk, then of each piece of the head."""
        return self.home + self.heads

    def needs(self, action: Action) -> tuple[Message, ...]:
        """The results of other chunks that an action needs."""
        op, chunk, micro = action
        last = len(self.home) - 1
        if op == "H":
            return (Message("F", chunk, micro),)
        if op == "F":
            return (Message("F", chunk, micro),) if chunk else ()
        if op == "W":
            return ()
        if chunk < last:
            return (Message("B", chunk, micro),)
        return tuple(Message("B", chunk, micro, piece) for piece in range(len(self.heads)))

    def results(self, action: Action) -> tuple[Message, ...]:
        """The results of an action that other chunks need."""
        op, chunk, micro = action
        count = len(self.home)
        if op == "H":
            return (Message("B", count - 1, micro, chunk - count),)
        if op == "F":
            after = [chunk + 1] if chunk + 1 < count else range(count, len(self.places))
            return tuple(Message("F", other, micro) for other in after)
        return (Message("B", chunk - 1, micro),) if op in "BI" and chunk else ()


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


class Bounds(NamedTuple):
    """The most that a rank may hold at a time.

    limit: in v and in tables with heads, forwards that wait for their backward, in chunks. None is the number
        of the schedule's first rank: pp in 1F1B, and 2 * pp, as many layers, in v. In 1F1B with heads it is
        pp + 1: a micro-batch more hides the way to the pieces of the head and back.
    waiting: W that wait, each with its inputs and their gradients; None is pp * chunks. With twice as many
        v's bubble was a quarter smaller; with more it did not shrink further.
    """

    limit: int | None = None
    waiting: int | None = None


@functools.lru_cache(128)
def table(
    schedule: str,
    pp: int,
    micros: int,
    chunks: int = 1,
    *,
    deferred: bool = False,
    cost: StageCost | tuple[StageCost, ...] = EXPERTS,
    heads: tuple[int, ...] = (),
    bounds: Bounds = Bounds(),  # noqa: B008
) -> Table:
    """The actions of each of pp ranks for `micros` micro-batches and `chunks` chunks a rank.

    Args:
        schedule: "1f1b", "interleaved" or "v".
        deferred: defers the experts' weight gradients (I and W in place of B).
        cost: durations in a chunk, which order the actions of v, the deferred W and those of a table with
            heads; or a tuple with the durations in each chunk. The same on every rank.
        heads: the rank of each piece of the head; (): the head is part of the last chunk.
        bounds: what a rank may hold at a time.

    Raises ValueError that names the flags (`validate`).
    """
    validate(schedule, pp, micros, chunks)
    most = {"1f1b": pp + bool(heads), "interleaved": 2 * (pp - 1) + (chunks - 1) * pp + 1, "v": 2 * pp}
    limit = most[schedule] if bounds.limit is None else bounds.limit
    waiting = pp * chunks if bounds.waiting is None else bounds.waiting
    least = 2 if schedule == "v" else chunks
    if limit < least or waiting < 1:
        raise ValueError(
            f"limit={limit}, waiting={waiting}: limit must be at least {least}, and waiting at least 1"
        )
    home = homes(schedule, pp, chunks)
    if not all(0 <= rank < pp for rank in heads):
        raise ValueError(f"heads={heads}: must be ranks from 0 to {pp - 1}")
    costs = [cost] * len(home + heads) if isinstance(cost, StageCost) else list(cost)
    if len(costs) != len(home + heads):
        raise ValueError(f"{len(costs)} costs for {len(home)} chunks and {len(heads)} pieces of the head")
    if schedule == "v" or heads:
        orders = (_order(home, heads, micros, costs, pace) for pace in PACES)
        candidates = [
            _Filling(home, heads, micros, deferred, limit, waiting).run(costs, order) for order in orders
        ]
        return min(candidates, key=lambda made: made[0])[1]
    rows = _1f1b(pp, micros) if schedule == "1f1b" else _interleaved(pp, micros, chunks)
    if not deferred:
        return Table(tuple(map(tuple, rows)), home)
    order = [0.0] * (2 * len(home) * micros)
    for row in rows:
        for place, (op, chunk, micro) in enumerate(row):
            order[(chunk + (op == "B") * len(home)) * micros + micro] = place
    return _Filling(home, (), micros, deferred, None, waiting).run(costs, order)[1]


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
        raise ValueError(too_few_blocks(layers, f"--parallel.pp={pp} x --parallel.chunks={chunks}"))


def too_few_blocks(layers: int, wanted: str) -> str:
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
            for message in table.results(action):
                if (target := table.places[message.chunk]) != source:
                    by_edge.setdefault((source, target), []).append(message)
    return {edge: tuple(sent) for edge, sent in by_edge.items()}


def simulate(table: Table, cost: StageCost | Sequence[StageCost] = EVEN, latency: float = 0) -> Simulation:
    """Simulates the run of a table.

    cost: durations in every chunk, or a list with the durations in each chunk and each piece of the head.
    latency: time of a message between ranks, during which both ranks can work.

    Raises ValueError where an action is missing, occurs twice or is on another rank than its chunk, and where
    ranks wait for each other.
    """
    count = len(table.places)
    micros = _check_actions(table)
    costs = [cost] * count if isinstance(cost, StageCost) else list(cost)
    if len(costs) != count:
        raise ValueError(f"{len(costs)} costs for {count} chunks: give one for all, or one for each")
    return Run(table, costs, latency).to_the_end().simulation(micros)


class Run:
    """A simulated run of a table: each rank's progress, the arrived messages, and what each rank holds."""

    def __init__(self, table: Table, costs: list[StageCost], latency: float):
        pp = len(table.ranks)
        self.table = table
        self.costs = costs
        self.latency = latency
        self.seconds = [dict(F=f, B=i + w, I=i, W=w, H=f + i + w) for f, i, w in costs]
        self.there: dict[Message, float] = {}  # time at which a message arrives
        self.place = [0] * pp
        self.now: list[float] = [0] * pp
        self.flying = [0] * pp
        self.left = [0] * pp
        self.held = [0] * pp  # the maximum of `flying` so far
        self.kept = [0] * pp  # the maximum of `left` so far
        self.stash: list[list[tuple[float, int]]] = [[] for _ in range(pp)]
        self.ends: list[list[float]] = [[] for _ in range(pp)]  # of each action that has run

    def to_the_end(self) -> Self:
        """Runs all actions. ValueError where ranks wait for each other."""
        runnable = list(range(len(self.table.ranks)))
        while runnable:
            rank = runnable.pop()
            while (begun := self.step(rank)) is not None:
                runnable += begun
        self.require_done()
        return self

    def ready(self, action: Action) -> float | None:
        """Time at which all inputs of an action are available; None: not known yet."""
        times = [self.there.get(message) for message in self.table.needs(action)]
        return None if None in times else max((time for time in times if time is not None), default=0)

    def step(self, rank: int) -> list[int] | None:
        """Runs a rank's next action.

        Returns the ranks to which it sends its results; None if the rank has no action left, or must wait.
        """
        row, places = self.table.ranks[rank], self.table.places
        if self.place[rank] == len(row):
            return None
        op, chunk, _ = action = row[self.place[rank]]
        come = self.ready(action)
        if come is None:
            return None
        start = max(self.now[rank], come)
        self.now[rank] = start + self.seconds[chunk][op]
        self.ends[rank].append(self.now[rank])
        self.place[rank] += 1
        self.hold(rank, op)
        for message in self.table.needs(action):
            if source(self.table, message) != rank:
                self.stash[rank] += [(self.there[message], 1), (start, -1)]
        targets = []
        for message in self.table.results(action):
            target = places[message.chunk]
            self.there[message] = self.now[rank] + (self.latency if target != rank else 0)
            targets += [target] if target != rank else []
        return targets

    def hold(self, rank: int, op: str) -> None:
        """Updates the counts of forwards without a backward (`flying`) and of waiting W (`left`)."""
        self.flying[rank] += dict(F=1, W=0, H=0).get(op, -1)
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

    ValueError unless a chunk's rank runs F and B, or F, I and W, of each micro-batch exactly once, and a
    piece's rank H.
    """
    seen: dict[tuple[int, int], str] = {}
    for rank, row in enumerate(table.ranks):
        for op, chunk, micro in row:
            if (home := table.places[chunk]) != rank:
                raise ValueError(f"{op}{chunk} of {micro} on rank {rank}: chunk {chunk} is rank {home}'s")
            seen[chunk, micro] = seen.get((chunk, micro), "") + op
    micros = 1 + max(micro for _, micro in seen)
    for key in itertools.product(range(len(table.places)), range(micros)):
        valid = ("FB", "FIW") if key[0] < len(table.home) else ("H",)
        if seen.get(key) not in valid:
            words = "FB or FIW, in this order" if "FB" in valid else "H"
            raise ValueError(f"chunk {key[0]} of micro-batch {key[1]}: {seen.get(key)}; valid: {words}")
    return micros


def source(table: Table, message: Message) -> int:
    """The rank that sends a message."""
    last = len(table.home) - 1
    if message.kind == "F":
        return table.home[min(message.chunk - 1, last)]
    return table.places[message.chunk + 1 + message.piece]


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


def _order(
    home: tuple[int, ...],
    heads: tuple[int, ...],
    micros: int,
    costs: Sequence[StageCost],
    pace: tuple[float, float],
) -> list[float]:
    """The priority of every action: a rank runs the action with the least number among its ready actions.

    A micro-batch is due when the busiest rank has done the work of all micro-batches before it. Returns a
    number for every action: F of all micro-batches for every chunk, H for every piece, B for every chunk.
    """
    loads = [0.0] * (1 + max(*home, *heads))
    for rank, each in zip(home + heads, costs, strict=True):
        loads[rank] += sum(each)
    blocks = costs[: len(home)]
    forward = [pace[0] * sum(each.forward for each in blocks[:c]) for c in range(len(home) + 1)]
    backward = [pace[1] * sum(each.inputs for each in blocks[c + 1 :]) for c in range(len(home))]
    # all other stages wait for the head
    starts = [*forward[:-1], *[-math.inf] * len(heads), *(forward[-1] + later for later in backward)]
    return [start + max(loads) * m for start in starts for m in range(micros)]


class _Filling:
    """Makes a table: a free rank runs the first of its ready actions in `order`, or a W if none is ready.

    order: priorities as `_order` returns them; if gradients are deferred, I takes the place of B.
    limit: most forwards that wait for their backward on a rank. A chunk leaves one such place free for each
        later chunk on its rank. So the most advanced micro-batch never waits for memory, and its backward
        frees places. This prevents a deadlock. None: the numbers in `order` are positions in a rank's row,
        and a rank waits for the action of the next position, or runs a W.

    An action is one number, its index in `order`, because thousands of tuples would be slower.
    """

    def __init__(
        self,
        home: tuple[int, ...],
        heads: tuple[int, ...],
        micros: int,
        deferred: bool,
        limit: int | None,
        waiting: int,
    ):
        pp = 1 + max(*home, *heads)
        self.home = home
        self.heads = heads
        self.micros = micros
        self.deferred = deferred
        self.limit = limit
        self.waiting = waiting
        self.chunks = [*range(len(home) + len(heads)), *range(len(home))]  # of F and H, and of B
        self.forwards = micros * len(home)  # lower numbers are F
        self.backwards = micros * (len(home) + len(heads))  # lower numbers are F and H
        self.most = limit or 2 * self.backwards
        self.missing = [len(heads)] * micros  # pieces of the head that have not been computed yet
        # Of each chunk: 2 and the number of later chunks on its rank; queues 0 and 1 are of B and H.
        self.kind = [2 + (home[c + 1 :].count(rank) if limit else 0) for c, rank in enumerate(home)]
        self.kind += [1] * len(heads) + [0] * len(home)
        self.ready: list[list[list[tuple[float, int]]]] = [
            [[] for _ in range(1 + max(self.kind))] for _ in range(pp)
        ]
        self.rows: list[list[tuple[str, int]]] = [[] for _ in range(pp)]
        self.later: list[deque[int]] = [deque() for _ in range(pp)]  # W that wait
        self.busy = [0.0] * pp
        self.flying = [0] * pp
        self.taken = [0] * pp
        self.ends: list[tuple[float, int, int]] = []  # (end, rank, action) of running actions; -1 is a W

    def run(self, costs: Sequence[StageCost], order: Sequence[float]) -> tuple[float, Table]:
        """Returns the time that the table needs, and the table."""
        count, pieces = len(self.home), costs[len(self.home) :]
        seconds = [each.forward for each in costs[:count]] + [sum(each) for each in pieces]
        seconds += [each.inputs + (0 if self.deferred else each.weights) for each in costs[:count]]
        for m in range(self.micros):
            self.add(order[m], m)
        now = 0.0
        awake = {self.home[0]}
        while True:
            for rank in sorted(awake):
                if self.busy[rank] > now:
                    continue
                queue = self.next_of(rank)
                if queue and (self.limit or queue[0][0] == self.taken[rank]):
                    key = self.take(rank, queue)
                    self.start(rank, key, now + seconds[key // self.micros])
                elif self.later[rank]:
                    self.rows[rank].append(("W", key := self.later[rank].popleft()))
                    self.start(rank, -1, now + costs[key // self.micros].weights)
            if not self.ends:
                break
            now = self.ends[0][0]
            awake = self.end(now, order)
        assert sum(self.taken) == self.forwards + self.backwards, "a rank waits for ever"
        made = tuple(tuple(Action(op, *divmod(key, self.micros)) for op, key in row) for row in self.rows)
        return now, Table(made, self.home, self.heads)

    def rank(self, key: int) -> int:
        """The rank of an action."""
        chunk = self.chunks[key // self.micros]
        return self.home[chunk] if chunk < len(self.home) else self.heads[chunk - len(self.home)]

    def add(self, place: float, key: int) -> None:
        """Notes that an action is ready on its rank."""
        heapq.heappush(self.ready[self.rank(key)][self.kind[key // self.micros]], (place, key))

    def next_of(self, rank: int) -> list[tuple[float, int]] | None:
        """The queue whose first action a rank runs next, within the limits of memory; None: no such queue."""
        if len(self.later[rank]) >= self.waiting:
            return None
        best: list[tuple[float, int]] | None = None
        free = self.most - self.flying[rank]
        for queue in self.ready[rank][: 2 + max(free, 0)]:
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
        elif key < self.backwards:
            self.rows[rank].append(("H", key))
        else:
            self.flying[rank] -= 1
            self.rows[rank].append(("I" if self.deferred else "B", key - self.backwards))
            if self.deferred:
                self.later[rank].append(key - self.backwards)
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
            for then in self.after(key):
                awake.add(self.rank(then))
                self.add(order[then], then)
        return awake

    def after(self, key: int) -> Iterable[int]:
        """The actions that can run when this action, the last of those that they need, has ended."""
        if key < 0 or self.backwards <= key < self.backwards + self.micros:
            return ()  # a W, and the first chunk's B
        if key >= self.backwards:
            return (key - self.micros,)
        if key + self.micros < self.forwards:
            return (key + self.micros,)
        micro = key % self.micros
        if key < self.forwards and self.heads:
            return range(self.forwards + micro, self.backwards, self.micros)
        # the last chunk's B
        self.missing[micro] -= 1
        return (self.backwards + self.forwards - self.micros + micro,) if self.missing[micro] < 1 else ()
