"""Compares predicted steps with measured ones, and fits constants to the measured steps.

next: page.py
"""

import math
from types import SimpleNamespace

from rich.table import Table

from benchmarks.cost.constants import values
from benchmarks.cost.points import RESULTS, UNHELD, Point, fitted_layouts, read_points
from benchmarks.cost.step_time import predict

TOLERANCE = 0.1  # allowed relative error of a step time


def ratio(point: Point, m: SimpleNamespace) -> float:
    """Predicted seconds divided by measured seconds; memory is not predicted."""
    step = predict(point.cfg, point.axes, m, point.skew, held=0.0, ahead=point.ahead)
    return step.seconds / point.seconds


def check(points: list[Point], constants: dict[str, dict]) -> tuple[Table, bool]:
    """A table of predicted and measured times, and whether all agree within TOLERANCE."""
    m = values(constants)
    used = fitted_layouts(constants)
    table = Table("GPUs", "command", "measured ms", "predicted ms", "off", "point")
    worst = 0.0
    for p in points:
        off = ratio(p, m) - 1
        worst = max(worst, abs(off))
        measured, predicted = p.seconds * 1e3, p.seconds * (1 + off) * 1e3
        role = "fitted" if p.layout in used else "predicted"
        numbers = f"{measured:.1f}", f"{predicted:.1f}", f"{off:+.1%}"
        table.add_row(str(p.axes.world), p.command, *numbers, role)
    return table, worst <= TOLERANCE


def unheld(m: SimpleNamespace) -> list[str]:
    """The errors of the shipped steps that do not decide --check's code: one line for each file."""
    errors = {name: [ratio(p, m) - 1 for p in read_points([RESULTS / name])] for name in UNHELD}
    return [f"left out: {n}, off by {min(e):+.1%} to {max(e):+.1%}: {UNHELD[n]}" for n, e in errors.items()]


def fit(points: list[Point], names: list[str], m: SimpleNamespace) -> dict[str, float]:
    """Values of the named constants that minimise the sum of squared log ratios over these points.

    It is a search: each constant in turn is multiplied or divided by a step, which shrinks.
    """

    def loss(trial: dict[str, float]) -> float:
        return sum(math.log(ratio(p, SimpleNamespace(**{**vars(m), **trial}))) ** 2 for p in points)

    best = {name: getattr(m, name) for name in names}
    lowest = loss(best)
    step = 2.0
    while step > 1.001:
        tries = [{**best, name: best[name] * f} for name in names for f in (step, 1 / step)]
        least, number = min((loss(trial), number) for number, trial in enumerate(tries))
        if least < lowest:
            best, lowest = tries[number], least
        else:
            step = math.sqrt(step)
    return best
