"""--train.dtype fp16: the rule of the loss scale, its place before clipping, resumed and divided runs."""

from __future__ import annotations

import itertools
import json
import random
import shutil

import pytest
import runs
import torch
from tiers import slow_but
from torch import nn

from tmoe.config.check import ConfigError
from tmoe.config.run import Config, TrainConfig
from tmoe.optim.adamw import AdamW
from tmoe.optim.loss_scale import LossScale

FAST = "--train.loss-scale-window 2 --train.loss-scale-hysteresis 1"  # changes within a few steps
FP16 = [*runs.SMALL, *"--train.dtype fp16 --optim.lr 3e-3 --optim.max-skips 4 --train.accumulate 2".split()]


def scales(out) -> list[float]:
    return [line["loss_scale"] for line in runs.lines(out)]


def megatron(overflows, first, least, window, hysteresis):
    """The factor after each step, by the update of Megatron's DynamicGradScaler in plain Python."""
    good, left = 0, hysteresis
    for overflow in overflows:
        if overflow:
            good, left = 0, left - 1
            if left <= 0:
                first = max(first / 2, least)
        else:
            good += 1
            if good == window:
                good, left, first = 0, hysteresis, first * 2
        yield first


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_factor_changes_as_megatrons(hysteresis):
    draw = random.Random(hysteresis)
    overflows = [draw.random() < share for share in (0.1, 0.9, 0.2) for _ in range(60)]
    words = dict(initial_loss_scale=64.0, min_loss_scale=0.5, loss_scale_window=5)
    cfg = TrainConfig(dtype="fp16", loss_scale_hysteresis=hysteresis, **words)
    scale = LossScale(cfg, torch.device("cpu"))
    found = []
    for overflow in overflows:
        scale.update(torch.tensor(float(not overflow)))
        found.append(scale.factor.item())
        other = LossScale(cfg, torch.device("cpu"))  # saved and loaded as JSON in each step
        other.load_state_dict(json.loads(json.dumps(scale.state_dict())))
        scale = other
    want = list(megatron(overflows, 64.0, 0.5, 5, hysteresis))
    assert found == want and min(want) == 0.5 and max(want) > 64


def test_the_factor_is_bounded_and_a_constant_stays():
    scale = LossScale(TrainConfig(dtype="fp16", loss_scale_window=1), torch.device("cpu"))
    for _ in range(40):
        scale.update(torch.ones(()))
    assert scale.factor.item() == 2.0**32
    fixed = LossScale(TrainConfig(dtype="fp16", loss_scale=8.0), torch.device("cpu"))
    fixed.update(torch.zeros(()))
    fixed.load_state_dict(scale.state_dict())
    assert fixed.factor.item() == fixed.least == 8.0 and fixed.state_dict() == {}


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_gradients_are_divided_before_they_are_clipped(clip):
    """A power of two changes no bit of the step."""
    ends = []
    for factor in (1.0, 2.0**16):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(5, 7))
        optimizer = AdamW([p], lr=0.1, eps=1e-3)
        for _ in range(3):
            grad = torch.randn(5, 7)
            p.grad = grad * factor
            scale = torch.tensor(factor)
            optimizer.decide(torch.ones(()), p.grad.norm() / scale, clip, scale)
            optimizer.step()
        ends.append([p.detach(), *optimizer.state[p].values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (dict(loss_scale=8.0), "loss-scale=8.0: needs --train.dtype=fp16"),
        (dict(dtype="fp32", loss_scale_window=5), "loss-scale-window=5: needs --train.dtype=fp16"),
        (dict(dtype="fp16", loss_scale=8.0, min_loss_scale=2.0), "not with --train.loss-scale=8.0, which is"),
        (dict(dtype="fp16", loss_scale=-1.0), r"loss-scale=-1.0: must be 0 \(a dynamic"),
        (dict(dtype="fp16", loss_scale=1e-40), "positive and finite in float32"),  # 1 / it is infinite
        (dict(dtype="fp16", initial_loss_scale=2.0**33), "must be at most 4294967296"),
        (
            dict(dtype="fp16", initial_loss_scale=2.0, min_loss_scale=4.0),
            "at most --train.initial-loss-scale",
        ),
        (dict(dtype="fp16", loss_scale_hysteresis=0), "must be at least 1"),
    ],
)
def test_settings_that_contradict_are_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        TrainConfig(**words)


def test_float8_and_narrow_masters_need_other_types():
    with pytest.raises(ConfigError, match="float8=rowwise: not with"):
        Config(train=TrainConfig(dtype="fp16", float8="rowwise", seq=32))


LAYOUTS = [
    (1, "--train.batch 4"),
    (2, "--parallel.ep 2 --train.batch 2"),
    (2, "--parallel.tp 2 --train.batch 4"),
    (2, "--parallel.cp 2 --train.batch 4"),
    (2, "--parallel.pp 2 --train.batch 4"),
    (2, "--parallel.pp 2 --parallel.schedule v --model.layers 4 --train.batch 4"),
    (2, "--parallel.gathered-gib 0 --train.batch 2"),
    (2, "--parallel.etp 2 --train.batch 2"),
]


@pytest.mark.parametrize(("world", "words"), slow_but([LAYOUTS[1]], LAYOUTS))
def test_a_resumed_run_goes_on_in_every_bit_in_every_layout(gloo, tmp_path, world, words):
    """The first steps overflow, until the factor fits; later it doubles. The loss is that of fp32."""
    given = [*FP16, *words.split(), *FAST.split(), "--train.initial-loss-scale", str(2.0**24)]
    given += ["--checkpoint.every", "5", "--steps", "10"]
    straight, *others = gloo(world, runs.run, [*given, "--out", str(tmp_path / "a")])
    for other in others if "pp" not in words else ():
        runs.assert_equal_state(straight, other)
    found = scales(tmp_path / "a")
    skipped = [line["skipped"] for line in runs.lines(tmp_path / "a")]
    steps = itertools.pairwise(zip(found, skipped, strict=True))
    assert found[0] == 2.0**24 and skipped[-1] >= 2 and skipped[2] > skipped[0] - 1
    assert all(b in (a / 2, a, 2 * a) for (a, _), (b, _) in steps)
    assert any(b == 2 * a for a, b in itertools.pairwise(found))
    shutil.copytree(tmp_path / "a/checkpoints/step-5", tmp_path / "b/checkpoints/step-5")
    again = gloo(world, runs.run, [*given, "--out", str(tmp_path / "b")])[0]
    runs.assert_equal_state(again, straight)
    assert scales(tmp_path / "b") == found[5:]


def test_skipped_steps_leave_every_byte(gloo, tmp_path):
    """Gradients of a loss that is multiplied by 2^32 overflow fp16. At its least factor the run then ends."""
    given = [*FP16, "--optim.ema", "0.9", "--out", str(tmp_path), "--train.initial-loss-scale", str(2.0**32)]
    before = gloo(1, runs.load, given)[0]
    after = gloo(1, runs.run, [*given, "--steps", "6"])[0]  # more than --optim.max-skips
    runs.assert_equal_state(after, before)
    assert scales(tmp_path) == [2.0**32, 2.0**32, 2.0**31, 2.0**30, 2.0**29, 2.0**28]
    assert [line["skipped"] for line in runs.lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--train.loss-scale", "--train.initial-loss-scale"])
def test_the_run_ends_if_no_factor_is_small_enough(gloo, tmp_path, how):
    given = [*FP16, "--out", str(tmp_path), how, str(2.0**32)]
    given += [] if how == "--train.loss-scale" else ["--train.min-loss-scale", str(2.0**32)]
    with pytest.raises(Exception, match="was not finite 4 times in a row"):
        gloo(1, runs.run, given)


@pytest.mark.slow
def test_losses_are_those_of_fp32(gloo, tmp_path):
    curves = []
    for kind in ("fp16", "fp32"):
        words = [*FP16, "--train.dtype", kind, "--out", str(tmp_path / kind), "--steps", "20"]
        gloo(1, runs.run, words)
        curves.append([(line["loss"], line["grad_norm"]) for line in runs.lines(tmp_path / kind)])
    half, wide = curves
    assert [loss for loss, _ in half] == pytest.approx([loss for loss, _ in wide], rel=3e-3)
    assert [norm for _, norm in half] == pytest.approx([norm for _, norm in wide], rel=3e-2)


def test_a_resumed_run_notes_changes_of_the_rule(gloo, tmp_path):
    """Without a note a new first factor looks as if it were used; the saved one is."""
    given = [*FP16, "--train.batch", "4", "--out", str(tmp_path)]
    gloo(1, runs.run, [*given, "--steps", "1"])
    more = "--steps 2 --train.loss-scale-window 5 --train.initial-loss-scale 64".split()
    noted = " ".join(gloo(1, runs.changes, [*given, *more])[0])
    assert "--train.loss-scale-window=5 (was 1000)" in noted
    assert f"--train.initial-loss-scale=64.0: not read, because {tmp_path}" in noted
    assert "loss-scale" not in " ".join(gloo(1, runs.changes, [*given, "--steps", "2"])[0])
