"""Compares products in float8 with bf16: times of whole steps, and the loss after some hundred steps.

    python -m benchmarks.float8 --json float8.json
    python -m benchmarks.float8 --loss --steps 500 --json float8-loss.json
    python -m benchmarks.float8 --loss --steps 1000 --at-once 5 --json float8-loss.json --plot loss.png

Times: DeepSeek-V2-Lite with 10 blocks and Mixtral with 4, on one GPU, with --train.float8 none and rowwise
alternating --rounds times, so that both settings use the same card at the same time. The medians are
compared.

--loss: a model whose dense and shared layers are all converted. Three runs are in bf16, with seeds 0, 1 and
2. With seed 0 and over the same text, one run has dense products in float8, and one has those of experts too
(--train.fp8 all, wherever it may be slower). The rule: the last losses of a run in float8 and of bf16 with
the same seed differ by at most twice the largest difference between the three seeds. If the rule is broken,
the command ends with code 1. It also runs on a CPU, with smaller batches after `--` and fewer steps.
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

from benchmarks.sft import about
from benchmarks.train import at_least_one, measure, running, write_line
from tmoe.cli.parse import parse
from tmoe.log.metrics_file import read_steps
from tmoe.model.float8 import layers_in

MODELS = {
    "deepseek-v2-lite, 10 blocks": "deepseek-v2-lite --model.layers 10 --train.batch 4",
    "mixtral, 4 blocks": "mixtral-8x7b --model.layers 4 --train.batch 4",
}
TIMES = 2  # allowed multiple of the largest difference between seeds
WINDOW = 20  # number of last steps whose mean loss is compared
LOSS = """tiny --train.dtype bf16 --model.dim 512 --model.layers 4 --model.heads 8 --model.kv-heads 4
    --model.head-dim 64
    --model.ffn-dim 1024 --model.dense-layers 1 --model.moe.experts 8 --model.moe.ffn-dim 256
    --model.moe.shared-dim 512 --train.seq 256 --train.batch 16 --optim.lr 1e-3 --train.eval-every 0
    --train.eval-batches 1 --checkpoint.mode off --resume none --log.no-progress --log.no-report"""
RUNS = {f"bf16, seed {seed}": ["--seed", str(seed)] for seed in range(3)}
NARROW = {  # of seed 0
    "float8": ["--train.float8", "rowwise"],
    "fp8 of experts too": ["--train.fp8", "all", "--train.fp8-everywhere"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loss", action="store_true", help="compare losses, not times")
    parser.add_argument(
        "--steps", type=at_least_one, help="steps of each run; default: 30 for times, 500 for losses"
    )
    parser.add_argument("--rounds", type=at_least_one, default=2, help="for times: runs of each setting")
    parser.add_argument("--timeout", type=float, default=300, help="for times: seconds for a run")
    parser.add_argument("--at-once", type=at_least_one, default=1, help="for losses: runs at the same time")
    parser.add_argument("--json", type=Path, help="append the result to this file, one JSON object a line")
    parser.add_argument("--plot", type=Path, help="for losses: draw the curves into this file")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- --section.field value ... for every run")
    args = parser.parse_args()
    more = [word for word in args.train if word != "--"]
    if not args.loss:
        times(args.steps or 30, args.rounds, args.timeout, more, args.json)
        return
    steps = 500 if args.steps is None else args.steps
    if steps < WINDOW:
        parser.error(f"--steps={steps}: must be {WINDOW} or more: losses are averaged over that many steps")
    left = layers_in(parse([*LOSS.split(), *more], "").model).left
    if left:
        parser.error(f"every dense and shared layer must be in float8; too narrow: {', '.join(left)}")
    curves = losses(steps, more, args.at_once)
    if args.json:
        write_line(args.json, dict(steps=steps, words=more, losses=curves) | about("float8"))
    if args.plot:
        draw(curves, args.plot)
    lines, holds = compared({name: statistics.mean(curve[-WINDOW:]) for name, curve in curves.items()})
    print("\n".join(lines))
    raise SystemExit(0 if holds else 1)


def times(steps: int, rounds: int, timeout: float, more: list[str], to: Path | None) -> None:
    """Prints a table of steps with and without float8; each run is appended to the file `to` as a line."""
    print("| model | float8 | ms a step | tokens/s | x |\n|---|---|---|---|---|", flush=True)
    for name, words in MODELS.items():
        rates: dict[str, list[float]] = {"none": [], "rowwise": []}
        tokens = 0  # tokens of a step
        for number in range(rounds):
            for kind in rates:
                with tempfile.TemporaryDirectory() as out:
                    given = [*words.split(), "--train.float8", kind, *more]
                    result = measure(1, steps, given, Path(out, "run"), timeout)
                tokens = result["tokens_per_step"]
                rates[kind].append(result["tokens_per_s_gpu"])
                if to:
                    write_line(to, result | dict(model=name, float8=kind, round=number))
        base = statistics.median(rates["none"])
        for kind, samples in rates.items():
            rate = statistics.median(samples)
            row = f"| {name} | {kind} | {1e3 * tokens / rate:.1f} | {rate:,.0f} | {rate / base:.3f} |"
            print(row, flush=True)


def losses(steps: int, more: list[str], at_once: int) -> dict[str, list[float]]:
    """The losses of each run of RUNS and NARROW."""

    runs = RUNS | {name: ["--seed", "0", *words] for name, words in NARROW.items()}
    curves = {}
    with tempfile.TemporaryDirectory() as out:
        for begin in range(0, len(runs), at_once):
            names = list(runs)[begin : begin + at_once]
            folders = {name: Path(out, name.replace(", ", "-").replace(" ", "")) for name in names}
            with ExitStack() as open_runs:
                processes = {}
                for name, folder in folders.items():
                    words = [*LOSS.split(), "--steps", str(steps), *runs[name], "--out", str(folder), *more]
                    command = [sys.executable, "train.py", *words]
                    processes[name] = open_runs.enter_context(running(command))
                for name, process in processes.items():
                    if code := process.wait():
                        raise SystemExit(f"{name}: train.py ended with code {code}")
            for name, folder in folders.items():
                curves[name] = [line["loss"] for _, line in read_steps(folder / "metrics.jsonl")]
    return curves


def draw(curves: dict[str, list[float]], to: Path) -> None:
    """The curves, each value the mean of WINDOW losses."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(8, 5), layout="constrained").subplots()
    for name, curve in curves.items():
        means = [statistics.mean(curve[i : i + WINDOW]) for i in range(len(curve) - WINDOW + 1)]
        axes.plot(range(WINDOW, len(curve) + 1), means, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel=f"loss, mean of {WINDOW} steps", yscale="log")
    axes.legend()
    axes.get_figure().savefig(to, dpi=120)


def compared(last: dict[str, float]) -> tuple[list[str], bool]:
    """A table of the last losses, and whether all in float8 are as close to bf16 as the rule demands.

    last: name of each run -> mean of its last losses.
    """
    spread = max(abs(last[a] - last[b]) for a, b in combinations(RUNS, 2))
    lines = ["| run | last loss |", "|---|---|", *(f"| {name} | {loss:.4f} |" for name, loss in last.items())]
    all_hold = True
    for name in NARROW:
        apart = abs(last[name] - last["bf16, seed 0"])
        holds = apart <= TIMES * spread
        verdict = "held" if holds else "broken"
        rule = f"at most {TIMES} times the seeds' {spread:.4f}: {verdict}"
        lines.append(f"{name} and bf16 of seed 0 are {apart:.4f} apart; {rule}")
        all_hold = all_hold and holds
    return lines, all_hold


if __name__ == "__main__":
    main()
