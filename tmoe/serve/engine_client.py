"""The front's side of the engines: each request is sent to one of them, and is handed its parts.

next: serve/protocol.py
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from tmoe.generate.live import State
from tmoe.generate.requests import Details
from tmoe.generate.sampler import Sampling
from tmoe.serve.counters import Counters
from tmoe.serve.links import PATIENCE, EngineGone, Engines, Link
from tmoe.serve.messages import Ask, Cancel, Close, EngineSettings, Failed, Part, Refusal, Step, Submit, Told
from tmoe.serve.spread import choose, needs_of


class RefusedByEngine(Exception):
    """The engine refuses a request."""


class Answers:
    """The answers of a request. Parts that the reader has not taken are joined, one for each answer."""

    def __init__(self, key: int, n: int, link: Link):
        self.key, self.left, self.link = key, n, link
        self.waiting: dict[int, Part] = {}
        self.problem: Exception | None = None
        self.news = asyncio.Event()
        self.begun = time.perf_counter()
        self.last: dict[int, float] = {}  # time of each answer's latest token
        # takes the text and ids of an answer without a task; False: it cannot now
        self.direct: Callable[[int, str, list[int]], bool] | None = None
        self.handing = False  # whether the reader has parts that it may not have used yet

    def measure(self, sample: int, now: float, counters: Counters) -> None:
        """Counts the time since the request, or since the answer's token before."""
        if (before := self.last.get(sample)) is not None:
            counters.gap.add(now - before)
        elif not self.last:
            counters.first.add(now - self.begun)
        self.last[sample] = now

    def say(self, sample: int, text: str, ids: list[int]) -> None:
        """Adds text to an answer: at once by `direct`, if all before has been taken."""
        if self.direct is None or self.waiting or self.handing or not self.direct(sample, text, ids):
            self.add(Part(self.key, sample, text, ids))

    def add(self, part: Part) -> None:
        if part.sample in self.waiting:
            self.waiting[part.sample].join(part)
        else:
            self.waiting[part.sample] = part
        self.left -= bool(part.finish)
        self.news.set()

    def fail(self, problem: Exception) -> None:
        self.problem, self.direct = problem, None
        self.news.set()

    async def __aiter__(self) -> AsyncIterator[Part]:
        """The parts until all answers are over. Raises EngineGone or RefusedByEngine."""
        while True:
            await self.news.wait()
            self.news.clear()
            parts, self.waiting = list(self.waiting.values()), {}
            self.handing = True
            for part in parts:
                yield part
            self.handing = False
            if self.problem is not None and self.left:
                raise self.problem
            if not self.left and not self.waiting:
                return


class EngineClient:
    """The engines of all ranks. `attach` connects them to the event loop that uses all other methods.

    Raises ConfigError if an engine refuses its settings, EngineGone if one cannot start.
    start, size: as for `Engines`.
    """

    def __init__(self, settings: EngineSettings, start: str = "spawn", size: int = 1):
        self.engines = Engines(settings, start, size)
        self.ready = self.engines.ready
        self.links = self.engines.links
        self.process = self.engines.process
        self.open: dict[int, Answers] = {}
        self.gone = asyncio.Event()
        self.counters = Counters()
        self.why = ""  # why an engine failed, if it is known
        self.ended: Link | None = None  # the first engine that failed or ended
        self._keys = itertools.count()

    def attach(self) -> None:
        """Begins to read the engines' messages, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        for link in self.links:
            name = f"tmoe-serve-pipe-{link.rank}"
            threading.Thread(target=self._read, args=(link,), name=name, daemon=True).start()

    def _read(self, link: Link) -> None:
        """The thread that reads a pipe: one call into the loop for each message."""
        with suppress(RuntimeError):  # the loop is closed
            try:
                while True:
                    self._loop.call_soon_threadsafe(self._take, link, link.pipe.recv())
            except (EOFError, OSError):
                self._loop.call_soon_threadsafe(self._ended, link)

    def _take(self, link: Link, message: Any) -> None:
        if isinstance(message, Told):
            waiting, link.asked = link.asked, []
            for future in waiting:
                if not future.done():
                    future.set_result(message.state)
        elif isinstance(message, Refusal):
            link.load.drop(message.key)
            if (answers := self.open.get(message.key)) is not None:
                answers.fail(RefusedByEngine(message.text))
        elif isinstance(message, Failed):
            if self.ended is None:  # else it fails because another one has ended
                self.ended, self.why = link, message.text
        else:
            self._take_step(link, message)

    def _take_step(self, link: Link, step: Step) -> None:
        now = time.perf_counter()
        for key, sample, text, ids in zip(*step[:4], strict=True):
            if (answers := self.open.get(key)) is not None:
                answers.measure(sample, now, self.counters)
                answers.say(sample, text, ids)
        for part in step.parts:
            if part.finish:
                link.load.ended(part.key)
            if (answers := self.open.get(part.key)) is not None:
                if part.ids:
                    answers.measure(part.sample, now, self.counters)
                answers.add(part)

    def _ended(self, link: Link) -> None:
        self.ended = self.ended or link
        self.gone.set()
        for answers in self.open.values():
            answers.fail(EngineGone("the engine has ended"))
        for future in [future for link in self.links for future in link.asked]:
            if not future.done():
                future.set_exception(EngineGone("the engine has ended"))

    def submit(
        self, ids: list[int], sampling: Sampling, n: int, details: Details, prompt_routes: bool = False
    ) -> Answers:
        """Submits a request. `finish` must follow once its answers are over, or no one reads them."""
        if self.gone.is_set():
            raise EngineGone("the engine has ended")
        key = next(self._keys)
        link = self.links[0]
        if len(self.links) > 1:
            kind = details.kind if self.ready.reuse else None
            needs = needs_of(ids, sampling.max_tokens, n, kind)
            link = self.links[choose((link.load for link in self.links), needs)]
            link.load.add(key, needs)
        link.send(Submit(key, ids, sampling, n, details, prompt_routes))
        self.open[key] = answers = Answers(key, n, link)
        return answers

    def cancel(self, answers: Answers) -> None:
        """Ends a request; its answers that are not over get the finish 'cancel'."""
        with suppress(EngineGone):
            answers.link.send(Cancel(answers.key))

    def finish(self, answers: Answers) -> None:
        """Forgets a request. Cancels it if it is not over."""
        if self.open.pop(answers.key, None) is not None and answers.left and not self.gone.is_set():
            self.cancel(answers)
        answers.link.load.drop(answers.key)

    async def states(self) -> list[State]:
        """The state of each engine, by rank. EngineGone if one does not reply."""
        if self.gone.is_set():
            raise EngineGone("the engine has ended")
        futures = []
        for link in self.links:
            futures.append(asyncio.get_running_loop().create_future())
            link.asked.append(futures[-1])
            link.send(Ask())
        await asyncio.wait(futures, timeout=PATIENCE)
        silent = [str(link.rank) for link, one in zip(self.links, futures, strict=True) if not one.done()]
        if silent:
            which = f" of rank {', '.join(silent)}" if len(self.links) > 1 else ""
            raise EngineGone(f"the engine{which} has not replied for {PATIENCE:g} s")
        return await asyncio.gather(*futures)

    def ending(self) -> str:
        """A line on the end of an engine that was not asked to end."""
        why = f": {self.why}" if self.why else ""
        return f"{self.engines.end_of(self.ended or self.links[0])}{why}"

    def close(self) -> int | None:
        """Ends the engines, and returns the exit code of the child process."""
        for link in self.links:
            with suppress(EngineGone):
                link.send(Close())
        if self.gone.is_set() and len(self.links) > 1:  # it may wait for a rank that has ended
            self.process.kill()
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(PATIENCE)
        return self.process.exitcode
