"""The state that a rank writes into the store, five times a second and at its end, and reads of other ranks.

Times are of the monotonic clock, from a moment that all ranks share, because a wall clock may jump, and the
wall clocks of two hosts differ.

next: run/watch/journal.py
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from tmoe.run.watch.failure_messages import after, cause, explain
from tmoe.run.watch.journal import Journal

BEAT_S = 0.2
GRACE_S = 0.8  # how long a failing rank reads the states of all ranks before it reports
HEARS_S = 10.0  # how long an ending rank waits for the store, whose host may be stopped
GONE = (RuntimeError, dist.DistStoreError)  # exceptions of a store whose host is gone


class Heartbeat:
    """One rank's state in the store: its step, its journal since the last vote, and the reason of its end.

    All ranks create theirs together, and their times count from that moment. `store` is set before any method
    is called.
    """

    store: dist.Store

    def __init__(self, rank: int, world: int, journal: Journal):
        self.rank = rank
        self.world = world
        self.journal = journal
        self.step = 0  # counted from 1, as in the log; 0 is before the first
        self.votes = 0
        self.began = time.monotonic()
        self._beats = self._told = 0
        self._telling = threading.Lock()

    def start(self, each: Callable[[], None], ended: threading.Event) -> threading.Thread:
        """Starts the thread that publishes the state, and calls `each`, at every beat until `ended`."""
        thread = threading.Thread(target=self._beat, args=(each, ended), name="heartbeat", daemon=True)
        thread.start()
        return thread

    def _beat(self, each: Callable[[], None], ended: threading.Event) -> None:
        while not ended.wait(BEAT_S):
            with suppress(*GONE):  # if the store is gone, collectives will fail too
                self.publish()
            each()

    def begin_journal(self) -> None:
        with self._telling:
            self.journal.begin()
            self._told = 0
            self.store.set(f"{self.rank}.journal", f"{self.votes}\n")

    def tell(self) -> None:
        """Appends the new lines of the journal to the store, without waiting for an answer."""
        with self._telling, suppress(*GONE):  # if the store is gone, collectives will fail too
            new = self.journal.lines[self._told :]
            self._told += len(new)
            if new:
                self.store.append(f"{self.rank}.journal", "\n".join([*new, ""]))

    def publish(self, failure: str | None = None, stands: bool = False) -> None:
        self.tell()
        self._beats += 1
        words = dict(beat=self._beats, step=self.step, failure=failure, stands=stands, at=self.now())
        self.store.set(str(self.rank), json.dumps(words))

    def now(self) -> float:
        """Seconds since the ranks created their watches; comparable between ranks, unlike wall clocks."""
        return time.monotonic() - self.began

    def hear(self) -> dict[int, dict[str, Any]]:
        """The last state of each rank, with its journal since its last vote."""
        heard = {}
        for r in range(self.world):
            if self.store.check([str(r), f"{r}.journal"]):
                votes, *sites = self.store.get(f"{r}.journal").decode().splitlines()
                heard[r] = json.loads(self.store.get(str(r))) | dict(votes=int(votes), sites=sites)
        return heard

    def words(self, error: BaseException | None) -> str:
        """`last_words`, if it returns within HEARS_S: the store does not answer if its host is stopped."""
        heard: list[str] = []
        hearing = threading.Thread(target=lambda: heard.append(self.last_words(error)), daemon=True)
        hearing.start()
        hearing.join(HEARS_S)
        silence = f"{self._own_end()}\nnothing is known of the other ranks, the store does not answer"
        return heard[0] if heard else silence

    def last_words(self, error: BaseException | None) -> str:
        """Publishes this rank's end, an error or a standstill; returns what is known of all other ranks."""
        try:
            self.publish(cause(error) if error else None, stands=not error)
            before = self.hear()
            time.sleep(GRACE_S)
            now = self.hear()
            lines = explain(self.rank, self.world, before, now, self.now(), self._own_end())
        except GONE as lost:
            lines = [self._own_end(), f"nothing is known of the other ranks, the store is gone: {lost}"]
        return "\n".join(lines)

    def _own_end(self) -> str:
        return f"rank {self.rank} ended in step {self.step}, {after(self.journal.lines)}"
