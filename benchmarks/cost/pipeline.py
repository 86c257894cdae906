"""Predicts the time of a pipeline's table if waiting receives slow down the products of experts.

tmoe/parallel/pipelining.py posts a receive for each neighbour, one ahead of need. Under NCCL a receive is a
kernel that occupies multiprocessors from then on until the message has arrived. A launch of the experts'
products has one
program for each multiprocessor, each with its own tiles: programs that find no free multiprocessor begin when
other programs end (docs/decisions/014-tiles-are-dealt.md). Sends find their receive posted and do not wait.

This is a part of step_time.py; nothing is measured here.

next: network.py
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tmoe.parallel.pipeline_schedule import Action, Message, StageCost, Table, messages, result


class Timed(NamedTuple):
    """The time of a table, and the time lost in it."""

    time: float
    """seconds from the first action to the end of the last"""
    lost: tuple[float, ...]
    """by rank: seconds that actions took longer because of waiting receives"""


class Stage:
    """A rank that is executing its row of the table."""

    def __init__(self, row: Sequence[Action], coming: dict[int, Iterator[Message]]):
        self.row = row
        self.coming = coming  # by source: the messages for which receives must still be posted
        self.place = 0
        self.waiting: set[Message] = set()  # receives that are posted and have not received their message
        self.left: float | None = None  # seconds that the action needs yet, without receives; None: not begun
        self.slower = 0.0  # seconds that each of these seconds is longer while a receive waits
        self.since = 0.0  # time for which `left` is valid
        self.lost = 0.0

    @property
    def pace(self) -> float:
        """Seconds needed at present for a second of work."""
        return 1 + self.slower * bool(self.waiting)

    def work(self, now: float) -> None:
        """Advances the action to the time `now`."""
        if self.left is not None:
            done = (now - self.since) / self.pace
            self.left -= done
            self.lost += now - self.since - done
        self.since = now


def run(table: Table, costs: Sequence[StageCost], lost: Sequence[StageCost], latency: float) -> Timed:
    """Simulates a table as schedule.simulate does, with receives posted as pipelining.Edges posts them.

    costs: seconds of each chunk's actions.
    lost: seconds that each action loses if a receive waits all the time, spread evenly over the action.
    latency: seconds of a message between ranks.
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
    # (time, order, rank, message that arrives at the rank or None: its action ends, turn). An end whose turn
    # is older than the stage's current turn is void.
    events: list[tuple[float, int, int, Message | None, int]] = []
    turns = [0] * len(stages)

    def push(when: float, rank: int, message: Message | None) -> None:
        heapq.heappush(events, (when, next(number), rank, message, turns[rank]))

    def foresee(rank: int, now: float) -> None:
        """Schedules the end of the stage's action, assuming that nothing changes before it."""
        turns[rank] += 1
        stage = stages[rank]
        if stage.left is not None:
            push(now + stage.left * stage.pace, rank, None)

    def post(stage: Stage, source: int) -> None:
        message = next(stage.coming[source], None)
        if message is not None and message not in arrived:
            stage.waiting.add(message)

    def begin(rank: int, now: float) -> None:
        """Begins the stage's next action, if its inputs have arrived."""
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
    """The message of another chunk that an action needs."""
    op, chunk, micro = action
    if op == "F":
        return Message("F", chunk, micro) if chunk else None
    return Message("B", chunk, micro) if op in "BI" and chunk < chunks - 1 else None
