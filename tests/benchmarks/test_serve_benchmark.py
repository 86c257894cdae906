"""benchmarks/serve.py on a CPU: loads, the clients, drawn models, and figures of a server under way.

next: benchmarks/serve.py
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import served
import torch

from benchmarks import http_load, serve, serve_models
from benchmarks.engine import tiny
from benchmarks.http_load import Client, Job, Record, Share
from tmoe.config.presets import presets

CFG = replace(tiny(presets()["qwen3-30b-a3b"].model), layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return serve_models.write_folder(tmp_path_factory.mktemp("drawn") / "m", CFG, "float32")


def test_lengths_and_arrivals_come_from_the_seed():
    pairs = http_load.lengths(4000, 7)
    assert pairs == http_load.lengths(4000, 7) != http_load.lengths(4000, 8)
    prompts, answers = zip(*pairs, strict=True)
    assert statistics.median(prompts) == pytest.approx(70, rel=0.1)
    assert statistics.median(answers) == pytest.approx(141, rel=0.1)
    assert min(prompts) == min(answers) == 4 and max(prompts) == max(answers) == http_load.LONGEST
    assert 150 < statistics.mean(prompts) < 200 < statistics.mean(answers) < 230
    times = http_load.arrivals(4000, 5.0, 1)
    steps = [b - a for a, b in pairwise(times)]
    assert statistics.mean(steps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(steps) == pytest.approx(0.2, rel=0.1)  # of an exponential distribution


def test_each_word_of_a_text_is_a_token(folder):
    loaded = serve_models.load_drawn(folder, device="cpu")
    assert loaded.tokenizer.vocab == CFG.vocab and loaded.eos == ()
    for job in serve.mixed_jobs(20, CFG.vocab, 1):
        asked = job.body
        assert len(loaded.tokenizer.encode(asked["prompt"])) == asked["prompt"].count(" ")
    theirs = serve.closed_jobs(2, CFG.vocab, theirs=True)
    mine = [{name: job.body[name] for name in theirs[0].body} for job in serve.closed_jobs(2, CFG.vocab)]
    assert mine == [job.body for job in theirs]


def test_both_models_have_the_same_kind_of_weights(folder):
    ours = serve_models.load_drawn(folder, device="cpu").model.state_dict()
    named = serve_models.transformers_model(folder, "cpu").named_parameters()
    theirs = {name: p.detach() for name, p in named}
    for tensors in (ours, theirs):
        matrices = torch.cat([t.flatten() for t in tensors.values() if t.dim() > 1])
        assert float(matrices.std()) == pytest.approx(0.02, rel=0.02)
        norms = [t for name, t in tensors.items() if "norm" in name]
        assert norms and all((t == 1).all() for t in norms)
    assert sum(t.numel() for t in ours.values()) == sum(t.numel() for t in theirs.values())


def test_events_in_pieces_are_counted_once():
    class Transport:
        aborted = False

        def write(self, head):
            pass

        def abort(self):
            self.aborted = True

    async def run(pieces, cut=False, exc=None):
        record = Record(0.0)
        client = Client(b"", record, time.monotonic(), asyncio.get_running_loop().create_future())
        client.connection_made(Transport())
        for piece in pieces:
            client.data_received(piece)
        if cut:
            client.cut()
        client.connection_lost(exc)
        return record

    raw = b'HTTP/1.1 200 OK\r\n\r\ndata: {"a"}\n\ndata: {"b"}\n\n'
    end = b'data: {"usage": {"prompt_tokens": 5, "completion_tokens":2}}\n\ndata: [DONE]\n\n'
    for size in (1000, 7, 5):
        whole = raw + end
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        pieces = [pieces[0] + pieces[1] + pieces[2], *pieces[3:]] if len(pieces) > 2 else pieces
        found = asyncio.run(run(pieces))
        assert (len(found.times), found.prompt_tokens, found.tokens, found.error) == (2, 5, 2, "")
    found = asyncio.run(run([raw], cut=True))
    assert len(found.times) == 2 and not found.over and not found.error
    found = asyncio.run(run([b'HTTP/1.1 503 Busy\r\n\r\n{"error": {"message": "full"}}']))
    assert found.error.startswith("status 503") and "full" in found.error
    assert "reset" in asyncio.run(run([raw], exc=ConnectionResetError("reset"))).error


def test_figures_of_records():
    """Two answers of 11 tokens, one every 0.1 s; the second one joins pairs of tokens after its first."""
    one = Record(0.0, [0.5 + 0.1 * i for i in range(11)], 3, 11, "", 1.5)
    two = Record(0.1, [0.5, *(0.7 + 0.2 * i for i in range(5))], 3, 11, "", 1.5)
    cut = Record(0.2, [0.9], 0, 0, "", 0.0)
    assert http_load.tokens_of_event([one, two, cut]) == pytest.approx(22 / 17)
    assert http_load.tokens_of_event([cut]) == 1.0
    assert http_load.speed([one], 0.45, 1.45) == pytest.approx(10.0)
    assert http_load.all_under_way([one, two], skipped=2) == (pytest.approx(0.9), pytest.approx(1.5))
    gaps = http_load.gaps([one, two, cut], 0.0)
    assert len(gaps) == 15 and http_load.part(gaps, 0.5) == pytest.approx(0.1)
    assert http_load.part(gaps, 0.99) == pytest.approx(0.2)
    assert http_load.first_tokens([one, two]) == pytest.approx([0.4, 0.5])
    rates = serve.rates_of([one, two])
    assert rates.whole == pytest.approx(22 / 1.5)
    assert serve.rates_of([Record(0.0, [1.0] * 4, 3, 4, "", 2.0)]) == (2.0, 2.0)  # all at once


def test_jobs_are_divided():
    jobs = [Job(dict(i=i)) for i in range(10)]
    found = http_load.shares(jobs, 5, 2, 1.0, port=1, path="/", seconds=2.0)
    assert [share.clients for share in found] == [3, 2]
    assert sorted(job.body["i"] for share in found for job in share.jobs) == [*range(10)]
    assert len(http_load.shares(jobs, 1, 4, 1.0, port=1, path="/", seconds=2.0)) == 1
    again = http_load.share_of(json.loads(json.dumps(http_load.asdict(found[0]))))
    assert again == found[0]


def test_loads_of_a_server(tmp_path):
    """Closed, timed and cut loads over sockets, with CPU times of both processes."""
    run = served.tiny_run(tmp_path / "tiny")
    ask = served.body("abc", max_tokens=9, min_tokens=9, stream=True, stream_options=dict(include_usage=True))
    with served.server(run, tmp_path / "log", slots=4) as at:

        def drive(jobs, clients, seconds=60.0):
            share = Share(at.port, serve.PATH, jobs, clients, seconds, time.monotonic())
            return asyncio.run(http_load.drive(share))

        records = drive([Job(ask)] * 5, 2)
        assert [(r.tokens, r.prompt_tokens, r.error) for r in records] == [(9, 3, "")] * 5
        assert all(r.sent < r.times[0] <= r.times[-1] <= r.over for r in records)
        assert sum(a.sent >= b.over for a in records for b in records) >= 3  # two at a time
        timed = drive([Job(ask, at=0.05 * i) for i in range(3)], 3)
        assert all(r.sent >= 0.05 * i and r.tokens == 9 for i, r in enumerate(timed))
        (cut,) = drive([Job(ask | dict(max_tokens=400, min_tokens=400))], 1, seconds=0.2)
        assert not cut.over and not cut.error
        (wrong,) = drive([Job(ask | dict(model="no"))], 1)
        assert "status 404" in wrong.error and "not served here" in wrong.error
        server = serve_models.Server(at.port, at.process, at.log)
        assert len(server.children()) == 1 and all(seconds >= 0 for seconds in server.cpu_seconds())
        assert serve_models.healthy(at.port)
        sizes = serve.TINY
        with pytest.raises(RuntimeError, match="1 of 1 requests failed: status 404"):
            serve.load(server, [Job(ask | dict(model="no"))], 1, 60, sizes)
        found = serve.load(server, [Job(ask)] * 4, 2, 60, sizes)
        shown, line = serve.describe("part", "closed", found, 0.0, 1.0)
        assert line["requests"] == line["over"] == 4 and "tokens/s" in shown[0].value
    assert not serve_models.healthy(at.port)


def test_a_server_that_does_not_start_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        pytest.raises(RuntimeError, match=r"tmoe serve does not answer \(exit code 1\)"),
        serve_models.server("tmoe", folder, [], tmp_path / "log", 60),
    ):
        pass


def test_a_rival_without_a_figure_is_named(monkeypatch):
    def missing(*_, **__):
        raise ImportError("No module named 'fastapi'")

    monkeypatch.setattr(serve, "theirs", missing)
    args = argparse.Namespace(device="cpu", tiny=True, json=None, figures=None)
    found = list(serve.rivals(args))
    assert "fastapi" in found[0].value and found[-1].good is False and found[-1].bar == "runs"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["qwen3", "rollout"])
def test_parts_run(part, tmp_path):
    args = argparse.Namespace(device="cpu", tiny=True, json=tmp_path, figures=tmp_path / "figures")
    found = list(serve.PARTS[part](args))
    assert not [figure for figure in found if figure.bar == "no error"]
    lines = [json.loads(line) for line in (tmp_path / "serve.jsonl").read_text().splitlines()]
    assert {line["part"] for line in lines} == {part}
    if part == "qwen3":
        whats = [line["what"].partition(",")[0] for line in lines]
        assert whats == ["engine", "engine", "equal", "equal", "closed", "closed", "Poisson"]
        assert all(line["front_us"] > 0 for line in lines[2:])
