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

from benchmarks import perplexity, quantised
from tmoe.base.quantised import integers
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
