"""Reads a run's routing over time from routing.bin into arrays of bounded size, and describes it in words.

next: tmoe/log/routing_report.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tmoe.log.metrics_file import read_steps
from tmoe.log.routing_log import RoutingRecord, read_records

MOST_BINS = 512  # bins of the load over time: more cannot be seen, and a long run's counts would fill memory
IDLE = 0.05  # an expert is idle below this share of an even load
END = 10  # "first" and "last" in words mean the first and last tenth of the records


@dataclass
class History:
    """Numbers of the MoE layers over time. Y: MoE layers. n: records. Shares are NaN without a pair."""

    name: str
    blocks: list[int]  # block number of each MoE layer
    losses: tuple[str, ...]
    steps: np.ndarray  # [n]
    violation: np.ndarray  # [n, Y], fullest expert over the mean, less 1
    entropy: np.ndarray  # [n, Y], nats
    dropped: np.ndarray  # [n, Y], share of pairs
    bias: np.ndarray  # [n, Y], largest less smallest choice bias
    of_losses: np.ndarray  # [n, Y, X]
    load: np.ndarray  # [bins, Y, E], routed pairs
    edges: np.ndarray  # [bins + 1], steps

    @property
    def pairs(self) -> float:
        return float(self.load.sum())

    def shares(self) -> np.ndarray:
        """Each expert's load divided by the mean of its layer, [bins, Y, E]; 1 is even."""
        mean = self.load.mean(-1, keepdims=True)
        return np.divide(self.load, mean, out=np.full_like(self.load, np.nan), where=mean > 0)


@dataclass
class _Bins:
    """Loads of consecutive records, added up into at most MOST_BINS bins."""

    size: int = 1  # records in a bin
    loads: list[np.ndarray] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, step: int, load: np.ndarray) -> None:
        if self.count % self.size == 0:
            if len(self.loads) == MOST_BINS:
                odd = self.loads[1::2]
                self.loads = [a + b for a, b in zip(self.loads[::2], odd, strict=True)]
                self.starts = self.starts[::2]
                self.size *= 2
            self.loads.append(np.zeros(load.shape))
            self.starts.append(step)
        self.loads[-1] += load
        self.count += 1


def read_history(run: Path) -> History:
    """The history of a run folder.

    Raises ValueError, which names the folder, if nothing is recorded of its routers.
    """
    bins = _Bins()
    rows: list[tuple[Any, ...]] = []
    of_losses: list[dict[str, np.ndarray]] = []
    shape = None
    for record in records_of(run):
        if shape not in (None, record.counts_LE.shape):
            raise ValueError(f"{run}: step {record.step} is of another model than the steps before")
        shape = record.counts_LE.shape
        bins.add(record.step, record.counts_LE)
        rows.append(_row(record))
        of_losses.append(dict(zip(record.losses, record.losses_LX.T, strict=True)))
    if shape is None:
        raise ValueError(f"{run}: has no routing.bin with a record; name a run of a model with MoE layers")
    steps, *columns = (np.array(column) for column in zip(*rows, strict=True))
    losses = tuple(dict.fromkeys(name for known in of_losses for name in known))  # a resumed run may add some
    unknown = np.full(shape[0], np.nan)
    by_loss = [[known.get(name, unknown) for name in losses] for known in of_losses]
    return History(
        run.resolve().name,
        moe_blocks(read_config(run), shape[0]),
        losses,
        steps,
        *columns,
        of_losses=np.array(by_loss, float).reshape(len(steps), len(losses), shape[0]).transpose(0, 2, 1),
        load=np.stack(bins.loads),
        edges=np.array([*bins.starts, int(steps[-1]) + 1]),
    )


def _row(record: RoutingRecord) -> tuple[Any, ...]:
    """A record's step, and its numbers for each layer."""
    counts = record.counts_LE.astype(np.float64)
    sums = counts.sum(1)
    known = np.where(sums > 0, sums, np.nan)
    violation = counts.max(1) * counts.shape[1] / known - 1
    span = record.bias_LE.max(1) - record.bias_LE.min(1)
    return record.step, violation, record.entropy_L, record.dropped_LE.sum(1) / known, span


def records_of(run: Path) -> Iterator[RoutingRecord]:
    """The records of routing.bin; for a run older than that file, the ones that metrics.jsonl holds."""
    if (run / "routing.bin").exists():
        yield from read_records(run / "routing.bin")
        return
    for _, line in read_steps(run / "metrics.jsonl"):
        if not line.get("expert_counts"):
            continue
        try:
            counts = np.array(line["expert_counts"], dtype=np.int64)
            entropy = np.array(line.get("entropy") or [None] * len(counts), dtype=np.float64)
            zeros = np.zeros(counts.shape)
            yield RoutingRecord(line["step"], (), counts, zeros, zeros, entropy, zeros[:, :0])
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise ValueError(
                f"{run / 'metrics.jsonl'}: step {line['step']}: no line of a run: {error}"
            ) from error


def read_config(run: Path) -> dict[str, Any]:
    """The content of a run folder's config.json; empty if the file is missing or unreadable."""
    try:
        config = json.loads((run / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def moe_blocks(config: dict[str, Any], layers: int) -> list[int]:
    """The block number of each MoE layer, from the model settings of a config.json."""
    try:
        model = config["config"]["model"]
        first, every, dense = model["dense_layers"], model["moe_every"], model["dense_blocks"]
        blocks = [i for i in range(first, model["layers"], every) if i not in dense]
    except (KeyError, TypeError, ValueError):
        blocks = []
    return blocks if len(blocks) == layers else list(range(layers))


# ---- in words ----

LEGEND = f"""violation: fullest expert over the mean, less 1. a > b: means over the first and the last tenth
of the records; one number: over the last. fullest, emptiest: expert (its load over the mean). idle: experts
below {IDLE:.0%} of an even load. Losses are without their coefficients"""


def ends(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over the first and over the last tenth of the first dimension; NaN is left out."""
    tenth = max(1, len(values) // END)
    return tuple(mean_of(part) for part in (values[:tenth], values[-tenth:]))  # pyrefly: ignore


def mean_of(values: np.ndarray) -> np.ndarray:
    """The mean of the finite values over the first dimension; NaN if there are none."""
    finite = np.isfinite(values)
    count = finite.sum(0)
    sums = np.where(finite, values, 0).sum(0)
    return np.divide(sums, count, out=np.full(sums.shape, np.nan), where=count > 0)


def last_shares(history: History) -> np.ndarray:
    """Each expert's load divided by its layer's mean, in the last tenth of the records, [Y, E]."""
    load = history.load[-max(1, len(history.load) // END) :].sum(0)
    mean = load.mean(1, keepdims=True)
    return np.divide(load, mean, out=np.full_like(load, np.nan), where=mean > 0)


def describe(history: History) -> str:
    """A run in words: one line for each MoE block, with its first and its last tenth."""
    violation, entropy = ends(history.violation), ends(history.entropy)
    dropped, losses = ends(history.dropped)[1], ends(history.of_losses)[1]
    shares = last_shares(history)
    head = ["block", "violation", "entropy", "dropped", "bias span", "fullest", "emptiest", "idle"]
    table = [[*head, *history.losses]]
    for y, block in enumerate(history.blocks):
        known = np.isfinite(shares[y]).all()
        full, empty = (f"{at} ({shares[y, at]:.2f})" for at in (shares[y].argmax(), shares[y].argmin()))
        table.append(
            [
                str(block),
                f"{violation[0][y]:.2f} > {violation[1][y]:.2f}",
                f"{entropy[0][y]:.2f} > {entropy[1][y]:.2f}",
                f"{dropped[y]:.2%}",
                f"{history.bias[-1, y]:.4f}",
                *((full, empty) if known else ("-", "-")),
                str(int((shares[y] < IDLE).sum())),
                *(f"{value:.4f}" for value in losses[y]),
            ]
        )
    first, last = history.steps[0], history.steps[-1]
    blocks = f"{len(history.blocks)} MoE blocks of {history.load.shape[2]} experts"
    records = f"{history.name}: {len(history.steps):,} records of steps {first:,} to {last:,}, {blocks}"
    return "\n".join([f"{records}, {history.pairs:,.0f} routed pairs", *aligned(table), LEGEND])


def compare(histories: list[History]) -> str:
    """Several runs, one line each: means over layers, and the worst layer."""
    names = dict.fromkeys(name for history in histories for name in history.losses)
    head = ["run", "steps", "violation", "worst block", "entropy", "dropped", "idle", *names]
    table = [head]
    for history in histories:
        first, last = ends(history.violation)
        losses = dict(zip(history.losses, mean_of(ends(history.of_losses)[1]), strict=True))
        worst = int(np.nan_to_num(last, nan=-1.0).argmax())
        table.append(
            [
                history.name,
                f"{int(history.steps[-1]):,}",
                f"{mean_of(first):.2f} > {mean_of(last):.2f}",
                f"{history.blocks[worst]} ({last[worst]:.2f})",
                f"{mean_of(ends(history.entropy)[1]):.2f}",
                f"{mean_of(ends(history.dropped)[1]):.2%}",
                f"{int((last_shares(history) < IDLE).sum())} of {last_shares(history).size}",
                *(f"{losses[name]:.4f}" if name in losses else "-" for name in names),
            ]
        )
    return "\n".join(aligned(table))


def aligned(table: list[list[str]]) -> list[str]:
    """The lines of a table, with the first column aligned left and numbers aligned right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in table)
    return ["  ".join([row[0].strip().ljust(widths[0]), *row[1:]]).rstrip() for row in rows]
