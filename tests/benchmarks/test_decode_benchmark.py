"""benchmarks/decode.py on a CPU: contestants agree, those that are missing or wrong are named.

next: test_logprobs_rivals.py
"""

import argparse

import torch

from benchmarks import decode
from tmoe.generate.sampler import Sampling


def test_attention(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    for shape in [(2, 140, 4, 2, 16, 16), (2, 140, 4, 1, 24, 16)]:
        found, missing, bytes_ = decode.attention(shape, "cpu", 1)
        assert {"tmoe", "sdpa, dense"} <= set(found) and not set(missing) - {"flex, dense"}
        assert bytes_ == 2 * 140 * 4 * (64 if shape[3] == 2 else 24)


def test_sampler():
    for sampling in (Sampling(), Sampling(temperature=0.6, top_k=9, top_p=0.9), Sampling(temperature=0.0)):
        found, missing, bytes_ = decode.sampler(3, 50, sampling, "cpu", 1)
        assert {"tmoe", "torch, sorted"} <= set(found) and not set(missing) - {"flashinfer"}
        assert bytes_ == 3 * 50 * 4


def test_rows_with_different_settings():
    found, missing, _ = decode.mixed(7, 50, "cpu", 1)
    assert set(found) == {"mixed settings", *(f"all rows: {name}" for name in decode.SAMPLER)}, missing


def test_what_is_wrong_or_absent_is_named():
    def absent():
        raise ImportError("No module named 'rival'")

    runs = {"right": lambda: torch.ones(2), "wrong": lambda: torch.zeros(2), "absent": absent}
    found, missing = decode.measure(runs, lambda t: bool(t.all()), 1, False)
    assert set(found) == {"right"} and missing["wrong"] == "ValueError: its result is wrong"
    assert missing["absent"] == "ImportError: No module named 'rival'"
    words = decode.table("x", {"right": 2.0}, missing, 2.9e6, 2.9)
    assert "| right | 2.0 | 50% |" in words and "| absent | ImportError" in words


def test_parts():
    given = argparse.Namespace(tiny=True)
    every = {}
    for part in decode.PARTS:
        given.parts = [part]
        every[part] = [title for title, _ in decode.jobs(given)]
    assert every["attention"] == list(decode.ATTENTION)
    assert every["sampler"] == [*decode.SAMPLER, "rows with different settings"]
