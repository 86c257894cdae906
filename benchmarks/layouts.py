"""Checks that no layout changes the mathematics: a small model in fp32, with kernels and compilation.

    python -m benchmarks.layouts --gpus 4                     with fewer than 4 GPUs, processes share them
    python -m benchmarks.layouts --gpus 2 -- --no-compile     on a CPU: two processes

benchmarks/shared.py explains how processes share a GPU.
Losses and gradient norms of 20 steps are compared with those of one process with one micro-batch; the exit
code is 1 if they differ by more than 1e-5. The processes of a world start once and train on one layout after
another. On GPUs, all worlds run at the same time and share the GPUs, because most of their time is
compilation. A world that fails is named, and the exit code is 1.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

import train
from benchmarks.train import at_least_one, running
from tmoe.cli.parse import parse
from tmoe.commands import warmup
from tmoe.log.metrics_file import read_steps

SEQUENCES = 8  # sequences of a step, over all processes
STEPS = 20
LIMIT = 1e-5  # largest relative difference
MODEL = """tiny --train.dtype fp32 --model.layers 3 --model.dense-layers 1 --model.dim 128
    --model.moe.shared-dim 4096 --train.seq 64 --model.moe.balance-coeff 0.1 --optim.lr 3e-3 --optim.eps 1e-4
    --optim.clip 0.5 --train.eval-every 0 --train.eval-batches 1 --log.no-progress
    --data.path stdlib --optim.warmup 0 --checkpoint.mode off --resume none"""


class Layout(NamedTuple):
    world: int  # processes
    ep: int
    micro: int  # micro-batches of a step
    dispatch: str


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus", type=at_least_one, default=1, help="most processes; one for each GPU while there are GPUs"
    )
    parser.add_argument("--timeout", type=float, default=60, help="seconds for each layout")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # a world's process: WORLD:FOLDER
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- --section.field value ... for every run")
    args = parser.parse_args()
    if not args.timeout > 0:
        parser.error(f"--timeout={args.timeout}: must be a positive number of seconds")
    more = [w for w in args.train if w != "--"]
    if args.inside:
        world, out = args.inside.split(":", 1)
        return inside(int(world), Path(out), more)
    if not torch.cuda.is_available():
        print("no GPU here: the layouts train on the CPU (`-- --no-compile` is quicker)", file=sys.stderr)
    print("| processes | ep | micro-batches | dispatch | largest relative difference of losses, of norms |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        right = True
        want = None
        worlds = [n for n in (1, 2, 4, 8) if n <= args.gpus]
        for together in [worlds] if torch.cuda.is_available() else [[n] for n in worlds]:
            failures = start(together, Path(folder), more, args.timeout)
            for world in together:
                if failures[world]:
                    print(f"{world} processes: {failures[world]}", flush=True)
                right &= not failures[world]
                for layout in layouts(world):
                    got = curves(layout, Path(folder))
                    want = want or got  # all layouts are compared with the first one
                    far = [distance(got[key], want[key]) for key in want] if got and want else []
                    right &= bool(far) and max(far) <= LIMIT
                    apart = ", ".join(f"{x:.1e}" for x in far) or "no curve"
                    print(f"| {' | '.join(map(str, layout))} | {apart} |", flush=True)
            if not want:
                break
    sys.exit(not right)


def distance(got: list[float], want: list[float]) -> float:
    """Largest relative difference; infinite if a value is NaN."""
    pairs = zip(got, want, strict=True)
    return max(abs(a - b) / abs(b) if a == a and b == b else math.inf for a, b in pairs)


def layouts(world: int) -> list[Layout]:
    """The layouts of a world that divide the batch; nccl only with one micro-batch."""
    cases = [Layout(world, 1, micro, "auto") for micro in ((1, 2, 4) if world == 1 else (1,))]
    for ep in (e for e in (2, 4, 8) if e <= world):
        cases += [Layout(world, ep, micro, "auto") for micro in (1, 2) if micro * world <= SEQUENCES]
        cases.append(Layout(world, ep, 1, "nccl"))
    return cases


def start(worlds: list[int], out: Path, more: list[str], timeout: float) -> dict[int, str]:
    """Trains on all layouts of these worlds; the worlds run at the same time.

    Returns for each world what went wrong, "" if nothing did.
    """
    end = time.monotonic() + timeout * max(len(layouts(world)) for world in worlds)
    failures = {}
    with ExitStack() as stack:
        processes = []
        for world in worlds:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(world)]
            if 0 < torch.cuda.device_count() < world:
                print(f"{world} processes share {torch.cuda.device_count()} GPUs", file=sys.stderr)
                command += ["-m", "benchmarks.shared"]
            command += ["-m", "benchmarks.layouts", "--inside", f"{world}:{out}", "--", *more]
            processes.append(stack.enter_context(running(command)))
        for world, process in zip(worlds, processes, strict=True):
            try:
                code = process.wait(max(0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                failures[world] = f"not within {timeout} s a layout"
            else:
                failures[world] = f"ended with code {code}" if code else ""
    return failures


def words(layout: Layout) -> list[str]:
    """The arguments of train.py."""
    batch = SEQUENCES // layout.world // layout.micro
    return [
        *MODEL.split(),
        *("--parallel.ep", str(layout.ep)),
        *("--parallel.dispatch", layout.dispatch),
        *("--train.batch", str(batch)),
        *("--train.accumulate", str(layout.micro)),
        *("--steps", str(STEPS)),
    ]


def inside(world: int, out: Path, more: list[str]) -> None:
    """Runs one of the processes of a world."""
    rank = int(os.environ["RANK"])
    # Compiled for all layouts at once, because this process must not fork once it has threads.
    warmup.warm([parse([*words(layout), *more], "", rank=rank, world=world) for layout in layouts(world)])
    for layout in layouts(world):
        train.main([*words(layout), "--out", str(out / name(layout)), *more])
        torch.compiler.reset()
        if not steps(layout, out):
            sys.exit(f"{layout}: was stopped")


def name(layout: Layout) -> str:
    return "-".join(map(str, layout))


def steps(layout: Layout, out: Path) -> list[dict[str, Any]]:
    """The entries of the run's metrics.jsonl, one for each step; [] if the run did not finish."""
    lines = [line for _, line in read_steps(out / name(layout) / "metrics.jsonl")]
    return lines if len(lines) >= STEPS else []


def curves(layout: Layout, out: Path) -> dict[str, list[float]]:
    """Losses and norms of the run.

    {} if the run did not finish, or if it learnt nothing and so proves nothing.
    """
    lines = steps(layout, out)
    if not lines or not lines[-1]["loss"] < lines[0]["loss"] - 0.5:
        return {}
    return {key: [line[key] for line in lines] for key in ("loss", "grad_norm")}


if __name__ == "__main__":
    main()
