"""Writes parts of a stream to its connection without a task: most of the front's cost of a token is saved.

ASGI's `send` is a coroutine, so each part needs a task that waits for it, and h11 checks each part. The frame
of a chunk is its size in a line before it and an empty line after it (RFC 9112, 7.1).

next: serve/front.py
"""

from __future__ import annotations

from typing import Any

CHUNKS = "tmoe.chunks"  # the key of a scope under which an application finds the Chunks of its reply


class Chunks:
    """The body of a reply that has begun, whose length is not known. cycle: uvicorn's, of the request."""

    def __init__(self, cycle: Any):
        self.cycle, self.transport = cycle, cycle.transport

    @property
    def ready(self) -> bool:
        """Whether the client takes more at once. If not, `send` must be awaited."""
        waits = self.cycle.flow.write_paused or self.cycle.disconnected
        return not waits and self.cycle.response_started and not self.transport.is_closing()

    def write(self, body: bytes) -> None:
        """Writes a part of the body, which is not empty."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class WithChunks:
    """ASGI: gives the application the Chunks of its reply. Clients of HTTP/1.0 cannot read chunks."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        cycle = getattr(send, "__self__", None)
        if scope["type"] == "http" and scope["http_version"] == "1.1" and hasattr(cycle, "flow"):
            scope[CHUNKS] = Chunks(cycle)
        await self.app(scope, receive, send)
