"""rollouts.jsonl of a run folder: samples of every step with their rewards, written and read.

A line is a sample: step, number (the prompt's), sample, prompt, answer, reward, parts, finish, tokens,
advantage. What is unknown or not finite is null.

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
from tmoe.log.lines import COMPACT, COUNTED, append, read_lines, rewind

NAME = "rollouts.jsonl"
KEYS = "step", "number", "sample", "prompt", "answer", "reward", "parts", "finish", "tokens", "advantage"


class Rollout(NamedTuple):
    """A sample and what became of it."""

    step: int
    """from 1 on"""
    number: int
    """the prompt's"""
    sample: int
    """which answer to the prompt"""
    prompt: str
    answer: str
    reward: float | None
    parts: dict[str, float | None]
    """rewards by name, without their weights"""
    finish: str
    """stop or length"""
    tokens: int
    """of the answer"""
    advantage: float | None


class RolloutLog:
    """Writes rollouts of a run; one process of a run does.

    done: steps that were done before this process. Lines of later ones are dropped, to be written again. A
    run that begins anew, with none, keeps all lines that it finds in rollouts.before-N.jsonl.
    keep: samples of a step that are written. Of more, those are that divide the step's rewards evenly: the
    best, the worst, and from rank to rank between them. say: prints a line where the file cannot be written.
    The run goes on without it.
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
        """The samples of one step, all lines at once or none."""
        lines = [as_line(one) for one in spread(rollouts, self.keep)]
        if (file := self.file) is not None:
            self.look(lambda: append(file, b"".join(lines)))

    def close(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            file.close()


def as_line(rollout: Rollout) -> bytes:
    """Only ASCII: text of any kind comes back as it was."""
    told = rollout._asdict() | COUNTED
    told |= dict(reward=_finite(rollout.reward), advantage=_finite(rollout.advantage))
    told["parts"] = {name: _finite(value) for name, value in rollout.parts.items()}
    return json.dumps(told, allow_nan=False, separators=COMPACT).encode() + b"\n"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def rank(rollout: Rollout) -> tuple[float, int, int]:
    """By reward, none first; equal ones by prompt and sample."""
    known = _finite(rollout.reward)
    return (-math.inf if known is None else known, rollout.number, rollout.sample)


def spread(rollouts: Sequence[Rollout], keep: int) -> list[Rollout]:
    """At most `keep` of them, evenly by rank with both ends, in the order in which they were given."""
    if len(rollouts) <= keep:
        return list(rollouts)
    order = sorted(range(len(rollouts)), key=lambda i: rank(rollouts[i]))
    last = len(rollouts) - 1
    picked = {order[last]} if keep == 1 else {order[i * last // (keep - 1)] for i in range(keep)}
    return [one for i, one in enumerate(rollouts) if i in picked]


def read_rollouts(run: Path) -> Iterator[Rollout]:
    """Those of a run folder in the order of its file; torn and foreign lines are passed over.

    Raises ValueError, which names the folder, without a file.
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
