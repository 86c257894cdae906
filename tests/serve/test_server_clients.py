"""Clients that close, that never read, or send half a request: pages, files, tasks and memory are freed.

next: tests/lib/served.py
"""

import random
import socket

import pytest
import served
from served import TEXT, alone, body

from tmoe.generate.load import load
from tmoe.serve import server as sockets


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return served.tiny_run(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with served.server(folder, tmp_path_factory.mktemp("log") / "log", slots=16, waiting=1000) as found:
        yield found


@pytest.fixture(scope="module")
def engine(folder):
    return load(folder, device="cpu").engine(4)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_frees_its_pages(server, stream):
    port = server.port
    before = served.gauges(port)["tmoe_tokens_total"]
    link = served.begin(port, TEXT, body(n=16, max_tokens=500, min_tokens=500, stream=stream))
    served.wait_for(lambda: served.gauges(port)["tmoe_tokens_total"] > before)
    link.close()
    served.settled(port)
    assert served.gauges(port)["tmoe_tokens_total"] - before < 16 * 500


def freed(server, files, tasks):
    """Whether the server has no more open files and tasks than before."""
    still = server.files()
    return still[0] <= files[0] and still[1] <= files[1] and served.gauges(server.port)["tmoe_tasks"] <= tasks


def test_200_streams_beside_clients_that_misbehave(server, engine):
    """50 close, 10 never read, 10 send half a head or body; the other streams have the right text."""
    port = server.port
    files, tasks = server.files(), served.gauges(port)["tmoe_tasks"]
    rng = random.Random(0)
    good = [served.begin(port, TEXT, body(f"{i % 7}", stream=True, seed=i % 7)) for i in range(200)]
    bad = [served.begin(port, TEXT, body(max_tokens=400, stream=True)) for _ in range(60)]
    for i in range(10):
        bad.append(served.connect(port))
        head = served.head_of(TEXT, 100)
        bad[-1].sendall(head[:30] if i % 2 else head + b'{"prompt"')
    for link in rng.sample(bad[:60], 50):
        link.close()
    want = [alone(engine, f"{i}", max_tokens=12, temperature=0.8, seed=i)[0].text for i in range(7)]
    for i, link in enumerate(good):
        events = served.receive(link).events
        link.close()
        assert events[-1] is None
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == want[i % 7]
    for link in bad:
        link.close()
    served.settled(port)
    served.wait_for(lambda: freed(server, files, tasks))


@pytest.mark.slow
def test_memory_is_flat_over_20_rounds(server):
    """Each round: 12 streams with log-probs, a third of which close early, and refused bodies."""
    port = server.port
    seen = []
    for number in range(20):
        asked = body("a" * 200 + str(number), stream=True, logprobs=5, max_tokens=30)
        links = [served.begin(port, TEXT, asked) for _ in range(12)]
        for i, link in enumerate(links):
            if i % 3:
                assert served.receive(link).events[-1] is None
            link.close()
        assert served.post(port, TEXT, body(n=0)).status == 400
        served.settled(port)
        seen.append(server.mib())
    assert max(seen[4:]) - min(seen[4:]) < 20, seen


def test_clients_that_stall_are_closed(folder, engine, tmp_path):
    """The limits of time are three seconds here. Streams of 16 answers with log-probs fill every buffer."""

    bind = sockets.bind

    def small(host, port):
        found = bind(host, port)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return found

    limits = {"server.HEAD_S": 3.0, "server.STALLED_S": 3.0, "guard.BODY_S": 3.0, "server.bind": small}
    with served.server(folder, tmp_path / "log", slots=16, waiting=1000, patches=limits) as found:
        port = found.port
        served.gauges(port)
        files, tasks = found.files(), served.gauges(port)["tmoe_tasks"]
        unread = []
        for stream in [True] * 8 + [False] * 2:
            unread.append(served.connect(port, buffer=4096))
            raw = served.json.dumps(
                body(n=16, max_tokens=60, min_tokens=60, logprobs=20, stream=stream)
            ).encode()
            unread[-1].sendall(served.head_of(TEXT, len(raw)) + raw)
        heads, bodies = ([served.connect(port) for _ in range(5)] for _ in range(2))
        for link in heads:
            link.sendall(served.head_of(TEXT, 100)[:30])
        for link in bodies:
            link.sendall(served.head_of(TEXT, 100) + b'{"prompt"')
        silent = served.connect(port)
        want = alone(engine, "b", max_tokens=12, temperature=0.8, seed=3)[0].text
        events = served.post(port, TEXT, body("b", stream=True)).events
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == want
        assert all(link.recv(1) == b"" for link in [*heads, silent])
        for link in bodies:
            reply = served.receive(link)
            assert reply.status == 408 and reply.json["error"]["message"].startswith("body: has not arrived")
        served.settled(port)  # although no client of `unread` has closed
        served.wait_for(lambda: freed(found, files, tasks))
        for link in (*unread, *heads, *bodies, silent):
            link.close()


def test_a_stream_that_waits_gets_comments(folder, tmp_path):
    with served.server(folder, tmp_path / "log", slots=1, patches={"front.ALIVE_S": 0.02}) as found:
        first = served.begin(found.port, TEXT, body(n=40, max_tokens=300, min_tokens=300, stream=True))
        assert first.recv(10)
        second = served.begin(found.port, TEXT, body(stream=True))
        seen = b""
        while b": alive\n\n" not in seen:
            part = second.recv(1000)
            assert part
            seen += part
        first.close()
        assert served.receive(second, seen).events[-1] is None
        second.close()


def test_metrics_are_exact(folder, tmp_path):
    """Counts after known requests, and the tokens of a prompt that were reused."""
    with served.server(folder, tmp_path / "log", slots=4) as found:
        port = found.port
        long = "x" * 300  # two full pages of 128 tokens
        replies = [
            served.post(port, TEXT, body(long, max_tokens=7, min_tokens=7, n=n, stream=stream))
            for n, stream in ((1, False), (3, False), (2, True))
        ]
        usages = [reply.json["usage"] for reply in replies[:2]]
        assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 256]
        assert served.post(port, TEXT, body(n=0)).status == 400
        assert served.get(port, "/nothing").status == 404
        served.settled(port)
        values = served.gauges(port)
        want = dict(running=0, waiting=0, pages_in_use=0, requests=0)
        want |= dict(tokens_total=6 * 7, prompt_tokens_total=3 * 300, cached_tokens_total=2 * 256)
        want |= dict(first_token_seconds_count=3, token_gap_seconds_count=6 * 6)
        assert {name: values[f"tmoe_{name}"] for name in want} == want
        assert values["tmoe_pages"] >= values["tmoe_pages_kept"] >= 2
        assert values["tmoe_steps_total"] >= 7 * 3
        statuses = {200: 3, 400: 1, 404: 1}
        assert {s: values[f'tmoe_replies_total{{status="{s}"}}'] for s in statuses} == statuses
        for name, count in (("first_token", 3), ("token_gap", 36)):
            rows = [v for k, v in values.items() if k.startswith(f"tmoe_{name}_seconds_bucket")]
            assert rows == sorted(rows) and rows[-1] == count
            assert 0 < values[f"tmoe_{name}_seconds_sum"] < count * 60
