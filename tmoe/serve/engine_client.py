"""The front's side of the engine: it starts the engine's process, and hands each request its parts.

next: serve/protocol.py
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from tmoe.config.check import ConfigError
from tmoe.generate.live import State
from tmoe.generate.requests import Details
from tmoe.generate.sampler import Sampling
from tmoe.serve.counters import Counters
from tmoe.serve.engine_process import engine_process
from tmoe.serve.messages import Ask, Cancel, Close, EngineSettings, Failed, Part, Ready, Refusal, Submit, Told

PATIENCE = 5.0  # seconds in which the engine must reply or end


class EngineGone(Exception):
    """The engine's process has ended, or could not start."""


class RefusedByEngine(Exception):
    """The engine refuses a request."""


class Answers:
    """The answers of a request. Parts that the reader has not taken are joined, one for each answer."""

    def __init__(self, key: int, n: int):
        self.key, self.left = key, n
        self.waiting: dict[int, Part] = {}
        self.problem: Exception | None = None
        self.news = asyncio.Event()
        self.begun = time.perf_counter()
        self.last: dict[int, float] = {}  # time of each answer's latest token

    def measure(self, part: Part, counters: Counters) -> None:
        """Counts the time since the request, or since the answer's token before."""
        if not part.ids:
            return
        now = time.perf_counter()
        if part.sample in self.last:
            counters.gap.add(now - self.last[part.sample])
        elif not self.last:
            counters.first.add(now - self.begun)
        self.last[part.sample] = now

    def add(self, part: Part) -> None:
        if part.sample in self.waiting:
            self.waiting[part.sample].join(part)
        else:
            self.waiting[part.sample] = part
        self.left -= bool(part.finish)
        self.news.set()

    def fail(self, problem: Exception) -> None:
        self.problem = problem
        self.news.set()

    async def __aiter__(self) -> AsyncIterator[Part]:
        """The parts until all answers are over. Raises EngineGone or RefusedByEngine."""
        while True:
            await self.news.wait()
            self.news.clear()
            parts, self.waiting = list(self.waiting.values()), {}
            for part in parts:
                yield part
            if self.problem is not None and self.left:
                raise self.problem
            if not self.left and not self.waiting:
                return


class EngineClient:
    """The engine's process. `attach` connects it to the event loop that uses all other methods.

    Raises ConfigError if the engine refuses its settings, EngineGone if it cannot start.
    start: how the process starts, as for multiprocessing.
    """

    def __init__(self, settings: EngineSettings, start: str = "spawn"):
        context: Any = multiprocessing.get_context(start)
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=engine_process, args=(other, self.pipe, settings), daemon=True)
        try:
            self.process.start()
            other.close()
            first = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(PATIENCE)
            code = self.process.exitcode
            raise EngineGone(f"the engine's process ended while it loaded (exit code {code})") from None
        except BaseException:  # Ctrl-C; the process ignores all signals but this
            if self.process.pid is not None:
                self.process.kill()
                self.process.join(PATIENCE)
            raise
        if isinstance(first, Failed):
            self.process.join(PATIENCE)
            raise (ConfigError if first.refused else EngineGone)(first.text)
        self.ready: Ready = first
        self.open: dict[int, Answers] = {}
        self.gone = asyncio.Event()
        self.counters = Counters()
        self.why = ""  # why the engine failed, if it is known
        self._keys = itertools.count()
        self._asked: list[asyncio.Future[State]] = []

    def attach(self) -> None:
        """Begins to read the engine's messages, for the running event loop."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, name="tmoe-serve-pipe", daemon=True).start()

    def _read(self) -> None:
        """The thread that reads the pipe: one call into the loop for each message."""
        with suppress(RuntimeError):  # the loop is closed
            try:
                while True:
                    self._loop.call_soon_threadsafe(self._take, self.pipe.recv())
            except (EOFError, OSError):
                self._loop.call_soon_threadsafe(self._ended)

    def _take(self, message: Any) -> None:
        if isinstance(message, Told):
            waiting, self._asked = self._asked, []
            for future in waiting:
                if not future.done():
                    future.set_result(message.state)
        elif isinstance(message, Refusal):
            if (answers := self.open.get(message.key)) is not None:
                answers.fail(RefusedByEngine(message.text))
        elif isinstance(message, Failed):
            self.why = message.text
        else:
            for part in message:
                if (answers := self.open.get(part.key)) is not None:
                    answers.measure(part, self.counters)
                    answers.add(part)

    def _ended(self) -> None:
        self.gone.set()
        for answers in self.open.values():
            answers.fail(EngineGone("the engine has ended"))
        for future in self._asked:
            if not future.done():
                future.set_exception(EngineGone("the engine has ended"))

    def _send(self, message: Any) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            raise EngineGone("the engine has ended") from None

    def submit(self, ids: list[int], sampling: Sampling, n: int, details: Details) -> Answers:
        """Submits a request. `finish` must follow once its answers are over, or no one reads them."""
        if self.gone.is_set():
            raise EngineGone("the engine has ended")
        key = next(self._keys)
        self._send(Submit(key, ids, sampling, n, details))
        self.open[key] = answers = Answers(key, n)
        return answers

    def cancel(self, answers: Answers) -> None:
        """Ends a request; its answers that are not over get the finish 'cancel'."""
        with suppress(EngineGone):
            self._send(Cancel(answers.key))

    def finish(self, answers: Answers) -> None:
        """Forgets a request. Cancels it if it is not over."""
        if self.open.pop(answers.key, None) is not None and answers.left and not self.gone.is_set():
            self.cancel(answers)

    async def state(self) -> State:
        """The engine's state. EngineGone if there is no reply."""
        if self.gone.is_set():
            raise EngineGone("the engine has ended")
        future = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._send(Ask())
        try:
            return await asyncio.wait_for(future, PATIENCE)
        except TimeoutError:
            raise EngineGone(f"the engine has not replied for {PATIENCE:g} s") from None

    def ending(self) -> str:
        """A line on the end of a process that was not asked to end."""
        self.process.join(1)
        why = f": {self.why}" if self.why else ""
        return f"the engine's process has ended (exit code {self.process.exitcode}){why}"

    def close(self) -> int | None:
        """Ends the process, and returns its exit code."""
        with suppress(EngineGone):
            self._send(Close())
        end = time.monotonic() + PATIENCE
        self.process.join(max(0.0, end - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join(PATIENCE)
        return self.process.exitcode
