"""Times steps of several micro-batches, where weight gradients are added to their sums in the kernels.

    python -m benchmarks.micro_batches --json results.jsonl                    # kernels and steps, one GPU
    python -m benchmarks.micro_batches --base old other --parts numbers steps grpo --seconds 420
    python -m benchmarks.micro_batches --parts dp --base old                   # two GPUs
    python -m benchmarks.micro_batches --parts numbers kernels                 # two minutes

numbers: sums of four micro-batches in fp32, by each way to add (`hopper.into_sum`), compared with fp64 sums
of the same products, as are sums of gradients that were rounded to bf16. Expected: nearer, and the same bits
in each call.

kernels: both products of a layer's weight gradients. "rounded" is the way without sums: written in bf16, read
and added to fp32 by another kernel. All other ways write the sum, or add to it; the number is that of column
slices. Milliseconds are medians over rounds in which all ways alternate.

steps: tokens/s of train.py as `benchmarks.train` starts it, here and in the folders of --base, which have
other versions of the project. Rows of 4096 random tokens, documents not kept apart. Caches of compilers are
filled before by models of one layer, whose block is the same; several run at the same time.

sft: 8 micro-batches of one conversation. dp: two GPUs. grpo: seconds of the update of `benchmarks.grpo_step`.

The tables are printed last. Each result is written to the JSON file at once. No run begins after --seconds.
"""

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.moe_layer import ALL, Bench, require_gpu
from benchmarks.sft import Job, speed_data
from benchmarks.train import write_line
from benchmarks.trl_rivals import write_tokenizer
from tmoe.cli.parse import parse
from tmoe.ops.experts import gpu

ROOT = Path(__file__).parents[1]
PARTS = "numbers", "kernels", "steps", "sft", "dp", "grpo"
WAYS = [("write", 8), ("add", 4), ("add", 8), ("add", 16), ("red", 4), ("red", 8), ("red", 16)]
QWEN = "qwen3-30b-a3b --train.no-isolate-documents"


class Step(NamedTuple):
    """A kind of step, and the tokens/s of a GPU that are expected of it (0: at least as many as before)."""

    name: str
    gpus: int
    words: str
    expected: float


ONE = Step("qwen3, 4 layers, 1 x 4", 1, "--model.layers 4 --train.accumulate 1 --train.batch 4", 0)
STEPS = [
    Step("qwen3, 4 layers, 4 x 1", 1, "--model.layers 4 --train.accumulate 4 --train.batch 1", 100_000),
    ONE,
    Step("qwen3, 4 layers, 4 x 4", 1, "--model.layers 4 --train.accumulate 4 --train.batch 4", 132_000),
]
DP = [
    Step("qwen3, 6 layers, dp 2, 4 x 2", 2, "--model.layers 6 --train.accumulate 4 --train.batch 2", 82_000)
]


# ---- one layer ----


def sums_like(bench: Bench, fill: float = 0.0) -> list[Tensor]:
    """fp32 sums of the layer's two gradients: of gate_up and of down."""
    return [torch.full_like(t, fill, dtype=torch.float32) for t in (bench.gate_up, bench.down)]


def gradients(bench: Bench, sums: list[Tensor] | None, how: str) -> list[Tensor]:
    """Both weight gradients, in new bf16 tensors or in `sums`."""
    layer, found = bench.layer, []
    for kernel, i in (("dw_up", 0), ("dw_down", 1)):
        gathers = layer.config(kernel).gather
        a, b = (bench.h, bench.x) if i == 0 else (bench.dy, bench.act)
        if not gathers:
            a, b = (a, bench.rows) if i == 0 else (bench.rows, b)
        gather = ("b", "a")[i] if gathers else ""
        found.append(layer.dw(kernel, a, b, gather, None if sums is None else sums[i], how))
    return found


def rounded(bench: Bench, sums: list[Tensor]) -> None:
    for total, grad in zip(sums, gradients(bench, None, ""), strict=True):
        total.add_(grad)


def exact(bench: Bench, e: int) -> list[Tensor]:
    """Both gradients of expert e in fp64, of one micro-batch."""
    offsets = bench.layer.meta.offsets.tolist()
    at = slice(offsets[e], offsets[e + 1])
    K = bench.ids.shape[1]
    tokens = bench.layer.meta.order[at].long() // K
    x, dy = (t[tokens].double() for t in (bench.x, bench.dy))
    return [bench.h[at].double().T @ x, dy.T @ bench.act[at].double()]


def numbers(name: str, micros: int = 4) -> dict[str, Any]:
    """Relative errors against fp64 over four experts, by way; and whether two calls give the same bits."""
    torch.manual_seed(0)
    bench = Bench(ALL[name], "cuda")
    # operands are gathered in the kernels, whatever the table says
    bench.layer.config = lambda kernel, known=bench.layer.config: known(kernel)._replace(gather=True)
    start = [(bench.h.clone(), bench.act.clone())]
    start += [tuple(torch.randn_like(t) for t in start[0]) for _ in range(micros - 1)]
    experts = bench.layer.meta.by_size[:4].tolist()
    want = [
        [torch.zeros_like(t[0], dtype=torch.float64) for t in (bench.gate_up, bench.down)] for _ in experts
    ]
    for bench.h, bench.act in start:
        for totals, e in zip(want, experts, strict=True):
            for total, one in zip(totals, exact(bench, e), strict=True):
                total += one

    def error(sums: list[Tensor]) -> float:
        pairs = [(sums[i][e].double(), w[i]) for w, e in zip(want, experts, strict=True) for i in (0, 1)]
        return max(float((a - b).norm() / b.norm()) for a, b in pairs)

    found: dict[str, Any] = {}
    sums = sums_like(bench)
    for bench.h, bench.act in start:
        rounded(bench, sums)
    found["rounded"] = error(sums)
    for way in ("add", "red"):
        gpu.SUMS = way
        calls = []
        for _ in range(2):
            calls.append(sums_like(bench, float("nan")))
            for i, (bench.h, bench.act) in enumerate(start):
                gradients(bench, calls[-1], "add" if i else "write")
        found[way] = error(calls[0])
        found[f"{way}, same bits"] = all(map(torch.equal, *calls))
    gpu.SUMS = "add"
    return found


def kernels(name: str, rounds: int) -> dict[str, float]:
    """Median milliseconds of both weight gradients, by way."""
    bench = Bench(ALL[name], "cuda")
    sums = sums_like(bench)
    ways: dict[str, Any] = {"rounded": lambda: rounded(bench, sums)}
    ways["bf16 alone"] = lambda: gradients(bench, None, "")

    def run(way: str, slices: int) -> None:
        gpu.SUMS, gpu.SUMS_SUB = ("add" if way == "write" else way), slices
        gradients(bench, sums, "write" if way == "write" else "add")

    for way, slices in WAYS:
        ways[f"{way} {slices}"] = lambda way=way, slices=slices: run(way, slices)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for i in range(rounds + 2):
        for way, call in ways.items():
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda.synchronize()
            events[0].record()
            call()
            events[1].record()
            torch.cuda.synchronize()
            if i >= 2:
                times[way].append(events[0].elapsed_time(events[1]))
    gpu.SUMS, gpu.SUMS_SUB = "add", 8
    return {way: statistics.median(ms) for way, ms in times.items()}


# ---- whole steps ----


def output(folder: Path, module: str, words: list[str]) -> list[dict[str, Any]]:
    """The JSON lines of a benchmark of the project in `folder`; [] if it fails."""
    with tempfile.TemporaryDirectory() as out:
        file = Path(out, "one.jsonl")
        command = [sys.executable, "-m", module, "--json", str(file), *words]
        log = subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True
        )
        if log.returncode or not file.exists():
            print(log.stdout[-500:], log.stderr[-1500:], file=sys.stderr)
            return []
        return [json.loads(line) for line in file.read_text().splitlines()]


def train(folder: Path, gpus: int, words: list[str], steps: int, timeout: float) -> dict[str, Any]:
    """The figures of benchmarks.train of the project in `folder`; {} if the run fails."""
    how = ["--gpus", str(gpus), "--steps", str(steps), "--timeout", str(timeout)]
    return dict(*output(folder, "benchmarks.train", [*how, "--", *words])[-1:])


def update(folder: Path, timeout: float) -> dict[str, Any]:
    """The figures of a GRPO step of the project in `folder`; {} if the run fails."""
    how = ["--only", "tmoe", "--steps", "6", "--timeout", str(timeout)]
    return dict(*[r for r in output(folder, "benchmarks.grpo_step", how) if r["part"] == "grpo run"][:1])


def fill_caches(folders: Iterable[Path], steps: Iterable[Step]) -> None:
    """Compiles kernels and blocks of these steps in all folders, by models of one layer and few words."""

    def small(words: str) -> str:
        one = re.sub(r"layers \d+", "layers 1 --model.vocab 4096", words)
        return re.sub(r"accumulate \d+", "accumulate 2", one)

    kinds = {small(step.words): step.gpus for step in steps}
    calls = [(f, gpus, step_words(words), 12, 150.0) for words, gpus in kinds.items() for f in folders]
    with ThreadPool(4) as pool:  # four of them have room on one GPU
        pool.starmap(train, calls)


def step_words(words: str) -> list[str]:
    return [*QWEN.split(), "--train.seq", "4096", *words.split()]


def sft_words(folder: Path) -> list[str]:
    """SFT of olmoe-1b-7b with 8 layers and 8 micro-batches of one conversation of 4096 tokens."""
    model = ["olmoe-1b-7b", "--model.layers", "8"]
    vocab = parse(model, "", world=1).model.vocab
    write_tokenizer(folder / "words", vocab)
    job = Job(argparse.Namespace(json=None, tiny=False), folder, {})
    data = speed_data(job, np.full(200, 4096), "full", vocab)["sft"]
    more = ["--task", "sft", "--data.path", str(data), "--data.tokenizer", str(folder / "words")]
    more += ["--data.val-fraction", "0.1", "--train.eval-batches", "1"]
    return [*model, "--train.seq", "4096", "--train.batch", "1", "--train.accumulate", "8", *more]


class Sides:
    """The project here and its other versions, and what is left of the time."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.begun = time.monotonic()
        self.folders = {folder.name: folder.resolve() for folder in args.base} | {"here": ROOT}

    def table(self, name: str, unit: str, expected: str) -> str:
        """The head of a table that compares the sides."""
        first, *others = self.folders
        cells = [name, *self.folders, *(f"{side} / {first}" for side in others), unit, expected]
        cells += [f"{side} GiB" for side in self.folders]
        return f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|"

    def row(self, part: str, name: str, key: str, expected: str, measure: Callable) -> str:
        """A row of that table: figures[key] of measure(folder, seconds), and the peaks."""
        found: dict[str, dict[str, Any]] = {}
        for side, folder in self.folders.items():
            left = self.args.seconds - (time.monotonic() - self.begun)
            if left < 40:
                print(f"{name}, {side}: left out, {left:.0f} s are left", file=sys.stderr)
                continue
            figures = measure(folder, min(left, 200))
            if figures:
                found[side] = figures
                print(f"{name}, {side}: {figures[key]:,.6g}, {figures['peak_gib']:.2f} GiB", flush=True)
                if self.args.json:
                    write_line(self.args.json, dict(part=part, step=name, side=side) | figures)

        def value(side: str, what: str) -> float:
            return found.get(side, {}).get(what, float("nan"))

        first, *others = self.folders
        cells = [name, *(f"{value(side, key):,.6g}" for side in self.folders)]
        cells += [f"{value(side, key) / value(first, key):.3f}" for side in others]
        cells += [key, expected, *(f"{value(side, 'peak_gib'):.2f}" for side in self.folders)]
        return f"| {' | '.join(cells)} |"


def whole_steps(sides: Sides) -> list[str]:
    """The rows of the parts that start programs."""
    args, rows = sides.args, []
    steps = [*(STEPS if "steps" in args.parts else ()), *(DP if "dp" in args.parts else ())]
    fill_caches(sides.folders.values(), steps)

    def row(step: Step, words: list[str], expected: str) -> str:
        run = lambda folder, seconds: train(folder, step.gpus, words, args.steps, seconds)  # noqa: E731
        return sides.row("step", step.name, "tokens_per_s_gpu", expected, run)

    for step in steps:
        expected = f"{step.expected:,.0f}" if step.expected else "no slower"
        rows.append(row(step, step_words(step.words), expected))
    if "grpo" in args.parts:
        rows.append(sides.row("grpo", "GRPO, update", "update_s", "1 / 1.1 of the first", update))
    if "sft" in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            step = Step("olmoe, 8 layers, SFT, 8 x 1", 1, "", 0)
            rows.append(row(step, sft_words(Path(folder)), "1.2 of the first"))
    if "steps" in args.parts:  # how much two runs differ
        rows.append(row(ONE._replace(name=f"{ONE.name}, once more"), step_words(ONE.words), "no slower"))
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", nargs="+", default=["numbers", "kernels", "steps", "sft"], choices=PARTS)
    p.add_argument("--shapes", nargs="+", default=["qwen3", "olmoe"], choices=list(ALL))
    p.add_argument("--base", nargs="+", type=Path, default=[], help="folders with other versions")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--seconds", type=float, default=460, help="no run begins after this time")
    p.add_argument("--json", type=Path, help="append each result to this file, one JSON object a line")
    args = p.parse_args()
    require_gpu(p)
    sides = Sides(args)
    lines: list[str] = []
    for part, measure in (("numbers", numbers), ("kernels", lambda name: kernels(name, args.rounds))):
        for name in args.shapes if part in args.parts else ():
            found = measure(name)
            if args.json:
                write_line(args.json, dict(part=part, shape=name, gpu=torch.cuda.get_device_name()) | found)
            lines.append(f"{part}, {name}: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()))
            print(lines[-1], flush=True)
            gc.collect()  # a Bench holds itself; the steps below need the whole GPU
            torch.cuda.empty_cache()
    rows = whole_steps(sides)
    print("\n".join(["", torch.cuda.get_device_name(), *lines]))
    if rows:
        print("\n".join([sides.table("step", "unit", "expected"), *rows]))


if __name__ == "__main__":
    main()
