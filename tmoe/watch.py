"""Watches the ranks of a run: when one stops, dies, raises or leaves the others' path, every rank says which, and where.

    heartbeat   a thread writes (step, last collective) of its rank into the store four times a second; a stopped rank falls silent
    journal     each collective's name, call site and size, chained into one checksum a step
    vote        once a step, before the weights change: count and checksum are equal on all ranks, or all ranks raise
    note        an exception that ends the run gets a note: who failed first, who is silent, where the paths parted

Gloo and NCCL name none of it: a peer that hangs reads as a timeout on whoever waits, and a collective that one rank skips
pairs with its next one and returns a wrong sum. (torch's flight recorder works on gloo too, but dumping its records
costs 9 us each and its stacks a second; the journal costs 3 us a collective, the vote 0.3 ms a step on two gloo ranks.)
"""

from __future__ import annotations

import json
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

BEAT_S = 0.2
GRACE_S = 0.8  # how long a failing rank listens for the others before it says what it knows
UNEVEN = {"all_to_all_single", "all_to_all"}  # sizes may differ between ranks
COLLECTIVES = [
    name
    for name in (
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_to_all"),
        *("all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_single", "broadcast", "barrier", "reduce"),
    )
    if hasattr(dist, name)  # 2.13 has added the _single ones
]


class DivergenceError(RuntimeError):
    """Ranks did not call the same collectives in one step: its sums are worth nothing. Raised on every rank."""


class Watch:
    """Inside `with watch:` collectives are journalled, the heart beats, and what escapes carries a note. One rank watches nothing.

    store: reachable by all ranks. control: group of the votes, of which no member's call is journalled.
    """

    def __init__(self, rank: int, world: int, store: dist.Store, control: dist.ProcessGroup):
        self.rank, self.world, self.control = rank, world, control
        self.store = dist.PrefixStore("watch", store.clone()) if world > 1 else store  # a connection of its own
        self.step = 0
        self.sites: list[str] = []
        self.checksum = 0
        self._ended = threading.Event()
        self._originals: dict[str, Callable[..., Any]] = {}
        self._beats = 0

    def over(self, steps: Iterable[int]) -> Iterator[int]:
        """The steps, one by one, each noted as the one under way."""
        for self.step in steps:
            if self._originals:
                self._publish()
            yield self.step

    def vote(self) -> None:
        """A collective of all ranks. Raises DivergenceError on all of them unless they agree on this step's collectives so far."""
        if not self._originals:
            return
        mine = torch.tensor([len(self.sites), self.checksum])
        votes = [torch.empty_like(mine) for _ in range(self.world)]
        self._originals["all_gather"](votes, mine, group=self.control)
        if any(not torch.equal(vote, mine) for vote in votes):
            journals: list[Any] = [None] * self.world
            self._originals["all_gather_object"](journals, self.sites, group=self.control)
            raise DivergenceError(f"step {self.step}: {_parting(dict(enumerate(journals)))}")
        self.sites, self.checksum = [], 0

    # ---- journal ----

    def _journalled(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def collective(*args: Any, **kwargs: Any) -> Any:
            # Background threads (Python's own, a checkpoint's) keep their own pace; autograd's threads are no Python threads.
            if kwargs.get("group") is not self.control and threading.current_thread().name.startswith(
                ("Main", "Dummy")
            ):
                self._note(name, args, kwargs, sys._getframe(1))
            return call(*args, **kwargs)

        return collective

    def _note(self, name: str, args: tuple, kwargs: dict[str, Any], frame: Any) -> None:
        first = args[0] if args else next(iter(kwargs.values()), None)
        size = f" of {first.numel()}" if isinstance(first, torch.Tensor) and name not in UNEVEN else ""
        code = frame.f_code
        site = f"{name}{size} at {Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
        self.sites.append(site)
        self.checksum = zlib.crc32(site.encode(), self.checksum)

    # ---- heartbeat and last words ----

    def __enter__(self) -> Self:
        if self.world > 1:
            for name in COLLECTIVES:
                self._originals[name] = getattr(dist, name)
                setattr(dist, name, self._journalled(name, self._originals[name]))
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        for name, original in self._originals.items():
            setattr(dist, name, original)
        if self._originals and isinstance(error, Exception):  # SystemExit: said already, by all ranks
            error.add_note(self._last_words(error))
        self._originals = {}

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self._publish()
            except (RuntimeError, dist.DistStoreError):  # the store's host is gone: the collectives will say so
                return

    def _publish(self, failure: str | None = None) -> None:
        """A heartbeat; once any rank has failed, with the whole journal of the step."""
        self._beats += 1
        if failure:
            self.store.set("failed", "")
        sites = list(self.sites) if self.store.check(["failed"]) else self.sites[-1:]
        words = dict(
            beat=self._beats, step=self.step, count=len(self.sites), sites=sites, failure=failure, at=time.time()
        )
        self.store.set(str(self.rank), json.dumps(words))

    def _last_words(self, error: BaseException) -> str:
        """What this rank knows of the others, after having told of its own end."""
        lines = [f"rank {self.rank} ended in step {self.step}, {_after(self.sites)}"]
        try:
            self._publish(f"{type(error).__name__}: {error}".splitlines()[0])
            before = self._hear()
            time.sleep(GRACE_S)
            lines += _explain(self.rank, before, self._hear())
        except (RuntimeError, dist.DistStoreError) as lost:
            lines.append(f"nothing is known of the other ranks, the store is gone: {lost}")
        return "\n".join(lines)

    def _hear(self) -> dict[int, dict[str, Any]]:
        return {r: json.loads(self.store.get(str(r))) for r in range(self.world) if self.store.check([str(r)])}


def _explain(rank: int, before: dict[int, dict], now: dict[int, dict]) -> Iterator[str]:
    """A line for every other rank that failed or fell silent, and one for where the journals part."""
    ended = {r: words for r, words in now.items() if words["failure"]}
    if ended:
        first = min(ended, key=lambda r: ended[r]["at"])
        yield f"the first to fail was rank {first} in step {ended[first]['step']}: {ended[first]['failure']}"
    for other, words in now.items():
        if other != rank and not words["failure"] and words["beat"] == before.get(other, words)["beat"]:
            silence = time.time() - words["at"]
            yield (
                f"rank {other} is silent for {silence:.1f} s, stopped or dead; "
                f"last heard of in step {words['step']}, {_after(words['sites'])}"
            )
        elif other != rank and not words["failure"]:
            yield f"rank {other} lives, in step {words['step']}, {_after(words['sites'])}"
    same_step = {
        r: w["sites"] for r, w in now.items() if (w["step"], w["count"]) == (now[rank]["step"], len(w["sites"]))
    }
    if len(set(map(tuple, same_step.values()))) > 1:
        yield _parting(same_step)


def _after(sites: list[str]) -> str:
    return f"in or after {sites[-1]}" if sites else "before its first collective"


def _parting(journals: dict[int, list[str]]) -> str:
    """Where the ranks' collectives begin to differ."""
    longest = max(map(len, journals.values()))
    padded = {rank: [*sites, *["nothing yet"] * (longest - len(sites))] for rank, sites in journals.items()}
    at = next((i for i, calls in enumerate(zip(*padded.values(), strict=True)) if len(set(calls)) > 1), longest)
    calls: dict[str, list[str]] = {}
    for rank, sites in padded.items():
        calls.setdefault(sites[at] if at < longest else "nothing yet", []).append(str(rank))
    who = "; ".join(f"rank {', '.join(ranks)}: {site}" for site, ranks in calls.items())
    return f"the ranks' collectives part at number {at + 1}: {who}"
