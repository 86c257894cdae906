"""benchmarks/bits.py on a CPU: rows are counted, and every piece of the three shapes is measured.

next: test_decode_benchmark.py
"""

import argparse

import torch

from benchmarks import bits


def test_rows_are_counted():
    a = torch.tensor([[1.0, 2.0], [3.0, float("nan")], [5.0, 6.0]])
    b = a.clone()
    b[2, 1] = 6.5
    share, difference = bits.compare(a, b)
    assert abs(share - 2 / 3) < 1e-6 and difference == 0.5


def test_each_piece_is_measured():
    args = argparse.Namespace(device="cpu", tiny=True, tokens=64, layers=1, compile=False)
    ledger = bits.Ledger(60, {}, None)
    bits.measure("pilot", args, ledger)
    assert not ledger.missing
    found = "\n".join(ledger.lines)
    for piece in (
        "norm, rms_norm",
        "o product",
        "shared experts",
        "0 router's weights",
        "logits",
        "engine's",
    ):
        assert f"| pilot | {piece}" in found
