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
    --train.global-batch 12 --train.batch 1""".split()
MUON = "--optim.muon . --optim.qk-clip 0.05".split()
KINDS = [
    [],
    "--optim.states int8 --optim.ema 0.9 --optim.freeze router".split(),
    "--optim.schedule wsd --optim.muon-heads --optim.lr-factors experts:0.5".split(),
    "--train.dtype bf16 --optim.states bf16 --optim.masters bf16 --optim.sums bf16".split(),
]


def trained(gloo, out: Path, *words: object, world: int = 1):
    return gloo(world, runs.run, [*runs.SMALL, *WORDS, "--out", str(out), *map(str, words)])[0]


def step_of(out: Path, step: int) -> Path:
    return out / f"checkpoints/step-{step}"


@pytest.mark.parametrize("words", slow_but([KINDS[1]], KINDS))
def test_a_resumed_run_goes_on_in_every_bit(gloo, tmp_path, words):
    """On two ranks, with experts and dense matrices divided."""
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


@pytest.mark.parametrize("world", slow_but([3], [3, 1]))
def test_four_ranks_save_and_others_resume(gloo, tmp_path, world):
    """The state is equal to the bit when it is loaded; two steps later it is a straight run's."""
    words = [*MUON, "--optim.ema", "0.9"]
    straight = trained(gloo, tmp_path / "a", *words, "--parallel.ep", 2, world=4)
    shutil.copytree(step_of(tmp_path / "a", 2), step_of(tmp_path / "b", 2))
    argv = [*runs.SMALL, *WORDS, *words, "--out", str(tmp_path / "b")]
    loaded = gloo(world, runs.load, argv)[0]
    for name, entry in read_manifest(step_of(tmp_path / "b", 2)).tensors.items():
        if not name.startswith("rng"):
            assert tuple(loaded[name].shape) == tuple(entry.shape), name
    again = trained(gloo, tmp_path / "b", *words, world=world)
    assert again.keys() == straight.keys()
    for name, t in straight.items():
        far = (again[name].float() - t.float()).norm() / t.float().norm().clamp(min=1e-3)
        assert far < 1e-4, (name, far)


def test_a_resharded_step_lies_as_ranks_save_it(gloo, tmp_path):
    """Twelve experts on eight ranks would be cut along axis 1 by AdamW; Muon's stay whole."""
    trained(gloo, tmp_path / "a", *MUON, "--steps", 2)
    reshard(step_of(tmp_path / "a", 2), tmp_path / "to", world=8, ep=1)
    for part in ("model", "optim.momentum"):
        entry = read_manifest(tmp_path / "to").tensors[f"{part}.blocks.1.moe.experts.down"]
        assert entry.placement == "dp=8: Shard(dim=0), ep=1: Shard(dim=0)"


REFUSED = [
    (MUON, [], "--optim.muon=None: {step} holds Muon's momentum of blocks.0.attention.qkv.weight and "),
    ([], MUON, "--optim.muon=.: {step} holds AdamW's moments of blocks.0.attention.qkv.weight and "),
    (
        MUON,
        ["--optim.muon", "experts"],
        "--optim.muon=experts: {step} holds Muon's momentum of blocks.0.attention.qkv.weight and ",
    ),
]


@pytest.mark.parametrize(("before", "after", "said"), slow_but(REFUSED[:1], REFUSED))
def test_another_optimizer_is_refused(gloo, tmp_path, before, after, said):
    trained(gloo, tmp_path, *before, "--steps", 2)
    argv = [*runs.SMALL, *WORDS, "--out", str(tmp_path)]
    (code, error), *_ = gloo(1, runs.begin, [*argv, *after])
    assert code == 2 and f"error: {said.format(step=step_of(tmp_path, 2))}" in error, error
    assert "--no-load-optim" in error
    assert gloo(1, runs.begin, [*argv, *after, "--no-load-optim"])[0][0] == 0
