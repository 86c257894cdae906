"""Predicts the time of a pipeline's table if messages that wait slow down the kernels of a stage.

Under NCCL a receive is a kernel that occupies multiprocessors from its post until its message has arrived. A
send occupies them from its start until its receive is posted (tmoe/parallel/pipeline_posts.py). A launch of
the experts' products has one program for each multiprocessor, each with its own tiles: programs that find no
free multiprocessor begin when other programs end (docs/decisions/014-tiles-are-dealt.md).

This is a part of step_time.py; nothing is measured here.

next: network.py
"""

import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tmoe.parallel.pipeline_posts import Posts, posts
from tmoe.parallel.pipeline_schedule import Action, Message, StageCost, Table, messages, source


class Timed(NamedTuple):
    """The time of a table, and the time lost in it."""

    time: float
    """seconds from the first action to the end of the last"""
    lost: tuple[float, ...]
    """by rank: seconds that actions took longer because of waiting receives"""


class Stage:
    """A rank that is executing its row of the table."""

    def __init__(self, row: Sequence[Action], posts: Sequence[Sequence[Message]]):
        self.row = row
        self.posts = posts
        self.place = 0
        self.waiting: set[Message] = set()  # posted without their message, or sent without their receive
        self.left: float | None = None  # seconds that the action needs yet, if nothing waits; None: not begun
        self.slower = 0.0  # seconds that each of these seconds is longer while a message waits
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


def run(
    table: Table,
    costs: Sequence[StageCost],
    lost: Sequence[StageCost],
    latency: float,
    *,
    ahead: bool = False,
) -> Timed:
    """Simulates a table as pipeline_schedule.simulate does, with receives posted as pipeline_posts.py says.

    costs: seconds of each chunk's actions.
    lost: seconds that each action loses if a message waits all the time, spread evenly over the action.
    latency: seconds of a message between ranks.
    ahead: receives are posted as `one_ahead` says.
    """
    seconds, losses = (
        [dict(F=c.forward, B=c.inputs + c.weights, I=c.inputs, W=c.weights, H=sum(c)) for c in these]
        for these in (costs, lost)
    )
    plans = one_ahead(table) if ahead else posts(table, costs, latency)
    stages = [Stage(row, plan) for row, plan in zip(table.ranks, plans, strict=True)]
    posted: set[Message] = set()
    sent: set[Message] = set()
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

    def meet(message: Message, now: float, first: set[Message], second: set[Message], rank: int) -> None:
        """Posts a receive on this rank, or begins a send from it; the message moves once both have begun."""
        first.add(message)
        if message in second:
            push(now + latency, table.places[message.chunk], message)
        else:
            stages[rank].waiting.add(message)

    def post(rank: int, now: float) -> None:
        """Posts the receives that are due before the stage's next action."""
        stage = stages[rank]
        for message in stage.posts[stage.place] if stage.place < len(stage.row) else ():
            meet(message, now, posted, sent, rank)

    def begin(rank: int, now: float) -> None:
        """Begins the stage's next action, if its inputs have arrived."""
        stage = stages[rank]
        if stage.left is not None or stage.place == len(stage.row):
            return
        op, chunk, _ = action = stage.row[stage.place]
        if not arrived.issuperset(table.needs(action)):
            return
        stage.left, stage.since = seconds[chunk][op], now
        stage.slower = losses[chunk][op] / stage.left if stage.left else 0.0
        foresee(rank, now)

    for rank in range(len(stages)):
        post(rank, 0.0)
        begin(rank, 0.0)
    time = 0.0
    while events:
        now, _, rank, message, turn = heapq.heappop(events)
        stage = stages[rank]
        if message is not None:
            arrived.add(message)
            for end in (rank, source(table, message)):
                stages[end].work(now)
                stages[end].waiting.discard(message)
                foresee(end, now)
        elif turn != turns[rank]:
            continue
        else:
            stage.work(now)
            time, done, stage.left = now, stage.row[stage.place], None
            stage.place += 1
            for result in table.results(done):
                if table.places[result.chunk] == rank:
                    arrived.add(result)
                else:
                    meet(result, now, sent, posted, rank)
            post(rank, now)
        begin(rank, now)
    stuck = [rank for rank, stage in enumerate(stages) if stage.place < len(stage.row)]
    assert not stuck, f"ranks {stuck} wait for ever"
    return Timed(time, tuple(stage.lost for stage in stages))


def one_ahead(table: Table) -> Posts:
    """The posts of stages that keep one receive ahead of need for each sender, as tmoe's did before.

    A sender's first message is posted before the first action, each further one before the action that needs
    the message before it. A record of such a run has `"receives": "one ahead"`.
    """
    found: list[list[list[Message]]] = [[[] for _ in row] for row in table.ranks]
    for (_, rank), sent in messages(table).items():
        needed = {m: place for place, action in enumerate(table.ranks[rank]) for m in table.needs(action)}
        for message, place in zip(sent, [0, *(needed[m] for m in sent[:-1])], strict=True):
            found[rank][place].append(message)
    return tuple(tuple(map(tuple, row)) for row in found)
