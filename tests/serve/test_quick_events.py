"""Events that a stream writes without a task: the same bytes in the same order, also for a slow client.

next: tmoe/serve/chunks.py, tmoe/serve/answers.py
"""

import asyncio
from itertools import pairwise
from types import SimpleNamespace

import pytest
from call_templates import call_tokenizer

from tmoe.data.chat.template import load_template
from tmoe.data.tokenizer import ByteTokenizer
from tmoe.serve import front
from tmoe.serve.answers import Reply
from tmoe.serve.chunks import CHUNKS, Chunks, WithChunks
from tmoe.serve.counters import BOUNDS, Counters, Histogram
from tmoe.serve.engine_client import Answers, EngineClient
from tmoe.serve.messages import Part, Ready, Step
from tmoe.serve.protocol import Protocol, parse_json

TOOL = dict(type="function", function=dict(name="weather", parameters={}))
SAID = '<think>\nWarm?</think>\n\nIt "is"\n \u00e9\u2028\0 <b> <tool_call>\n'
SAID += '{"name": "weather", "arguments": {"at": "here"}}\n</tool_call> and more'
TEXTS = [SAID[a:b] for a, b in pairwise([*range(0, len(SAID), 5), len(SAID)])]


def asked_of(chat, **more):
    tokenizer = call_tokenizer("hermes") if chat else ByteTokenizer()
    template = load_template(tokenizer, now=True) if chat else None
    ready = Ready(tokenizer, tokenizer.vocab, (tokenizer.eos,), (), {}, 4096, 64, ())
    protocol = Protocol("m", ready, template, "")
    body = dict(stream=True, max_tokens=100) | more
    if not chat:
        return protocol.text(dict(prompt="a") | body), "m", tokenizer
    message = dict(role="user", content="hi")
    return protocol.chat(dict(messages=[message], tools=[TOOL]) | body), "m", tokenizer


def replies(chat, **more):
    """Two replies with the same id."""
    found = [Reply(*asked_of(chat, **more)) for _ in range(2)]
    found[1].frame = found[0].frame
    return found


@pytest.mark.parametrize(
    ("chat", "more"),
    [(False, {}), (True, {}), (True, dict(stream_options=dict(include_usage=True))), (False, dict(n=2))],
)
def test_the_same_bytes(chat, more, monkeypatch):
    """With thoughts, a call, quotes, and characters that JSON escapes."""
    slow, quick = replies(chat, **more)
    monkeypatch.setattr("tmoe.serve.answers.uuid.uuid4", lambda: SimpleNamespace(hex="0" * 32))
    pairs = []
    for place, text in enumerate(TEXTS):
        for sample in range(slow.asked.n):
            want = slow.event(slow.choices[sample], Part(0, sample, text, [place]))
            found = quick.quick_event(quick.choices[sample], text, 1)
            if not place:
                assert found is None  # the first event has more than a text
                found = quick.event(quick.choices[sample], Part(0, sample, text, [place]))
            pairs.append((want, found))
    assert all(want == found for want, found in pairs) and len({want for want, _ in pairs}) > 5
    for reply in (slow, quick):
        pairs.append(reply.event(reply.choices[0], Part(0, 0, "", [9], finish="stop")))
    assert pairs[-1] == pairs[-2] and slow.usage() == quick.usage()


@pytest.mark.parametrize(
    "more", [dict(logprobs=1), dict(tmoe=dict(routes=True)), dict(max_tokens=0, echo=True)]
)
def test_other_parts_are_not_quick(more):
    reply, _ = replies(False, **more)
    reply.event(reply.choices[0], Part(0, 0, "a", [97]))
    before = reply.choices[0].text
    assert reply.quick_event(reply.choices[0], "b", 1) is None and reply.choices[0].text == before


class Engine:
    """An EngineClient without engines; `step` is a step of them."""

    def __init__(self):
        self.client = EngineClient.__new__(EngineClient)
        self.client.open, self.client.counters = {}, Counters()
        self.client.gone = asyncio.Event()
        self.client.submit = self.submit
        load = SimpleNamespace(ended=lambda key: None, drop=lambda key: None)
        self.link = SimpleNamespace(load=load, send=lambda message: None)

    def submit(self, ids, sampling, n, details, prompt_routes):
        key = len(self.client.open)
        self.client.open[key] = Answers(key, n, self.link)
        return self.client.open[key]

    def step(self, text, finish=""):
        """Adds a token with this text to each request."""
        keys = [*self.client.open]
        step = Step(keys, [0] * len(keys), [text] * len(keys), [[1] for _ in keys], [])
        if finish:
            step = Step([], [], [], [], [Part(key, 0, text, [1], finish=finish) for key in keys])
        self.client._take_step(self.link, step)


class Wire:
    """A connection: what ASGI sends and what is written to it, and whether the client keeps up."""

    def __init__(self):
        self.flow = SimpleNamespace(write_paused=False)
        self.disconnected, self.response_started = False, True
        self.transport = SimpleNamespace(write=self.write, is_closing=lambda: False)
        self.bodies, self.written = [], 0
        self.free = asyncio.Event()
        self.free.set()

    def write(self, raw):
        size, _, rest = raw.partition(b"\r\n")
        assert int(size, 16) == len(rest) - 2 and rest.endswith(b"\r\n")
        self.bodies.append(rest[:-2])
        self.written += 1

    async def send(self, message):
        await self.free.wait()
        self.bodies.append(message.get("body", b""))

    async def receive(self):
        await asyncio.Event().wait()

    def pause(self, paused):
        self.flow.write_paused = paused
        (self.free.clear if paused else self.free.set)()

    @property
    def text(self):
        events = [e for body in self.bodies for e in body.split(b"\n\n") if e.startswith(b"data: {")]
        return "".join(parse_json(event[6:])["choices"][0]["text"] for event in events)


def stream_of(engine, wire):
    reply = Reply(*asked_of(False))
    idle = asyncio.Event()
    room = SimpleNamespace(engine=engine.client, counters=engine.client.counters, open=0, idle=idle)
    stream = front.Stream(front.Run(room, reply), reply)
    return asyncio.ensure_future(stream({CHUNKS: Chunks(wire)}, wire.receive, wire.send))


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_slow_client_loses_nothing_and_the_order_is_kept():
    """Every pattern of pauses over six steps; a pause may end before the task that waits has run."""

    async def run(pauses):
        engine, wire = Engine(), Wire()
        task = stream_of(engine, wire)
        await settle()
        for place in range(6):
            wire.pause(bool(pauses >> place & 1))
            engine.step("abcdef"[place])
            if place % 2 == 0:
                await settle()
        wire.pause(False)
        engine.step("g", finish="length")
        await task
        assert wire.text == "abcdefg" and wire.bodies[-1] == b"data: [DONE]\n\n"
        return wire.written

    counts = [asyncio.run(run(pauses)) for pauses in range(2**6)]
    assert max(counts) == counts[0] == 5  # the first event and the last one have more than a text
    assert min(counts) == counts[-1] == 0


def test_a_reply_that_fails_does_not_end_others(monkeypatch):
    async def run():
        engine, wires = Engine(), [Wire(), Wire()]
        tasks = [stream_of(engine, wire) for wire in wires]
        for text in ("", "a", "b"):
            await settle()
            engine.step(text)
        real, bad = Reply.quick_event, engine.client.open[0].direct.__self__.reply

        def quick_event(self, choice, text, tokens):
            if self is bad:
                raise ValueError("a parser")
            return real(self, choice, text, tokens)

        monkeypatch.setattr(Reply, "quick_event", quick_event)
        engine.step("c")
        with pytest.raises(ValueError, match="a parser"):
            await tasks[0]
        assert not tasks[1].done() and wires[1].text == "abc" and [*engine.client.open] == [1]
        tasks[1].cancel()

    asyncio.run(run())


def test_only_clients_that_know_chunks_get_them():
    seen = {}

    async def app(scope, receive, send):
        seen[scope["http_version"]] = CHUNKS in scope

    class Cycle:
        transport = flow = None

        async def send(self, message):
            pass

    for version in ("1.0", "1.1"):
        asyncio.run(WithChunks(app)(dict(type="http", http_version=version), None, Cycle().send))
    assert seen == {"1.0": False, "1.1": True}


def test_bounds_of_a_histogram_are_inclusive():
    histogram = Histogram("a", "b")
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, BOUNDS[-1], BOUNDS[-1] * 2):
        histogram.add(seconds)
    assert histogram.counts[:2] == [2, 1] and histogram.counts[-2:] == [1, 1]
