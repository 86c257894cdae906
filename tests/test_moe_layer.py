"""What benchmarks/moe_layer.py accepts as a shape, and what its yardstick moves."""

import argparse

import pytest
import torch

from benchmarks import moe_layer


def test_five_numbers_are_a_shape_and_others_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(moe_layer, "ALL", dict(moe_layer.ALL))
    assert moe_layer.shape("olmoe-512") == "olmoe-512"
    name = moe_layer.shape("64,96,32,6,2")
    assert moe_layer.ALL[name] == (64, 96, 32, 6, 2)
    for wrong in ("olmo", "64,96,32,6", "64,96,32,6,7", "64,0,32,6,2", "64,96,32,6,two"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{wrong}' is neither of qwen3"):
            moe_layer.shape(wrong)
        assert wrong not in moe_layer.ALL


def test_weights_once_moves_the_bytes_of_the_experts_that_have_tokens():
    logits = torch.full((5, 8), -1.0)
    logits[:, 2] = logits[:3, 4] = logits[3:, 7] = 1.0  # three experts of eight
    gate_up, down = torch.empty(8, 24, 10, dtype=torch.bfloat16), torch.empty(8, 10, 12, dtype=torch.bfloat16)
    copied = moe_layer.weights_once(logits, 2, gate_up, down)()
    assert 2 * copied.nbytes == 3 * (24 * 10 + 10 * 12) * 2
