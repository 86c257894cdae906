"""Compares the bf16 loss curves of one model along each parallel axis with the curve of data parallelism.

    python -m benchmarks.axes_curves --gpus 2 --json curves.json -- olmoe-1b-7b --model.layers 2
    python -m benchmarks.axes_curves --gpus 2 --steps 30 -- tiny --no-compile           # on a CPU

The layouts are those of benchmarks/axes.py, with the same global batches; the text is Python's standard
library. Losses are averaged over 20 steps and compared with the first layout's. Expected after 300 steps: a
difference of at most 0.02. Several layouts train at the same time, so nothing is timed. A layout that fails
is named, and the exit code is 1.

next: axes.py
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.axes import layouts
from benchmarks.curve import WINDOW, read
from benchmarks.train import at_least_one
from tmoe.cli.parse import parse

SETTINGS = """--data.path stdlib --optim.warmup 20 --train.eval-every 0 --train.eval-batches 1
    --checkpoint.mode off --resume none --log.no-progress"""


def train(gpus: int, words: list[str], out: Path, timeout: float) -> list[float] | str:
    """The losses of a run, or a text that says what went wrong."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    log = out.with_suffix(".log")
    with log.open("w") as output:
        run = subprocess.Popen(
            [*command, "train.py", *words, "--out", str(out)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[1],
        )
        try:
            code = run.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"not done within {timeout} s"
        finally:
            run.terminate()  # torchrun then ends its workers
            run.wait()
    return f"code {code}: {log.read_text()[-2000:]}" if code else read(out / "metrics.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=at_least_one, default=2)
    parser.add_argument("--steps", type=at_least_one, default=300)
    parser.add_argument("--at-once", type=at_least_one, default=2, help="layouts that train at the same time")
    parser.add_argument("--timeout", type=float, default=200, help="seconds for each layout")
    parser.add_argument("--only", nargs="+", help="layouts, for example 'dp2'; the first is the reference")
    parser.add_argument("--json", type=Path, help="write the curves to this file")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- PRESET --section.field value ...")
    args = parser.parse_args()
    if args.steps < WINDOW:
        parser.error(
            f"--steps {args.steps}: must be {WINDOW} or more: losses are averaged over that many steps"
        )
    preset, *more = (word for word in args.train if word != "--")
    words = [preset, *SETTINGS.split(), *more, "--steps", str(args.steps)]
    batch = parse(words, "", world=1).train.batch
    chosen = [(name, more) for name, more in layouts(args.gpus, batch) if not args.only or name in args.only]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as pool:
        runs = {}
        for name, more in chosen:
            out = Path(folder, name.replace(" ", "-"))
            runs[name] = pool.submit(train, args.gpus, [*words, *more], out, args.timeout)
            time.sleep(1)  # so that two torchruns do not choose the same port
        curves = {name: run.result() for name, run in runs.items()}

    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(dict(command=sys.argv[1:], curves=curves)) + "\n")
    first = next((curve for curve in curves.values() if not isinstance(curve, str)), None)
    print("layout        first loss   last mean   largest difference of means")
    for name, curve in curves.items():
        if isinstance(curve, str) or first is None:
            print(f"{name:12}  failed: {curve}")
            continue
        mean, want = (torch.tensor(c).unfold(0, WINDOW, 1).mean(-1) for c in (curve, first))
        print(f"{name:12} {curve[0]:11.4f} {mean[-1]:11.4f} {(mean - want).abs().max():12.4f}")
    sys.exit(any(isinstance(curve, str) for curve in curves.values()))


if __name__ == "__main__":
    main()
