"""Whole runs with --train.float8: its line, a resume with another value, an engine of its step, GRPO.

next: tmoe/model/float8.py
"""

import json
from importlib.metadata import version

import forked
import pytest
import torch
from runs import SMALL, lines

from tmoe.generate.load import load
from tmoe.generate.sampler import Sampling
from tmoe.model.float8 import float8_layers

pytest.importorskip("torchao")
pytestmark = pytest.mark.slow
WIDE = """--model.dim 512 --model.heads 4 --model.kv-heads 2 --model.head-dim 128 --model.dense-layers 1
    --model.ffn-dim 512 --model.moe.shared-dim 512 --train.batch 2 --optim.lr 3e-4
    --train.float8 rowwise""".split()


def test_a_run_is_resumed_without_it_and_speaks(tmp_path):
    """8 of 8 layers; the resumed run names the change; weights are plain ones of an ordinary model."""
    words = ["train.py", *SMALL, *WIDE, "--out", tmp_path / "run"]
    first = forked.run([*words, "--steps", "2"])
    assert first.returncode == 0, first.stderr
    assert "float8 (rowwise): 8 of 8 dense and shared layers" in first.stdout
    assert f"; torchao {version('torchao')}" in first.stdout
    again = forked.run([*words, "--steps", "3", "--train.float8", "none"])
    assert again.returncode == 0, again.stderr
    assert "--train.float8=none (was rowwise)" in again.stdout and "float8 (rowwise)" not in again.stdout
    losses = [line["loss"] for line in lines(tmp_path / "run")]
    assert len(losses) == 3 and losses[2] < losses[0]
    loaded = load(tmp_path / "run", device="cpu")
    assert not float8_layers(loaded.model)
    (answer,) = loaded.engine(slots=1).generate(["def "], 1, Sampling(max_tokens=4))[0]
    assert torch.isfinite(answer.logprobs).all()


def test_grpo_answers_in_bf16_and_learns_in_float8(tmp_path):
    """One step: rollout and update in the same modules. Their log-probs differ by rounding alone."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(dict(prompt=f"{i}+1=", answer=str(i + 1))) + "\n" for i in range(40)))
    words = ["train.py", *SMALL, *WIDE, "--out", tmp_path / "run", "--data.path", rows]
    words += "--task grpo --grpo.rewards length(8,4) --grpo.prompts 2".split()
    words += "--grpo.group 2 --grpo.max-tokens 8".split()
    done = forked.run([*words, "--steps", "1"])
    assert done.returncode == 0, done.stderr
    (line,) = lines(tmp_path / "run")
    assert line["loss"] == line["loss"] and line["grad_norm"] >= 0
