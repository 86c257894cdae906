"""Decides who may ask: Host, Origin, token; and the content type, size and time of a body.

next: serve/front.py
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from starlette.responses import JSONResponse

from tmoe.serve.protocol import Refused

MOST_BODY = 4 * 2**20  # bytes
DROPPED = 16 * 2**20  # bytes that are read of a body that is too large, so that its client reads the reply
BODY_S = 30.0  # seconds in which a body must arrive
DROP_S = 2.0  # seconds in which the body of a refused request is read
OPEN = {"/", "/health"}  # paths that need no token
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
WHOLE_URL = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE)
HOST = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::[0-9]*)?")  # IPv6 in brackets, or a name; a port may follow


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by name."""
    return host in LOOPBACK


def split_host(text: str) -> str:
    """The name in a Host header, without its port and without the brackets of IPv6."""
    text = text.strip().lower()
    found = HOST.fullmatch(text)
    return text if found is None else found[1] or found[2] or ""


def with_path(scope: Any) -> Any:
    """The scope of a request with its path alone, if its target is a whole URL, as proxies are asked.

    The URL's host replaces the Host header (RFC 9112, 3.2.2).
    """
    found = WHOLE_URL.fullmatch(scope["raw_path"])
    if found is None:
        return scope
    host, path = found[1], found[2] or b"/"
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return scope | dict(
        path=unquote(path.decode("ascii")), raw_path=path, headers=[*headers, (b"host", host)]
    )


class Guard:
    """ASGI: refuses a request before the application sees it.

    hosts: names that the Host header may have; None: any, for a server with a token on all addresses.
    token: the secret of `Authorization: Bearer`; None: none is needed.
    error: makes the reply of a refusal, and counts it.
    """

    def __init__(
        self,
        app: Any,
        hosts: set[str] | None,
        token: str | None,
        error: Callable[[Refused], JSONResponse],
    ):
        self.app, self.hosts, self.token, self.error = app, hosts, token, error

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope = with_path(scope)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        asked = headers.get("x-request-id", "")[:128]

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start" and asked:
                message["headers"] = [*message["headers"], (b"x-request-id", asked.encode("latin-1"))]
            await send(message)

        if (refused := self.refusal(scope, headers)) is not None:
            await drop_body(receive)
            reply = self.error(refused)
            if refused.status == 401:
                reply.headers["www-authenticate"] = "Bearer"
            await reply(scope, receive, send_with_id)
            return
        await self.app(scope, receive, send_with_id)

    def refusal(self, scope: Any, headers: dict[str, str]) -> Refused | None:
        """Why a request is refused; None if it is not."""
        host = headers.get("host", "")
        if self.hosts is not None and split_host(host) not in self.hosts:
            return Refused(403, f"Host: {host[:80]!r} is not a name of this server")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            return Refused(403, f"Origin: {origin[:80]!r} may not ask this server")
        if self.token is not None and scope["path"] not in OPEN:
            kind, _, given = headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(given.strip().encode("latin-1"), self.token.encode())
            if kind.lower() != "bearer" or not same:
                wrong = "Authorization: needs Bearer and the token of this server"
                return Refused(401, wrong, None, "invalid_api_key")
        return None


def require_json(request: Any) -> None:
    """Refused unless the body is declared as JSON: pages of other sites cannot declare that unasked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, f"Content-Type: {kind[:80]!r}; valid: application/json")
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise Refused(415, f"Content-Encoding: {coding[:80]!r} is not served; leave it out")


async def drop_body(receive: Any) -> None:
    """Reads the rest of a request that is refused, up to DROPPED bytes and for DROP_S.

    A connection that is closed with unread bytes is reset, and the client may then not see the reply.
    """

    async def read() -> None:
        left = DROPPED
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if not message.get("more_body"):
                return

    with suppress(TimeoutError, asyncio.CancelledError):  # the server ends: the reply is sent at once
        await asyncio.wait_for(read(), DROP_S)


async def read_body(request: Any, limits: set[asyncio.Timeout]) -> bytes:
    """The body of a request. Refused if it is too large or too slow, or if the client has gone.

    limits: of the bodies that are being read, for a server that ends before they have arrived.
    """
    limit = asyncio.timeout(BODY_S)
    limits.add(limit)
    try:
        async with limit:
            return await _read(request)
    except TimeoutError:
        raise Refused(408, f"body: has not arrived in {BODY_S:g} s") from None
    finally:
        limits.remove(limit)


async def _read(request: Any) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= MOST_BODY:
            parts.append(part)
        elif size > DROPPED:
            break
    if size > MOST_BODY:
        raise Refused(413, f"body: more than {MOST_BODY} bytes")
    return b"".join(parts)
