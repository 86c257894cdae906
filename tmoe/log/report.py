"""Draws a run folder's metrics.jsonl as one picture, report.png.

    python -m tmoe.report RUN

It shows loss, gradient norm, learning rate, throughput, and how evenly the experts were used. With --task
preference it also shows margin and accuracy; with --task grpo rewards, answers, the policy and the shares of
time. The picture can be drawn while the run is still training.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tmoe.base.disk import naming
from tmoe.log.metrics_file import read_steps


@contextmanager
def any_backend() -> Iterator[None]:
    """Surrounds the first import of matplotlib, which fails if MPLBACKEND names a backend that is missing.

    That happens in notebooks. The picture needs no backend. Code that imports pyplot later gets the backend
    that was asked for, if it is installed.
    """
    asked = os.environ.pop("MPLBACKEND", None)
    first = "matplotlib" not in sys.modules
    try:
        yield
    finally:
        if asked is not None:
            os.environ["MPLBACKEND"] = asked
    if asked and first:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = asked


with any_backend():
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

WINDOW = 50  # number of lines whose counts the heat map adds up
SERIES = (
    *("loss", "val_loss", "grad_norm", "lr", "tokens_per_s", "mfu"),
    *("reward/mean", "reward/std", "reward/equal", "reward/faults", "val_reward/mean"),
    *("answers/tokens", "answers/truncated"),
    *("policy/entropy", "policy/kl", "policy/clipped", "time/rollout", "time/rewards", "time/update"),
    *("rewards/margin", "rewards/accuracy", "val_rewards/margin", "val_rewards/accuracy"),
    *(f"mtp/{what}_{depth}" for what in ("loss", "equal") for depth in (1, 2, 3)),
)
LEGEND_ROW, LEGEND_EDGE = 0.1, 0.05  # heights of a legend's row and of its edges, as a share of the picture's
BLUE, RED, GREY, PALE = "#1f5fa8", "#c8442c", "#666666", "#b9cfe6"
GREEN, GOLD = "#3a8a4d", "#c28f1d"
COLOURS = BLUE, GREEN, GOLD


@dataclass
class ReportedRun:
    """The numbers of a run that the picture shows; NaN where a line had null or lacks the number."""

    name: str
    config: dict[str, Any]  # config.json; empty if there is none
    steps: np.ndarray  # [lines]
    series: dict[str, np.ndarray]  # of SERIES, [lines]
    violation: np.ndarray  # [lines, layers], no columns without MoE layers
    counts: np.ndarray  # [layers, E], summed over the last WINDOW lines


class Curves(NamedTuple):
    """A picture that consists of curves only."""

    heading: str
    names: dict[str, str]
    """name of each series -> its label"""
    validation: str = ""
    """name of the series of a validation; "": none"""
    top: float | None = None
    """end of the scale, which then begins at 0; None: the scale follows the values"""


def load(path: Path) -> ReportedRun:
    """Reads a run folder.

    Raises ValueError, which names the file, if metrics.jsonl holds no line, or if either file holds something
    that no run writes.
    """
    file = path / "metrics.jsonl"
    described = path / "config.json"

    numbers = []
    violation = []
    counts = deque(maxlen=WINDOW)  # the counts of all lines may not fit in memory
    for number, line in read_steps(file):
        try:  # None becomes NaN
            numbers.append(np.array([line["step"], *(line.get(name) for name in SERIES)], dtype=float))
            violation.append(
                [None if value is None else float(value) for value in line.get("max_violation") or []]
            )
            if line.get("expert_counts"):
                counts.append(np.array(line["expert_counts"], dtype=float))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{file}:{number}: no line of a run: {error}") from error
    if not numbers:
        why = "holds no line to draw" if file.exists() else "missing; name a run folder"
        raise ValueError(f"{file}: {why}")

    table = np.array(numbers)
    layers = max(map(len, violation))
    try:
        config = json.loads(described.read_text()) if described.exists() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{described}: no config.json of a run: {error}") from error
    try:
        filled = np.array([row or [None] * layers for row in violation], dtype=float)
        filled = filled.reshape(len(table), layers)
        summed = np.sum(counts, axis=0) if counts else np.zeros((0, 0))
    except ValueError as error:
        raise ValueError(f"{file}: lines of different models: {error}") from error
    return ReportedRun(
        name=readable(path.resolve().name),
        config=config,
        steps=table[:, 0],
        series={name: table[:, i + 1] for i, name in enumerate(SERIES)},
        violation=filled,
        counts=summed,
    )


def readable(name: str | Path) -> str:
    """A name that can be printed: in a file system it may contain bytes that are not text."""
    return os.fsencode(name).decode(errors="replace")


def draw(path: Path) -> Path:
    """Draws RUN/metrics.jsonl as RUN/report.png and returns its path.

    Raises ValueError as `load` does, and an OSError that names the picture.
    """
    path = Path(path)
    run = load(path)
    try:
        figure = paint(run)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path / 'config.json'}: not of the run in metrics.jsonl: {why}") from error
    out = path / "report.png"
    aside = path / "report.png.tmp"
    try:
        with naming(out):
            figure.savefig(aside, format="png")
            os.replace(aside, out)  # so an incomplete picture never has the name
    finally:
        aside.unlink(missing_ok=True)
    return out


def paint(run: ReportedRun) -> Figure:
    """The picture: curves, and below them the load of the experts if the model has MoE layers."""
    rows = layout(kind(run), bool(run.counts.size))
    if np.isfinite(run.series["mtp/loss_1"]).any():
        rows.insert(1, ["further", "further", "equal"])
    figure = Figure(figsize=(15, 2.9 * len(rows)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title(run), fontsize=13, x=0.012, ha="left", parse_math=False)
    for name, axis in figure.subplot_mosaic(rows).items():
        if name == "load":
            draw_load(axis, run)
            continue
        if name in PAINTERS:
            PAINTERS[name](axis, run)
        else:
            draw_curves(axis, run, PICTURES[name])
            if name in OF_KTO and loss_of(run) == "kto":
                axis.set_title(OF_KTO[name], loc="left")
        dress(axis, run)
    return figure


def kind(run: ReportedRun) -> str:
    """The run's --task from its config.json; without that file, guessed from what its lines measure."""
    measured = {name for name, values in run.series.items() if np.isfinite(values).any()}
    guess = "preference" if "rewards/margin" in measured else "grpo" if "reward/mean" in measured else ""
    return str(run.config.get("config", {}).get("task") or guess)


def layout(task: str, moe: bool) -> list[Any]:
    """The rows of the picture, three axes in each."""
    if task == "grpo":
        rows = [["reward", "answers", "shares"], ["entropy", "kl", "faults"], ["loss", "norm", "rate"]]
        return (
            [*rows, ["speed", "time", "violation"], ["load"] * 3]
            if moe
            else [*rows, ["speed", "time", "time"]]
        )
    if task == "preference":
        rows = [["loss", "margin", "accuracy"], ["norm", "speed", "rate"]]
        return [*rows, ["violation", "load", "load"]] if moe else rows
    rows = [["loss", "loss", "norm"]]
    last = [["speed", "rate", "violation"], ["load"] * 3]
    return [*rows, *last] if moe else [*rows, ["speed", "rate", "rate"]]


def title(run: ReportedRun) -> str:
    done = int(run.steps[-1])
    parts = [run.name, f"{done:,} step{'s' * (done != 1)}"]
    if "parameters" in run.config:
        counts, mesh = run.config["parameters"], run.config["mesh"]
        parts.append(f"{short(counts['total'])} parameters, {short(counts['active'])} active")
        world = run.config["world"]
        parts.append(f"{world} rank{'s' * (world != 1)}: dp {mesh['dp']} × ep {mesh['ep']}")
        parts.append(run.config["versions"].get("gpu") or "CPU")
    return "  ·  ".join([*parts, "dotted: resumed"] if resumptions(run) else parts)


def resumptions(run: ReportedRun) -> list[int]:
    """Steps at which the run was resumed."""
    return [start["step"] for start in run.config.get("starts", []) if 0 < start["step"] < run.steps[-1]]


def short(number: float, _: object = None) -> str:
    """1234567 as 1.23M; usable as a tick formatter."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def dress(axis: Axes, run: ReportedRun) -> None:
    """Steps along the axis, a light grid, and a dotted line at each step at which the run was resumed."""
    axis.set_xlabel("step")
    first, last = run.steps[0], run.steps[-1]
    margin = 0.03 * (last - first) or 1
    axis.set_xlim(first - margin, last + margin)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.grid(True, color="#e6e6e6", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    for step in resumptions(run):
        axis.axvline(step, color=GREY, linewidth=0.8, linestyle=":")


def smooth(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Up to 400 points of the running median over a twentieth of the lines.

    One spike would move a mean; it does not move a median.
    """
    keep = np.isfinite(values)
    steps, values = steps[keep], values[keep]
    half = len(values) // 40
    at = np.unique(np.linspace(0, len(values) - 1, min(len(values), 400)).astype(int))
    return steps[at], np.array([np.median(values[max(0, i - half) : i + half + 1]) for i in at])


def curve(
    axis: Axes, steps: np.ndarray, values: np.ndarray, color: str = BLUE, raw: bool = True, label: str = ""
) -> None:
    """The smoothed values as a thick line, over a thin line of all values; a dot for a single value."""
    if raw:
        axis.plot(steps, values, color=PALE, linewidth=0.8)
    single = np.isfinite(values).sum() == 1
    axis.plot(*smooth(steps, values), color=color, linewidth=1.6, label=label, marker="o" if single else None)


def draw_loss(axis: Axes, run: ReportedRun) -> None:
    loss, val = run.series["loss"], run.series["val_loss"]
    curve(axis, run.steps, loss, label=f"training, smoothed{last_value(loss)}")
    if kind(run) != "grpo":  # for grpo a validation's loss is minus the mean reward
        draw_validation(axis, run.steps, val)
    entropy = run.config.get("facts", {}).get("unigram_entropy")
    if entropy is not None:
        label = f"unigram entropy ({entropy:.2f})"
        axis.axhline(entropy, color=GREY, linewidth=1, linestyle="--", label=label)
    axis.set_title(title_of_loss(run), loc="left")
    legend(axis)


def loss_of(run: ReportedRun) -> str | None:
    """The name of the loss of --task preference or grpo; None for other tasks."""
    task = kind(run)
    return run.config.get("config", {}).get(task, {}).get("loss") if task in ("preference", "grpo") else None


def title_of_loss(run: ReportedRun) -> str:
    """Name and unit of the loss that the task minimises."""
    config, task, name = run.config.get("config", {}), kind(run), loss_of(run)
    if task == "grpo":
        return f"Loss of the policy{f', {name}' if name else ''}"
    if task == "preference":
        return f"Loss, {'DPO (sigmoid)' if name == 'sigmoid' else name or 'of preferences'}"
    if task == "sft":
        weighed = config.get("sft", {}).get("dft")
        return "Loss, weighed by probability (dft)" if weighed else "Loss, nats a trained token"
    return "Loss, nats a token" if task == "pretrain" else "Loss"


def draw_validation(axis: Axes, steps: np.ndarray, values: np.ndarray, name: str = "validation") -> None:
    seen = np.isfinite(values)
    if seen.any():
        label = f"{name}{last_value(values)}"
        axis.plot(steps[seen], values[seen], "o-", color=RED, markersize=4, linewidth=0.8, label=label)


def draw_curves(axis: Axes, run: ReportedRun, picture: Curves) -> None:
    """Smoothed series over the steps, and the validation's numbers as dots."""
    heading, curves, validation, top = picture
    for (name, label), color in zip(curves.items(), COLOURS, strict=False):
        values = run.series[name]
        if np.isfinite(values).any():
            known = f"{label}{last_value(values)}"
            curve(axis, run.steps, values, color, raw=len(curves) == 1, label=known)
    if validation:
        draw_validation(axis, run.steps, run.series[validation])
    if top is not None:
        axis.set_ylim(0, top)
        axis.set_yticks(np.linspace(0, top, 5))
    axis.set_title(heading, loc="left")
    legend(axis)


def legend(axis: Axes) -> None:
    """Places the legend in a band above all curves: the scale is extended by the height of the legend."""
    handles, labels = axis.get_legend_handles_labels()
    if not labels:
        return
    axis.legend(
        handles, labels, frameon=False, loc="upper right", fontsize=9, labelspacing=0.3, borderpad=0.2
    )
    share = LEGEND_ROW * len(labels) + LEGEND_EDGE
    scale = axis.yaxis.get_transform()
    low, high = scale.transform(axis.get_ylim())
    top = scale.inverted().transform([low + (high - low) / (1 - share)])[0]
    axis.set_ylim(top=top)


def last_value(values: np.ndarray) -> str:
    known = values[np.isfinite(values)]
    return f" (last {known[-1]:.4g})" if known.size else ""


def draw_norm(axis: Axes, run: ReportedRun) -> None:
    norm = run.series["grad_norm"]
    curve(axis, run.steps, norm)
    if np.nanmax(norm, initial=0.0) > 0:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
    # If a step's own line was lost on a full disk, at most its validation's line is there, without an lr.
    missing = int((~np.isfinite(norm) & np.isfinite(run.series["lr"])).sum())
    axis.set_title("Gradient norm" + (f", {missing} not finite" if missing else ""), loc="left")
    clip = run.config.get("config", {}).get("optim", {}).get("clip")
    if clip:
        axis.axhline(clip, color=GREY, linewidth=1, linestyle="--", label=f"clipped at {clip:g}")
        legend(axis)


def draw_speed(axis: Axes, run: ReportedRun) -> None:
    rate, mfu = run.series["tokens_per_s"], run.series["mfu"]
    known = rate[np.isfinite(rate)]
    if not known.size:
        axis.set_title("Tokens/s, all ranks: known from the second line on", loc="left")
        axis.set_yticks([])
        return
    curve(axis, run.steps, rate)
    axis.yaxis.set_major_formatter(short)
    axis.set_ylim(0, 1.15 * known.max())
    heading = f"Tokens/s, all ranks: median {short(np.median(known))}"
    both = np.isfinite(mfu) & (rate > 0)
    if both.any() and (share := np.median(mfu[both] / rate[both])) > 0:
        # MFU is throughput in other units, so it gets a second scale instead of a second curve
        there, back = partial(np.multiply, share), partial(np.multiply, 1 / share)
        other = axis.secondary_yaxis("right", functions=(there, back))
        other.yaxis.set_major_formatter(PercentFormatter(1.0))
        other.spines["right"].set_visible(False)
        heading += f"; right: MFU, {np.nanmedian(mfu):.1%}"
    axis.set_title(heading, loc="left")


def draw_rate(axis: Axes, run: ReportedRun) -> None:
    marker = "o" if len(run.steps) == 1 else None
    axis.plot(run.steps, run.series["lr"], color=BLUE, linewidth=1.6, marker=marker)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:.1e}")
    axis.set_title("Learning rate", loc="left")


def draw_violation(axis: Axes, run: ReportedRun) -> None:
    known = np.isfinite(run.violation).all(1)
    steps, layers = run.steps[known], run.violation[known]
    if len(steps):
        curve(axis, steps, layers.max(1), RED, raw=False, label="worst layer")
        curve(axis, steps, layers.mean(1), label="mean of layers")
        axis.set_ylim(0, 1.1 * layers.max() + 1e-3)
        legend(axis)
    axis.set_title("Max violation: fullest expert over the mean, −1", loc="left")


def draw_load(axis: Axes, run: ReportedRun) -> None:
    """Layer x expert: an expert's share of its layer's routed pairs, 1 = uniform; blue idle, red crowded."""
    lines = min(WINDOW, len(run.steps))
    which = f"{lines} lines" if lines > 1 else "line"
    axis.set_title(f"Expert load over the last {which}, 1 = uniform share", loc="left")
    share = run.counts / np.maximum(run.counts.mean(1, keepdims=True), 1e-9)
    # The colour scale ends at 2, so that runs can be compared, or at the 99.5th percentile if that is more:
    # one runaway expert must not turn all others white.
    top = max(2.0, float(np.quantile(share, 0.995)))
    norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=top)
    image = axis.imshow(share, aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
    axis.set_xlabel("expert")
    axis.set_ylabel("layer")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    numbers = moe_layers(run, len(share))
    shown = range(0, len(share), -(-len(share) // 8))
    axis.set_yticks(list(shown), [str(numbers[i]) for i in shown])
    bar = axis.figure.colorbar(image, ax=axis, pad=0.01, extend="max" if share.max() > top else "neither")
    bar.set_ticks([0, 0.5, 1, (1 + top) / 2, top])
    bar.ax.yaxis.set_major_formatter("{x:.2g}")


def moe_layers(run: ReportedRun, layers: int) -> list[int]:
    """The block number of each MoE layer; dense blocks have no row."""
    model = run.config.get("config", {}).get("model", {})
    numbers = count(model.get("dense_layers", 0), model.get("moe_every", 1))
    return list(islice((i for i in numbers if i not in model.get("dense_blocks", ())), layers))


# Axes that need more than curves, and axes of curves alone: title, curves, validation, end of the scale.
PAINTERS = dict(loss=draw_loss, norm=draw_norm, speed=draw_speed, rate=draw_rate, violation=draw_violation)
PICTURES = dict(
    reward=Curves(
        "Reward",
        {"reward/mean": "mean, smoothed", "reward/std": "deviation, smoothed"},
        validation="val_reward/mean",
    ),
    answers=Curves("Answers, tokens", {"answers/tokens": "mean length, smoothed"}),
    shares=Curves(
        "Shares of answers, prompts and tokens",
        {
            "answers/truncated": "answers truncated",
            "reward/equal": "prompts rewarded equally",
            "policy/clipped": "tokens that the loss bounds",
        },
        top=1.0,
    ),
    entropy=Curves("Entropy of the policy, nats a token", {"policy/entropy": "smoothed"}),
    kl=Curves("Divergence from the sampler (k3), nats a token", {"policy/kl": "smoothed"}),
    faults=Curves("Faults of rewards in a step", {"reward/faults": "smoothed"}),
    time=Curves(
        "Shares of a step's time",
        {"time/rollout": "rollout", "time/rewards": "rewards", "time/update": "update"},
        top=1.0,
    ),
    further=Curves(
        "Loss of further tokens by depth, nats a token",
        {f"mtp/loss_{depth}": f"depth {depth}, smoothed" for depth in (1, 2, 3)},
    ),
    equal=Curves(
        "Share of drafts equal to the main head's",
        {f"mtp/equal_{depth}": f"depth {depth}, smoothed" for depth in (1, 2, 3)},
        top=1.0,
    ),
    margin=Curves(
        "Margin of rewards, chosen less rejected",
        {"rewards/margin": "training, smoothed"},
        validation="val_rewards/margin",
    ),
    accuracy=Curves(
        "Accuracy: share of pairs with a margin above 0",
        {"rewards/accuracy": "training, smoothed"},
        validation="val_rewards/accuracy",
        top=1.0,
    ),
)
OF_KTO = dict(
    margin="Margin of rewards, desirable less undesirable",
    accuracy="Accuracy: completions on their side of z",
)
