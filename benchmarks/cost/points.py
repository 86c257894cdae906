"""Reads the measured steps in results/, sorts them by layout, and names the files that are not compared.

The cost model (step_time.py) is compared with these steps. A record is a line of `python -m benchmarks.train
--json`, whose command is one of train.py. Every file below results/ that has such a line is used. A file is
left out only by UNHELD, with the reason. Other benchmarks record the tokens a second of their loops.
"""

import functools
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tmoe.cli.parse import parse
from tmoe.config.axes import ALONE, Axes
from tmoe.config.run import Config

RESULTS = Path(__file__).parents[1] / "results"
# Files whose errors --check shows, but which do not decide its exit code.
UNHELD = {
    "accumulation/h200-before.jsonl": (
        "another code: separate kernels added gradients of micro-batches to their sums"
    ),
    "olmoe-1b-7b-4xH200/bench.jsonl": (
        "another code: before the symm exchange, working copies of parameters, flex "
        "attention and the AdamW in one pass"
    ),
    "steps-4xH200/pilot-behind.jsonl": (
        "another code: the shared expert ran after the exchange, not at the same time"
    ),
    "steps-4xH200/pilot-hosts.jsonl": (
        "three hosts that could not keep up (GPU idle for up to 14% of a traced step), "
        "before launches were replayed: the model has no host"
    ),
}


class Point(NamedTuple):
    """One measured step time."""

    command: str
    cfg: Config
    axes: Axes
    seconds: float
    skew: float | None = None
    """pairs of the busiest rank over the mean; None: the line does not record it"""
    ahead: bool = False
    """whether the run posted receives one ahead of need, as pipelines did before they posted them when due"""

    @property
    def layout(self) -> tuple:
        return layout(self.cfg, self.axes)


def layout(cfg: Config, axes: Axes) -> tuple:
    """The settings that a step's time depends on; not the number of steps, nor tracing or validation."""
    train = cfg.train
    parallel = cfg.parallel
    optim = cfg.optim
    step = train.batch, train.seq, train.accumulate, train.dtype, train.isolate_documents
    spread = (
        axes,
        parallel.dispatch,
        parallel.dispatch_dtype,
        parallel.checkpoint,
        parallel.gathered_gib,
    )
    if axes.cp > 1:
        spread += (parallel.cp_exchange,)
    if axes.pp > 1:
        spread += parallel.schedule, parallel.chunks
    return cfg.model, step, spread, optim.offload, optim.ema > 0


def step_files() -> list[Path]:
    """All files below results/ that contain a step of train.py."""
    files = sorted(RESULTS.rglob("*.jsonl"))
    return [path for path in files if any(is_step(line) for line in path.read_text().splitlines())]


def is_step(line: str) -> bool:
    """Whether a line of a file of results is the record of a step of train.py."""
    return '"tokens_per_s_gpu"' in line and '"command": "train.py ' in line


def held() -> list[Path]:
    """The files that the cost model is compared with."""
    return [path for path in step_files() if path.relative_to(RESULTS).as_posix() not in UNHELD]


def read_points(paths: list[Path]) -> list[Point]:
    """The measured steps of files; an unreadable file ends the program with one line."""
    points = []
    try:
        lines = [(path, line) for path in paths for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"--check: {error}") from None
    if not lines:
        raise SystemExit(f"--check {' '.join(map(str, paths))}: holds no line to compare with")
    for file, line in lines:
        try:
            points.append(point_of(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
            what = "not a line of `python -m benchmarks.train --json`"
            raise SystemExit(f"--check {file}: {what}: {line[:80]}") from None
    return points


@functools.cache
def settings_of(command: str, gpus: int) -> Config:
    """The settings of a recorded command; many records have the same."""
    return parse(command.split()[1:], "", world=gpus)


def point_of(record: dict[str, Any]) -> Point:
    """The measurement that a line of `python -m benchmarks.train --json` records."""
    cfg = settings_of(record["command"], record["gpus"])
    if "cut" in record:  # a cut by time changes with the constants
        cfg = replace(cfg, parallel=replace(cfg.parallel, cut=tuple(record["cut"])))
    axes = Axes.of(cfg.parallel, record["gpus"])
    train = cfg.train
    tokens = axes.readers * train.batch * train.seq * train.accumulate
    seconds = tokens / axes.world / record["tokens_per_s_gpu"]
    skew = statistics.median(record["busiest_rank"]) if "busiest_rank" in record else None
    return Point(record["command"], cfg, axes, seconds, skew, record.get("receives") == "one ahead")


def fitted_layouts(constants: dict[str, dict]) -> list[tuple]:
    """Layouts with a run that set a constant: all runs of these layouts count as fitted."""
    runs = [run for c in constants.values() for run in c.get("points", ())]
    layouts = []
    for run in runs:
        cfg = settings_of(run["command"], run["gpus"])
        layouts.append(layout(cfg, Axes.of(cfg.parallel, run["gpus"])))
    return layouts


def summary(points: list[Point], errors: list[float], fitted: list[tuple]) -> str:
    """A line for each kind of point: the number of points, of layouts, and their errors."""

    def off(name: str, which: list[bool]) -> str:
        its = [error for error, inside in zip(errors, which, strict=True) if inside]
        layouts = len({p.layout for p, inside in zip(points, which, strict=True) if inside})
        if not its:
            return f"{name}: none"
        worst, mean = max(its, key=abs), sum(its) / len(its)
        return f"{name}: {len(its)} steps of {layouts} layouts, worst {worst:+.1%}, mean {mean:+.1%}"

    kinds = {
        "all": [True for _ in points],
        "layouts that set no constant": [p.layout not in fitted for p in points],
        "one GPU": [p.axes.world == 1 for p in points],
        "dp alone": [p.axes == Axes(dp=p.axes.world) != ALONE for p in points],
        "ep > 1": [p.axes.ep > 1 for p in points],
        "other axes": [p.axes != Axes(dp=p.axes.dp, ep=p.axes.ep) for p in points],
    }
    return "\n".join(off(name, which) for name, which in kinds.items())
