"""The part `walk` of benchmarks.nf4: commands of a user on a small model, from a base to answers.

Widths are those that kernels read, but for the shared expert's, which 64 does not divide. First come a base
and a run of adapters on it in NF4, then all other commands together.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.figures import Figure, at_most, keep
from tmoe.log.metrics_file import read_steps

MODEL = """tiny --model.layers 2 --model.dim 128 --model.heads 2 --model.kv-heads 1 --model.head-dim 64
    --model.moe.experts 8 --model.moe.ffn-dim 64 --model.moe.shared-dim 72 --train.seq 128 --train.batch 2
    --optim.warmup 0 --train.eval-batches 1 --log.no-progress --log.no-report"""
TEXT = ["--data.path", "stdlib"]
ADAPTERS = "--lora.rank 8 --lora.base nf4 --optim.lr 1e-3 --steps 6 --checkpoint.every 3"
GRPO = """--task grpo --grpo.prompts 4 --grpo.group 4 --grpo.max-tokens 8 --grpo.kl 0.1
    --lora.rank 8 --lora.base nf4 --steps 2"""
SECONDS = 60  # most of a command
ROOT = Path(__file__).parents[1]


class Command(NamedTuple):
    """A command of the walk. world: processes, started by torchrun if they are several."""

    words: list[str]
    world: int = 1

    def argv(self) -> list[str]:
        if self.world == 1:
            return [sys.executable, *self.words]
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self.world)]
        return [sys.executable, "-m", *launch, *self.words]


def first(folder: Path) -> dict[str, Command]:
    """The first two commands, in their order; all later commands need their results."""
    model = ["train.py", *MODEL.split(), *TEXT]
    base = [*model, "--steps", "2", "--no-compile", "--out", f"{folder}/base"]
    nf4 = [*model, *ADAPTERS.split(), "--init", f"{folder}/base/checkpoints/step-2", "--out", f"{folder}/nf4"]
    return {"base": Command(base), "nf4": Command([*nf4, "--parallel.checkpoint", "block"])}


def others(folder: Path, gpus: int) -> dict[str, Command]:
    """All other commands, which do not need each other."""
    model = ["train.py", *MODEL.split()]
    base = f"{folder}/base/checkpoints/step-2"
    nf4 = [*model, *TEXT, *ADAPTERS.split(), "--init", base]
    whole = [word if word != "nf4" else "whole" for word in nf4]
    asked = ["--max-tokens", "16", "--min-tokens", "16", "--temperature", "0"]
    resumed = [*nf4, "--parallel.checkpoint", "block", "--out", f"{folder}/resumed"]
    rows = f"{folder}/rows.jsonl"
    grpo = [*model, *GRPO.split(), "--grpo.rewards", f"{folder}/reward.py:some", "--data.path", rows]
    made = {
        "resumed": Command(resumed),
        "whole": Command([*whole, "--out", f"{folder}/whole"]),
        "eager": Command([*nf4, "--no-compile", "--out", f"{folder}/eager"]),
        "grpo": Command([*grpo, "--init", base, "--out", f"{folder}/grpo"]),
        "generate": Command(["-m", "tmoe.generate", f"{folder}/nf4", "def f(", *asked]),
        "adapter": Command(
            ["-m", "tmoe.generate", base, "def f(", "--adapter", f"{folder}/nf4", *asked]
        ),
    }  # fmt: skip
    if gpus > 1:
        two = [word if word != "2" or nf4[i - 1] != "--train.batch" else "1" for i, word in enumerate(nf4)]
        made["two ranks"] = Command([*two, "--out", f"{folder}/two ranks"], 2)
    return made


def prepare(folder: Path) -> None:
    """Files of the commands: prompts and a reward, and the step from which a run is resumed."""
    rows = [dict(prompt=f"{n}+{n}=", answer=str(2 * n)) for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (folder / "reward.py").write_text("def some(s):\n    return sum(s.answer.encode()) % 7 / 7\n")


def ran(commands: dict[str, Command], folder: Path) -> Iterator[tuple[str, str]]:
    """Runs commands at the same time; yields each one's name and "", or why it failed.

    Their outputs are in the files NAME.txt and NAME.err.
    """
    started: dict[str, subprocess.Popen] = {}
    for name, command in commands.items():
        with (folder / f"{name}.txt").open("w") as out, (folder / f"{name}.err").open("w") as errors:
            path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            env = os.environ | {"PYTHONPATH": path}
            started[name] = subprocess.Popen(command.argv(), stdout=out, stderr=errors, cwd=ROOT, env=env)
    deadline = time.monotonic() + SECONDS
    try:
        for name, process in started.items():
            try:
                code = process.wait(max(1.0, deadline - time.monotonic()))
                wrong = f"ended with code {code}" if code else ""
            except subprocess.TimeoutExpired:
                wrong = f"not done within {SECONDS} s"
            if wrong:
                said = "".join((folder / f"{name}.{kind}").read_text() for kind in ("txt", "err")).split("\n")
                print(f"--- {name}: {wrong}", *said[-25:], sep="\n", flush=True)
                last = next((line for line in reversed(said) if line.strip()), "")
                wrong = f"{wrong}: {last[-160:]}"
            yield name, wrong
    finally:
        for process in started.values():
            process.terminate()
            process.wait()


def losses(folder: Path, name: str) -> dict[int, float]:
    """The loss of each step of a run; {} without a run."""
    path = folder / name / "metrics.jsonl"
    return {line["step"]: line["loss"] for _, line in read_steps(path)} if path.exists() else {}


def apart(a: dict[int, float], b: dict[int, float]) -> float:
    """The largest difference of losses of the steps that both have; inf if there are none."""
    return max((abs(a[step] - b[step]) for step in a.keys() & b.keys()), default=float("inf"))


def walk(args: argparse.Namespace) -> Iterator[Figure]:
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepare(folder)
        for name, command in first(folder).items():
            for _, wrong in ran({name: command}, folder):
                yield Figure("walk", name, wrong or "done", "done", not wrong)
                if wrong:
                    return
        steps = folder / "nf4/checkpoints"
        shutil.copytree(steps / "step-3", folder / "resumed/checkpoints/step-3")
        for name, wrong in ran(others(folder, gpus), folder):
            yield Figure("walk", name, wrong or "done", "done", not wrong)
        found = {
            name: losses(folder, name) for name in ("nf4", "resumed", "whole", "eager", "two ranks", "grpo")
        }
        keep(args, "nf4", "walk", dict(losses=found))
        yield from figures_of(found, folder, gpus)


def figures_of(found: dict[str, dict[int, float]], folder: Path, gpus: int) -> Iterator[Figure]:
    """Figures of the commands' results."""
    nf4 = found["nf4"]
    each = " ".join(f"{loss:.4f}" for loss in nf4.values())
    yield Figure("walk", "losses on NF4", each, "finite", bool(nf4) and all(v == v for v in nf4.values()))
    yield at_most("walk", "losses of a resumed run, apart by", apart(found["resumed"], nf4), 1e-3)
    yield at_most("walk", "losses without compilation, apart by", apart(found["eager"], nf4), 0.02)
    yield at_most("walk", "losses on a whole base, apart by", apart(found["whole"], nf4), 0.1)
    if gpus > 1:
        yield at_most("walk", "losses of two ranks, apart by", apart(found["two ranks"], nf4), 0.02)
    texts = [(folder / f"{name}.txt").read_text() for name in ("generate", "adapter")]
    answers = [text.partition("def f(")[2] for text in texts]
    same = bool(answers[0].strip()) and answers[0] == answers[1]
    said = "equal" if same else f"{answers[0][:60]!r} and {answers[1][:60]!r}"
    yield Figure("walk", "answers of the run, and of the base with --adapter", said, "equal", same)
