"""The offline tools that cast, average and look: means, differences and numpy's statistics.

Means have the layout of the first step, and every difference is listed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import asdict, replace

import forked
import numpy as np
import pytest
import torch
from steps import (
    assert_same,
    load,
    plain,
    refused,
    run,
    save,
    save_layout,
)
from steps import step as step  # a fixture

from benchmarks.inject import die_at, flip
from tmoe.checkpoint import dcp as shards
from tmoe.checkpoint import manifest as files
from tmoe.checkpoint import plans
from tmoe.checkpoint.checkpoints import read_manifest, verify
from tmoe.config.model import ModelConfig, MoEConfig
from tmoe.config.run import Config, OptimConfig

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected pickle protocol"
)


# ---- weights alone, in bf16 ----


@pytest.mark.parametrize(("world", "ep", "shape"), [(1, 1, (3,)), (3, 1, (8, 5)), (4, 2, (4, 6, 3))])
def test_a_killed_cast_of_weights_goes_on(tmp_path, monkeypatch, world, ep, shape):
    monkeypatch.setattr(shards, "SMALL", 300)  # several groups
    step = save(
        tmp_path, 20, plain(20) | {"ema.w": torch.randn(9, 5), "model.0.experts.w": torch.randn(shape)}
    )
    want = {
        n: t.bfloat16() if t.is_floating_point() else t
        for n, t in load(step).items()
        if n.startswith("model.")
    }
    for count in range(1, 400, 23):
        words = ("reshard", step, tmp_path / f"dst{count}", "--world", world, "--ep", ep, "--dtype", "bf16")
        killed = die_at(count, lambda words=words: run(*words, "--only", "model"))
        if not words[2].exists():
            run(*words, "--only", "model")
        assert_same(load(words[2]), want)
        if not killed:
            break
    assert count > 60 and verify(words[2]) == []


# ---- averages ----


@pytest.mark.parametrize(
    "name",
    [
        "thesis.txt",
        "group-0/thesis.txt",
        "group-0/deep/",
        "precious/thesis.txt",
        "group-1",
        "__0_0.distcp/",
        "link",
    ],
)
def test_nobody_elses_file_is_removed(step, tmp_path, name):
    work = tmp_path / "dst.partial"
    path = work / name
    (path if name[-1] == "/" else path.parent).mkdir(parents=True)
    if name == "link":
        (tmp_path / "theirs").mkdir()
        (work / "group-0").symlink_to(tmp_path / "theirs")
        path = tmp_path / "theirs/thesis.txt"
    if not path.is_dir():
        path.write_text("a life's work")
    before = sorted(tmp_path.rglob("*"))
    for words in (["reshard", step, tmp_path / "dst", "--world", 2], ["average", step, tmp_path / "dst"]):
        for more in ([], ["--dry-run"]):
            said = refused(*words, *more)
            assert said.startswith(f"error: {work}: holds ") and said.endswith(
                ", which this command did not write; move it away, or name another folder"
            ), said
    assert sorted(tmp_path.rglob("*")) == before


def test_a_work_folder_that_is_none(step, tmp_path):
    work = tmp_path / "dst.partial"
    for make in (lambda: work.write_text("x"), lambda: work.symlink_to("nowhere")):
        make()
        said = refused("reshard", step, tmp_path / "dst", "--world", 2)
        assert said == f"error: {work}: is no folder; move it away, or name another folder"
        work.unlink()


def test_the_average_is_the_mean_in_the_layout_of_the_first(gloo, tmp_path):
    gloo(2, save_layout, tmp_path / "a", 2, 5)
    gloo(4, save_layout, tmp_path / "b", 1, 5)
    first = load(tmp_path / "a/step-5")
    run("reshard", tmp_path / "a/step-5", tmp_path / "one", "--world", 1)
    others = [{n: torch.randn(t.shape).to(t.dtype) for n, t in first.items()} for _ in range(2)]
    steps = [tmp_path / "a/step-5", *(save(tmp_path, 8 + i, tensors) for i, tensors in enumerate(others))]
    run("average", *steps, tmp_path / "mean")
    expected = {
        n: ((t.double() + others[0][n].double() + others[1][n].double()) / 3).float().to(t.dtype)
        for n, t in first.items()
        if n.startswith("model.")
    }
    assert_same(load(tmp_path / "mean"), expected)
    mean, source = read_manifest(tmp_path / "mean"), read_manifest(steps[0])
    assert (mean.step, mean.tokens, mean.world) == (9, 900, 2)
    for name, entry in mean.tensors.items():
        assert [(c.offset, c.shape) for c in entry.chunks] == [
            (c.offset, c.shape) for c in source.tensors[name].chunks
        ]
    # other layout, equal weights
    run("average", tmp_path / "a/step-5", tmp_path / "b/step-5", tmp_path / "same")
    assert_same(load(tmp_path / "same"), {n: t for n, t in first.items() if n.startswith("model.")})


def test_the_mean_of_large_and_small_is_exact(tmp_path):
    values = [2.0**24, 1.0, 1.0, -(2.0**24)]  # fp32 sums give 0 or 2 by order
    steps = [save(tmp_path, i, {"model.w": torch.full((3,), v)}) for i, v in enumerate(values)]
    run("average", *steps, tmp_path / "mean")
    assert load(tmp_path / "mean")["model.w"].tolist() == [0.5] * 3


def test_the_mean_of_other_types(tmp_path):
    g = torch.Generator().manual_seed(2)
    a, b = (
        {
            f"model.{t}": torch.randn(99, generator=g).to(t)
            for t in (torch.float64, torch.float8_e4m3fn, torch.half)
        }
        for _ in "ab"
    )
    run("average", save(tmp_path, 1, a), save(tmp_path, 2, b), tmp_path / "mean")
    expected = {n: ((a[n].double() + b[n].double()) / 2) for n in a}
    expected = {n: t if a[n].dtype == t.dtype else t.float().to(a[n].dtype) for n, t in expected.items()}
    assert_same(load(tmp_path / "mean"), expected)


def test_a_step_given_twice_counts_twice_also_when_resumed(tmp_path):
    steps = [save(tmp_path, i, {"model.w": torch.full((3,), float(i))}) for i in (0, 3)]
    keys = {
        plans.plan_average(given).key
        for given in (steps, [*steps, steps[1]], steps[::-1], [*steps, steps[0]])
    }
    assert len(keys) == 4
    run("average", steps[0], steps[1], steps[1], tmp_path / "mean")
    assert load(tmp_path / "mean")["model.w"].tolist() == [2.0] * 3


def test_the_moving_average_becomes_the_weights(tmp_path):
    g = torch.Generator().manual_seed(3)
    weights = {f"model.{n}": torch.randn(6, 2, generator=g) for n in "ab"}
    averages = {f"ema.{n}": torch.randn(6, 2, generator=g) for n in "ab"}
    half = {n: t.bfloat16() for n, t in weights.items()}
    step = save(tmp_path, 1, weights | averages | {"optim.step.a": torch.tensor(1.0)})
    run("average", step, tmp_path / "ema", "--ema")
    assert_same(load(tmp_path / "ema"), {f"model.{n[4:]}": t for n, t in averages.items()})
    run("average", save(tmp_path, 2, half | averages), tmp_path / "half", "--ema")
    assert_same(load(tmp_path / "half"), {f"model.{n[4:]}": t.bfloat16() for n, t in averages.items()})
    assert "holds no ema.*" in refused("average", save(tmp_path, 3, weights), tmp_path / "x", "--ema")
    partial = save(tmp_path, 4, weights | {"ema.a": averages["ema.a"]})
    assert "ema.b: not in" in refused("average", partial, tmp_path / "x", "--ema")


def test_every_difference_is_listed(tmp_path):
    def settings(top_k, **training):
        model = ModelConfig(moe=MoEConfig(top_k=top_k, **training))
        return dict(config=asdict(Config(optim=OptimConfig(), model=model)))

    first = {
        "model.a": torch.zeros(4),
        "model.b": torch.zeros(2, 2),
        "model.c": torch.zeros(3),
        "model.i": torch.ones(2).int(),
    }
    second = {"model.a": torch.zeros(5), "model.b": torch.zeros(2, 2).bfloat16(), "model.d": torch.zeros(1)}
    steps = [
        save(tmp_path, 1, first | {"optim.x": torch.zeros(1)}, settings(2)),
        save(tmp_path, 2, second | {"model.i": torch.ones(2).int()}, settings(1)),
    ]
    message = refused("average", *steps, tmp_path / "mean")
    for line in (
        "6 differences",
        f"model.a: shape (4,) in {steps[0]}, (5,) in {steps[1]}",
        f"model.b: float32 in {steps[0]}, bfloat16 in {steps[1]}",
        f"model.c: not in {steps[1]}",
        f"model.d: not in {steps[0]}",
        "model.i: int32 has no mean",
        f"model.moe.top_k: 2 in {steps[0]}, 1 in {steps[1]}",
    ):
        assert line in message, message
    same = [
        save(tmp_path, 3, first, settings(2)),
        save(tmp_path, 4, first, settings(2, balance_coeff=0.5, jitter=0.1)),
    ]
    # model.i alone: of training's settings none
    assert "1 difference\n" in refused("average", *same, tmp_path / "mean")
    assert {p.name for p in tmp_path.iterdir()} == {"step-1", "step-2", "step-3", "step-4"}


# ---- looking ----


def test_statistics_are_numpys(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tmoe.checkpoint.inspect.BLOCK", 7)
    g = torch.Generator().manual_seed(1)
    w = torch.randn(4, 5, 6, generator=g) * 3 + 10
    w[1, 2, 3], w[3] = math.nan, math.inf
    step = save(
        tmp_path,
        1,
        {
            "model.moe.experts.w": w,
            "model.none": torch.zeros(0, 3),
            "model.f8": torch.ones(3).to(torch.float8_e4m3fn),
        },
    )
    run("reshard", step, tmp_path / "dst", "--world", 4, "--ep", 2)

    def told(tensor):
        run("inspect", tmp_path / "dst", "--tensor", tensor, "--json")
        return json.loads(capsys.readouterr().out)

    capsys.readouterr()
    found = told("model.moe.experts.w")
    for part, values in [(found, w), *zip(found["experts"], w, strict=True)]:
        finite = values[values.isfinite()].double().numpy()
        assert (part["finite"], part["non_finite"]) == (finite.size, values.numel() - finite.size)
        if finite.size:
            expected = [finite.min(), finite.max(), finite.mean(), finite.std(), np.linalg.norm(finite)]
            assert np.allclose(
                [part[k] for k in ("min", "max", "mean", "std", "norm")], expected, rtol=1e-12, atol=0
            )
    assert found["experts"][3]["mean"] is None
    assert told("model.none")["finite"] == 0 and told("model.f8")["mean"] == 1.0
    assert "nearest: model.moe.experts.w" in refused("inspect", step, "--tensor", "model.moe.expert.w")
    run("inspect", step, "--tensor", "model.moe.experts.w")
    assert "expert 3" in capsys.readouterr().out


def test_inspect_shows_the_run_and_folds_equal_blocks(tmp_path, capsys):
    tensors = {f"model.blocks.{i}.w": torch.zeros(4, 2 + (i == 2)) for i in range(12)}
    tensors["model.[red]x\x1b[31m"] = torch.zeros(3)
    step = save(
        tmp_path, 1, tensors, dict(config=asdict(Config()), versions={"torch": "2"}), dict(step=1, tokens=5)
    )
    run("inspect", step)
    out = capsys.readouterr().out
    for text in (
        "0-1.w  [4, 2] float32  32 bytes each, 2 times",
        "2.w  [4, 3]",
        "3-11.w",
        "9 times",
        "tokens",
        "top_k=2",
        "[red]x",
    ):
        assert text in out, out
    assert "\x1b[31m" not in out
    run("inspect", step, "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 1 and told["info"]["versions"] == {"torch": "2"} and told["world"] == 1
    assert (
        told["tensors"]["model.blocks.2.w"]["shape"] == [4, 3]
        and told["tensors"]["model.blocks.2.w"]["bytes"] == 48
    )


def test_inspect_in_brief_shows_what_is_not_the_default(tmp_path, capsys):
    """A line for each section that has such a setting, and no other; the data in a line."""
    cfg = Config()
    cfg = replace(cfg, steps=77, optim=replace(cfg.optim, lr=0.5), data=replace(cfg.data, path=("a", "b")))
    info = dict(config=asdict(cfg), versions={"torch": "2"}, data=dict(tokenizer="bytes", eos=0))
    step = save(tmp_path, 1, {"model.w": torch.zeros(3, 4)}, info, dict(step=1, tokens=5000))
    run("inspect", step, "--brief")
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{step}: step 1, 5,000 tokens, 1 rank, ") and first.endswith(
        "12 numbers of the model"
    )
    assert [line for line in lines if not line.startswith("model")] == [
        "run  steps=77",
        "optim  lr=0.5",
        "data  path=['a', 'b']",
        "data  tokenizer=bytes  eos=0",
    ]
    assert "--brief: not with --json or --tensor" in refused("inspect", step, "--brief", "--json")


def test_verify_names_every_problem_of_every_step(tmp_path, capsys):
    steps = [save(tmp_path, i, plain(i)) for i in range(4)]
    run("verify", tmp_path)
    assert capsys.readouterr().out.count("whole ") == 4
    flip(steps[1] / "__0_0.distcp", 500)
    os.truncate(steps[1] / ".metadata", 3)
    (steps[2] / files.NAME).unlink()
    assert "2 of 4 steps damaged" in refused("verify", tmp_path)
    out = capsys.readouterr().out
    for text in (
        "step-1/__0_0.distcp: damaged: SHA-256",
        "step-1/.metadata: damaged: 3 bytes",
        "step-2/manifest.json: missing",
    ):
        assert text in out, out
    assert out.count("whole ") == 2
    assert "1 of 1" in refused("verify", tmp_path / "nothing")


def test_a_run_folder_where_a_step_is_meant(tmp_path):
    steps = [save(tmp_path / "run/checkpoints", i, plain(i)) for i in (9, 10)]
    said = f"no step folder; did you mean {steps[1]}?"
    for words in (["reshard", tmp_path / "dst", "--world", 1], ["average", tmp_path / "dst"]):
        for folder in (tmp_path / "run", tmp_path / "run/checkpoints"):
            assert refused(words[0], folder, *words[1:]) == f"error: {folder}: {said}"
    for folder in (tmp_path / "run", tmp_path / "run/checkpoints"):  # all steps of a run
        run("verify", folder)
    run("inspect", tmp_path / "run")  # lists them


@pytest.mark.parametrize("again", [False, True], ids=["removed", "replaced"])
def test_verify_looks_on_while_a_run_goes_on(tmp_path, monkeypatch, capsys, again):
    """A step that retention removes, or that a save replaces, between two looks is not damaged."""
    for i in range(3):
        save(tmp_path, i, plain(i))
    digest = files._digest

    def and_the_run_goes_on(file, advance):
        if file.parent == tmp_path / "step-1" and file.name == "__0_0.distcp":
            monkeypatch.setattr(files, "_digest", digest)
            shutil.rmtree(file.parent)
            if again:
                save(tmp_path, 1, plain(9))
        return digest(file, advance)

    monkeypatch.setattr(files, "_digest", and_the_run_goes_on)
    run("verify", tmp_path)
    said = capsys.readouterr().out
    assert said.count("whole ") == 2 + again and said.count("removed ") == 1 - again and "damaged" not in said


def test_the_command_line(step):
    def tool(*words):
        done = forked.run(["-m", "tmoe.checkpoint", *map(str, words)])
        return done.returncode, done.stdout, done.stderr.strip().splitlines()

    assert tool("verify", step) == (0, f"whole    {step}\n", [])
    code, _, errors = tool("reshard", step, step / "x", "--world", 4, "--ep", 3)
    assert code == 2 and errors == ["error: --world=4 --ep=3: both at least 1, and ep must divide the world"]
    with pytest.raises(SystemExit) as end:
        run("reshard", step)
    assert end.value.code == 2
