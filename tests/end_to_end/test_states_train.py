"""Runs with narrow states: resumed bit for bit, on other ranks, with moments of another type, and refused.

next: tests/optim/test_states.py
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import runs
import torch
from tiers import slow_but

from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.checkpoint.manifest import read_manifest
from tmoe.checkpoint.resume import converted
from tmoe.checkpoint.rewrite import read_whole
from tmoe.checkpoint.tools import reshard
from tmoe.cli.parse import parse

WIDE = """--model.dim 64 --model.moe.ffn-dim 64 --train.accumulate 2 --train.dtype bf16 --checkpoint.every 2
    --steps 4""".split()
NARROW = "--optim.states int8 --optim.sums bf16 --optim.ema 0.9".split()
HALF = "--optim.states bf16 --optim.masters bf16 --optim.sums bf16 --optim.freeze router".split()


def trained(gloo, out: Path, *words: object, world: int = 1):
    return gloo(world, runs.run, [*runs.SMALL, *WIDE, "--out", str(out), *map(str, words)])[0]


def step_of(out: Path, step: int) -> Path:
    return out / f"checkpoints/step-{step}"


@pytest.mark.parametrize(("world", "words"), [(2, [*NARROW, "--parallel.ep", 2]), (1, HALF)])
def test_a_resumed_run_goes_on_in_every_bit(gloo, tmp_path, world, words):
    straight = trained(gloo, tmp_path / "a", *words, world=world)
    kinds = {name: str(t.dtype) for name, t in straight.items()}
    if "int8" in words:
        assert kinds["optim.exp_avg.blocks.1.moe.experts.down"] == "torch.uint8"
        assert kinds["optim.exp_avg_sq_scale.blocks.1.moe.experts.down"] == "torch.float32"
        assert kinds["optim.exp_avg.norm.weight"] == "torch.float32"
    else:
        assert {kind for name, kind in kinds.items() if name.startswith(("model.", "optim.exp"))} >= {
            "torch.bfloat16"
        }
        assert kinds["model.embedding.weight"] == "torch.bfloat16"
    shutil.copytree(step_of(tmp_path / "a", 2), step_of(tmp_path / "b", 2))
    again = trained(gloo, tmp_path / "b", *words, world=world)
    assert again.keys() == straight.keys()
    for name, t in straight.items():
        assert torch.equal(again[name], t), name


@pytest.mark.parametrize(
    ("before", "after"), slow_but([("int8", "fp32")], [("int8", "fp32"), ("fp32", "bf16")])
)
def test_moments_of_another_type_are_converted_and_said(gloo, tmp_path, before, after):
    """Two processes resume the step of one, resharded for them."""
    trained(gloo, tmp_path / "a", "--optim.states", before, "--steps", 2)
    reshard(step_of(tmp_path / "a", 2), step_of(tmp_path / "b", 2), world=2, ep=2)
    shutil.copy(tmp_path / "a/config.json", tmp_path / "b/config.json")
    words = ["--optim.states", after, "--parallel.ep", 2]
    trained(gloo, tmp_path / "b", *words, world=2)
    step = step_of(tmp_path / "b", 2)
    (line,) = converted(step, parse([*runs.SMALL, *WIDE, *map(str, words)], "", world=2))
    assert line == f"--optim.states={after}: the moments are {before} in {step}, and are converted"
    kinds = {n: e.dtype for n, e in read_manifest(step_of(tmp_path / "b", 4)).tensors.items()}
    assert kinds["optim.exp_avg.blocks.1.moe.experts.down"] == dict(bf16="bfloat16", fp32="float32")[after]
    assert not [name for name in kinds if "_scale." in name]
    old, new = (
        read_whole(step, read_manifest(step).tensors["optim.step.norm.weight"])
        for step in (step_of(tmp_path / "a", 2), step_of(tmp_path / "b", 4))
    )
    assert (old, new) == (2, 4)


def test_small_moments_of_int8_are_not_converted(tmp_path):
    """Moments of vectors are fp32 with int8; a step without the setting, which is older, has fp32."""
    cfg = parse(["tiny", "--optim.states", "int8"], "")
    saved = dict(now=json.loads(json.dumps(asdict(cfg))), older=dict(optim={}))
    for name, config in saved.items():
        steps = Checkpoints(tmp_path / name, keep=0, mode="sync", info=dict(config=config))
        steps.save(4, {"optim.exp_avg.norm.weight": torch.zeros(8)}, dict(step=4), {})
    assert converted(tmp_path / "now/step-4", cfg) == []
    (line,) = converted(tmp_path / "older/step-4", cfg)
    assert "the moments are fp32 in" in line
    assert converted(tmp_path / "older/step-4", parse(["tiny"], "")) == []


def test_other_masters_are_refused(gloo, tmp_path):
    trained(gloo, tmp_path / "a", "--steps", 2)
    argv = [*runs.SMALL, *WIDE, "--out", str(tmp_path / "a"), "--optim.masters", "bf16"]
    (code, said), *_ = gloo(1, runs.begin, argv)
    assert code == 2 and said.startswith("error: --optim.masters=bf16: "), said
    assert "holds weights of --optim.masters=fp32; start a new run from its weights with --init" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optim.masters bf16", "--optim.masters=bf16: needs --train.dtype=bf16"),
        ("--optim.sums bf16", "--optim.sums=bf16: needs --train.dtype=bf16"),
        (
            "--optim.masters bf16 --train.dtype bf16 --lora.rank 4",
            "--optim.masters=bf16: not with --lora.rank=4",
        ),
        ("--optim.masters bf16 --train.dtype bf16 --parallel.shard 2", "valid: --optim.sums=bf16 as well"),
        ("--optim.states fp8", "--optim.states=fp8: must be one of fp32, bf16, int8"),
    ],
)
def test_contradictions_are_refused(capsys, words, said):
    with pytest.raises(SystemExit):
        parse(["tiny", *words.split()], "")
    assert said in capsys.readouterr().err
