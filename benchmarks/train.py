"""Times whole training steps: starts train.py as a user would and reads its run folder.

    python -m benchmarks.train --gpus 4 --json results.json -- olmoe-1b-7b --parallel.ep 4
    python -m benchmarks.train --gpus 1 --cold --trace -- olmoe-1b-7b --model.layers 8

Everything after `--` is passed to train.py. Tokens are drawn at random from the whole vocabulary, as in
torchtitan's benchmark, and the learning rate warms up over 2000 steps, as DeepSeek-V3's did. With few
distinct tokens, such as the bytes of text, a new model's experts get far less even loads, and so they do if
the first steps
use the full rate: `-- ... --data.path stdlib`, `--optim.warmup 0`.

The start is the time from the launch of torchrun to the end of the first step on the GPU. With --cold it is
measured twice, first with empty caches of inductor and triton, then with the filled caches. The warm-up steps
are left out of the medians. With --trace two more steps are traced, and the GPU time of the second is summed
up below the table. The table and the JSON line are written before the trace is read, and the trace is then
added to the line, so a run killed meanwhile keeps its figures.

`busiest_rank` is a number for each step that says how unevenly tokens were routed: pairs of a layer's busiest
rank over the mean, averaged over layers. It is 1 without expert parallelism, and at most --parallel.ep.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.trace import read, summary
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.config.run import Config
from tmoe.data.shards import write_shards
from tmoe.data.tokenizer import ByteTokenizer
from tmoe.log.metrics_file import read_steps
from tmoe.model.stage_times import division

WARMUP = 10  # steps left out of the medians


def at_least_one(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=at_least_one, default=1, help="number of processes, one for each GPU")
    parser.add_argument("--steps", type=at_least_one, default=30)
    parser.add_argument("--timeout", type=float, default=500, help="seconds after which the run is given up")
    parser.add_argument("--json", type=Path, help="append the result to this file, one JSON object a line")
    parser.add_argument(
        "--cold", action="store_true", help="start once with empty compile caches before the measured run"
    )
    parser.add_argument("--trace", action="store_true", help="trace the step after the measured ones")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- PRESET --section.field value ...")
    args = parser.parse_args()
    words = [w for w in args.train if w != "--"]
    env = dict(os.environ)
    cold_s = None
    with tempfile.TemporaryDirectory() as out:
        if args.cold:
            env |= {f"{name}_CACHE_DIR": f"{out}/{name}" for name in ("TORCHINDUCTOR", "TRITON")}
            cold_s = launch(args.gpus, 1, words, Path(out, "cold"), args.timeout, env)

        # Two steps are traced and the second is read: it begins with the host ahead, as untraced steps do.
        # The tracer starts in the step before them, and delays the step before that; the last step validates.
        traced = args.steps + 3
        steps = args.steps + 4 * args.trace
        words += ["--profile", str(traced - 1), str(traced)] if args.trace else []
        figures = measure(args.gpus, steps, words, Path(out, "run"), args.timeout, env)
        result = figures | {"cold_start_s": cold_s}
        print(table(result), flush=True)
        begin = write_line(args.json, result) if args.json else None

        if args.trace:
            result["trace_ms"], kernels, waits = read(Path(out, f"run/trace-step{traced}-rank0.json.gz"))
            result["kernels"] = [(name[:160], round(us), launches) for name, us, launches in kernels[:40]]
            result["idle_ms_before"] = {name[:160]: round(ms, 2) for name, ms in list(waits.items())[:12]}
            print(summary(result["trace_ms"], waits))
            if args.json:
                write_line(args.json, result, begin)


def write_line(path: Path, result: dict[str, Any], at: int | None = None) -> int:
    """Writes a JSON line at the end of the file, or over everything after byte `at`.

    Returns the byte at which the line begins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with path.open("r+b") as file:
        begin = file.seek(0, os.SEEK_END) if at is None else file.seek(at)
        file.write(json.dumps(result).encode() + b"\n")
        file.truncate()
    return begin


def launch(
    gpus: int, steps: int, words: list[str], out: Path, timeout: float, env: dict[str, str] | None = None
) -> float:
    """Trains into `out` and returns the seconds from the launch to the end of the first step.

    If train.py fails, or takes more than `timeout` seconds, the program ends with one line.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(gpus),
        "train.py",
        *words,
    ]
    command += ["--steps", str(steps), "--out", str(out), "--checkpoint.mode", "off"]
    if not given("--data.path", words):
        vocab = parse(words, "", world=gpus).model.vocab
        command += ["--data.path", str(random_tokens(out.with_name("random"), vocab))]
    if not given("--optim.warmup", words):
        command += ["--optim.warmup", "2000"]
    began = time.monotonic()
    with running([*command, "--resume", "none"], env) as process:
        start_s = first_line(out / "metrics.jsonl", process, began, timeout)
        try:
            process.wait(max(1.0, timeout - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            lines = (out / "metrics.jsonl").read_text().count("\n")
            raise SystemExit(f"not done within {timeout} s, after {lines} lines of metrics.jsonl") from None
        if process.returncode:
            raise SystemExit(f"train.py ended with code {process.returncode}")
    return start_s


@contextmanager
def running(command: list[str], env: dict[str, str] | None = None) -> Iterator[subprocess.Popen]:
    """Runs a command in the project's folder.

    It is ended when the block ends for any reason, SIGTERM included.
    """
    # SIGTERM acts like Ctrl-C here: it is not counted as a failed run that is followed by the next.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1], env=env)
    try:
        yield process
    finally:
        process.terminate()  # torchrun then ends its workers; killed, it would leave them on the GPUs
        process.wait()
        signal.signal(signal.SIGTERM, before)


def given(flag: str, words: list[str]) -> bool:
    """Whether train.py's words set this flag."""
    return any(word.split("=")[0] == flag for word in words)


def random_tokens(folder: Path, vocab: int, tokens: int = 2**23) -> Path:
    """A folder with one shard: a document of ids drawn uniformly from 1 .. vocab - 1.

    An existing folder is left unchanged.
    """
    if not folder.exists():
        ids = np.random.default_rng(0).integers(1, vocab, tokens, dtype=np.uint32)
        write_shards(folder, [np.append(ids, np.uint32(0))], RandomIds(vocab), tokens)
    return folder


class RandomIds(ByteTokenizer):
    """The tokenizer that shards of random ids name as their origin."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.eos = 0
        self.fingerprint = f"random-{vocab}"


def measure(
    gpus: int, steps: int, words: list[str], out: Path, timeout: float, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Trains as `launch` does. Returns the figures that are printed and written to the JSON file."""
    start_s = launch(gpus, steps, words, out, timeout, env)
    lines = [line for _, line in read_steps(out / "metrics.jsonl")]
    steady = [line for line in lines if line["step"] > WARMUP and line["tokens_per_s"]]
    if not steady:
        raise SystemExit(
            f"--steps {steps}: too few; {WARMUP} steps warm up and are not timed (and log.every must be 1)"
        )
    # left out: the last step, which validates; with --profile also two traced steps, and two that start the
    # tracer
    steady = steady[: -5 if "--profile" in words else -1] or steady
    config = json.loads((out / "config.json").read_text())
    ep = config["config"]["parallel"]["ep"]
    return {
        "command": " ".join(["train.py", *words, "--steps", str(steps)]),
        "data": "as the command says" if given("--data.path", words) else "random tokens",
        "date": date.today().isoformat(),
        "versions": config["versions"],
        "gpus": gpus,
        "parameters": config["parameters"],
        "tokens_per_step": lines[0]["tokens"],
        "start_s": start_s,
        "tokens_per_s_gpu": statistics.median(line["tokens_per_s"] for line in steady) / gpus,
        "tflops_gpu": statistics.median(line["tflops"] for line in steady),
        "mfu": statistics.median(line["mfu"] for line in steady) if steady[0]["mfu"] else None,
        "peak_gib": max(line["peak_gib"] for line in lines),
        "recompiles": lines[-1]["recompiles"],
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
        "max_violation": [max(line["max_violation"] or [0.0]) for line in steady],
        "busiest_rank": [busiest_rank(line["expert_counts"], ep) for line in steady],
        **cut_of(parse(words, "", world=gpus), gpus),
    }


def cut_of(cfg: Config, gpus: int) -> dict[str, list[int]]:
    """{"cut": number of blocks of each part} of a pipeline, else {}: a cut changes with the constants."""
    spans = division(cfg, Axes.of(cfg.parallel, gpus)).spans
    return {"cut": [len(span) for span in spans]} if len(spans) > 1 else {}


def busiest_rank(counts_LE: list[list[int]] | None, ep: int) -> float:
    """Pairs of a layer's busiest rank of `ep` over the mean, averaged over layers.

    All groups of ranks that hold a copy of the experts count as one, so with dp > 1 the result is a little
    low.
    """
    if not counts_LE:
        return 1.0
    layers = np.array(counts_LE, dtype=float)
    pairs = layers.reshape(len(layers), ep, -1).sum(2)  # rank r holds experts r*E/ep to (r+1)*E/ep
    return float((pairs.max(1) / pairs.mean(1)).mean())


def first_line(path: Path, process: subprocess.Popen, began: float, timeout: float) -> float:
    """Seconds from `began` (time.monotonic) until the file has a line.

    Ends the program if no line appears.
    """
    while not (path.exists() and path.read_text().strip()):
        if process.poll() is not None:
            raise SystemExit(f"train.py ended with code {process.returncode} before its first step")
        if time.monotonic() - began > timeout:
            raise SystemExit(f"no step within {timeout} s")
        time.sleep(0.05)
    return time.monotonic() - began


def table(r: dict[str, Any]) -> str:
    """The command, and its figures as a table of one row."""
    mfu = "unknown" if r["mfu"] is None else f"{r['mfu']:.1%}"
    cold = f"{r['cold_start_s']:.1f}, " if r.get("cold_start_s") else ""
    head = "GPUs | tokens/s/GPU | TFLOP/s/GPU | MFU | peak GiB | start s (cold, warm) | loss"
    speed = f"{r['tokens_per_s_gpu']:,.0f} | {r['tflops_gpu']:.1f} | {mfu}"
    row = f"{r['gpus']} | {speed} | {r['peak_gib']:.1f} | {cold}{r['start_s']:.1f}"
    return f"{r['command']}\n| {head} |\n| {row} | {r['first_loss']:.3f} -> {r['last_loss']:.3f} |"


if __name__ == "__main__":
    main()
