"""Runs the front: sockets, signals, draining, and the end when the engine's process ends.

next: serve/front.py, serve/guard.py
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tmoe.config.check import require
from tmoe.serve.chunks import WithChunks
from tmoe.serve.front import Front
from tmoe.serve.guard import Guard
from tmoe.serve.protocol import error_body

HEAD_S = 30.0  # seconds in which the head of a request must arrive
STALLED_S = 60.0  # seconds after which a connection whose client has read nothing is closed
MOST_CONNECTIONS = 2048
SPARE_FILES = 64  # descriptors that connections may not use
FAREWELL_S = 1.0  # seconds in which open replies must end once the engine is gone


class Protocol(H11Protocol):
    """uvicorn's protocol with limits: connections, time of an unfinished head, time without a read."""

    waits: asyncio.TimerHandle | None = None  # for the rest of a head
    slow: asyncio.TimerHandle | None = None  # for a read of the client
    unread = 0  # bytes that waited for the client at the last look

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
            return
        # so `pause_writing` follows as soon as the kernel takes no more bytes
        transport.set_write_buffer_limits(high=0)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread = self.transport.get_write_buffer_size()
        self.slow = self.loop.call_later(STALLED_S, self._stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_slow()

    def _stalled(self) -> None:
        """Closes the connection, and drops what waits, if the client has read nothing since the last look."""
        left = self.transport.get_write_buffer_size()
        if left >= self.unread:
            self.transport.abort()
            return
        self.unread = left
        self.slow = self.loop.call_later(STALLED_S, self._stalled)

    def _end_slow(self) -> None:
        if self.slow is not None:
            self.slow.cancel()
            self.slow = None

    def send_400_response(self, msg: str) -> None:
        """The reply to what is not HTTP, in OpenAI's form."""
        body = json.dumps(error_body(400, msg)).encode()
        size = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), size, (b"connection", b"close")]
        with contextlib.suppress(h11.LocalProtocolError):  # a reply has begun
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._end_slow()
        super().connection_lost(exc)

    def _between(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if not self._between():
            self._stop()
        elif self.waits is None:
            self.waits = self.loop.call_later(HEAD_S, self._late)

    def _stop(self) -> None:
        if self.waits is not None:
            self.waits.cancel()
            self.waits = None

    def _late(self) -> None:
        self.waits = None
        if self._between() and not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn without its signals, which `serve` handles."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def most_connections() -> int:
    """Most connections at a time: MOST_CONNECTIONS, or what the limit of open files leaves."""
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES)


def raise_limit_of_files() -> None:
    """Sets this process's limit of open files to what it may have, at most what the connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + SPARE_FILES
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(1024)
    except OSError as error:
        found.close()
        taken = error.errno == errno.EADDRINUSE
        of_port = taken or isinstance(error, PermissionError)
        name, value = ("port", port) if of_port else ("host", host)
        wrong = "another program listens there" if taken else (error.strerror or str(error)).lower()
        require(False, name, value, wrong, "0, for a port that is free" if taken else "")
    return found


async def serve(
    front: Front, listening: socket.socket, hosts: set[str] | None, token: str | None, drain: float
) -> int:
    """Serves until a signal or the engine's end. Returns the exit code.

    hosts, token: as for `Guard`. drain: seconds in which requests under way may end after a signal.
    """
    loop = asyncio.get_running_loop()
    raise_limit_of_files()
    front.engine.attach()
    guarded = WithChunks(Guard(front.app(), hosts, token, front.error))
    config = uvicorn.Config(
        guarded,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=int(FAREWELL_S),
    )
    server = Server(config)
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():  # a second signal
            front.engine.process.kill()
            print("ended at once by a second signal", file=sys.stderr, flush=True)
            os._exit(1)
        front.draining = True
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    running = asyncio.ensure_future(server.serve(sockets=[listening]))
    ends = [asyncio.ensure_future(one.wait()) for one in (asked, front.engine.gone)]
    await asyncio.wait({*ends, running}, return_when=asyncio.FIRST_COMPLETED)
    whole = True
    if not front.engine.gone.is_set() and asked.is_set():
        over = asyncio.ensure_future(front.idle.wait())
        await asyncio.wait({over, ends[1]}, timeout=drain, return_when=asyncio.FIRST_COMPLETED)
        whole = front.idle.is_set()
        if not whole:
            for answers in list(front.engine.open.values()):
                front.engine.cancel(answers)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(front.idle.wait(), FAREWELL_S)
    front.end_bodies()
    server.should_exit = True
    await asyncio.wait({running}, timeout=FAREWELL_S)
    for one in ends:
        one.cancel()
    if front.engine.gone.is_set():
        print(f"error: {front.engine.ending()}", file=sys.stderr, flush=True)
        return 1
    await asyncio.to_thread(front.engine.close)
    left = "all requests under way were answered" if whole else f"requests were cancelled after {drain:g} s"
    print(f"ended: {left}", file=sys.stderr, flush=True)
    return 0
