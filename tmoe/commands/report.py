"""Draws the report of a run folder again: python -m tmoe.report RUN.

next: log/report.py
"""

from pathlib import Path
from typing import Annotated

import tyro

from tmoe.base.disk import expand_home
from tmoe.front import call, one_message
from tmoe.log.report import draw, readable


def main(run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]) -> None:
    """Draws RUN/report.png from RUN/metrics.jsonl.

    Args:
        run: a run folder
    """
    print(readable(draw(run)))


def command() -> None:
    """The command line."""
    with one_message():
        call(main, "python -m tmoe.report", expand_home())
