"""benchmarks/activations.py gives every activation equal products, and prints and keeps what it measured."""

import json
import sys

import pytest
import torch

from benchmarks import activations, moe_layer
from tmoe.base.activations import ACTIVATIONS


def test_every_activation_is_timed_beside_swiglu(monkeypatch, tmp_path, capsys):
    """With the GPU's part replaced: all calls run, what is compiled first, printed and kept."""
    compiled = []
    ran = []

    def time_all(calls, rounds, begin):
        ran.append([call() for call in calls])
        return [float(i // 2 + 1) for i in range(len(calls))]

    make = moe_layer.make
    monkeypatch.setitem(moe_layer.ALL, "tiny", (5, 16, 8, 4, 2))
    monkeypatch.setattr(activations, "require_gpu", lambda parser: None)
    monkeypatch.setattr(activations, "make", lambda shape, device: make(shape, "cpu", torch.float32))
    monkeypatch.setattr(activations, "device_facts", lambda device: ("none",))
    monkeypatch.setattr(activations, "precompile", lambda arch, traces, processes: compiled.extend(traces))
    monkeypatch.setattr(activations, "time_all", time_all)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    out = tmp_path / "activations.jsonl"
    words = ["activations", "--shapes", "tiny", "--draws", "2", "--rounds", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    activations.main()

    # Every contestant has the same number of products; SwiGLU's second turn gives its first turn's results.
    names = activations.NAMES
    assert {a for *_, a in compiled} == set(ACTIVATIONS) and len(compiled) == len(ACTIVATIONS)
    assert {F * (3 if ACTIVATIONS[a].gated else 2) for _, _, _, F, *_, a in compiled} == {3 * 8}
    assert len(ran) == 2 and all(len(results) == 2 * len(names) for results in ran)
    for results in ran:
        assert torch.equal(results[0], results[-2])
        shapes = {tuple(t.shape) for grads in results[1::2] for t in grads}
        assert shapes == {(5, 16), (5, 2), (4, 16, 16), (4, 16, 8), (4, 12, 16), (4, 16, 12)}
        assert all(t.isfinite().all() for grads in results[1::2] for t in grads)
    assert not torch.equal(ran[0][0], ran[1][0])  # drawn anew

    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert line["sizes"] == [5, 16, 8, 4, 2] and line["gpu"] == "none" and list(line["results"]) == names
    for i, name in enumerate(names, 1):
        assert line["results"][name] == {"fwd": i, "both": i, "fwd_beside": i, "both_beside": i}
    table = capsys.readouterr().out.splitlines()[-len(names) - 1 :]
    assert "of swiglu" in table[0] and all(name in row for name, row in zip(names, table[1:], strict=True))


def test_a_width_that_has_no_equal_without_a_gate_is_refused(monkeypatch, capsys):
    monkeypatch.setitem(moe_layer.ALL, "odd", (5, 16, 7, 4, 2))
    monkeypatch.setattr(sys, "argv", ["activations", "--shapes", "odd"])
    with pytest.raises(SystemExit):
        activations.main()
    assert "--shapes odd: F=7 must be even" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["activations", "--draws", "0"])
    with pytest.raises(SystemExit):
        activations.main()
    assert "--draws=0 --rounds=7: must be 1 or more" in capsys.readouterr().err
