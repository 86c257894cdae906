"""Shows how evenly experts were used in the course of a run: python -m tmoe.routing RUN [RUN...].

next: log/routing_history.py
"""

from pathlib import Path
from typing import Annotated

import tyro

from tmoe.base.disk import expand_home
from tmoe.front import call, one_message
from tmoe.log.report import readable
from tmoe.log.routing_history import compare, describe, read_history
from tmoe.log.routing_report import paint, paint_beside, save


def main(runs: Annotated[tuple[Path, ...], tyro.conf.Positional], out: Path | None = None) -> None:
    """Draws RUN/routing.png of each run, load over time by layer and expert, and prints a summary.

    Several runs are compared in a line for each run, and in one more picture with the curves of all runs.

    Args:
        runs: run folders; a run that is still active can be drawn too
        out: the picture that compares several runs; None: routing-compare.png in the first run's folder
    """
    if not runs:
        raise ValueError("RUN: name one run folder or more")
    if out is not None and len(runs) == 1:
        raise ValueError(f"--out={out}: is for several runs; one is drawn as RUN/routing.png")
    histories = [read_history(run) for run in runs]
    for run, history in zip(runs, histories, strict=True):
        print(readable(describe(history)))
        print(readable(save(paint(history), run / "routing.png")), end="\n\n")
    if len(runs) > 1:
        print(readable(compare(histories)))
        print(readable(save(paint_beside(histories), out or runs[0] / "routing-compare.png")))


def command() -> None:
    """The command line."""
    with one_message():
        call(main, "python -m tmoe.routing", expand_home())
