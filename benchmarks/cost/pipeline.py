"""Predicts the time of a pipeline's table where receives that wait slow the products of experts.

tmoe/parallel/pipelining.py posts a receive for each neighbour, one ahead of need. Under NCCL it is a kernel
that holds multiprocessors from then on until the message has come. A launch of the experts' products has a
program for each multiprocessor, with tiles of its own: those of the programs that find no place begin when
others end (docs/decisions/014-tiles-are-dealt.md). Sends find their receive posted and do not wait.

It is a part of step_time.py; it measures nothing itself.

next: network.py
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tmoe.parallel.schedule import Action, Cost, Message, Table, messages, result


class Timed(NamedTuple):
    """What a table takes."""

    time: float
    """seconds from the first action to the end of the last"""
    lost: tuple[float, ...]
    """seconds that each rank's actions took longer beside receives that waited"""


class Stage:
    """A rank on its way through its row of the table."""

    def __init__(self, row: Sequence[Action], coming: dict[int, Iterator[Message]]):
        self.row = row
        self.coming = coming  # by source, what receives are still to be posted for
        self.place = 0
        self.waiting: set[Message] = set()  # receives that are posted and have nothing yet
        self.left: float | None = None  # seconds that the action at `place` needs yet, alone; None: not begun
        self.slower = 0.0  # seconds that each of these loses beside a receive that waits
        self.since = 0.0  # when `left` was right
        self.lost = 0.0

    @property
    def pace(self) -> float:
        """Seconds that a second's work takes now."""
        return 1 + self.slower * bool(self.waiting)

    def work(self, now: float) -> None:
        """Goes on with the action until `now`."""
        if self.left is not None:
            done = (now - self.since) / self.pace
            self.left -= done
            self.lost += now - self.since - done
        self.since = now


def run(table: Table, costs: Sequence[Cost], lost: Sequence[Cost], latency: float) -> Timed:
    """Runs a table in thought, as schedule.simulate does, with receives posted as pipelining.Edges does.

    costs: seconds of each chunk's actions; lost: what each loses if a receive waits all the time, in equal
    parts from its beginning to its end. latency: of a message between ranks.
    """
    count = len(table.home)
    seconds, losses = (
        [dict(F=c.forward, B=c.inputs + c.weights, I=c.inputs, W=c.weights) for c in these]
        for these in (costs, lost)
    )
    edges = messages(table)
    stages = [
        Stage(row, {edge[0]: iter(sent) for edge, sent in edges.items() if edge[1] == rank})
        for rank, row in enumerate(table.ranks)
    ]
    arrived: set[Message] = set()
    number = itertools.count()
    # (when, order, rank, message that arrives there or None: its action ends, turn): a stage's later turn
    # makes what stands here of its end void
    events: list[tuple[float, int, int, Message | None, int]] = []
    turns = [0] * len(stages)

    def push(when: float, rank: int, message: Message | None) -> None:
        heapq.heappush(events, (when, next(number), rank, message, turns[rank]))

    def foresee(rank: int, now: float) -> None:
        """Says when the stage's action ends, if nothing comes between."""
        turns[rank] += 1
        stage = stages[rank]
        if stage.left is not None:
            push(now + stage.left * stage.pace, rank, None)

    def post(stage: Stage, source: int) -> None:
        message = next(stage.coming[source], None)
        if message is not None and message not in arrived:
            stage.waiting.add(message)

    def begin(rank: int, now: float) -> None:
        """Begins the stage's next action, if what it needs is there."""
        stage = stages[rank]
        if stage.left is not None or stage.place == len(stage.row):
            return
        op, chunk, _ = action = stage.row[stage.place]
        if needed := needs(action, count):
            if needed not in arrived:
                return
            source = table.home[chunk - 1 if op == "F" else chunk + 1]
            if source != rank:
                post(stage, source)
        stage.left, stage.since = seconds[chunk][op], now
        stage.slower = losses[chunk][op] / stage.left if stage.left else 0.0
        foresee(rank, now)

    for rank, stage in enumerate(stages):
        for source in stage.coming:
            post(stage, source)
        begin(rank, 0.0)
    time = 0.0
    while events:
        now, _, rank, message, turn = heapq.heappop(events)
        stage = stages[rank]
        if message is not None:
            arrived.add(message)
            stage.work(now)
            stage.waiting.discard(message)
            foresee(rank, now)
        elif turn != turns[rank]:
            continue
        else:
            stage.work(now)
            time, done, stage.left = now, stage.row[stage.place], None
            stage.place += 1
            if sent := result(done, count):
                target = table.home[sent.chunk]
                if target == rank:
                    arrived.add(sent)
                else:
                    push(now + latency, target, sent)
        begin(rank, now)
    stuck = [rank for rank, stage in enumerate(stages) if stage.place < len(stage.row)]
    assert not stuck, f"ranks {stuck} wait for ever"
    return Timed(time, tuple(stage.lost for stage in stages))


def needs(action: Action, chunks: int) -> Message | None:
    """What an action needs of another chunk."""
    op, chunk, micro = action
    if op == "F":
        return Message("F", chunk, micro) if chunk else None
    return Message("B", chunk, micro) if op in "BI" and chunk < chunks - 1 else None
