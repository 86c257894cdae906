"""The picture of each task: which curves, titles that are true, and legends that cover no line.

next: tmoe/log/report.py
"""

from dataclasses import asdict, replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from run_logs import config, start, step

from tmoe.config.run import GrpoConfig, PreferenceConfig, SftConfig
from tmoe.log import report

OF_GRPO = {
    "reward/mean": lambda n: n / 40,
    "reward/std": lambda n: 0.3,
    "reward/equal": lambda n: 0.25,
    "reward/faults": lambda n: n % 3,
    "answers/tokens": lambda n: 100 - n,
    "answers/truncated": lambda n: 1 / (n + 1),
    "policy/entropy": lambda n: 2 - n / 40,
    "policy/kl": lambda n: 1e-4 * n,
    "policy/clipped": lambda n: 0.01 * n,
    "time/rollout": lambda n: 0.6,
    "time/rewards": lambda n: 0.1,
    "time/update": lambda n: 0.3,
}
OF_PAIRS = {"rewards/margin": lambda n: n / 10, "rewards/accuracy": lambda n: min(1, 0.5 + n / 40)}
GRPO = dict(task="grpo", grpo=GrpoConfig(rewards=("exact",), loss="dr_grpo", max_tokens=16))


def drawn(tmp_path, measures=(), validation=(), **settings):
    """The figure of a run of 30 steps; measures: name to a number by the step."""
    cfg = replace(config(tmp_path, steps=30), **settings)
    with start(cfg) as log:
        log.draw = lambda: None
        for number in range(30):
            measured = {name: of(number) for name, of in dict(measures).items()}
            step(log, number, measured=measured)
            if number % 10 == 9:
                log.validated(1.0 - number / 50, {name: measured[name] for name in validation})
    return report.paint(report.load(tmp_path))


def pictures(figure) -> dict[str, Axes]:
    return {axis.get_title(loc="left"): axis for axis in figure.axes if axis.get_title(loc="left")}


def lines_of(axis: Axes) -> dict[str, np.ndarray]:
    """The labelled lines of a picture: their last value, by label without that value."""
    found = {line.get_label().partition(" (last")[0]: line.get_ydata() for line in axis.get_lines()}
    return {label: values[-1] for label, values in found.items() if not label.startswith("_")}


@pytest.mark.parametrize(
    ("settings", "title"),
    [
        (dict(task="pretrain"), "Loss, nats a token"),
        (dict(task="sft"), "Loss, nats a trained token"),
        (dict(task="sft", sft=SftConfig(dft=True)), "Loss, weighed by probability (dft)"),
        (dict(task="preference"), "Loss, DPO (sigmoid)"),
        (dict(task="preference", preference=PreferenceConfig(loss="ipo")), "Loss, ipo"),
        (GRPO, "Loss of the policy, dr_grpo"),
    ],
)
def test_the_loss_is_called_what_it_is(tmp_path, settings, title):
    shown = asdict(replace(config(tmp_path), **settings))
    nothing = np.zeros((1, 0))
    run = report.ReportedRun("a", dict(config=shown), np.ones(1), {}, nothing, nothing)
    assert report.title_of_loss(run) == title
    run.config = {}
    assert report.title_of_loss(run) == "Loss"


def test_grpo_shows_rewards_answers_and_the_policy(tmp_path):
    figure = drawn(tmp_path, OF_GRPO, ["reward/mean"], **GRPO)
    found = pictures(figure)
    want = {
        "Reward": {"mean, smoothed": 29 / 40, "deviation, smoothed": 0.3, "validation": 29 / 40},
        "Answers, tokens": {"mean length, smoothed": 71},
        "Entropy of the policy, nats a token": {"smoothed": 2 - 29 / 40},
        "Divergence from the sampler (k3), nats a token": {"smoothed": 29e-4},
        "Faults of rewards in a step": {"smoothed": 2},
        "Shares of answers, prompts and tokens": {
            "answers truncated": 1 / 30,
            "prompts rewarded equally": 0.25,
            "tokens that the loss bounds": 0.29,
        },
        "Shares of a step's time": {"rollout": 0.6, "rewards": 0.1, "update": 0.3},
    }
    for title, lines in want.items():
        assert lines_of(found[title]) == pytest.approx(lines), title
    # a validation's number is minus the mean reward, which is no loss
    assert list(lines_of(found["Loss of the policy, dr_grpo"])) == ["training, smoothed"]
    assert "Gradient norm" in found and "Learning rate" in found


def test_preferences_show_margin_and_accuracy(tmp_path):
    found = pictures(drawn(tmp_path, OF_PAIRS, list(OF_PAIRS), task="preference"))
    margin = lines_of(found["Margin of rewards, chosen less rejected"])
    assert margin == pytest.approx({"training, smoothed": 2.9, "validation": 2.9})
    accuracy = lines_of(found["Accuracy: share of pairs with a margin above 0"])
    assert accuracy == pytest.approx({"training, smoothed": 1, "validation": 1})
    assert list(lines_of(found["Loss, DPO (sigmoid)"])) == ["training, smoothed", "validation"]


def test_kto_has_completions_in_place_of_pairs(tmp_path):
    settings = dict(task="preference", preference=PreferenceConfig(loss="kto"))
    found = pictures(drawn(tmp_path, OF_PAIRS, **settings))
    titles = "Loss, kto", "Margin of rewards, desirable less undesirable"
    assert found.keys() >= {*titles, "Accuracy: completions on their side of z"}
    figure = next(iter(found.values())).figure
    figure.draw_without_rendering()
    for axis in figure.axes:  # in pixels: no title is cut off
        assert axis._left_title.get_window_extent().x1 <= figure.bbox.x1, axis.get_title(loc="left")


@pytest.mark.parametrize("task", ["pretrain", "preference", "grpo"])
def test_no_legend_covers_a_line(tmp_path, task):
    """In the picture's own pixels: every value of every line lies below its legend."""
    measures = dict(pretrain={}, preference=OF_PAIRS, grpo=OF_GRPO)[task]
    names = ["reward/mean"] if task == "grpo" else list(measures)
    figure = drawn(tmp_path, measures, names, **(GRPO if task == "grpo" else dict(task=task)))
    figure.draw_without_rendering()
    legends = [axis for axis in figure.axes if axis.get_legend() is not None]
    assert len(legends) >= 3
    for axis in legends:
        lowest = axis.get_legend().get_window_extent().y0
        for line in axis.get_lines():
            values = np.asarray(line.get_ydata(), dtype=float)
            highest = axis.transData.transform((1, np.nanmax(values)))[1]
            assert highest < lowest, (axis.get_title(loc="left"), line.get_label())
