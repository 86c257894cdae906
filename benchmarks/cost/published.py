"""Compares the cost model with published training speeds of other programs, one row of published.jsonl each.

A row has the words of train.py with the same model, layout, batch and recomputation, the GPU, tokens/s a GPU
as published, sources that were read, and `cannot`, what the words and the model do not express. The model
predicts tmoe: a ratio far from 1 is a difference of the programs, or an error of the model where nothing was
measured (several nodes above all). No row sets a constant.

    gate           which experts a token chooses: tmoe/model/reach.py
    hops_overlap   constants.py; 1 for exchanges that send both hops at the same time
    skew           pairs of the busiest rank over the mean; 1 where the load is forced to be even

next: page.py
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.cost.constants import of_gpu, values
from benchmarks.cost.page import spelled
from benchmarks.cost.points import settings_of
from benchmarks.cost.step_time import predict
from tmoe.config.axes import Axes
from tmoe.config.run import Config

PUBLISHED = Path(__file__).with_name("published.jsonl")


class Compared(NamedTuple):
    """A published speed and the predicted one, in tokens/s a GPU."""

    row: dict[str, Any]
    cfg: Config
    axes: Axes
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted speed over published speed."""
        return self.predicted / self.row["tokens_per_s_gpu"]


def rows() -> list[dict[str, Any]]:
    """The published steps."""
    return [json.loads(line) for line in PUBLISHED.read_text().splitlines()]


def compared(constants: dict[str, dict]) -> list[Compared]:
    """Every published step with its prediction. constants: those of the H200."""
    found = []
    for row in rows():
        cfg = settings_of(row["command"], row["gpus"])
        axes = Axes.of(cfg.parallel, row["gpus"])
        m = values(of_gpu(constants, row["gpu"]))
        m.gate, m.hops_overlap = row["gate"], row["hops_overlap"]
        found.append(Compared(row, cfg, axes, predict(cfg, axes, m, row["skew"]).tokens_per_s_gpu))
    return found


def published_table(found: list[Compared]) -> Table:
    """A line for each published step."""
    table = Table(title="published steps of other programs", title_justify="left", box=SIMPLE_HEAD)
    heads = ["", "by", "model", "GPUs", "layout", "micro-batches", "recomputed", "tokens/s/GPU", "predicted"]
    for name in [*heads, "ratio"]:
        table.add_column(name)
    for number, one in enumerate(found, 1):
        row, cfg = one.row, one.cfg
        table.add_row(
            str(number),
            row["by"],
            row["model"],
            f"{row['gpus']} {row['gpu']}",
            spelled(cfg, one.axes),
            f"{cfg.train.accumulate} x {cfg.train.batch} x {cfg.train.seq}",
            row["recomputed"],
            f"{row['tokens_per_s_gpu']:,.0f}",
            f"{one.predicted:,.0f}",
            f"{one.ratio:.2f}",
        )
    return table


def not_expressed(found: list[Compared]) -> list[str]:
    """A line for each property that the model cannot express, with the numbers of the rows that have it."""
    lines: dict[str, list[str]] = {}
    for number, one in enumerate(found, 1):
        for what in one.row["cannot"]:
            lines.setdefault(what, []).append(str(number))
    return [f"not expressed: {what} (row {', '.join(numbers)})" for what, numbers in lines.items()]


def published_summary(found: list[Compared]) -> str:
    """The geometric mean of the ratios, and the ratio that is farthest from 1."""
    logs = [math.log(one.ratio) for one in found]
    worst = max(found, key=lambda one: abs(math.log(one.ratio)))
    return (
        f"predicted / published, {len(found)} rows: geometric mean {math.exp(sum(logs) / len(logs)):.2f}, "
        f"worst {worst.ratio:.2f} (row {found.index(worst) + 1})"
    )
