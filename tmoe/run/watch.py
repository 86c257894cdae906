"""Watches the ranks of a run: if one stops, dies, raises or takes another path, all say which and where.

    heartbeat     a thread writes its rank's step into the store five times a second; a stopped rank falls
                  silent
    standstill    a step in which nothing moves for --train.timeout ends the process, wherever its main
                  thread waits
    journal       each collective's name, size, type and call site, chained into a checksum for each group
    vote          once a step, before the weights change: the ranks of each group have called the same, or all
                  ranks raise
    note          an exception that ends the run gets a note: which ranks are silent, which failed first,
                  where the paths parted; its last line says it in short, and torchrun's report has that line

Gloo and NCCL name none of these. A peer that hangs reads as a timeout on the rank that waits. A collective
that one rank skips pairs with its next one and returns a wrong sum. Gloo aborts the process that receives
more than it asked for, so the store hears of a collective of CPU tensors before it runs.

The journal stands at the process group's own methods, below every function of torch.distributed and whatever
was wrapped around one. It costs about 15 us a collective, the vote 0.3 ms a step on two gloo ranks. (torch's
flight recorder works on gloo too, but dumping its records costs 9 us each and its stacks a second.)

Times are of the monotonic clock, from a moment that all ranks share: a wall clock jumps, and those of two
hosts differ.
"""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from tmoe.base import last_line
from tmoe.parallel import agree
from tmoe.parallel.mesh import patience
from tmoe.run.journal import METHODS, Journal, parting

BEAT_S = 0.2
GRACE_S = 0.8  # how long a failing rank listens for the others before it says what it knows
HEARS_S = 10.0  # how long a rank that ends waits for the store's answers, whose host may be stopped
# Numbers the watches of this process, alike on all ranks: each has keys of its own in the store.
ENTRIES = itertools.count()
MEETINGS = itertools.count()  # and their meetings
LEAVES = "_tmoe_leaves"  # marks an exception that, if nothing catches it, ends the process at once
GONE = (RuntimeError, dist.DistStoreError)  # what a store raises when its host is gone
# What faulthandler raises for a notebook's stderr, a closed one, none.
NO_FILE = (OSError, AttributeError, RuntimeError, ValueError)
# Words of errors that a lost peer causes: gloo's, NCCL's and the store's.
LOST = re.compile(
    r"gloo|NCCL|nccl|[Cc]onnection|[Ss]ocket|Broken pipe|[Tt]imed? ?out|remote process|DistStore"
)
STRAYED = "DivergenceError: "


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
        self.step = 0
        self.votes = 0
        self.journal = Journal(rank, world)
        self.began = time.monotonic()
        self.timeout = 0.0
        self.saving: Callable[[], bool] = lambda: False
        self._aside = False  # whether collectives are left out of the journal
        self._moved: float | None = None  # when anything last moved in this step
        self._saved = False  # whether a save was under way at the last beat
        self._ended = threading.Event()
        self._guarding = threading.Lock()
        self._armed = False  # whether faulthandler's only timer is ours: it may be the user's
        self._thread = threading.current_thread()
        self._heart: threading.Thread | None = None
        self._originals: dict[str, Callable[..., Any]] = {}
        self._beats = self._told = 0
        self._telling = threading.Lock()

    def over(
        self, steps: Iterable[int], timeout: float = 0.0, saving: Callable[[], bool] = lambda: False
    ) -> Iterator[int]:
        """The steps, one by one, each noted as the one under way.

        timeout: seconds for which a step may stand still before this process ends, on top of the time that
        the step before took (a host may have all of that to wait for). 0: no limit. The first step, which
        compiles, has none.
        saving: whether a save is under way. For one a step may wait as long as a collective may.
        """
        self.saving = saving
        began = None
        for index in steps:
            self.step = index + 1  # from 1, as the log counts; 0 is before the first
            if timeout and began and self._originals and self._moved is None:
                # After a pause: other ranks may still be at work that this rank did not have.
                dist.barrier(group=self.control)
            now = time.monotonic()
            self.timeout = timeout + now - began if timeout and began else 0.0
            began = self._moved = now
            if self._originals:
                self._publish()
                self._guard()
            yield index

    def pause(self) -> None:
        """Stops the clock until the next step begins: a save or a validation takes as long as it takes."""
        with self._guarding:
            self._moved = None
            self._disarm()

    def moved(self) -> None:
        """Says that work goes on of which no collective tells."""
        if self._moved is not None:
            self._moved = time.monotonic()

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
        others = (range(1, self.world) if self.rank == 0 else [0]) if self._originals else []
        heard: dict[int, tuple[int, float]] = {}  # of each of them: its last beat, and when it was new
        while self.connection.add(here, 0) < self.world:
            time.sleep(BEAT_S)
            now = time.monotonic()
            for r in others:
                if not self.store.check([str(r)]):
                    continue
                words = json.loads(self.store.get(str(r)))
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
        if not self._originals:
            return
        shares = torch.tensor([self.journal.share()])
        dist.all_reduce(shares, group=self.control)
        if shares.item():
            journals = dict(enumerate(agree.gathered(self.journal.lines, self.control)))
            raise DivergenceError(f"step {self.step}: {parting(journals)}")
        self.votes += 1
        self._begin_journal()

    # ---- journal ----

    def _journalled(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def collective(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            # Background threads (Python's own, a checkpoint's) keep their own pace and are left out.
            # Autograd's threads are not Python's: Python calls them "Dummy-N".
            thread = threading.current_thread()
            if group is not self.control and (thread is self._thread or thread.name.startswith("Dummy")):
                self._note(name, group, args, sys._getframe(1))
            return call(group, *args, **kwargs)

        return collective

    def _note(self, name: str, group: dist.ProcessGroup, args: tuple, frame: Any) -> None:
        if not self._aside and self.journal.note(name, group, args, frame):
            # At once, as gloo may abort this process. Where NCCL hangs, the heartbeat tells later.
            self._tell()
        self.moved()

    def _begin_journal(self) -> None:
        with self._telling:
            self.journal.begin()
            self._told = 0
            self.store.set(f"{self.rank}.journal", f"{self.votes}\n")

    def _tell(self) -> None:
        """Sends the store what it has not heard of the journal; there is no answer to wait for."""
        with self._telling, suppress(*GONE):  # if the store is gone, collectives will say so
            new = self.journal.lines[self._told :]
            self._told += len(new)
            if new:
                self.store.append(f"{self.rank}.journal", "\n".join([*new, ""]))

    # ---- heartbeat and last words ----

    def __enter__(self) -> Self:
        if self.world > 1:
            if not faulthandler.is_enabled():
                with suppress(*NO_FILE):
                    faulthandler.enable()  # so a process that aborts says where, at least on its own stderr
            self.store = dist.PrefixStore(f"watch {next(ENTRIES)}", self.connection)
            self._thread = threading.current_thread()
            self._ended = threading.Event()
            self._moved = None
            self._begin_journal()
            self._publish()
            for method in METHODS.keys() & vars(dist.ProcessGroup).keys():
                # To be put back, the method as the class holds it: what getattr gives would not bind again.
                self._originals[method] = vars(dist.ProcessGroup)[method]
                journalled = self._journalled(METHODS[method], getattr(dist.ProcessGroup, method))
                setattr(dist.ProcessGroup, method, journalled)
            ended = self._ended
            self._heart = threading.Thread(target=self._beat, args=(ended,), name="heartbeat", daemon=True)
            self._heart.start()
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

    def _end(self, error: BaseException | None) -> None:
        self._ended.set()
        self.pause()
        for method, original in self._originals.items():
            setattr(dist.ProcessGroup, method, original)
        # Not SystemExit, of which all ranks have said why.
        if self._originals and isinstance(error, Exception):
            words = self._words(error)
            error.add_note(words)
            *_, line = words.splitlines()
            line = line if line.startswith("in short: ") else f"{_cause(error)}; {line}"
            last_line.leave(line, behind=not line.startswith(f"in short: rank {self.rank} "))
            if torch.cuda.is_initialized():
                _leave_behind(error)
        if self._heart:
            # A thread that comes back from the store while Python ends would end the process by
            # std::terminate, with code -6.
            self._heart.join(BEAT_S if error else HEARS_S)
        self._originals = {}
        self._heart = None

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_S):
            with suppress(*GONE):  # if the store is gone, collectives will say so
                self._publish()
            self._guard()

    def _guard(self) -> None:
        """Ends this process if its step stands still; faulthandler's timer does so if this thread cannot.

        Where the GPU waits for a peer and its queue is full, inductor's launches wait with Python's lock
        held, and no thread of Python runs. faulthandler's thread needs no lock and ends the process then.
        """
        with self._guarding:
            if self._ended.is_set():
                return
            saves = self.saving()
            if self._saved and not saves and self._moved is not None:
                # A save has ended: what waited for its disk may go on now.
                self._moved = time.monotonic()
            self._saved = saves

            moved = self._moved if self.timeout else None
            limit = max(self.timeout, patience().total_seconds()) if saves else self.timeout
            stood = 0.0 if moved is None else time.monotonic() - moved
            self._disarm()
            if moved is not None and stood <= limit:
                with suppress(OverflowError, *NO_FILE):  # OverflowError: a timeout of centuries
                    faulthandler.dump_traceback_later(limit, exit=True)
                    self._armed = True
        if stood > limit:
            self._give_up(stood)

    def _disarm(self) -> None:
        if self._armed:
            faulthandler.cancel_dump_traceback_later()
        self._armed = False

    def _give_up(self, stood: float) -> None:
        """Says where the watched thread is and what is known of the other ranks, then ends the process.

        If the thread is already ending by an exception, that is said too. The process has to be ended: no
        exception reaches a thread that waits for a peer in gloo, or for a GPU whose kernels wait for one.
        """
        with open(os.devnull, "w") as nowhere:
            # A timer for the end, as to say all this reads files and writes into pipes, which may be what
            # hangs.
            faulthandler.dump_traceback_later(2 * HEARS_S, exit=True, file=nowhere)
            main = self._thread.ident or 0
            error: Any = sys._current_exceptions().get(main)
            error = error[1] if isinstance(error, tuple) else error  # Python 3.11
            said = traceback.format_stack(sys._current_frames().get(main))
            said += traceback.format_exception(error) if error else []
            try:
                said.append(f"error: nothing has moved for {stood:.1f} s (--train.timeout)")
                print("".join(said), file=sys.stderr, flush=True)
                words = self._words(error)
                print(words, file=sys.stderr)
                last_line.leave(words.splitlines()[-1], behind=True)
            finally:
                _leave()

    def _words(self, error: BaseException | None) -> str:
        """`_last_words`, if they come within HEARS_S: a stopped host of the store does not answer."""
        heard: list[str] = []
        hearing = threading.Thread(target=lambda: heard.append(self._last_words(error)), daemon=True)
        hearing.start()
        hearing.join(HEARS_S)
        silence = f"{self._own_end()}\nnothing is known of the other ranks, the store does not answer"
        return heard[0] if heard else silence

    def _own_end(self) -> str:
        return f"rank {self.rank} ended in step {self.step}, {_after(self.journal.lines)}"

    def _now(self) -> float:
        """Seconds since the ranks made their watches; comparable between ranks, whatever wall clocks say."""
        return time.monotonic() - self.began

    def _publish(self, failure: str | None = None, stands: bool = False) -> None:
        self._tell()
        self._beats += 1
        words = dict(beat=self._beats, step=self.step, failure=failure, stands=stands, at=self._now())
        self.store.set(str(self.rank), json.dumps(words))

    def _last_words(self, error: BaseException | None) -> str:
        """Tells of this rank's end, an error or a standstill; returns what is known of the other ranks."""
        try:
            self._publish(_cause(error) if error else None, stands=not error)
            before = self._hear()
            time.sleep(GRACE_S)
            now = self._hear()
            lines = _explain(self.rank, self.world, before, now, self._now(), self._own_end())
        except GONE as lost:
            lines = [self._own_end(), f"nothing is known of the other ranks, the store is gone: {lost}"]
        return "\n".join(lines)

    def _hear(self) -> dict[int, dict[str, Any]]:
        """What each rank said last, and its journal since its last vote."""
        heard = {}
        for r in range(self.world):
            if self.store.check([str(r), f"{r}.journal"]):
                votes, *sites = self.store.get(f"{r}.journal").decode().splitlines()
                heard[r] = json.loads(self.store.get(str(r))) | dict(votes=int(votes), sites=sites)
        return heard


def _leave_behind(error: BaseException) -> None:
    """Ends the process if nothing catches the error, after its traceback and what threads have to end.

    CUDA's own end waits for kernels, and those for a peer that does not come: four ranks that shared an H200
    had said all after 21 s and were still there after 106.
    """
    # A mark on the error, not a reference to it: that would keep its frames, and the model in them.
    setattr(error, LEAVES, True)
    hook = sys.excepthook
    if hasattr(hook, LEAVES):
        return

    def escaped(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        hook(kind, value, trace)
        if any(hasattr(of, LEAVES) for of in _all_of(value)):
            atexit.register(_leave)

    setattr(escaped, LEAVES, True)
    sys.excepthook = escaped


def _all_of(error: BaseException) -> list[BaseException]:
    """The error, the errors that it was raised from or while handling, and those that a group holds."""
    found: list[BaseException] = []
    more: list[Any] = [error]
    while more:
        one = more.pop()
        if one is not None and all(one is not other for other in found):
            found.append(one)
            more += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return found


def _cause(error: BaseException | None) -> str:
    """What was raised, after what was being handled at that time.

    The end of a run may fail too, and that is not why it ends.
    """
    said: list[str] = []
    while error:
        said.append(f"{type(error).__name__}: {error}".splitlines()[0])
        error = None if error.__suppress_context__ else error.__context__
    return ", then ".join(reversed(said))


def _leave() -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # a full disk must not keep the process
        os._exit(1)


def _explain(
    rank: int, world: int, before: dict[int, dict], now: dict[int, dict], clock: float, own_end: str
) -> list[str]:
    """What became of the ranks: the cause first, then the others, last all of it in one line.

    A rank that is dead or stopped is the cause before any error, as far as these are of a kind that a lost
    peer gives; an error of another kind is a cause too.

    before, now: what was heard of each rank, at two moments. clock: the second moment, in seconds as `Watch`
    counts them. own_end: the line of this rank.
    """
    failed = {r: words for r, words in now.items() if words["failure"]}
    stood = {r: words for r, words in now.items() if words["stands"]}
    quiet = [r for r in now if r != rank and r not in failed and r not in stood]
    silent = {r: now[r] for r in quiet if now[r]["beat"] == before.get(r, {}).get("beat")}
    never = [r for r in range(world) if r not in now]
    lost = {r: words for r, words in failed.items() if LOST.search(words["failure"].split(", then ")[0])}
    causes = {r: words for r, words in failed.items() if r not in lost} or ({} if silent or never else failed)

    # The causes, and this rank's own end.
    lines = [f"rank {r} was never heard of" for r in never]
    for r, words in silent.items():
        silence = clock - words["at"]
        lines.append(
            f"rank {r} is silent for {silence:.1f} s, stopped or dead; "
            f"last heard of in step {words['step']}, {_after(words['sites'])}"
        )
    first = min(causes, key=lambda r: causes[r]["at"], default=None)
    if first is not None:
        its = causes[first]
        earlier = [str(r) for r, words in stood.items() if words["at"] < its["at"]]
        behind = f", behind the standstill of rank {', '.join(earlier)}" if earlier else ""
        also = (
            "rank {} also failed, in step {}: {}{}"
            if lines
            else "the first to fail was rank {} in step {}: {}{}"
        )
        lines.append(also.format(first, its["step"], its["failure"], behind))
    lines.append(own_end)

    # The others.
    lines += [
        f"rank {r} lost it, in step {words['step']}" for r, words in lost.items() if r not in (rank, first)
    ]
    for r, words in stood.items():
        if r != rank:
            lines.append(f"rank {r} stood still, in step {words['step']}, {_after(words['sites'])}")
    for r in quiet:
        if r not in silent:
            lines.append(f"rank {r} lives, in step {now[r]['step']}, {_after(now[r]['sites'])}")

    # Where their journals part. A rank that is gone has not come as far as the others: that is no parting.
    journals = {r: words["sites"] for r, words in now.items() if words["votes"] == now[rank]["votes"]}
    gone = silent or never or (first is not None and first not in lost)
    parted = parting(journals, skipped=not gone)
    lines += [parted] if parted else []
    return [*lines, _in_short(rank, now, sorted([*silent, *never]), first, sorted(lost), bool(parted))]


def _in_short(
    rank: int, now: dict[int, dict], gone: list[int], first: int | None, lost: list[int], parted: bool
) -> str:
    """The one line that stands last, as a reader of the end alone would want it."""
    divergence = [words["failure"] for words in now.values() if f"{words['failure']}".startswith(STRAYED)]
    if parted or divergence:
        where = f": {divergence[0].removeprefix(STRAYED)}" if divergence else ", as above"
        return f"in short: the ranks called different collectives, and no weights were changed by it{where}"
    if gone:
        steps = {now[r]["step"] for r in gone if r in now}
        where = f" in step {max(steps)}" if steps else " before the first step"
        losers = f"; rank {', '.join(map(str, lost))} lost it" if lost else ""
        return f"in short: rank {', '.join(map(str, gone))} was killed or stopped{where}{losers}"
    if first is not None:
        return f"in short: rank {first} failed in step {now[first]['step']}: {now[first]['failure']}"
    return f"in short: no rank is known to have failed; rank {rank} stood still in step {now[rank]['step']}"


def _after(sites: list[str]) -> str:
    return f"in or after {sites[-1]}" if sites else "before its first collective"
