"""The front's connections to the engines: it starts rank 0's process, and meets those of the other ranks.

next: serve/engine_client.py
"""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import socket
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from tmoe.config.check import ConfigError
from tmoe.generate.live import State
from tmoe.serve.engine_process import engine_process
from tmoe.serve.messages import EngineSettings, Failed, Joined, Pages, Ready
from tmoe.serve.spread import Load

PATIENCE = 5.0  # seconds in which an engine must reply or end
LONGEST = 90  # characters of a folder's path that leave room for a socket's name


class EngineGone(Exception):
    """An engine's process has ended, or could not start."""


class Link:
    """The connection to the engine of one rank."""

    def __init__(self, rank: int, pipe: Connection, pid: int | None):
        self.rank, self.pipe, self.pid = rank, pipe, pid
        self.load = Load(0, 0)
        self.asked: list[asyncio.Future[State]] = []

    def send(self, message: Any) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            raise EngineGone("the engine has ended") from None


class Meeting:
    """A socket for engines, in a folder that only this user can enter. A context: it removes the folder."""

    def __init__(self) -> None:
        usual = tempfile.gettempdir()
        self.folder = tempfile.mkdtemp(prefix="tmoe-", dir=usual if len(usual) < LONGEST else "/tmp")
        self.path = str(Path(self.folder) / "s")
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(self.path)
        self.socket.listen(1024)

    def meet(self) -> Link:
        """The connection of an engine that has arrived."""
        pipe = Connection(self.socket.accept()[0].detach())
        try:
            joined = pipe.recv()
        except (EOFError, OSError):
            raise EngineGone("the engine of a rank has ended before it loaded") from None
        assert isinstance(joined, Joined)
        return Link(joined.rank, pipe, joined.pid)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Engines:
    """The engines of all ranks, with their models loaded.

    Args:
        settings: of each engine.
        start: how rank 0's process starts, as for multiprocessing.
        size: number of ranks; the launcher has started the other ones.

    Raises ConfigError if an engine refuses its settings, EngineGone if one cannot start.
    """

    def __init__(self, settings: EngineSettings, start: str = "spawn", size: int = 1):
        context: Any = multiprocessing.get_context(start)
        self.size = size
        self.links: list[Link] = []
        with Meeting() if size > 1 else nullcontext() as meeting:
            mine, other = context.Pipe()
            given = replace(settings, meeting=meeting.path if meeting else "")
            self.process = context.Process(target=engine_process, args=(other, mine, given), daemon=True)
            try:
                self.process.start()
                other.close()
                self.links.append(Link(0, mine, self.process.pid))
                self.ready = self._load(meeting, settings.slots)
            except BaseException:  # Ctrl-C too; the process ignores all signals but this
                if self.process.pid is not None:
                    self.process.kill()
                    self.process.join(PATIENCE)
                raise

    def _load(self, meeting: Meeting | None, slots: int) -> Ready:
        """Waits until all ranks have loaded the model. Returns what rank 0 says of it."""
        ready: Ready | None = None
        silent: set[Link] = set()  # ranks whose reason rank 0 reports
        left = self.size
        while left:
            links = [link for link in self.links if link not in silent]
            pipes = [link.pipe for link in links]
            # Ctrl-C just before the system call would otherwise wait with it
            came = wait([*pipes, *([meeting.socket] if meeting else [])], 1.0)
            if meeting and meeting.socket in came:
                self.links.append(meeting.meet())
            for link in [link for link in links if link.pipe in came]:
                try:
                    said = link.pipe.recv()
                except (EOFError, OSError):
                    raise EngineGone(self.end_of(link, " while it loaded")) from None
                if isinstance(said, Failed) and not said.text:
                    silent.add(link)
                elif isinstance(said, Failed):
                    self._refuse(link, said)
                else:
                    assert isinstance(said, Ready | Pages)
                    link.load = Load(said.pages, slots)
                    ready = said if isinstance(said, Ready) else ready
                    left -= 1
        self.links.sort(key=lambda link: link.rank)
        assert ready is not None
        return ready._replace(pages=min(link.load.pages for link in self.links))

    def _refuse(self, link: Link, said: Failed) -> NoReturn:
        """Raises what an engine says of its end."""
        if not link.rank:
            self.process.join(PATIENCE)
        where = f"rank {link.rank}: " if link.rank else ""
        raise (ConfigError if said.refused else EngineGone)(where + said.text)

    def end_of(self, link: Link, when: str = "") -> str:
        """A line on the end of an engine that was not asked to end."""
        what = "the engine's process" if self.size == 1 else f"the engine of rank {link.rank}"
        if link.rank:
            return f"{what} (process {link.pid}) has ended{when}"
        self.process.join(PATIENCE)
        verb = f"ended{when}" if when else "has ended"
        return f"{what} {verb} (exit code {self.process.exitcode})"
