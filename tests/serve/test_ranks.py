"""A server over several ranks on gloo: its answers, the spread of requests, and its ends.

next: tests/lib/served.py
"""

import os
import signal
import time
from pathlib import Path

import pytest
import served
from served import TEXT, alone, body

from tmoe.config.check import ConfigError
from tmoe.generate.load import load
from tmoe.generate.slots import Slots
from tmoe.serve import command_line
from tmoe.serve.spread import Load, choose, needs_of

LONG = dict(max_tokens=500, min_tokens=500, stream=True)
EP2 = command_line.Copies(ep=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return served.tiny_run(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def engine(folder):
    return load(folder, device="cpu").engine(4)


def by_rank(port: int, name: str) -> list[float]:
    """A value of /metrics for each rank; their sum is the value of all."""
    found = served.gauges(port)
    values = [found[key] for key in sorted(found) if key.startswith(f"tmoe_rank_{name}{{")]
    assert sum(values) == found[f"tmoe_{name}"]
    return values


def gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def ask_all(found: served.Served, engine, count: int) -> None:
    """Requests at the same time, some streams, have the answers of one process; pages are free at the end."""
    links, wants = [], []  # of the connections, and the texts of their answers
    for i in range(count):
        prompt, how = "def f(a, b"[: 3 + i % 7], dict(temperature=0.8 * (i % 2), seed=i, max_tokens=30 + i)
        links.append(served.begin(found.port, TEXT, body(prompt, **how, stream=i % 3 == 0, n=1 + i % 2)))
        wants.append([sample.text for sample in alone(engine, prompt, 1 + i % 2, **how)])
    for link, want in zip(links, wants, strict=True):
        reply = served.receive(link)
        link.close()
        got = [""] * len(want)
        for event in reply.events or [reply.json]:
            for choice in event["choices"] if event else ():
                got[choice["index"]] += choice["text"]
        assert got == want
    served.settled(found.port)


@pytest.mark.parametrize("ranks, ep", [(2, 1), (2, 2), (4, 2)])
def test_answers_are_those_of_one_process(folder, engine, tmp_path, ranks, ep):
    """All ranks answer. SIGTERM for all, as torchrun's agent sends it, lets what is under way end."""
    flags = dict(slots=2, parallel=command_line.Copies(ep=ep), drain=600.0)
    with served.server(folder, tmp_path / "log", ranks=ranks, **flags) as found:
        for _ in range(20):  # a request may be over before the next one is read
            ask_all(found, engine, 12)
            if min(tokens := by_rank(found.port, "tokens_total")) > 0:
                break
        assert len(tokens) == ranks and min(tokens) > 0 and by_rank(found.port, "pages") == [8.0] * ranks
        links = [served.begin(found.port, TEXT, body(**LONG)) for _ in range(ranks + 1)]
        firsts = [link.recv(10) for link in links]
        child = found.engine
        for process in (*found.others, found.process):
            os.kill(process.pid, signal.SIGTERM)
        while served.get(found.port, "/health").status != 503:
            time.sleep(0.005)
        for link, first in zip(links, firsts, strict=True):
            events = served.receive(link, first).events
            link.close()
            assert events[-1] is None and events[-2]["choices"][0]["finish_reason"] == "length"
        assert found.ended() == 0 and gone(child)
        for process in found.others:
            process.join(60)
            assert process.exitcode == 0
        log = found.log.read_text().splitlines()
        assert log[0].startswith(f"{ranks} processes have {ranks // ep} cop")
        assert log[-1] == "ended: all requests under way were answered"


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_named(folder, tmp_path, killed):
    with served.server(folder, tmp_path / "log", ranks=2, slots=4, parallel=EP2) as found:
        links = [served.begin(found.port, TEXT, body(**LONG, n=9)) for _ in range(3)]
        firsts = [link.recv(10) for link in links]
        child, pid = found.engine, found.others[0].pid
        os.kill(pid if killed else child, signal.SIGKILL)
        for link, first in zip(links, firsts, strict=True):
            reply = served.receive(link, first)
            link.close()
            assert b'data: {"error": ' in reply.body and b"[DONE]" not in reply.body
        assert found.ended() == 1
        last = found.log.read_text().splitlines()[-1]
        how = f"rank 1 (process {pid}) has ended" if killed else "rank 0 has ended (exit code -9)"
        assert last == f"error: the engine of {how}"
        served.wait_for(lambda: gone(child) and gone(pid))


def test_a_rank_that_fails_is_named(folder, tmp_path, monkeypatch):
    """The other rank of its expert group fails too, because it has lost its peer."""
    turn = Slots.turn

    def failing(self):
        if os.environ["RANK"] == "1" and self.rows:
            raise RuntimeError("out of luck")
        return turn(self)

    monkeypatch.setattr(Slots, "turn", failing)
    with served.server(folder, tmp_path / "log", ranks=2, slots=4, parallel=EP2) as found:
        links = [served.begin(found.port, TEXT, body(**LONG)) for _ in range(2)]
        for link in links:
            assert "error" in served.receive(link).events[-1]
            link.close()
        assert found.ended() == 1
        last = found.log.read_text().splitlines()[-1]
        assert "rank 1" in last and last.endswith("the engine failed: RuntimeError: out of luck")


def test_a_silent_rank_is_named_and_a_killed_front_leaves_none(folder, tmp_path):
    patches = {"engine_client.PATIENCE": 1.0}
    with served.server(folder, tmp_path / "log", ranks=2, slots=4, patches=patches) as found:
        child, other = found.engine, found.others[0].pid
        os.kill(other, signal.SIGSTOP)
        reply = served.get(found.port, "/metrics")
        assert reply.status == 503 and "rank 1 has not replied for 1 s" in reply.json["error"]["message"]
        os.kill(other, signal.SIGCONT)
        served.wait_for(lambda: served.get(found.port, "/health").status == 200)
        os.kill(found.process.pid, signal.SIGKILL)
        served.wait_for(lambda: gone(child) and gone(found.others[0].pid))


def test_what_the_ranks_refuse_is_said_once(folder, tmp_path):
    """A rank's own reason has its number."""

    def load(*given):
        if os.environ["RANK"] == "1":
            raise ConfigError("--path=x: not here")

    for flags, patches, want in (
        (dict(max_len=4096), {}, "--max-len=4096"),
        (dict(quantize="int8", parallel=EP2), {}, "--quantize=int8: not with --parallel.ep=2"),
        (dict(device="cuda:1", parallel=EP2), {}, "--device=cuda:1: one device for 2 processes"),
        (dict(parallel=command_line.Copies(ep=3)), {}, "--parallel.ep=3: must divide the 2 processes"),
        ({}, {"engine_process.load": load}, "rank 1: --path=x: not here"),
    ):
        log = tmp_path / "log"
        patches |= {"command_line.AFTER_FIRST_S": 0.0}
        with served.launched(folder, log, "fork", patches, 2, **flags) as processes:
            for process in processes:
                process.join(120)
            assert [process.exitcode for process in processes] == [2, 2]
        assert log.read_text().count(want) == 1 and "Traceback" not in log.read_text()
        assert Path(f"{log}.1").read_text() == ""


def test_more_hosts_than_one_are_refused(folder, monkeypatch):
    for name, value in dict(RANK=0, WORLD_SIZE=4, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match="2 of 4 processes are on this host; valid: one host"):
        command_line.run(command_line.Flags(folder))


def test_most_free_pages():
    """Pages of 128 tokens: 100 tokens and an answer of 29 need one; a prompt of 301 fills two and a part."""
    loads = [Load(20, 2), Load(20, 2)]
    short, long = needs_of([1] * 100, 29, 1, ""), needs_of([2] * 301, 84, 2, "")
    assert (short.shared, short.own, long.shared, long.own) == (0, 1, 2, 1)
    assert choose(loads, short) == 0
    loads[0].add(0, long)
    assert [load.free for load in loads] == [16, 20] and choose(loads, short) == 1
    loads[0].ended(0)
    assert loads[0].free == 17
    # the same beginning: two pages need not be filled again, but a rank without a slot comes last
    again = needs_of([2] * 301 + [3], 80, 1, "")
    assert loads[0].after(again)[1] == 17 - 3 + 2 and choose(loads, again) == 1
    whole = needs_of([2] * 301 + [3], 80, 1, None)  # no pages are kept: a model with linear layers
    assert loads[0].after(whole)[1] == 17 - 3
    loads[0].drop(0)
    loads[1].add(1, short)
    loads[1].drop(1)
    assert choose(loads, again) == 0 and choose(loads, needs_of([5] * 301, 80, 1, "")) == 0
    for key in (2, 3):
        loads[0].add(key, short)
    assert choose(loads, again) == 1


def test_a_second_turn_is_sent_to_the_rank_of_the_first(folder, tmp_path):
    """Ranks have equally many free pages again: the first rank would get every request."""
    turns = ["a" * 140, "b" * 140]
    with served.server(folder, tmp_path / "log", ranks=2, slots=2) as found:
        other = served.begin(found.port, TEXT, body(**LONG))
        first = other.recv(10)
        for turn, cached in ((turns[0], 0), (turns[0] + "c", 128), (turns[1], 0)):
            usage = served.post(found.port, TEXT, body(turn)).json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        served.receive(other, first)
        other.close()
        usage = served.post(found.port, TEXT, body(turns[1] + "c")).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 128
