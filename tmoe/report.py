"""Draws a run folder anew: python -m tmoe.report RUN.

next: run/report.py
"""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from tmoe.disk import expand_home
from tmoe.run.report import draw, readable


def main(run: Annotated[Path, tyro.conf.Positional]) -> None:
    """Draws RUN/report.png from RUN/metrics.jsonl.

    Args:
        run: a run folder
    """
    print(readable(draw(run)))


if __name__ == "__main__":
    try:
        tyro.cli(main, prog="python -m tmoe.report", args=expand_home())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
