"""Runs with Muon: resumed bit for bit, saved by four ranks and resumed by one and three, refused.

next: tests/optim/test_muon.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import runs
import torch
from tiers import slow_but

from tmoe.checkpoint.manifest import read_manifest
from tmoe.checkpoint.tools import reshard

WORDS = """--model.dim 64 --model.moe.experts 12 --model.qk-norm none --checkpoint.every 2 --steps 4 --seed 3
    --train.global-batch 12""".split()
MUON = "--optim.muon . --optim.qk-clip 0.05".split()
AVERAGED = [*MUON, "--optim.ema", "0.9"]
KINDS = [
    """--optim.states int8 --optim.ema 0.9 --optim.freeze router --optim.schedule wsd --optim.muon-heads
        --optim.lr-factors experts:0.5 --model.dropout 0.1 --model.moe.jitter 0.1""".split(),
    "--train.dtype bf16 --optim.states bf16 --optim.masters bf16 --optim.sums bf16".split(),
]


def trained(gloo, out: Path, *words: object, world: int = 1):
    return gloo(world, runs.run, line(out, world, *words))[0]


def line(out: Path, world: int, *words: object) -> list[str]:
    """A command line for some ranks; a step has at least two micro-batches."""
    batch = ["--train.batch", str(max(1, 6 // world))]
    return [*runs.SMALL, *WORDS, *batch, "--out", str(out), *map(str, words)]


def step_of(out: Path, step: int) -> Path:
    return out / f"checkpoints/step-{step}"


@pytest.mark.parametrize("words", slow_but(KINDS[:1], KINDS))
def test_a_resumed_run_goes_on_in_every_bit(gloo, tmp_path, words):
    """On two ranks, with experts and dense matrices divided, and with noise.

    The line about Muon's matrices builds a model, which draws a number.
    """
    words = [*MUON, *words, "--parallel.ep", 2]
    straight = trained(gloo, tmp_path / "a", *words, world=2)
    assert "optim.momentum.blocks.1.moe.experts.down" in straight
    assert "optim.exp_avg.blocks.1.moe.experts.down" not in straight
    assert "optim.exp_avg.embedding.weight" in straight
    shutil.copytree(step_of(tmp_path / "a", 2), step_of(tmp_path / "b", 2))
    again = trained(gloo, tmp_path / "b", *words, world=2)
    assert again.keys() == straight.keys()
    for name, t in straight.items():
        assert torch.equal(again[name], t), name


@pytest.fixture(scope="module")
def straight(gloo, tmp_path_factory):
    """The folder and the final state of a run of four ranks, with steps 2 and 4."""
    out = tmp_path_factory.mktemp("four")
    return out, trained(gloo, out, *AVERAGED, "--parallel.ep", 2, world=4)


@pytest.mark.parametrize("world", slow_but([3], [3, 1]))
def test_four_ranks_save_and_others_resume(gloo, straight, tmp_path, world):
    """The state is equal to the bit when it is loaded; two steps later it is a straight run's."""
    four, want = straight
    shutil.copytree(step_of(four, 2), step_of(tmp_path, 2))
    loaded = gloo(world, runs.load, line(tmp_path, world, *AVERAGED))[0]
    for name, entry in read_manifest(step_of(four, 2)).tensors.items():
        if not name.startswith("rng"):
            assert tuple(loaded[name].shape) == tuple(entry.shape), name
    again = trained(gloo, tmp_path, *AVERAGED, world=world)
    assert again.keys() == want.keys()
    for name, t in want.items():
        far = (again[name].float() - t.float()).norm() / t.float().norm().clamp(min=1e-3)
        assert far < 1e-4, (name, far)


def test_a_resharded_step_lies_as_ranks_save_it(straight, tmp_path):
    """Twelve experts on eight ranks would be cut along axis 1 by AdamW; Muon's stay whole."""
    reshard(step_of(straight[0], 2), tmp_path / "to", world=8, ep=1)
    for part in ("model", "optim.momentum"):
        entry = read_manifest(tmp_path / "to").tensors[f"{part}.blocks.1.moe.experts.down"]
        assert entry.placement == "dp=8: Shard(dim=0), ep=1: Shard(dim=0)"


HOLDS = "holds {} of blocks.0.attention.qkv.weight and "
REFUSED = [  # PATTERN of the run that saved the step, and of the one that resumes it
    (".", None, HOLDS.format("Muon's momentum")),
    (None, ".", HOLDS.format("AdamW's moments")),
    (".", "experts", HOLDS.format("Muon's momentum")),
]


@pytest.mark.parametrize(("before", "after", "said"), slow_but(REFUSED[:1], REFUSED))
def test_another_optimizer_is_refused(gloo, straight, tmp_path, before, after, said):
    if before is None:
        trained(gloo, tmp_path, "--optim.ema", 0.9, "--steps", 2)
    else:
        shutil.copytree(step_of(straight[0], 2), step_of(tmp_path, 2))
    words = ["--optim.muon", after] if after else []
    argv = line(tmp_path, 1, "--optim.ema", 0.9, *words)
    (code, error), *_ = gloo(1, runs.begin, argv)
    assert code == 2 and f"error: --optim.muon={after}: {step_of(tmp_path, 2)} {said}" in error, error
    assert "--no-load-optim" in error
    assert gloo(1, runs.begin, [*argv, "--no-load-optim"])[0][0] == 0
