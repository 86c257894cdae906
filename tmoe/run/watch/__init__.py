"""Watches the ranks of a run: if one stops, dies, raises or takes another path, all say which and where.

    heartbeat     a thread writes its rank's step into the store five times a second; a stopped rank falls
                  silent
    standstill    a step in which nothing moves for --train.timeout ends the process, wherever its main
                  thread waits
    journal       each collective's name, size, type and call site, chained into a checksum for each group
    vote          once a step, before the weights change: the ranks of each group have called the same, or all
                  ranks raise
    words         an exception that ends the run gets a note: which ranks are silent, which failed first,
                  where the paths parted; its last line says it in short, and torchrun's report has that line

Gloo and NCCL name none of these. A peer that hangs reads as a timeout on the rank that waits. A collective
that one rank skips pairs with its next one and returns a wrong sum. Gloo aborts the process that receives
more than it asked for, so the store hears of a collective of CPU tensors before it runs.

The journal costs about 15 us a collective, the vote 0.3 ms a step on two gloo ranks. (torch's flight recorder
works on gloo too, but dumping its records costs 9 us each and its stacks a second.)

next: run/watch/heartbeat.py
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from tmoe.base import last_line
from tmoe.parallel import agree
from tmoe.parallel.mesh import patience
from tmoe.run.watch import heartbeat
from tmoe.run.watch.heartbeat import BEAT_S, Heartbeat
from tmoe.run.watch.journal import Journal, Originals, attach, detach, parting
from tmoe.run.watch.standstill import NO_FILE, Standstill, end_process, leave_behind
from tmoe.run.watch.words import cause

# Numbers the watches of this process, equal on all ranks: each has keys of its own in the store.
ENTRIES = itertools.count()
MEETINGS = itertools.count()  # and their meetings


class DivergenceError(RuntimeError):
    """Ranks of a group called different collectives in one step: sums are wrong. Raised on every rank."""


class Watch:
    """Inside `with watch:` collectives are journalled, the heart beats, and what escapes gets a note.

    Journalled are the collectives of the thread that entered. A world of one rank watches nothing.

    store: reachable by all ranks. control: the group of the votes; calls on it are not journalled. All ranks
    make their Watch together, and their times count from there.
    """

    def __init__(self, rank: int, world: int, store: dist.Store, control: dist.ProcessGroup):
        self.rank = rank
        self.world = world
        self.control = control
        self.connection = store.clone() if world > 1 else store  # a connection of its own
        self.journal = Journal(rank, world)
        self.heart = Heartbeat(rank, world, self.journal)
        self.clock = Standstill(self._give_up)
        self._aside = False  # whether collectives are left out of the journal
        self._thread = threading.current_thread()
        self._beating: threading.Thread | None = None
        self._attached: Originals = {}  # empty where nothing is watched

    def over(
        self, steps: Iterable[int], timeout: float = 0.0, saving: Callable[[], bool] = lambda: False
    ) -> Iterator[int]:
        """The steps, one by one, each noted as the one under way.

        timeout: seconds for which a step may stand still before this process ends, on top of the time that
        the step before took (a host may have all of that to wait for). 0: no limit. The first step, which
        compiles, has none.
        saving: whether a save is under way. For one a step may wait as long as a collective may.
        """
        self.clock.saving = saving
        began = None
        for index in steps:
            self.heart.step = index + 1
            if timeout and began and self._attached and self.clock.since is None:
                # After a pause: other ranks may still be at work that this rank did not have.
                dist.barrier(group=self.control)
            now = time.monotonic()
            self.clock.begin(timeout + now - began if timeout and began else 0.0, now)
            began = now
            if self._attached:
                self.heart.publish()
                self.clock.guard()
            yield index

    def pause(self) -> None:
        """Stops the clock until the next step begins: a save or a validation takes as long as it takes."""
        self.clock.pause()

    def moved(self) -> None:
        """Says that work goes on of which no collective tells."""
        self.clock.moved()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, collectives show that work goes on, and are left out of the journal.

        For rollouts: each expert group calls as many as its own answers are long.
        """
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def meet(self) -> None:
        """Waits until all ranks are here, for as long as they live. No collective: its patience would end.

        RuntimeError if a rank has failed, or is silent for as long as a collective would wait. Rank 0 looks
        at all others, and these at rank 0: the store could not serve all who look at all.
        """
        if self.world == 1:
            return
        here = f"tmoe meeting {next(MEETINGS)}"
        self.connection.add(here, 1)
        others = (range(1, self.world) if self.rank == 0 else [0]) if self._attached else []
        heard: dict[int, tuple[int, float]] = {}  # of each of them: its last beat, and when it was new
        while self.connection.add(here, 0) < self.world:
            time.sleep(BEAT_S)
            now = time.monotonic()
            for r in others:
                if not self.heart.store.check([str(r)]):
                    continue
                words = json.loads(self.heart.store.get(str(r)))
                if words["failure"]:
                    raise RuntimeError(f"connection lost: rank {r} failed before the first step")
                beat, since = heard.get(r, (-1, now))
                heard[r] = words["beat"], since if beat == words["beat"] else now
                if now - heard[r][1] > patience().total_seconds():
                    raise RuntimeError(f"connection lost: rank {r} is silent before the first step")

    def vote(self) -> None:
        """Raises DivergenceError on all ranks unless the ranks of each group called the same in this step.

        A collective of all ranks.
        """
        if not self._attached:
            return
        shares = torch.tensor([self.journal.share()])
        dist.all_reduce(shares, group=self.control)
        if shares.item():
            journals = dict(enumerate(agree.gathered(self.journal.lines, self.control)))
            raise DivergenceError(f"step {self.heart.step}: {parting(journals)}")
        self.heart.votes += 1
        self.heart.begin_journal()

    def __enter__(self) -> Self:
        if self.world > 1:
            if not faulthandler.is_enabled():
                with suppress(*NO_FILE):
                    faulthandler.enable()  # so a process that aborts says where, at least on its own stderr
            self.heart.store = dist.PrefixStore(f"watch {next(ENTRIES)}", self.connection)
            self._thread = threading.current_thread()
            self.clock.enter()
            self.heart.begin_journal()
            self.heart.publish()
            self._attached = attach(self._heard)
            self._beating = self.heart.start(self.clock.guard, self.clock.ended)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.vote()  # on what followed the last step's vote: validation, metrics
        except Exception as caught:
            error = caught
            raise
        finally:
            self._end(error)

    def _heard(self, name: str, group: dist.ProcessGroup, args: tuple, frame: Any) -> None:
        """Before each collective of this process: into the journal with the watched thread's own."""
        # Background threads (Python's own, a checkpoint's) keep their own pace and are left out.
        # Autograd's threads are not Python's: Python calls them "Dummy-N".
        thread = threading.current_thread()
        if group is self.control or not (thread is self._thread or thread.name.startswith("Dummy")):
            return
        if not self._aside and self.journal.note(name, group, args, frame):
            # At once, as gloo may abort this process. Where NCCL hangs, the heartbeat tells later.
            self.heart.tell()
        self.clock.moved()

    def _end(self, error: BaseException | None) -> None:
        self.clock.end()
        detach(self._attached)
        # Not SystemExit, of which all ranks have said why.
        if self._attached and isinstance(error, Exception):
            words = self.heart.words(error)
            error.add_note(words)
            *_, line = words.splitlines()
            line = line if line.startswith("in short: ") else f"{cause(error)}; {line}"
            last_line.leave(line, behind=not line.startswith(f"in short: rank {self.rank} "))
            if torch.cuda.is_initialized():
                leave_behind(error)
        if self._beating:
            # A thread that comes back from the store while Python ends would end the process by
            # std::terminate, with code -6.
            self._beating.join(BEAT_S if error else heartbeat.HEARS_S)
        self._attached = {}
        self._beating = None

    def _give_up(self, stood: float) -> None:
        end_process(stood, self._thread, self.heart.words, 2 * heartbeat.HEARS_S)
