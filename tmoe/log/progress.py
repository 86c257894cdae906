"""Shows a run's progress: a bar on a terminal, occasional lines elsewhere. If it fails, the run continues.

next: tmoe/log/report.py
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from tmoe.base.listing import counted
from tmoe.base.optional import Onlooker, say
from tmoe.config.run import Config

BAR_SECONDS = 0.5  # least seconds between two updates of the bar
PLAIN_SECONDS = 10.0  # without a terminal: seconds between lines


class Bar:
    """Progress on a terminal: step, loss, tokens/s, time left.

    Draws without rich's own thread, whose errors could not be caught.
    """

    def __init__(self, cfg: Config, start_step: int) -> None:
        # on a narrow terminal only the column of numbers is cut, at its end
        whole = Column(no_wrap=True, min_width=len(f"step {cfg.steps}/{cfg.steps}"))
        columns = (
            TextColumn("step {task.completed}/{task.total}", table_column=whole),
            BarColumn(40 if cfg.task == "pretrain" else 20),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("left", table_column=Column(no_wrap=True, min_width=4)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        )
        # the estimate starts at the first finished step, so it does not count compilation
        # the bar has its own console, because rich's shared console may be inside another program's display
        console = Console()
        self.bar = Progress(*columns, console=console, auto_refresh=False, speed_estimate_period=300)
        first = "first step: compiling" if cfg.compile else "first step"
        self.task = self.bar.add_task("", total=cfg.steps, completed=start_step, numbers=first)
        self.drawn = time.perf_counter()
        self.steps = cfg.steps
        self.validated = start_step  # step of the last validation

    def begin(self) -> None:
        self.bar.start()

    def advance(self, step: int) -> None:
        self.move(completed=step + 1)

    def show(self, line: dict[str, Any]) -> None:
        """Updates the bar; a validation also prints a line above the bar, which remains."""
        step = line["step"]
        if "val_loss" in line and step > self.validated:
            self.note(f"step {step}/{self.steps}  {summary(line)}")
            self.validated = step
        trained = {name: value for name, value in line.items() if name != "val_loss"}
        self.move(completed=step, numbers=summary(trained))

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
    """Progress without a terminal: a line for the first step, the last step and every validation.

    Between these, a line every PLAIN_SECONDS.
    """

    def __init__(self, cfg: Config, start_step: int) -> None:
        self.compiles = cfg.compile
        self.steps = cfg.steps
        self.first = start_step + 1
        self.since = 0.0  # time at which the first step ended, so that compilation is not counted
        self.last = -math.inf  # time of the last line

    def begin(self) -> None:
        if self.compiles and self.first <= self.steps:
            self.note("first step: compiling")

    def advance(self, step: int) -> None:
        pass

    def show(self, line: dict[str, Any]) -> None:
        now = time.perf_counter()
        step = line["step"]
        if now - self.last < PLAIN_SECONDS and step != self.steps and "val_loss" not in line:
            return
        if step == self.first:
            self.since = now
        self.last = now
        self.note(f"step {step}/{self.steps}  {summary(line)}{self.left(step, now)}")

    def left(self, step: int, now: float) -> str:
        """The time left in words; empty at the first and at the last step."""
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
    """Everything that rank 0 shows, from `begin` to `close`. After a failure only notes are printed."""

    def __init__(self, cfg: Config, start_step: int) -> None:
        self.cfg = cfg
        self.start_step = start_step
        self.shown: Bar | Lines = Silent(cfg, start_step)
        # a bar that is not closed would leave the cursor hidden and stdout redirected
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


# Numbers that the screen shows in addition to rewards and loss: the key in a line of metrics.jsonl, its text.
WATCHED = (
    ("answers/tokens", "answers of {:.0f} tokens"),
    ("answers/truncated", "{:.0%} truncated"),
    ("pass@1", "pass@1 {:.0%}"),
    ("rewards/margin", "margin {:.3f}"),
    ("rewards/accuracy", "accuracy {:.0%}"),
)


def summary(line: dict[str, Any]) -> str:
    """A step in one line: numbers of the task, of a validation, tokens/s, MFU.

    Unknown numbers are left out. A loss that is not finite, and a step without a reward, are shown as such.
    A validation is shown if the line has a val_loss; its value is None if the loss is not finite.
    """
    rewarded = "reward/mean" in line
    loss = f"loss {line['loss']:.4f}" if line["loss"] is not None else "loss not finite"
    # With --task grpo the loss says little, so the rewards are shown first.
    parts = [*rewards_of(line), loss] if rewarded else [loss, *numbers_of(line)]
    if "val_loss" in line:
        val_line = {name.removeprefix("val_"): line[name] for name in line if name.startswith("val_")}
        value = "not finite" if val_line["loss"] is None else f"{val_line['loss']:.4f}"
        first = rewards_of(val_line) if rewarded else [value, *numbers_of(val_line)]
        parts.append(f"val {', '.join(first)}")
    for name, text in (("tokens_per_s", "{:,.0f} tokens/s"), ("mfu", "MFU {:.1%}")):
        if line[name] is not None:
            parts.append(text.format(line[name]))
    return "  ".join(parts)


def validation(name: str, loss: float, measured: Mapping[str, float], step: int) -> str:
    """The result of a validation or a test as a line.

    name: "validation" or "test", the first word of the line.
    measured: what the task measures besides the loss. The loss of --task grpo is minus the mean reward.
    """
    if "reward/mean" in measured:
        first, *more = rewards_of(measured)
    else:
        first, more = f"loss {loss:.4f}", numbers_of(measured)
    line = f"{name} {first} after step {step}"
    return f"{line}; {', '.join(more)}" if more else line


def rewards_of(found: Mapping[str, Any]) -> list[str]:
    """The mean reward in words, the number of answers that had one, and the numbers of the answers."""
    reward, known = found.get("reward/mean"), found.get("reward/known")
    none = reward is None or math.isnan(reward)
    parts = ["no reward" if none else f"reward {reward:.4f}"]
    if known is not None:
        parts.append(f"rewarded {known:.0f}/{found['answers/count']:.0f}")
    if faults := round(found.get("reward/faults") or 0):
        parts.append(counted(faults, "fault"))
    return [*parts, *numbers_of(found)]


def numbers_of(found: Mapping[str, Any]) -> list[str]:
    """The numbers of WATCHED that are known, in words."""
    known = [(text, found.get(name)) for name, text in WATCHED]
    return [text.format(value) for text, value in known if value is not None]
