"""Shows a run's progress: a bar on a terminal, now and then a line elsewhere. If that fails, the run goes on.

next: tmoe/run/report.py
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tmoe.config.run import Config
from tmoe.onlookers import Onlooker, say

BAR_SECONDS = 0.5  # between two pictures of the bar
PLAIN_SECONDS = 10.0  # without a terminal: seconds between lines


class Bar:
    """Progress on a terminal: step, loss, tokens/s, time left.

    It does without rich's thread, whose errors could not be caught.
    """

    def __init__(self, cfg: Config, start_step: int) -> None:
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        # the estimate starts at the first finished step, so compilation is not in it
        self.bar = Progress(*columns, auto_refresh=False, speed_estimate_period=300)
        self.task = self.bar.add_task(
            "", total=cfg.steps, completed=start_step, numbers="first step: compiling"
        )
        self.drawn = time.perf_counter()

    def begin(self) -> None:
        self.bar.start()

    def advance(self, step: int) -> None:
        self.move(completed=step + 1)

    def show(self, line: dict[str, Any]) -> None:
        self.move(completed=line["step"], numbers=summary(line))

    def move(self, **values: Any) -> None:
        now = time.perf_counter()
        due = now - self.drawn >= BAR_SECONDS
        if due:
            self.drawn = now
        self.bar.update(self.task, refresh=due, **values)

    def note(self, text: str) -> None:
        self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.bar.stop()


class Lines:
    """Progress without a terminal: a line for the first and last step and every validation.

    Between those, a line each PLAIN_SECONDS.
    """

    def __init__(self, cfg: Config, start_step: int) -> None:
        self.compiles = cfg.compile
        self.steps = cfg.steps
        self.first = start_step + 1
        self.since = 0.0  # when the first step ended: compilation lies before
        self.last = -math.inf  # when a line was last printed

    def begin(self) -> None:
        if self.compiles and self.first <= self.steps:
            self.note("first step: compiling")

    def advance(self, step: int) -> None:
        pass

    def show(self, line: dict[str, Any]) -> None:
        now = time.perf_counter()
        step = line["step"]
        if now - self.last < PLAIN_SECONDS and step != self.steps and line["val_loss"] is None:
            return
        if step == self.first:
            self.since = now
        self.last = now
        self.note(f"step {step}/{self.steps}  {summary(line)}{self.left(step, now)}")

    def left(self, step: int, now: float) -> str:
        """The time left in words; nothing at the first and at the last step."""
        if step in (self.first, self.steps):
            return ""
        seconds = (now - self.since) / (step - self.first) * (self.steps - step)
        return f"  left {timedelta(seconds=round(seconds))}"

    def note(self, text: str) -> None:
        say(text)

    def close(self) -> None:
        pass


class Silent(Lines):
    """With --eval-only: notes only."""

    def begin(self) -> None:
        pass

    def show(self, line: dict[str, Any]) -> None:
        pass


class Display:
    """What rank 0 shows, from `begin` to `close`. Once that has failed, notes alone are printed."""

    def __init__(self, cfg: Config, start_step: int) -> None:
        self.cfg = cfg
        self.start_step = start_step
        self.shown: Bar | Lines = Silent(cfg, start_step)
        # a bar that stays open keeps the cursor hidden and stdout behind itself
        self.look = Onlooker("progress could not be shown", say, leave=lambda: self.shown.close())

    def begin(self) -> None:
        self.shown = self.look(self.choose) or self.shown
        self.look(lambda: self.shown.begin())

    def choose(self) -> Bar | Lines:
        if self.cfg.eval_only:
            return self.shown
        bar = self.cfg.log.progress and Console().is_terminal
        return (Bar if bar else Lines)(self.cfg, self.start_step)

    def advance(self, step: int) -> None:
        self.look(lambda: self.shown.advance(step))

    def show(self, line: dict[str, Any]) -> None:
        self.look(lambda: self.shown.show(line))

    def note(self, text: str) -> None:
        self.look(lambda: self.shown.note(text))
        if not self.look.works:
            say(text)

    def close(self) -> None:
        self.look(lambda: self.shown.close())


def summary(line: dict[str, Any]) -> str:
    """What a person watches: loss, validation loss, tokens/s, MFU.

    What is not known is left out. A loss that is not finite is shown as that.
    """
    parts = [f"loss {line['loss']:.4f}" if line["loss"] is not None else "loss not finite"]
    for name, text in (
        ("val_loss", "val {:.4f}"),
        ("tokens_per_s", "{:,.0f} tokens/s"),
        ("mfu", "MFU {:.1%}"),
    ):
        if line[name] is not None:
            parts.append(text.format(line[name]))
    for name in ("", "val_"):
        if (known := line.get(f"{name}reward/known")) is not None:
            parts.append(f"{name.replace('_', ' ')}rewarded {known:.0f}/{line[f'{name}answers/count']:.0f}")
    return "  ".join(parts)
