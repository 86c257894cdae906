"""Watches the ranks of a run: if one stops, dies, raises or diverges, all ranks report which and where.

    heartbeat     a thread writes its rank's step into the store five times a second; a stopped rank becomes
                  silent
    standstill    a step without progress for --train.timeout ends the process, wherever its main thread
                  waits
    journal       each collective's name, size, type and call site, chained into a checksum for each group
    vote          once a step, before the weights change: unless the ranks of each group have made the same
                  calls, all ranks raise
    words         an exception that ends the run gets a note: which ranks are silent, which failed first,
                  where their calls differed; its last line is a summary, which torchrun's report shows

Gloo and NCCL report none of these. If a peer hangs, the rank that waits reports a timeout. A collective that
one rank skips is paired with that rank's next collective and returns a wrong sum. Gloo aborts a process that
receives more than it asked for, so a collective of CPU tensors is written into the store before it runs.

The journal costs about 15 us a collective, the vote 0.3 ms a step on two gloo ranks. (torch's flight recorder
works on gloo too, but dumping its records costs 9 us each, and dumping its stacks takes a second.)

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

from tmoe.base import exit_message
from tmoe.parallel import agree
from tmoe.parallel.mesh import patience
from tmoe.run.watch import heartbeat
from tmoe.run.watch.failure_messages import cause
from tmoe.run.watch.heartbeat import BEAT_S, Heartbeat
from tmoe.run.watch.journal import Journal, Originals, attach, detach, parting
from tmoe.run.watch.standstill import NO_FILE, Standstill, end_process, leave_behind

# Numbers of the watches of this process, equal on all ranks: each watch has separate keys in the store.
ENTRIES = itertools.count()
MEETINGS = itertools.count()  # numbers of their meetings


class DivergenceError(RuntimeError):
    """Ranks of a group called different collectives in one step: sums are wrong. Raised on every rank."""


class Watch:
    """In `with watch:` collectives are journalled, the heart beats, and an escaping exception gets a note.

    Only collectives of the thread that entered are journalled. In a world of one rank nothing is watched.

    store: reachable from all ranks. control: the group of the votes; calls on it are not journalled. All
    ranks create their Watch together, and their times count from that moment.
    """

    def __init__(self, rank: int, world: int, store: dist.Store, control: dist.ProcessGroup):
        self.rank = rank
        self.world = world
        self.control = control
        self.connection = store.clone() if world > 1 else store  # a separate connection
        self.journal = Journal(rank, world)
        self.heart = Heartbeat(rank, world, self.journal)
        self.clock = Standstill(self._give_up)
        self._aside = False  # whether collectives are left out of the journal
        self._thread = threading.current_thread()
        self._beating: threading.Thread | None = None
        self._attached: Originals = {}  # empty if nothing is watched

    def watched_steps(
        self, steps: Iterable[int], timeout: float = 0.0, saving: Callable[[], bool] = lambda: False
    ) -> Iterator[int]:
        """The steps, one by one; each is recorded as the current step.

        timeout: seconds for which a step may be without progress before this process ends, in addition to the
        time of the step before (a host may have to wait for all of that). 0: no limit. The first step, which
        compiles, has no limit.
        saving: whether a save is running. A step may wait for a save as long as a collective may wait.
        """
        self.clock.saving = saving
        began = None
        for index in steps:
            self.heart.step = index + 1
            if timeout and began and self._attached and self.clock.since is None:
                # After a pause: other ranks may still have work that this rank did not have.
                dist.barrier(group=self.control)
            now = time.monotonic()
            self.clock.begin(timeout + now - began if timeout and began else 0.0, now)
            began = now
            if self._attached:
                self.heart.publish()
                self.clock.guard()
            yield index

    def pause(self) -> None:
        """Stops the clock until the next step begins, because a save or a validation may take any time."""
        self.clock.pause()

    def note_progress(self) -> None:
        """Reports progress that no collective shows."""
        self.clock.moved()

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """In this context, collectives count as progress, and are not journalled.

        For rollouts: the number of an expert group's collectives depends on the length of its answers.
        """
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def wait_for_ranks(self) -> None:
        """Waits until all ranks are here, as long as they live. Not a collective, which would time out.

        RuntimeError if a rank has failed, or is silent for as long as a collective would wait. Rank 0 checks
        all other ranks, and they check rank 0: the store could not serve all ranks if each checked all
        others.
        """
        if self.world == 1:
            return
        key = f"tmoe meeting {next(MEETINGS)}"
        self.connection.add(key, 1)
        others = (range(1, self.world) if self.rank == 0 else [0]) if self._attached else []
        heard: dict[int, tuple[int, float]] = {}  # by rank: its last beat, and when that was new
        while self.connection.add(key, 0) < self.world:
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

    def compare_calls(self) -> None:
        """Raises DivergenceError on all ranks unless each group's ranks made the same calls in this step.

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
                    faulthandler.enable()  # so an aborting process reports where, at least on its own stderr
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
                self.compare_calls()  # covers the calls after the last step's vote: validation, metrics
        except Exception as caught:
            error = caught
            raise
        finally:
            self._end(error)

    def _heard(self, name: str, group: dist.ProcessGroup, args: tuple, frame: Any) -> None:
        """Called before each collective of this process; journals the collectives of the watched thread."""
        # Background threads (Python's, a checkpoint's) run at a different pace and are left out. Autograd's
        # threads are not Python's: Python calls them "Dummy-N".
        thread = threading.current_thread()
        if group is self.control or not (thread is self._thread or thread.name.startswith("Dummy")):
            return
        if not self._aside and self.journal.note(name, group, args, frame):
            # At once, because gloo may abort this process. If NCCL hangs, the heartbeat sends the lines
            # later.
            self.heart.tell()
        self.clock.moved()

    def _end(self, error: BaseException | None) -> None:
        self.clock.end()
        detach(self._attached)
        # Not for SystemExit, whose reason all ranks have printed.
        if self._attached and isinstance(error, Exception):
            words = self.heart.words(error)
            error.add_note(words)
            *_, line = words.splitlines()
            line = line if line.startswith("in short: ") else f"{cause(error)}; {line}"
            exit_message.leave(line, behind=not line.startswith(f"in short: rank {self.rank} "))
            if torch.cuda.is_initialized():
                leave_behind(error)
        if self._beating:
            # If a thread returned from the store while Python ends, it would end the process by
            # std::terminate, with code -6.
            self._beating.join(BEAT_S if error else heartbeat.HEARS_S)
        self._attached = {}
        self._beating = None

    def _give_up(self, stood: float) -> None:
        end_process(stood, self._thread, self.heart.words, 2 * heartbeat.HEARS_S)
