"""The ends of a server: signals, an engine that is killed or fails; its flags, also those that are refused.

next: tests/lib/served.py
"""

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import served
import torch
from safetensors.torch import save_file
from served import CHAT, TEXT, alone, body

from tmoe.config.check import ConfigError
from tmoe.generate.load import load
from tmoe.generate.slots import Slots
from tmoe.serve import command_line

LONG = dict(max_tokens=500, min_tokens=500, stream=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return served.tiny_run(tmp_path_factory.mktemp("served") / "tiny")


def gone(pid: int) -> bool:
    """Whether a process has ended. Pytest may be its parent by now, and reaps it later or never."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def test_more_than_waiting_and_a_token(folder, tmp_path):
    """On all addresses any Host may be named, but the token is needed."""
    flags = dict(slots=1, waiting=39, token="secret", host="0.0.0.0")
    with served.server(folder, tmp_path / "log", **flags) as found:
        port, key = found.port, dict(authorization="Bearer secret", host="gpu.example.com")
        for wrong in ("", "Bearer secre", "secret", "Bearer secretx", "Basic secret", "Bearer \xe9"):
            refused = served.get(port, "/v1/models", authorization=wrong)
            assert refused.status == 401 and refused.headers["www-authenticate"] == "Bearer"
            assert refused.json["error"]["code"] == "invalid_api_key"
        assert served.post(port, CHAT, {}).status == served.get(port, "/metrics").status == 401
        assert served.get(port, "/health").status == served.get(port, "/v1/models", **key).status == 200
        raw = json.dumps(body(**LONG | dict(max_tokens=300, min_tokens=300), n=20)).encode()
        links = [served.connect(port) for _ in range(2)]
        for link in links:
            link.sendall(served.head_of(TEXT, len(raw), **key) + raw)
            assert link.recv(10)
        refused = served.post(port, TEXT, body(), **key)
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json["error"]["code"] == "overloaded"
        for link in links:
            link.close()


def test_a_killed_engine_ends_streams_with_an_error(folder, tmp_path):
    with served.server(folder, tmp_path / "log", slots=4) as found:
        links = [served.begin(found.port, TEXT, body(**LONG, n=40)) for _ in range(3)]
        firsts = [link.recv(10) for link in links]
        os.kill(found.engine, signal.SIGKILL)
        for link, first in zip(links, firsts, strict=True):
            reply = served.receive(link, first)
            link.close()
            assert b'data: {"error": ' in reply.body and b"[DONE]" not in reply.body
        assert found.ended() == 1
        last = found.log.read_text().splitlines()[-1]
        assert last == "error: the engine's process has ended (exit code -9)"


def test_an_engine_that_fails_is_named(folder, tmp_path, monkeypatch):
    def failing(self):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Slots, "turn", failing)
    with served.server(folder, tmp_path / "log", slots=4) as found:
        engine = found.engine
        reply = served.post(found.port, TEXT, body(stream=True))
        assert "error" in reply.events[-1]
        assert found.ended() == 1
        last = found.log.read_text().splitlines()[-1]
        assert last.endswith("(exit code 1): the engine failed: RuntimeError: out of luck")
    served.wait_for(lambda: gone(engine))


def test_a_killed_front_leaves_no_orphan(folder, tmp_path):
    with served.server(folder, tmp_path / "log", slots=4) as found:
        engine = found.engine
        link = served.begin(found.port, TEXT, body(**LONG, n=16))
        assert link.recv(10)
        os.kill(found.process.pid, signal.SIGKILL)
        served.wait_for(lambda: gone(engine))
        link.close()


def test_sigterm_drains(folder, tmp_path):
    with served.server(folder, tmp_path / "log", slots=4, drain=600.0) as found:
        port, engine = found.port, found.engine
        links = [served.begin(port, TEXT, body(**LONG, n=5)) for _ in range(2)]
        firsts = [link.recv(10) for link in links]
        halves = [served.connect(port), served.connect(port)]  # bodies that never arrive whole
        halves[0].sendall(served.head_of(TEXT, 50) + b"{")
        os.kill(found.process.pid, signal.SIGTERM)
        while served.get(port, "/health").status != 503:
            time.sleep(0.005)
        halves[1].sendall(served.head_of(TEXT, 50) + b"{")
        refused = served.post(port, TEXT, body())
        assert refused.status == 503 and refused.json["error"]["code"] == "draining"
        replies = [served.receive(link, first) for link, first in zip(links, firsts, strict=True)]
        assert [served.receive(half).json["error"]["code"] for half in halves] == ["draining"] * 2
        for link in (*links, *halves):
            link.close()
        assert all(reply.events[-1] is None for reply in replies) and found.ended() == 0
        ends = [c["finish_reason"] for r in replies for e in r.events if e for c in e["choices"]]
        assert ends.count("length") == 10 and {*ends} == {None, "length"}
        assert gone(engine)
        assert found.log.read_text().splitlines()[-1] == "ended: all requests under way were answered"


def test_drain_has_a_limit(folder, tmp_path):
    with served.server(folder, tmp_path / "log", slots=1, drain=0.0) as found:
        link = served.begin(found.port, TEXT, body(**LONG | dict(max_tokens=200, min_tokens=200), n=50))
        first = link.recv(10)
        os.kill(found.process.pid, signal.SIGTERM)
        reply = served.receive(link, first)
        link.close()
        finishes = {c["finish_reason"] for e in reply.events if e for c in e["choices"]} - {None}
        assert "abort" in finishes and found.ended() == 0
        assert found.log.read_text().splitlines()[-1] == "ended: requests were cancelled after 0 s"


def test_a_request_that_the_pool_never_holds(folder, tmp_path):
    """Four pages: several answers share one of 128 tokens, and each needs a copy of one that is begun."""
    with served.server(folder, tmp_path / "log", slots=1) as found:
        for n, status in ((1, 200), (2, 400)):
            asked = body("a" * 200, n=n, max_tokens=312, stream=True, stop_token_ids=list(range(256)))
            reply = served.post(found.port, TEXT, asked)
            assert reply.status == status
        assert reply.json["error"]["message"].startswith("max_tokens: a prompt of 200 tokens with 2 answers")


def test_a_second_signal_ends_at_once(folder, tmp_path):
    with served.server(folder, tmp_path / "log", slots=4) as found:
        engine = found.engine
        link = served.begin(found.port, TEXT, body(**LONG, n=16))
        assert link.recv(10)
        os.kill(found.process.pid, signal.SIGINT)
        while served.get(found.port, "/health").status != 503:
            time.sleep(0.005)
        os.kill(found.process.pid, signal.SIGTERM)
        assert found.ended() == 1
        link.close()
        served.wait_for(lambda: gone(engine))


def test_ctrl_c_while_the_model_loads(folder, tmp_path):
    log = tmp_path / "log"
    with served.started(folder, log, patches={"engine_process.load": lambda *_: time.sleep(1000)}) as process:
        found = served.Served(0, process, log)
        served.wait_for(lambda: log.exists() and found.children())
        engine = found.engine
        served.wait_for(lambda: ignores_ctrl_c(engine))
        os.kill(process.pid, signal.SIGINT)
        assert found.ended() == 1
        served.wait_for(lambda: gone(engine))


def ignores_ctrl_c(pid: int) -> bool:
    rows = dict(row.split(":\t") for row in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(rows["SigIgn"], 16) >> (signal.SIGINT - 1) & 1)


# ---- flags ----


def test_quantized_and_adapted_models(folder, tmp_path):
    """The answers are those of `load` with the same flags, and differ from the plain model's."""
    peft = tmp_path / "peft"
    peft.mkdir()
    config = dict(peft_type="LORA", r=2, lora_alpha=8, target_modules=["q_proj"], peft_version="0.19.1")
    (peft / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    pair = {f"{at}.lora_A.weight": torch.randn(2, 16), f"{at}.lora_B.weight": torch.randn(16, 2)}
    save_file(pair, peft / "adapter_model.safetensors")
    asked = dict(max_tokens=40, temperature=0.0)
    plain = alone(load(folder, device="cpu").engine(4), "def f(", **asked)[0].text
    for flags in (dict(quantize="int4"), dict(adapter=peft)):
        want = alone(load(folder, device="cpu", **flags).engine(4), "def f(", **asked)[0].text
        with served.server(folder, tmp_path / f"log of {next(iter(flags))}", slots=4, **flags) as found:
            reply = served.post(found.port, TEXT, body(**asked)).json
        assert reply["choices"][0]["text"] == want != plain


@pytest.mark.slow
def test_a_spawned_engine(folder, tmp_path):
    """The command starts the engine's process in this way."""
    with served.server(folder, tmp_path / "log", start="spawn", slots=2) as found:
        pid = found.engine
        assert found.log.read_text().startswith("conversations are written by plain built-in template")
        assert served.post(found.port, TEXT, body()).status == 200
        os.kill(found.process.pid, signal.SIGTERM)
        assert found.ended() == 0
        served.wait_for(lambda: gone(pid))


def test_flags_that_cannot_work(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("TMOE_TOKEN", raising=False)

    def refused(**flags):
        with pytest.raises(ConfigError) as error:
            command_line.run(command_line.Flags(folder, **flags), start="fork")
        return str(error.value)

    assert "host=0.0.0.0" in refused(host="0.0.0.0") and "token" in refused(host="0.0.0.0")
    assert "port=70000" in refused(port=70000)
    for name in ("slots", "waiting", "drain"):
        assert f"{name}=-1" in refused(**{name: -1})
    said = refused(token="two words")
    assert "token" in said and "two words" not in said
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert f"port={number}: another program listens there" in refused(port=number)
    assert "host=203.0.113.9" in refused(host="203.0.113.9", token="a")
    assert "--max-len=4096" in refused(max_len=4096, port=0)
    assert f"--adapter={tmp_path / 'none'}" in refused(adapter=tmp_path / "none", port=0)
    assert "not-there" in refused(chat_template="not-there.jinja", port=0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2 in the environment: RANK must be"):
        command_line.run(command_line.Flags(folder), start="fork")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    assert "pip install 'tmoe[serve]'" in refused()
