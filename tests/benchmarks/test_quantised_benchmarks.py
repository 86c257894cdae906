"""benchmarks/perplexity.py on a small model, within its bounds; benchmarks/quantised.py on a CPU.

next: tests/benchmarks/test_engine_benchmark.py
"""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from benchmarks import nf4_layer, perplexity, quantised, quantised_forms
from tmoe.base.quantised import integers
from tmoe.config.presets import presets
from tmoe.model.quantised import quantised_copy


def test_perplexity_of_a_small_model_stays_within_the_bounds(monkeypatch):
    """Widths of 128; after 60 steps, a byte's perplexity is far below a random model's 256."""
    for name, value in dict(SEQ=64, BATCH=8).items():
        monkeypatch.setattr(perplexity, name, value)
    moe = replace(perplexity.MODEL.moe, experts=4, ffn_dim=128)
    cfg = replace(perplexity.MODEL, dim=128, layers=2, heads=2, kv_heads=1, moe=moe)
    model = perplexity.train(cfg, 60)
    base = perplexity.perplexity(model, 64)
    assert base < 40
    data = perplexity.text(evaluation=True)[: 64 * 64 + 1]
    with torch.no_grad():
        losses = F.cross_entropy(model(data[:-1].view(64, 64)).flatten(0, 1), data[1:])
    assert base == pytest.approx(math.exp(losses), rel=1e-4)
    for kind, most in perplexity.KINDS.items():
        small = quantised_copy(model, kind)
        growth = perplexity.perplexity(small, 64) / base - 1
        assert abs(growth) <= most, (kind, growth)
    small = quantised_copy(model, "int4")
    up = model.blocks[0].moe.experts.gate_up  # far from all equal, and all sixteen codes are used
    codes = small.blocks[0].moe.experts.gate_up_codes
    assert integers(codes, up.shape[-1]).unique().numel() == 16


def test_the_tables_and_the_line(monkeypatch, tmp_path, capsys):
    out = tmp_path / "quantised.jsonl"
    words = f"quantised --device cpu --tiny --json {out}"
    monkeypatch.setattr(sys, "argv", words.split())
    quantised.main()
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[-5:]] == ["bf16", "int8", "int4", "fp8", "nf4"]
    (line,) = [json.loads(row) for row in out.read_text().splitlines()]
    assert [one["kind"] for one in line["decode"]] == ["bf16", "int8", "int4", "fp8", "nf4"]
    lines = [
        dict(kind=kind, gib=1.0, step_ms=1.0, tokens_s=n)
        for kind, n in (("bf16", 10), ("int8", 17), ("int4", 23))
    ]
    rows = list(quantised.table(lines))
    assert rows[2].endswith("1.70  1.65 reached") and rows[3].endswith("2.30  2.4 MISSED")


def test_bytes_of_a_step():
    """qwen3-30b-a3b, by hand: 48 layers of 128 experts [3 x 768, 2048], qkv [5120, 2048], out of 4096."""
    cfg = presets()["qwen3-30b-a3b"].model
    bf16, int8, int4 = (quantised.read_bytes(cfg, kind, 64, 272) for kind in ("bf16", "int8", "int4"))
    touched = 1 - (120 / 128) ** 64
    codes = 128 * 3 * 768 * 2048
    assert bf16["experts"] == pytest.approx(48 * touched * 2 * codes)
    assert int8["experts"] == pytest.approx(48 * touched * (codes + 2 * 128 * (2 * 768 + 2048)))
    assert int4["experts"] == pytest.approx(48 * touched * (codes / 2 + 2 * codes / 128))
    assert bf16["dense"] == 48 * 2 * (5120 + 4096) * 2048
    assert bf16["head"] == int8["head"] == 2 * 151936 * 2048
    assert bf16["keys"] == int4["keys"] == 64 * 272 * 48 * 2 * 4 * 128 * 2


def test_every_tile_divides_its_matrix_and_the_default_is_first():
    cfg = presets()["qwen3-30b-a3b"].model
    tasks = quantised_forms.tasks(cfg, ["int8", "int4", "fp8", "nf4"], 64)
    assert len(tasks) == len({*tasks})
    defaults = {}
    for _, kind, _, name, tile in tasks:
        defaults.setdefault((kind, name), tile)
        L = dict(up=2048, qkv=2048, down=768, out=4096)[name]
        row = L // 2 if kind in ("int4", "nf4") else L
        assert row % (tile.BL * tile.parts if tile.direct else tile.parts * 32) == 0
        assert not (kind == "nf4" and tile.direct)
    assert {tile.direct for *_, tile in tasks} == {True, False}
    for kind in ("int8", "int4", "fp8", "nf4"):
        assert [defaults[kind, name].parts for name in ("up", "down", "qkv", "out")] == [1, 1, 2, 2]


def test_nf4_with_adapters_is_compared(monkeypatch, capsys, tmp_path):
    out = tmp_path / "nf4.jsonl"
    words = f"nf4_layer --device cpu --tiny --slots 5 --json {out}"
    monkeypatch.setattr(sys, "argv", words.split())
    nf4_layer.main()
    names = {*json.loads(out.read_text())["us"]}
    assert {"bf16", "nf4", "bf16, rank 8", "nf4, rank 8", "qkv, nf4", "out, bf16"} <= names
    monkeypatch.setattr(nf4_layer, "moe_mlp_nf4", lambda x, *_: x)  # a wrong op ends it
    with pytest.raises(AssertionError, match="nf4, rank 0: wrong by"):
        nf4_layer.main()
