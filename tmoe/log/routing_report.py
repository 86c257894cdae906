"""Draws how a run's experts were loaded over time: layer x expert x step, or several runs side by side.

python -m tmoe.routing RUN [RUN...]
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from tmoe.base.disk import naming
from tmoe.config.balance_settings import NAMES
from tmoe.log.report import any_backend, readable
from tmoe.log.routing_history import History, mean_of

with any_backend():
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

MOST_MAPS = 12  # most layers whose load a picture shows; with more, 12 layers evenly spread over the depth
COLOURS = ("#1f5fa8", "#c8442c", "#2e8b57", "#8a5fb0", "#b8860b", "#666666", "#d16ba5", "#20808d")


def shown_layers(history: History) -> list[int]:
    """Indices of the MoE layers that get their own map."""
    layers = len(history.blocks)
    return np.unique(np.linspace(0, layers - 1, min(layers, MOST_MAPS)).round().astype(int)).tolist()


def paint(history: History) -> Figure:
    """The picture of one run: curves over steps, the violation of all layers, and maps of expert x step."""
    layers = shown_layers(history)
    rows = -(-len(layers) // 3)
    figure = Figure(figsize=(15, 5.4 + 2.3 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    span = f"steps {history.steps[0]:,} to {history.steps[-1]:,}"
    heading = f"{readable(history.name)}  ·  routing of {span}"
    figure.suptitle(heading, fontsize=13, x=0.012, ha="left", parse_math=False)
    grid = figure.add_gridspec(2 + rows, 3, height_ratios=[2.5, 2.5, *[2.3] * rows])
    cells = [figure.add_subplot(grid[i // 3, i % 3]) for i in range(6)]
    draw_violation(cells[0], [history])
    draw_by_layer(cells[1], history, top_violation(history), "Violation by block")
    draw_mean(cells[2], [history], "entropy", "Entropy of the router, nats")
    draw_mean(cells[3], [history], "dropped", "Dropped pairs, share")
    draw_mean(cells[4], [history], "bias", "Choice bias, largest less smallest")
    draw_losses(cells[5], [history])
    shares = history.shares()
    for place, y in enumerate(layers):
        axis = figure.add_subplot(grid[2 + place // 3, place % 3])
        draw_load(axis, history, shares[:, y], f"Block {history.blocks[y]}: load, 1 = even")
    return figure


def paint_beside(histories: list[History]) -> Figure:
    """The picture of several runs: each curve of all runs in one axis, and a map of layer x step for each."""
    rows = -(-len(histories) // 3)
    figure = Figure(figsize=(15, 5.4 + 2.5 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2 + rows, 3)
    cells = [figure.add_subplot(grid[i // 3, i % 3]) for i in range(5)]
    draw_violation(cells[0], histories)
    draw_mean(cells[1], histories, "entropy", "Entropy of the router, nats")
    draw_mean(cells[2], histories, "dropped", "Dropped pairs, share")
    draw_mean(cells[3], histories, "bias", "Choice bias, largest less smallest")
    draw_losses(cells[4], histories)
    top = max(map(top_violation, histories))  # one scale for all runs
    for place, history in enumerate(histories):
        axis = figure.add_subplot(grid[2 + place // 3, place % 3])
        draw_by_layer(axis, history, top, f"{readable(history.name)}: violation by block")
    return figure


def dress(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", parse_math=False)
    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def draw_violation(axis: Axes, histories: list[History]) -> None:
    """The mean over layers as a thick line, the worst layer as a thin line."""
    for history, colour in zip(histories, _colours(len(histories)), strict=True):
        worst = np.nanmax(np.nan_to_num(history.violation, nan=-1.0), axis=1)
        label = readable(history.name) if len(histories) > 1 else "mean of blocks (thin: worst)"
        axis.plot(history.steps, mean_of(history.violation.T), color=colour, linewidth=1.6, label=label)
        axis.plot(history.steps, np.where(worst < 0, np.nan, worst), color=colour, linewidth=0.7, alpha=0.6)
    axis.set_ylim(bottom=0)
    _legend(axis)
    dress(axis, "Violation: fullest expert over the mean, −1")


def draw_mean(axis: Axes, histories: list[History], name: str, title: str) -> None:
    """The mean over layers of one attribute of History."""
    for history, colour in zip(histories, _colours(len(histories)), strict=True):
        axis.plot(history.steps, mean_of(getattr(history, name).T), color=colour, linewidth=1.6)
    axis.set_ylim(bottom=0)
    dress(axis, title)


def draw_losses(axis: Axes, histories: list[History]) -> None:
    """The mean over layers of each balancing loss. Other logged losses are of another scale and left out."""
    many = len(histories) > 1
    terms = [(history, x) for history in histories for x, name in enumerate(history.losses) if name in NAMES]
    for (history, x), colour in zip(terms, _colours(len(terms)), strict=True):
        label = f"{readable(history.name)} {history.losses[x]}" if many else history.losses[x]
        axis.plot(
            history.steps, mean_of(history.of_losses[:, :, x].T), color=colour, linewidth=1.4, label=label
        )
    _legend(axis)
    dress(axis, "Balancing losses without coefficients" if terms else "No balancing loss is known")


def _legend(axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        # a $ in a run's name does not start a formula
        axis.legend(handles, [label.replace("$", r"\$") for label in labels], frameon=False, fontsize=8)


def top_violation(history: History) -> float:
    """The end of the map's colour scale: the 99th percentile, so that one spike does not darken the rest."""
    known = history.violation[np.isfinite(history.violation)]
    return max(float(np.quantile(known, 0.99)), 1e-3) if known.size else 1.0


def draw_by_layer(axis: Axes, history: History, top: float, title: str) -> None:
    """The violation, layer x step, in as many columns as the loads have bins."""
    bins = np.clip(np.searchsorted(history.edges, history.steps, "right") - 1, 0, len(history.load) - 1)
    columns = np.stack([mean_of(history.violation[bins == i]) for i in range(len(history.load))])
    edges = np.arange(len(history.blocks) + 1) - 0.5
    image = axis.pcolormesh(history.edges, edges, columns.T, cmap="viridis", vmin=0, vmax=top)
    shown = range(0, len(history.blocks), -(-len(history.blocks) // 8))
    axis.set_yticks(list(shown), [str(history.blocks[i]) for i in shown])
    axis.set_ylabel("block")
    axis.figure.colorbar(image, ax=axis, pad=0.01)
    dress(axis, title)


def draw_load(axis: Axes, history: History, shares: np.ndarray, title: str) -> None:
    """Expert x step of one layer; blue idle, white even, red crowded, from 0 to 2 or more."""
    known = shares[np.isfinite(shares)]
    top = max(2.0, float(np.quantile(known, 0.995))) if known.size else 2.0
    norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=top)
    edges = np.arange(shares.shape[1] + 1) - 0.5
    image = axis.pcolormesh(history.edges, edges, shares.T, cmap="RdBu_r", norm=norm)
    axis.set_ylabel("expert")
    axis.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.figure.colorbar(image, ax=axis, pad=0.01, ticks=[0, 1, top], format="%.2g")
    dress(axis, title)


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def save(figure: Figure, out: Path) -> Path:
    """Writes the picture under a temporary name first, so that an incomplete one never has the name `out`."""
    aside = out.with_name(out.name + ".tmp")
    try:
        with naming(out):
            figure.savefig(aside, format="png")
            os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    return out
