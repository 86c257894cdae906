"""Sends completions to a server over HTTP and notes when each event of their streams arrives.

A process of this file is a share of the clients: it reads a Share as JSON from its input and prints Records.
It imports nothing but Python's own modules, so that it starts at once and a client costs less than a server.

next: serve_models.py
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

LONGEST = 1024  # tokens of a prompt, and of an answer
EVENT = b"data: {"
KEPT = 1200  # bytes of a stream's end in which its counts are looked for
COUNTS = {
    name: re.compile(rb'"%s": ?(\d+)' % name.encode()) for name in ("prompt_tokens", "completion_tokens")
}


@dataclass
class Job:
    """A request. at: seconds after the begin at which it is sent; None: once a client is free."""

    body: dict[str, Any]
    at: float | None = None


@dataclass
class Share:
    """The requests of one process.

    clients: most requests at a time. seconds: time after which what is under way is cut off. begin: the
    monotonic time from which times count.
    """

    port: int
    path: str
    jobs: list[Job]
    clients: int
    seconds: float
    begin: float


@dataclass
class Record:
    """A request that was sent. Times are seconds after the begin."""

    sent: float
    times: list[float] = field(default_factory=list)
    """of each event with a part of the answer"""
    prompt_tokens: int = 0
    tokens: int = 0
    """of the answer, as the server counts them; 0: the answer was cut off, or the server does not count"""
    error: str = ""
    over: float = 0.0
    """0: it was cut off"""


def lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """Tokens of prompts and of answers, as in ShareGPT's conversations: both log-normal, cut at LONGEST.

    Prompts have a median of 70 tokens and a mean of about 190, answers a median of 140 and a mean of about
    200, like the first turns that vLLM's benchmark takes from ShareGPT.
    """
    draw = random.Random(seed)
    pairs = ((draw.lognormvariate(4.25, 1.4), draw.lognormvariate(4.95, 0.9)) for _ in range(count))
    return [(int(min(max(a, 4), LONGEST)), int(min(max(b, 4), LONGEST))) for a, b in pairs]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Times of a Poisson process with `rate` requests a second."""
    draw, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += draw.expovariate(rate)
        found.append(at)
    return found


class Client(asyncio.Protocol):
    """One request on one connection, which the server closes."""

    def __init__(self, head: bytes, record: Record, begin: float, over: asyncio.Future[None]):
        self.head, self.record, self.begin, self.over = head, record, begin, over
        self.end = b""  # the last bytes, in which an event may begin that the next bytes complete
        self.last = b""
        self.status = 0
        self.times = array("d")
        self.ended = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.record.sent = time.monotonic() - self.begin
        transport.write(self.head)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic() - self.begin
        if not self.status:
            self.status = int(data.split(b" ", 2)[1])
        whole = self.end + data
        self.times.extend([now] * whole.count(EVENT))
        self.end = whole[1 - len(EVENT) :]
        self.last = (self.last + data)[-KEPT:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended:
            return
        self.ended, record = True, self.record
        record.over = time.monotonic() - self.begin
        counts = {name: pattern.findall(self.last) for name, pattern in COUNTS.items()}
        record.prompt_tokens, record.tokens = (int(found[-1]) if found else 0 for found in counts.values())
        record.times = list(
            self.times[:-1] if record.tokens else self.times
        )  # the last event has counts only
        if self.status != 200 or b'"error"' in self.last or exc is not None:
            record.error = f"status {self.status}: {exc or self.last.decode('utf-8', 'replace')[-300:]}"
        if not self.over.done():
            self.over.set_result(None)

    def cut(self) -> None:
        """Ends the request, if it is under way, without waiting for its answer."""
        if not self.ended:
            self.ended = True
            self.record.times = list(self.times)
            self.transport.abort()


def head_of(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    )
    return f"{lines}content-length: {len(raw)}\r\n\r\n".encode() + raw


async def drive(share: Share) -> list[Record]:
    """Sends the jobs of a share, and returns the records of those that were sent, in their order."""
    loop = asyncio.get_running_loop()
    records: list[Record] = []
    jobs = iter(share.jobs)

    async def one(job: Job) -> None:
        record = Record(0.0)
        records.append(record)
        over: asyncio.Future[None] = loop.create_future()
        head = head_of(share.path, job.body)
        try:
            _, client = await loop.create_connection(
                lambda: Client(head, record, share.begin, over), "127.0.0.1", share.port
            )
        except OSError as error:
            record.error = f"no connection: {error}"
            return
        try:
            await over
        finally:
            client.cut()

    async def closed() -> None:
        for job in jobs:
            await one(job)

    async def timed(job: Job) -> None:
        assert job.at is not None
        await asyncio.sleep(share.begin + job.at - time.monotonic())
        await one(job)

    await asyncio.sleep(max(0.0, share.begin - time.monotonic()))
    poisson = any(job.at is not None for job in share.jobs)
    work = [timed(job) for job in jobs] if poisson else [closed() for _ in range(share.clients)]
    tasks = [asyncio.ensure_future(one) for one in work]
    await asyncio.wait(tasks, timeout=share.begin + share.seconds - time.monotonic())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return records


def shares(jobs: Sequence[Job], clients: int, processes: int, begin: float, **more: Any) -> list[Share]:
    """Divides jobs and clients over processes; each has at least one client."""
    count = max(1, min(processes, clients))
    each = [clients // count + (i < clients % count) for i in range(count)]
    return [Share(jobs=list(jobs[i::count]), clients=n, begin=begin, **more) for i, n in enumerate(each)]


def send(
    port: int, path: str, jobs: Sequence[Job], clients: int, seconds: float, processes: int
) -> list[Record]:
    """The records of all jobs that were sent, from processes of clients."""
    begin = time.monotonic() + 0.5 + 0.0002 * len(jobs)  # each process has read its share by then
    parts = shares(jobs, clients, processes, begin, port=port, path=path, seconds=seconds)
    command = [sys.executable, str(Path(__file__).resolve())]
    running = []
    for share in parts:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        running.append((process, json.dumps(asdict(share)).encode()))
    try:
        for process, raw in running:
            assert process.stdin is not None
            process.stdin.write(raw)
            process.stdin.close()
        found: list[Record] = []
        for process, _ in running:
            assert process.stdout is not None
            found += [Record(**line) for line in json.loads(process.stdout.read())]
        return found
    finally:
        for process, _ in running:
            process.kill()
            process.wait()


def share_of(raw: dict[str, Any]) -> Share:
    jobs: Any = [Job(**job) for job in raw["jobs"]]
    return Share(**raw | dict(jobs=jobs))


# ---- figures of records ----


def tokens_of_event(records: Iterable[Record]) -> float:
    """Tokens of an event, from the answers that are over: 1, unless the server joins tokens."""
    whole = [(record.tokens, len(record.times)) for record in records if record.over and record.tokens]
    events = sum(events for _, events in whole)
    return sum(tokens for tokens, _ in whole) / events if events else 1.0


def speed(records: Sequence[Record], begin: float, end: float) -> float:
    """Tokens a second between two times."""
    events = sum(begin < at <= end for record in records for at in record.times)
    return events * tokens_of_event(records) / (end - begin)


def all_under_way(records: Sequence[Record], skipped: int = 8) -> tuple[float, float]:
    """The times between which all answers are under way, without the first tokens of each."""
    begin = max(record.times[min(skipped, len(record.times) // 2)] for record in records)
    return begin, min(record.times[-1] for record in records)


def gaps(records: Sequence[Record], begin: float) -> list[float]:
    """Sorted seconds between two events of an answer, after a time."""
    found = []
    for record in records:
        times = [at for at in record.times if at > begin]
        found += [b - a for a, b in pairwise(times)]
    return sorted(found)


def part(values: Sequence[float], share: float) -> float:
    """The value below which this share of sorted values lies."""
    return values[min(len(values) - 1, int(share * len(values)))]


def first_tokens(records: Sequence[Record]) -> list[float]:
    """Sorted seconds from a request to its first event."""
    return sorted(record.times[0] - record.sent for record in records if record.times)


def errors(records: Sequence[Record]) -> list[str]:
    return [record.error for record in records if record.error]


if __name__ == "__main__":
    found = asyncio.run(drive(share_of(json.load(sys.stdin))))
    print(json.dumps([asdict(record) for record in found]))
