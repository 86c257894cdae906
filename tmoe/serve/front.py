"""The application: routes, streams, disconnects, and the limit of waiting requests.

next: serve/server.py
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tmoe.data.chat.template import ChatTemplate
from tmoe.serve.answers import Choice, Reply, event
from tmoe.serve.chunks import CHUNKS, Chunks
from tmoe.serve.engine_client import Answers, EngineClient, RefusedByEngine
from tmoe.serve.guard import drop_body, read_body, require_json
from tmoe.serve.links import EngineGone
from tmoe.serve.messages import Part
from tmoe.serve.page import Page, RunRouting
from tmoe.serve.parse_tools import format_of, has_thoughts, text_of
from tmoe.serve.protocol import Asked, Protocol, Refused, error_body, parse_json

ALIVE_S = 15.0  # seconds of silence after which a stream gets a comment
PATHS = "/, /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics"
STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Sizes(NamedTuple):
    """Most answers that are under way."""

    slots: int
    """of each rank"""
    waiting: int
    """without a slot"""
    ranks: int = 1


class Front:
    """The state of the front: the engine, the requests under way, and whether it drains."""

    def __init__(
        self,
        engine: EngineClient,
        model: str,
        template: ChatTemplate | None,
        why: str,
        sizes: Sizes,
        routing: RunRouting | None = None,
    ):
        """why: why there is no template. routing: of the run that the page shows."""
        self.engine, self.model, self.template = engine, model, template
        self.protocol = Protocol(model, engine.ready, template, why)
        self.sizes = sizes
        self.page = Page(routing)
        self.counters = engine.counters
        self.open = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.draining = False
        self.reading: set[asyncio.Timeout] = set()
        self.created = int(time.time())

    def app(self) -> Starlette:
        post = dict(methods=["POST"])
        routes = [
            Route("/v1/chat/completions", partial(self.answer, chat=True), **post),
            Route("/v1/completions", partial(self.answer, chat=False), **post),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            *self.page.routes(),
        ]
        handlers: Any = {HTTPException: self.not_there, Refused: self.refused, Exception: self.failed}
        handlers |= {EngineGone: self.engine_gone, ClientDisconnect: self.client_gone}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False  # a path that is not there is 404
        return app

    # ---- errors ----

    def error(self, refused: Refused) -> JSONResponse:
        self.counters.statuses[refused.status] = self.counters.statuses.get(refused.status, 0) + 1
        headers = {"retry-after": "1"} if refused.status == 503 else {}
        if refused.status in (408, 413):
            headers["connection"] = "close"
        return JSONResponse(refused.body, refused.status, headers=headers)

    async def refused(self, request: Request, refused: Refused) -> Response:
        return self.error(refused)

    async def not_there(self, request: Request, found: HTTPException) -> Response:
        await drop_body(request.receive)
        wrong = "no such path" if found.status_code == 404 else f"{request.method} is not served there"
        text = f"{request.url.path[:80]}: {wrong}; valid: {PATHS}"
        reply = self.error(Refused(found.status_code, text))
        reply.headers.update(found.headers or {})
        return reply

    async def engine_gone(self, request: Request, found: EngineGone) -> Response:
        return self.error(Refused(503, str(found), None, "engine_gone"))

    async def client_gone(self, request: Request, found: ClientDisconnect) -> Response:
        return Response(status_code=499)

    async def failed(self, request: Request, found: Exception) -> Response:
        return self.error(Refused(500, f"the server failed: {type(found).__name__}"))

    # ---- small routes ----

    async def models(self, request: Request) -> Response:
        text = text_of(self.template)
        ours = dict(max_len=self.engine.ready.max_len, chat=self.template is not None)
        ours |= dict(tool_calls=format_of(text) or None, reasoning=has_thoughts(text))
        one = dict(id=self.model, object="model", created=self.created, owned_by="tmoe", tmoe=ours)
        ours |= dict(moe_blocks=self.engine.ready.moe_blocks, experts=self.engine.ready.experts)
        ours |= dict(run=self.page.routing is not None)
        if (name := request.path_params.get("name")) is None:
            return JSONResponse(dict(object="list", data=[one]))
        if name != self.model:
            wrong = f"model={name[:80]!r}: not served here; valid: {self.model!r}"
            raise Refused(404, wrong, "model", "model_not_found")
        return JSONResponse(one)

    async def health(self, request: Request) -> Response:
        try:
            await self.engine.states()
        except EngineGone:
            return JSONResponse(dict(status="engine gone"), 503)
        status = "draining" if self.draining else "ok"
        return JSONResponse(dict(status=status), 503 if self.draining else 200)

    async def metrics(self, request: Request) -> Response:
        tasks = len(asyncio.all_tasks())
        text = self.counters.text(await self.engine.states(), self.open, tasks)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    # ---- answers ----

    async def answer(self, request: Request, chat: bool) -> Response:
        """Both routes of answers."""
        try:
            require_json(request)
            self.require_room(1)
        except Refused:
            await drop_body(request.receive)
            raise
        try:
            raw = await read_body(request, self.reading)
        except Refused:
            self.require_open()
            raise
        # a template or a long text must not delay the streams of others
        asked = await asyncio.to_thread(self.asked, raw, chat)
        self.require_room(asked.n * len(asked.prompts))
        reply = Reply(asked, self.model, self.engine.ready.tokenizer)
        run = Run(self, reply)
        if asked.stream:
            return Stream(run, reply)
        return await self.whole(request, run, reply)

    def asked(self, raw: bytes, chat: bool) -> Asked:
        body = parse_json(raw)
        return self.protocol.chat(body) if chat else self.protocol.text(body)

    def require_open(self) -> None:
        """Refused with 503 if the server drains."""
        if self.draining:
            raise Refused(503, "the server is ending", None, "draining")

    def end_bodies(self) -> None:
        """Refuses all requests whose bodies have not arrived."""
        for limit in self.reading:
            limit.reschedule(0)

    def require_room(self, answers: int) -> None:
        """Refused with 503 if the server drains, or if too many answers would wait."""
        self.require_open()
        slots, waiting, ranks = self.sizes
        each = f" of each of {ranks} ranks" if ranks > 1 else ""
        most = f"at most --slots={slots}{each} and --waiting={waiting}"
        slots *= ranks
        if answers > slots + waiting:
            raise Refused(400, f"n: {answers} answers of one request; {most}", "n")
        under_way = sum(one.left for one in self.engine.open.values())
        if under_way + answers > slots + waiting:
            raise Refused(503, f"{under_way} answers are under way; {most}", None, "overloaded")

    async def whole(self, request: Request, run: Run, reply: Reply) -> Response:
        """The reply without a stream. A client that closes its connection ends the request."""

        async def collect() -> None:
            async for choice, part in run.parts():
                choice.take(part)

        task, gone = asyncio.ensure_future(collect()), asyncio.ensure_future(client_leaves(request.receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return Response(status_code=499)
            await task
        except RefusedByEngine as error:
            raise Refused(400, str(error)) from None
        finally:
            for one in (task, gone):
                one.cancel()
            with suppress(asyncio.CancelledError, EngineGone, RefusedByEngine):
                await task
            run.close()
        if failed := reply.failed():
            raise Refused(500, failed)
        self.counters.statuses[200] = self.counters.statuses.get(200, 0) + 1
        # log-probs of many answers are a large body
        return await asyncio.to_thread(lambda: JSONResponse(reply.whole()))


async def client_leaves(receive: Any) -> None:
    """Returns once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Run:
    """A request under way in the engine: one submission for each prompt."""

    def __init__(self, front: Front, reply: Reply):
        self.front, self.reply, asked = front, reply, reply.asked
        self.answers: list[Answers] = []
        self.closed = False
        front.open += 1
        front.idle.clear()
        try:
            for ids in asked.prompts:
                how = replace(asked.sampling), asked.n, asked.details, asked.prompt_routes
                self.answers.append(front.engine.submit(ids, *how))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the request; what is not over is cancelled."""
        if self.closed:
            return
        self.closed = True
        for answers in self.answers:
            self.front.engine.finish(answers)
        self.front.open -= 1
        if not self.front.open:
            self.front.idle.set()

    async def parts(self) -> AsyncIterator[tuple[Choice, Part]]:
        """Each part with its choice. Raises EngineGone or RefusedByEngine."""
        if len(self.answers) == 1:
            async for part in self.answers[0]:
                yield self._placed(0, part)
            return
        queue: asyncio.Queue[Any] = asyncio.Queue(1)  # a part at a time: what waits is joined in `Answers`

        async def feed(i: int, answers: Answers) -> None:
            try:
                async for part in answers:
                    await queue.put((i, part))
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.ensure_future(feed(i, answers)) for i, answers in enumerate(self.answers)]
        try:
            left = len(tasks)
            while left:
                found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                left -= found is None
                if found is not None:
                    yield self._placed(*found)
        finally:
            for task in tasks:
                task.cancel()

    def _placed(self, prompt: int, part: Part) -> tuple[Choice, Part]:
        return self.reply.choices[prompt * self.reply.asked.n + part.sample], part


class Stream(Response):
    """The reply as server-sent events. A client that leaves ends the request."""

    def __init__(self, run: Run, reply: Reply):
        super().__init__()
        self.run, self.reply = run, reply
        self.chunks: Chunks | None = None
        self.wrote = False  # whether `direct` has written since the last look

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.chunks = scope.get(CHUNKS)
        writer = asyncio.ensure_future(self.write(send))
        gone = asyncio.ensure_future(client_leaves(receive))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            for one in (writer, gone):
                one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await writer
            self.run.close()

    def direct(self, sample: int, text: str, ids: list[int]) -> bool:
        """Writes the event of a text. False: `write` has to do it."""
        assert self.chunks is not None
        if not self.chunks.ready:
            return False
        try:
            body = self.reply.quick_event(self.reply.choices[sample], text, len(ids))
        except Exception as error:  # it ends this reply, not those of others in the same step
            self.run.answers[0].fail(error)
            return True
        if body:
            self.chunks.write(body)
            self.wrote = True
        return body is not None

    async def write(self, send: Any) -> None:
        """Sends all events but those that `direct` writes."""

        async def say(body: bytes, more: bool = True) -> None:
            await send(dict(type="http.response.body", body=body, more_body=more))

        statuses = self.run.front.counters.statuses
        statuses[200] = statuses.get(200, 0) + 1
        await send(dict(type="http.response.start", status=200, headers=STREAM))
        if self.chunks is not None and len(self.run.answers) == 1:
            self.run.answers[0].direct = self.direct
        parts = aiter(self.run.parts())
        coming: asyncio.Future | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(parts))
                done, _ = await asyncio.wait({coming}, timeout=ALIVE_S)
                if not done:
                    if not self.wrote:
                        await say(b": alive\n\n")
                    self.wrote = False
                    continue
                try:
                    choice, part = coming.result()
                except StopAsyncIteration:
                    break
                finally:
                    coming = None
                if body := self.reply.event(choice, part):
                    await say(body)
        except (EngineGone, RefusedByEngine) as error:
            status = 503 if isinstance(error, EngineGone) else 400
            await say(event(error_body(status, str(error))), False)
            return
        finally:
            if coming is not None:
                coming.cancel()
        if failed := self.reply.failed():
            await say(event(error_body(500, failed)), False)
            return
        last = self.reply.usage_event() if self.reply.asked.usage else b""
        await say(last + b"data: [DONE]\n\n", False)
