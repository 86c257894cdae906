"""--task sft and --task preference: the same in every layout, resumed bit for bit, and what they refuse."""

import json
import math
import random
from pathlib import Path
from typing import Any, cast

import forked
import pytest
import runs
import torch

from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig
from tmoe.config.run import Config, DataConfig, PreferenceConfig
from tmoe.data.tokenizer import DataError
from tmoe.log.metrics_file import read_steps
from tmoe.post.preference import Preference
from tmoe.post.sft import Sft

ROOT = Path(__file__).parents[2]
FLAGS = "--train.dtype fp32 --train.seq 64 --optim.lr 1e-3 --resume none --steps 4".split()
# Flags of layouts with the same global batch: eight rows a step.
ALONE = dict(batch=4, accumulate=2)
LAYOUTS = [
    (2, dict(batch=2, accumulate=2), dict(ep=2)),
    (2, dict(batch=4, accumulate=2), dict(tp=2)),
    (2, dict(batch=4, accumulate=2), dict(cp=2)),
    (2, dict(batch=2, accumulate=4), dict(pp=2)),
    (4, dict(batch=1, accumulate=2), dict(dp=4)),
    (4, dict(batch=2, accumulate=4), dict(tp=2, cp=2, ep=2)),
]
LOSSES = "sigmoid robust hinge ipo simpo orpo kto".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files of sums: what is asked and answered, and answers of which one is right; lengths vary."""
    folder = tmp_path_factory.mktemp("chat")
    draw = random.Random(0)
    rows = {"sft": [], "preference": []}
    for _ in range(160):
        a, b = draw.randrange(1000), draw.randrange(10)
        asked, right = f"{a}+{b}?", str(a + b)
        turns = [dict(role="user", content=asked), dict(role="assistant", content=right)]
        rows["sft"].append(dict(messages=turns))
        wrong = str(a + b + draw.randrange(1, 99))
        rows["preference"].append(dict(prompt=asked, chosen=right, rejected=wrong))
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)))
    return folder


def words(data, out, task, sizes, axes, *more):
    made = [*runs.SMALL, *FLAGS, "--out", str(out)]
    made += ["--task", task, "--data.path", str(data / f"{task}.jsonl")]
    for section, given in (("train", sizes), ("parallel", axes)):
        made += [word for name, size in given.items() for word in (f"--{section}.{name}", str(size))]
    return [*made, *more]


def lines(out):
    """Loss, norm and what the task measures of each step, and the validation's."""
    kept = ("loss", "grad_norm", "rewards/margin", "rewards/accuracy", "val_loss", "val_rewards/margin")
    return [
        [line[name] for name in kept if line.get(name) is not None]
        for _, line in read_steps(out / "metrics.jsonl")
    ]


def assert_near(got, want):
    for a, b in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("task", ["sft", "preference"])
def test_a_task_learns(data, tmp_path, task, gloo):
    flags = words(data, tmp_path, task, ALONE, {}, "--steps", "12", "--optim.lr", "3e-3")
    gloo(1, runs.run, flags)
    found = lines(tmp_path)
    assert found[-1][0] < 0.95 * found[0][0]
    if task == "preference":
        assert found[0][0] == pytest.approx(math.log(2), abs=1e-6)
        assert found[-1][3] > 0.6


CASES = [(task, more) for task, more in [("sft", []), ("sft", ["--sft.dft"])]]
CASES += [("preference", ["--preference.loss", loss]) for loss in LOSSES]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "more"), CASES, ids=str)
def test_every_layout_gives_the_same_numbers(data, tmp_path, gloo, task, more):
    gloo(1, runs.run, words(data, tmp_path / "alone", task, ALONE, {}, *more))
    want = lines(tmp_path / "alone")
    some = LAYOUTS if more in ([], ["--preference.loss", "sigmoid"]) else LAYOUTS[1:4]
    for i, (world, sizes, axes) in enumerate(some):
        gloo(world, runs.run, words(data, tmp_path / str(i), task, sizes, axes, *more))
        assert_near(lines(tmp_path / str(i)), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "more"),
    [("sft", ["--sft.neftune", "5"]), ("preference", []), ("preference", ["--preference.loss", "kto"])],
    ids=str,
)
def test_a_resumed_run_goes_on_bit_for_bit(data, tmp_path, gloo, task, more):
    flags = words(data, tmp_path / "whole", task, dict(batch=2), dict(ep=2), *more)
    want = gloo(2, runs.run, flags)[0]
    flags = words(data, tmp_path / "parts", task, dict(batch=2), dict(ep=2), *more, "--resume", "auto")
    gloo(2, runs.run, flags, 1)  # stopped by SIGTERM after step 1
    got = gloo(2, runs.run, flags)[0]
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
@pytest.mark.parametrize("held", ["--data.val-path", "--data.split"])
def test_every_held_out_row_has_its_reference(data, tmp_path, gloo, loss, held):
    """Rows of a validation's own files, and those of a test: a model that has not moved is its reference."""
    (tmp_path / "own.jsonl").write_text("\n".join((data / "preference.jsonl").read_text().splitlines()[::-1]))
    more = [held, str(tmp_path / "own.jsonl")] if held == "--data.val-path" else [held, "7", "2", "1"]
    more += ["--preference.loss", loss, "--optim.lr", "1e-30", "--optim.warmup", "0", "--steps", "1"]
    gloo(1, runs.run, words(data, tmp_path / "run", "preference", dict(batch=4), {}, *more))
    ((_, line),) = read_steps(tmp_path / "run/metrics.jsonl")
    losses = [line[name] for name in ("loss", "val_loss", "test_loss") if name in line]
    assert len(losses) == 2 + (held == "--data.split")
    assert losses == pytest.approx([math.log(2) if loss == "sigmoid" else 0.5] * len(losses), abs=1e-6)


def test_what_cannot_be_meant_is_one_error(data):
    rows = DataConfig(path=(str(data / "preference.jsonl"),))
    with pytest.raises(DataError, match="which --task preference trains on, not --task sft"):
        Sft(Config(task="sft", data=rows), cast(Any, None)).open("train", None)
    with pytest.raises(ConfigError, match=r"--preference.smoothing=0.5: must be at least 0"):
        PreferenceConfig(smoothing=0.5)
    with pytest.raises(ConfigError, match=r"--model.dropout.*--task preference needs 0"):
        Preference(Config(task="preference", model=ModelConfig(dropout=0.1)), cast(Any, None))


@pytest.mark.slow
def test_a_reference_that_is_gone_is_named(data, tmp_path, gloo):
    """The weights of a run that goes on are the reference's no more."""
    flags = words(data, tmp_path, "preference", dict(batch=2), {}, "--resume", "auto")
    gloo(1, runs.run, flags, 1)
    next((tmp_path / "reference").glob("rows-*")).unlink()
    again = forked.run(["train.py", *flags])
    assert again.returncode == 2
    assert "lacks the reference's log-probs" in again.stderr
