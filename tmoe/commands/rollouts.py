"""Pages through the samples of a run with --task grpo: python -m tmoe.rollouts RUN.

next: post/rollouts.py
"""

import contextlib
import heapq
import io
import itertools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated
from unicodedata import category

import tyro

from tmoe.base.disk import expand_home
from tmoe.front import call, one_message
from tmoe.post.rollouts import Rollout, rank, read_rollouts

TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # signs that change the direction of text


def main(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    step: int | None = None,
    best: int | None = None,
    worst: int | None = None,
) -> None:
    """Prints samples of RUN/rollouts.jsonl; on a terminal through the program $PAGER, or `less`.

    Args:
        run: a run folder; a run that is still active can be read too
        step: print only samples of this step; None: of all steps
        best: print only this many samples, those with the highest rewards, the highest first
        worst: print only this many samples: first those without a reward, then the lowest rewards, rising
    """
    if best is not None and worst is not None:
        raise ValueError(f"--best={best}, --worst={worst}: give one of them")
    for flag, count in (("best", best), ("worst", worst)):
        if count is not None and count < 1:
            raise ValueError(f"--{flag}={count}: must be at least 1")
    show(lines_of(run, step, best, worst))


def lines_of(run: Path, step: int | None, best: int | None, worst: int | None) -> Iterator[str]:
    """The text to print, one sample after the other, because the file may be larger than memory."""
    rollouts: Iterable[Rollout] = of_step(run, step)
    if best is None and worst is None:
        for number, samples in itertools.groupby(rollouts, lambda sample: sample.step):
            of_one = list(samples)
            yield summary(number, of_one)
            for sample in of_one:
                yield described(sample)
        return
    picked = heapq.nlargest(best, rollouts, rank) if best else heapq.nsmallest(worst or 0, rollouts, rank)
    for sample in picked:
        yield described(sample)


def of_step(run: Path, step: int | None) -> Iterator[Rollout]:
    """The samples of a step (None: of all steps). ValueError, which names the steps, if there is none."""
    steps: list[int] = []
    some = False
    for sample in read_rollouts(run):
        steps = [sample.step] * 2 if not steps else [min(steps[0], sample.step), max(steps[1], sample.step)]
        if step in (None, sample.step):
            some = True
            yield sample
    if not some:
        has = (
            f"samples of steps {steps[0]} to {steps[1]}, not all of them perhaps"
            if steps
            else "no samples yet"
        )
        raise ValueError(f"{'' if step is None else f'--step={step}: '}{run} has {has}")


def summary(step: int, samples: list[Rollout]) -> str:
    """A line for a step, about the samples in the file, which may not be all samples."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    mean = f"{sum(rewards) / len(rewards):.3g}" if rewards else "-"
    tokens = sum(sample.tokens for sample in samples) / len(samples)
    cut = sum(sample.finish == "length" for sample in samples)
    of_all = f"mean reward {mean}, {tokens:,.0f} tokens, {cut} cut off"
    return f"==== step {step}: {len(samples)} samples, {of_all} ====\n"


def described(one: Rollout) -> str:
    parts = ", ".join(f"{readable(name)} {short(value)}" for name, value in one.parts.items())
    of_reward = f" ({parts})" if parts else ""
    ended = "cut off" if one.finish == "length" else one.finish
    head = f"---- step {one.step}, prompt {one.number}, sample {one.sample}: "
    head += f"reward {short(one.reward)}{of_reward}, advantage {short(one.advantage)}, "
    head += f"{one.tokens} tokens, {readable(ended)}"
    return f"{head}\n{readable(one.prompt)}\n>>>>\n{readable(one.answer)}\n"


def short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def readable(text: str) -> str:
    """Text with control characters written out, so that a model's text cannot control the terminal."""
    return "".join(
        ascii(char)[1:-1]
        if char not in "\n\t" and (char in TURNS or category(char) in ("Cc", "Cs"))
        else char
        for char in text
    )


def show(parts: Iterator[str]) -> None:
    """Prints to a terminal through a pager, if there is one, else to stdout. A reader may stop early."""
    first = next(parts, "")  # an error is raised before the pager starts
    pager = shlex.split(os.environ.get("PAGER", "")) or ["less"]
    if sys.stdout.isatty() and shutil.which(pager[0]):
        process = subprocess.Popen(pager, stdin=subprocess.PIPE, text=True, errors="replace")
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            for part in itertools.chain((first,), parts):
                pipe.write(f"{part}\n")
        process.wait()
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        for part in itertools.chain((first,), parts):
            print(part)
        sys.stdout.flush()
    except BrokenPipeError:  # Python would complain once more when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def command() -> None:
    """The command line."""
    with one_message():
        call(main, "python -m tmoe.rollouts", expand_home())
