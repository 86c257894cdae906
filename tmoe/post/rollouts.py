"""rollouts.jsonl of a run folder: samples of every step with their rewards, written and read.

A line is a sample: step, number (the prompt's), sample, prompt, answer, reward, parts, finish, tokens,
advantage. A value that is unknown or not finite is null.

next: tmoe/commands/rollouts.py
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tmoe.base.optional import Onlooker
from tmoe.log.metrics_file import COMPACT, COUNTED, append, read_lines, rewind

NAME = "rollouts.jsonl"
KEYS = "step", "number", "sample", "prompt", "answer", "reward", "parts", "finish", "tokens", "advantage"


class Rollout(NamedTuple):
    """A sampled answer, its rewards and its advantage."""

    step: int
    """from 1 on"""
    number: int
    """number of the prompt"""
    sample: int
    """number of the answer among those to its prompt"""
    prompt: str
    answer: str
    reward: float | None
    parts: dict[str, float | None]
    """rewards by name, without their weights"""
    finish: str
    """stop or length"""
    tokens: int
    """number of tokens of the answer"""
    advantage: float | None


class RolloutLog:
    """Writes the rollouts of a run. One process of a run has such a log.

    Args:
        run: the run folder.
        done: steps that were done before this process. Lines of later steps are dropped; they are written
            again. With 0, a new run, lines that the file has are kept in rollouts.before-N.jsonl.
        keep: most samples of a step that are written. If a step has more, the written ones are evenly spaced
            by rank of their reward, from the worst to the best.
        say: prints a line if the file cannot be written. The run then continues without the file.
    """

    def __init__(self, run: Path, done: int, keep: int, say: Callable[[str], Any]) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: samples of a step that are kept must be at least 1")
        self.path = run / NAME
        self.keep = keep
        self.look = Onlooker(f"{self.path}: could not be written", say, self.close)
        self.file: BinaryIO | None = None
        self.look(lambda: self.open(done))

    def open(self, done: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if done:
            rewind(self.path, done)
        elif self.path.exists() and self.path.stat().st_size:
            copies = (self.path.with_name(f"rollouts.before-{n}.jsonl") for n in itertools.count(1))
            os.replace(self.path, next(path for path in copies if not path.exists()))
        self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def write(self, rollouts: Sequence[Rollout]) -> None:
        """Writes the samples of one step: all lines at once, or none."""
        lines = [as_line(rollout) for rollout in spread(rollouts, self.keep)]
        if (file := self.file) is not None:
            self.look(lambda: append(file, b"".join(lines)))

    def close(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            file.close()


def as_line(rollout: Rollout) -> bytes:
    """The line of a sample, ASCII only, so that any text is read back unchanged."""
    fields = rollout._asdict() | COUNTED
    fields |= dict(reward=_finite(rollout.reward), advantage=_finite(rollout.advantage))
    fields["parts"] = {name: _finite(value) for name, value in rollout.parts.items()}
    return json.dumps(fields, allow_nan=False, separators=COMPACT).encode() + b"\n"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def rank(rollout: Rollout) -> tuple[float, int, int]:
    """Sort key: by reward, samples without one first; at equal rewards by prompt and sample."""
    known = _finite(rollout.reward)
    return (-math.inf if known is None else known, rollout.number, rollout.sample)


def spread(rollouts: Sequence[Rollout], keep: int) -> list[Rollout]:
    """At most `keep` rollouts, evenly spaced by rank with both ends, in their given order."""
    if len(rollouts) <= keep:
        return list(rollouts)
    order = sorted(range(len(rollouts)), key=lambda i: rank(rollouts[i]))
    last = len(rollouts) - 1
    picked = {order[last]} if keep == 1 else {order[i * last // (keep - 1)] for i in range(keep)}
    return [rollout for i, rollout in enumerate(rollouts) if i in picked]


def read_rollouts(run: Path) -> Iterator[Rollout]:
    """The rollouts of a run folder in the order of its file; torn and foreign lines are skipped.

    Raises ValueError, which names the folder, if it has no such file.
    """
    path = run / NAME
    if not path.is_file():
        raise ValueError(f"{run}: has no {NAME}; name the folder of a run with --task grpo")
    for line in read_lines(path):
        if line is not None and _is_rollout(line):
            yield Rollout(*(line[key] for key in KEYS))


def _is_rollout(line: dict[str, Any]) -> bool:
    def number(value: Any) -> bool:
        return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))

    return (
        all(key in line for key in KEYS)
        and all(isinstance(line[key], str) for key in ("prompt", "answer", "finish"))
        and all(isinstance(line[key], int) for key in ("number", "sample", "tokens"))
        and number(line["reward"])
        and number(line["advantage"])
        and isinstance(line["parts"], dict)
        and all(map(number, line["parts"].values()))
    )
