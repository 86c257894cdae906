"""A table of figures and their bars, from parts that run one after the other, each in a separate process.

A part that fails, or is not done in its time, is named in the table, and all later parts still run.

    PARTS = dict(name=function)                  a function yields a Figure as soon as it has one
    flags(parser, PARTS, seconds=465)            --parts, --seconds, --device, --tiny, --json
    run("benchmarks.adapters", args, PARTS, LIMITS)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.sft import about
from benchmarks.train import running, write_line

LEAST = 15  # seconds without which no part begins


class Figure(NamedTuple):
    """A row of the table. bar: what it must be, in words; good: whether it is, None without a bar."""

    part: str
    what: str
    value: str
    bar: str = ""
    good: bool | None = None


Parts = dict[str, Callable[[argparse.Namespace], Iterator[Figure]]]


def at_most(part: str, what: str, value: float, bar: float | None, unit: str = "") -> Figure:
    if bar is None:
        return Figure(part, what, f"{value:.3f}{unit}")
    return Figure(part, what, f"{value:.3f}{unit}", f"at most {bar}{unit}", value <= bar)


def at_least(part: str, what: str, value: float, bar: float | None, unit: str = "") -> Figure:
    if bar is None:
        return Figure(part, what, f"{value:.3f}{unit}")
    return Figure(part, what, f"{value:.3f}{unit}", f"at least {bar}{unit}", value >= bar)


def row(figure: Figure) -> str:
    good = {None: "", True: "yes", False: "NO"}[figure.good]
    cells = (" ".join(cell.split()).replace("|", "/") for cell in figure[1:4])
    return f"| {figure.part} | {' | '.join(cells)} | {good} |"


def table(figures: Iterable[Figure]) -> str:
    head = "| part | figure | measured | bar | met |\n| --- | --- | --- | --- | --- |"
    return "\n".join([head, *map(row, figures)])


def flags(p: argparse.ArgumentParser, parts: Parts, default: list[str], seconds: float) -> None:
    """Adds the flags that all programs of this kind have."""
    p.add_argument("--parts", nargs="+", choices=parts, default=default)
    p.add_argument("--seconds", type=float, default=seconds, help="seconds of all parts")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--tiny", action="store_true", help="a model of a few thousand weights")
    p.add_argument("--json", type=Path, help="a folder, to which lines are appended")
    p.add_argument("--one", choices=parts, help=argparse.SUPPRESS)  # in the process of a part
    p.add_argument("--figures", type=Path, help=argparse.SUPPRESS)


def keep(args: argparse.Namespace, program: str, part: str, found: dict[str, Any]) -> None:
    """Appends a line to the program's file in the folder --json."""
    if args.json:
        write_line(args.json / f"{program}.jsonl", dict(part=part) | found | about(program))


def run_part(module: str, part: str, out: Path, seconds: float) -> list[Figure]:
    """The figures of a part, from its process."""
    words = [word for word in sys.argv[1:] if word != "--"]
    command = [sys.executable, "-m", module, "--one", part, "--figures", str(out)]
    with running([*command, *words], dict(os.environ)) as process:
        try:
            code = process.wait(seconds)
            ended = "" if code == 0 else f"ended with code {code}"
        except subprocess.TimeoutExpired:
            ended = f"not done within {seconds:.0f} s"
    figures = [Figure(*json.loads(line)) for line in out.read_text().splitlines()] if out.exists() else []
    return [*figures, Figure(part, "the part", ended, "done", False)] if ended else figures


def write_figures(args: argparse.Namespace, part: str, parts: Parts) -> None:
    """Runs a part in this process."""
    for figure in parts[part](args):
        print(row(figure), flush=True)
        if args.figures:
            write_line(args.figures, figure)  # pyrefly: ignore


def run(module: str, args: argparse.Namespace, parts: Parts, limits: Mapping[str, float]) -> None:
    """Runs the parts in processes of `module`, or the part --one in this process; prints the table last.

    limits: the most seconds of each part.
    """
    if args.one:
        return write_figures(args, args.one, parts)
    print(about(module.rpartition(".")[2]), flush=True)
    deadline = time.monotonic() + args.seconds
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as made:
        for part in args.parts:
            left = deadline - time.monotonic()
            if left < LEAST:
                figures.append(Figure(part, "the part", "no time was left", "done", False))
                continue
            began = time.monotonic()
            figures += run_part(module, part, Path(made) / f"{part}.jsonl", min(limits[part], left))
            print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{table(figures)}")
