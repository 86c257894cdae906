"""Shows a run's progress: a bar on a terminal, now and then a line elsewhere.

next: tmoe/report.py
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tmoe.config import Config

PLAIN_SECONDS = 10.0  # without a terminal: seconds between lines


class Bar:
    """Progress on a terminal: step, loss, tokens/s, time left."""

    def __init__(self, cfg: Config, start_step: int) -> None:
        texts = ("step {task.completed}/{task.total}", "{task.fields[numbers]}", "left")
        columns = (TextColumn(texts[0]), BarColumn(), TextColumn(texts[1]), TextColumn(texts[2]), TimeRemainingColumn())
        # the estimate starts at the first finished step, so compilation is not in it
        self.bar = Progress(*columns, refresh_per_second=2, speed_estimate_period=300)
        self.task = self.bar.add_task("", total=cfg.steps, completed=start_step, numbers="first step: compiling")
        self.bar.start()

    def advance(self, step: int) -> None:
        self.bar.update(self.task, completed=step + 1)

    def show(self, line: dict[str, Any]) -> None:
        self.bar.update(self.task, completed=line["step"] + 1, numbers=summary(line))

    def note(self, text: str) -> None:
        self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.bar.stop()


class Lines:
    """Progress where no terminal is: the first and the last step, every validation, else a line each PLAIN_SECONDS."""

    def __init__(self, cfg: Config, start_step: int) -> None:
        self.steps = cfg.steps
        self.first, self.since = start_step, 0.0  # the first step and when it ended: compilation lies before
        self.last = -math.inf

    def advance(self, step: int) -> None:
        pass

    def show(self, line: dict[str, Any]) -> None:
        now, step = time.perf_counter(), line["step"]
        if now - self.last < PLAIN_SECONDS and step != self.steps - 1 and line["val_loss"] is None:
            return
        if step == self.first:
            self.since = now
        self.last = now
        self.note(f"step {step + 1}/{self.steps}  {summary(line)}{self.left(step, now)}")

    def left(self, step: int, now: float) -> str:
        if step in (self.first, self.steps - 1):
            return ""
        seconds = (now - self.since) / (step - self.first) * (self.steps - 1 - step)
        return f"  left {timedelta(seconds=round(seconds))}"

    def note(self, text: str) -> None:
        with suppress(
            OSError, UnicodeError
        ):  # a full disk, a pipe that nobody reads, a name that is no text: no reason to end training
            print(text, flush=True)

    def close(self) -> None:
        pass


class Silent(Lines):
    """--log.no-progress and --eval-only: notes only."""

    def show(self, line: dict[str, Any]) -> None:
        pass


def make_display(cfg: Config, start_step: int) -> Bar | Lines:
    if not cfg.log.progress or cfg.eval_only:
        return Silent(cfg, start_step)
    return Bar(cfg, start_step) if Console().is_terminal else Lines(cfg, start_step)


def summary(line: dict[str, Any]) -> str:
    """What a person watches: loss, validation loss, tokens/s, MFU; a loss that is not a number is shown as one."""
    parts = [f"loss {line['loss']:.4f}" if line["loss"] is not None else "loss not finite"]
    for name, text in (("val_loss", "val {:.4f}"), ("tokens_per_s", "{:,.0f} tokens/s"), ("mfu", "MFU {:.1%}")):
        if line[name] is not None:
            parts.append(text.format(line[name]))
    return "  ".join(parts)
