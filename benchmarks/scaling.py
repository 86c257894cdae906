"""Measures weak scaling: the same tokens per GPU on 1, 2, 4 and 8 GPUs, with experts over all GPUs or pairs.

    python -m benchmarks.scaling --json scaling.jsonl -- olmoe-1b-7b --model.layers 8
    python -m benchmarks.scaling --gpus 2 --steps 12 -- tiny --no-compile           on a CPU: two processes

One call measures all layouts that this machine's GPUs allow: n GPUs with ep = n, and with ep = 2 and dp =
n/2. Each layout is a run of benchmarks/train.py and a line of its JSON, which `python -m benchmarks.model
--check` compares with its prediction. Efficiency is tokens/s/GPU divided by that of the first run. A run that
fails is named in the table, the remaining runs continue, and the exit code is 1.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.train import at_least_one, measure, write_line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=at_least_one, help="most GPUs to use; default: all of this machine")
    parser.add_argument("--steps", type=at_least_one, default=24)
    parser.add_argument("--timeout", type=float, default=240, help="seconds after which one run is given up")
    parser.add_argument("--json", type=Path, help="append a line for every run to this file")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- PRESET --section.field value ...")
    args = parser.parse_args()
    words = [w for w in args.train if w != "--"]
    if taken := [w for w in words if w.startswith(("--parallel.ep", "--parallel.dp"))]:
        parser.error(f"{taken[0]}: the layouts are this benchmark's own")
    results = []
    for gpus, ep in layouts(args.gpus or max(1, torch.cuda.device_count())):
        print(f"--- {gpus} GPUs, dp {gpus // ep} x ep {ep}", flush=True)
        result: dict[str, Any] = {"gpus": gpus, "ep": ep}
        run_words = [*words, "--parallel.ep", str(ep)]
        try:
            with tempfile.TemporaryDirectory() as out:
                result |= measure(gpus, args.steps, run_words, Path(out, "run"), args.timeout)
        except SystemExit as failure:
            result["failure"] = str(failure)
        results.append(result)
        if args.json and "failure" not in result:
            write_line(args.json, result)
    print(table(results))
    raise SystemExit(any("failure" in r for r in results))


def layouts(most: int) -> list[tuple[int, int]]:
    """(GPUs, ep): powers of two, first with ep = GPUs, then with ep = 2 if that differs."""
    sizes = [2**i for i in range(most.bit_length())]
    return [(gpus, ep) for gpus in sizes for ep in dict.fromkeys((gpus, min(gpus, 2)))]


def table(results: list[dict[str, Any]]) -> str:
    """One row for each run, with its numbers or the reason why it failed."""
    lines = ["| GPUs | dp x ep | tokens/s/GPU | efficiency | MFU | peak GiB | start s |", "|" + " --- |" * 7]
    first = next((r["tokens_per_s_gpu"] for r in results if "failure" not in r), None)
    for r in results:
        layout = f"| {r['gpus']} | {r['gpus'] // r['ep']} x {r['ep']} |"
        if "failure" in r:
            lines.append(f"{layout} {r['failure']} | | | | |")
            continue
        mfu = "" if r["mfu"] is None else f"{r['mfu']:.1%}"
        rate = r["tokens_per_s_gpu"]
        seen = f"{r['peak_gib']:.1f} | {r['start_s']:.1f}"
        lines.append(f"{layout} {rate:,.0f} | {rate / first:.1%} | {mfu} | {seen} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
