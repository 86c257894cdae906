"""benchmarks/logprobs.py on a CPU: contestants agree with fp64, those that are missing or wrong are named.

next: test_moe_layer.py
"""

import json
import sys

import pytest
import torch

from benchmarks import logprobs


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return logprobs.make(3, 8, 16, 40, "cpu", torch.float32)


def eager(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)


def test_contestants_agree_and_others_are_named(inputs, monkeypatch):
    eager(monkeypatch)

    def wrong():
        ours = logprobs.tmoe()
        return ours._replace(logprobs=lambda x, _: [2 * t for t in ours.logprobs(x, None)])

    def absent():
        raise ImportError("No module named 'rival'")

    monkeypatch.setitem(logprobs.CONTESTANTS, "wrong", wrong)
    monkeypatch.setitem(logprobs.CONTESTANTS, "absent", absent)
    names = ["tmoe", "tmoe, log-probs first", "tmoe, fp32 logits", "torch", "torch in chunks", "wrong"]
    found, missing = logprobs.measure("log-probs", inputs, [*names, "absent"], 1)
    assert set(found) == {"tmoe", "tmoe, fp32 logits", "torch", "torch in chunks"}
    assert missing["absent"] == "ImportError: No module named 'rival'"
    assert "result 0 is off by 1.0e+00" in missing["wrong"]
    found, _ = logprobs.measure("policy", inputs, names, 1)
    assert set(found) == set(names)
    assert found["torch in chunks"]["setting"] in (1024, 4096) and found["torch"]["extra_gib"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl", "liger grpo", "liger scaled"])
def test_rivals_that_are_here_are_right(inputs, name):
    pytest.importorskip("trl.kernels" if name == "trl" else "liger_kernel")
    for kind in ("log-probs", "policy"):
        _, missing = logprobs.measure(kind, inputs, [name], 1)
        assert not missing


def test_what_is_printed_and_kept(monkeypatch, tmp_path, capsys):
    eager(monkeypatch)
    out = tmp_path / "new" / "results.jsonl"
    words = "logprobs --device cpu --sequences 1 2 --length 4 --dim 8 --vocab 11 --rounds 1 --only tmoe torch"
    monkeypatch.setattr(sys, "argv", [*words.split(), "--json", str(out)])
    logprobs.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["kind"], line["shape"]) for line in lines] == [
        (kind, [n, 4, 8, 11]) for n in (1, 2) for kind in ("log-probs", "policy")
    ]
    assert all(set(line["results"]) == {"tmoe", "torch"} for line in lines)
    text = capsys.readouterr().out
    assert text.count("| tmoe |") == 4 and "policy: 2 sequences of 4, D 8, V 11" in text


def test_the_rate_counts_products_of_2_tvd(inputs):
    found = {"tmoe": {"ms": 1e-3, "setting": None, "extra_gib": 0.25}}
    one, three = (logprobs.table(kind, inputs, found, {})[-1] for kind in ("log-probs", "policy"))
    assert pytest.approx(0.03072) == 2 * 24 * 40 * 16 / 1e-6 / 1e12
    assert "| 0.00 | 0 | 0.25 |" in one and "| 0.00 | 0 | 0.25 |" in three
    big = {"tmoe": {"ms": 1e-6, "setting": None, "extra_gib": 0.25}}
    assert "| 31 |" in logprobs.table("log-probs", inputs, big, {})[-1]
    assert "| 92 |" in logprobs.table("policy", inputs, big, {})[-1]
