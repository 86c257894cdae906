"""benchmarks/engine.py on a CPU: transformers agrees, steps are timed while all decode, layers are scaled.

next: test_exchange_rivals.py
"""

import json
import sys

import pytest
import torch

from benchmarks import engine
from tmoe.config.presets import presets


@pytest.fixture
def short(monkeypatch):
    """No continuous batching: on a CPU it takes half a minute to start."""
    rivals = engine.rivals

    def some(model, B):
        found = rivals(model, B)
        return {name: run for name, run in found.items() if "static" not in name and "batching" not in name}

    monkeypatch.setattr(engine, "rivals", some)
    monkeypatch.setattr(engine, "AT_ONCE", 40)


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """The tests' heap is large, and nothing needs to go."""
    monkeypatch.setattr(engine, "free", lambda: None)


def test_what_is_printed_and_kept(short, monkeypatch, tmp_path, capsys):
    out = tmp_path / "new" / "results.jsonl"
    words = "engine moe-pilot-14b --device cpu --tiny --batch 3 1 --context 30 --tokens 8 --cuts 1 2"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--rounds", "1", "--json", str(out)])
    engine.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    asked = [(line["batch"], line["layers"]) for line in lines]
    assert asked == [(3, 2), (1, 2), (3, 1), (1, 1), (3, 45), (1, 45)]
    assert [set(line["results"]) for line in lines[:4]] == [
        {"tmoe"},
        {"tmoe"},
        {"tmoe", "generate, grouped_mm", "generate"},
        {"tmoe", "generate"},
    ]
    assert all(r["agrees"] == 1.0 for line in lines[:4] for r in line["results"].values())
    assert not any(line["missing"] for line in lines[:4])
    text = capsys.readouterr().out
    assert "| 3 | tmoe |" in text and "from 1 and 2 layers" in text


def test_a_step_is_that_of_all_sequences():
    """One begins late, one ends early: only what lies between counts, 2 ms a token."""
    rows = [[0.002 * i for i in range(a, b)] for a, b in [(0, 40), (5, 45), (0, 42)]]
    answers = engine.Answers([], rows, -1.0)
    assert engine.step_ms(answers) == pytest.approx(2.0)
    assert engine.first_s(answers) == pytest.approx(1.01)
    apart = engine.Answers([], [rows[0], [9.0, 9.1, 9.2]], 0.0)
    with pytest.raises(ValueError, match="no time in which all"):
        engine.step_ms(apart)


def test_rivals_that_fail_or_differ_are_named():
    def like(tokens):
        return lambda prompts, n, greedy: engine.Answers([tokens] * len(prompts), [[0.0, 1.0, 2.0]] * 3, -1.0)

    def absent(prompts, n, greedy):
        raise ImportError("No module named 'rival'")

    job = engine.Job({"tmoe": like([1]), "other": like([2]), "absent": absent}, [[3]] * 3, 3, 2, 1e18)
    found, missing = engine.measure(job)
    assert set(found) == {"tmoe"} and found["tmoe"]["ms"] == pytest.approx(1000)
    assert "only 0% of its greedy answers" in missing["other"] and "'rival'" in missing["absent"]
    late = engine.Job({"tmoe": like([1]), "generate": like([1])}, [[3]] * 3, 3, 2, 0.0)
    assert engine.measure(late)[1] == {"generate": "no time was left"}


def test_bytes_and_layers_are_those_of_the_study():
    """POSTTRAINING's floors on an H100 in tokens/s, of the same weights and keys."""
    for name, B, floor in [
        ("qwen3-30b-a3b", 256, 8610),
        ("qwen3-30b-a3b", 1, 465),
        ("moe-pilot-14b", 256, 14220),
        ("olmoe-1b-7b", 256, 15470),
    ]:
        seconds = engine.step_bytes(presets()[name].model, B, 1024) / 2.9e12
        assert B / seconds == pytest.approx(floor, rel=0.02)
    assert engine.whole_ms({4: 3.0, 12: 7.0}, 48) == pytest.approx(25.0)
    assert engine.whole_ms({4: 3.0, 16: 9.5}, 16) == 9.5
    assert engine.whole_ms({4: 3.0}, 16) is None


@pytest.mark.slow
def test_static_caches_decode_alike(tmp_path):
    cfg = engine.replace(engine.tiny(presets()["olmoe-1b-7b"].model), layers=1)
    model, theirs = engine.both(cfg, "cpu", tmp_path)
    prompts = torch.randint(cfg.vocab, (2, 20)).tolist()
    want = engine.ours(model, False)(prompts, 4, True)
    found = engine.rivals(theirs, 2)["generate, static, grouped_mm"](prompts, 4, True)
    assert found.ids == want.ids and all(len(row) == 4 for row in found.stamps)
