"""Times steps of several micro-batches, where weight gradients are added to their sums in the kernels.

    python -m benchmarks.micro_batches --json results.jsonl                    # kernels and steps, one GPU
    python -m benchmarks.micro_batches --base base --seconds 460               # and the code in folder base
    python -m benchmarks.micro_batches --parts dp --base base                  # two GPUs
    python -m benchmarks.micro_batches --parts numbers kernels                 # two minutes

numbers: sums of four micro-batches in fp32, by each way to add (`hopper.into_sum`), compared with fp64 sums
of the same products, as are sums of gradients that were rounded to bf16. Expected: nearer, and the same bits
in each call.

kernels: both products of a layer's weight gradients. "rounded" is the way without sums: written in bf16, read
and added to fp32 by another kernel. The others write the sum, or add to it; the number is that of column
slices. Milliseconds are medians over rounds in which all ways alternate.

steps: tokens/s of train.py as `benchmarks.train` starts it, here and in --base, a folder with another version
of the project. Rows of 4096 random tokens, documents not kept apart.

The tables are printed last. Each result is written to the JSON file at once. No run begins after --seconds.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
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
PARTS = "numbers", "kernels", "steps", "sft", "dp"
WAYS = [("write", 8), ("add", 4), ("add", 8), ("add", 16), ("red", 4), ("red", 8), ("red", 16)]
QWEN = "qwen3-30b-a3b --train.no-isolate-documents"


class Step(NamedTuple):
    """A kind of step, and the tokens/s of a GPU that are expected of it (0: of no slower than --base)."""

    name: str
    gpus: int
    words: str
    expected: float


STEPS = [
    Step("qwen3, 4 layers, 4 x 1", 1, "--model.layers 4 --train.accumulate 4 --train.batch 1", 100_000),
    Step("qwen3, 4 layers, 4 x 4", 1, "--model.layers 4 --train.accumulate 4 --train.batch 4", 132_000),
    Step("qwen3, 4 layers, 1 x 4", 1, "--model.layers 4 --train.accumulate 1 --train.batch 4", 0),
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


def train(folder: Path, gpus: int, words: list[str], steps: int, timeout: float) -> dict[str, Any]:
    """The figures of benchmarks.train of the project in `folder`; {} if the run fails."""
    with tempfile.TemporaryDirectory() as out:
        file = Path(out, "one.jsonl")
        command = [sys.executable, "-m", "benchmarks.train", "--gpus", str(gpus), "--steps", str(steps)]
        command += ["--timeout", str(timeout), "--json", str(file), "--", *words]
        log = subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True
        )
        if log.returncode or not file.exists():
            print(log.stdout[-500:], log.stderr[-1500:], file=sys.stderr)
            return {}
        return json.loads(file.read_text().splitlines()[-1])


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


def compare(args: argparse.Namespace, step: Step, words: list[str], begun: float) -> str:
    """A row of the table of steps: the project here, and that in --base."""
    sides = {"here": ROOT} | ({"base": args.base.resolve()} if args.base else {})
    found: dict[str, dict[str, Any]] = {}
    for side, folder in sides.items():
        left = args.seconds - (time.monotonic() - begun)
        if left < 45:
            print(f"{step.name}, {side}: left out, {left:.0f} s are left", file=sys.stderr)
            continue
        figures = train(folder, step.gpus, words, args.steps, min(left, 200))
        if figures:
            found[side] = figures
            if args.json:
                write_line(args.json, dict(part="step", step=step.name, side=side) | figures)
    rate = {side: figures["tokens_per_s_gpu"] for side, figures in found.items()}
    peak = {side: figures["peak_gib"] for side, figures in found.items()}
    ratio = rate["here"] / rate["base"] if len(rate) == 2 else float("nan")
    cells = [f"{rate.get(side, float('nan')):,.0f}" for side in ("base", "here")]
    cells += [f"{ratio:.3f}", f"{step.expected:,.0f}" if step.expected else "no slower"]
    cells += [f"{peak.get(side, float('nan')):.1f}" for side in ("base", "here")]
    return f"| {step.name} | {' | '.join(cells)} |"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", nargs="+", default=["numbers", "kernels", "steps", "sft"], choices=PARTS)
    p.add_argument("--shapes", nargs="+", default=["qwen3", "olmoe"], choices=list(ALL))
    p.add_argument("--base", type=Path, help="a folder with another version of the project")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--seconds", type=float, default=460, help="no run begins after this time")
    p.add_argument("--json", type=Path, help="append each result to this file, one JSON object a line")
    args = p.parse_args()
    require_gpu(p)
    begun = time.monotonic()
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
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for step in [*(STEPS if "steps" in args.parts else ()), *(DP if "dp" in args.parts else ())]:
            words = [*QWEN.split(), "--train.seq", "4096", *step.words.split()]
            rows.append(compare(args, step, words, begun))
        if "sft" in args.parts:
            step = Step("olmoe, 8 layers, SFT, 8 x 1 (1.2 x base)", 1, "", 0)
            rows.append(compare(args, step, sft_words(Path(folder)), begun))
    print("\n".join(["", torch.cuda.get_device_name(), *lines]))
    print("| step | base tokens/s/GPU | here | here / base | expected | base GiB | here GiB |")
    print("\n".join(["|---" * 7 + "|", *rows]))


if __name__ == "__main__":
    main()
