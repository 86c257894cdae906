"""Measures cost and saving of checkpointing policies, offloaded moments and narrow states, in whole steps.

    python -m benchmarks.policies --json policies.jsonl -- qwen3-30b-a3b --model.layers 4
    python -m benchmarks.policies --gpus 4 -- qwen3-30b-a3b --model.layers 24 --parallel.ep 4
    python -m benchmarks.policies --states -- qwen3-30b-a3b --model.layers 4 --train.accumulate 4

One table shows speed and peak memory. Each row is a run of benchmarks/train.py. Speed is also given relative
to the first row, which recomputes nothing. The peak is torch's; the dry run's estimate is in parentheses. A
run that fails is named in the table, the remaining runs continue, and the exit code is 1.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.moe_layer import require_gpu
from benchmarks.train import at_least_one, measure, write_line
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.plan.memory import memory_per_rank, peak_bytes

POLICIES = [
    ["--parallel.checkpoint", "none"],
    ["--parallel.checkpoint", "moe"],
    ["--parallel.checkpoint", "attention"],
    ["--parallel.checkpoint", "block"],
    ["--optim.offload"],
]
STATES = [  # moments, sums of gradients and masters in fewer bytes
    ["--optim.states", "fp32"],
    ["--optim.states", "bf16"],
    ["--optim.states", "bf16", "--optim.sums", "bf16"],
    ["--optim.states", "int8", "--optim.sums", "bf16"],
    ["--optim.states", "bf16", "--optim.sums", "bf16", "--optim.masters", "bf16"],
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=at_least_one, default=1, help="number of processes, one for each GPU")
    parser.add_argument("--steps", type=at_least_one, default=14)
    parser.add_argument("--states", action="store_true", help="types of states instead of policies")
    parser.add_argument("--timeout", type=float, default=240, help="seconds after which one run is given up")
    parser.add_argument("--json", type=Path, help="append a line for every run to this file")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- PRESET --section.field value ...")
    args = parser.parse_args()
    words = [w for w in args.train if w != "--"]
    if taken := [w for w in words if w.startswith(("--parallel.checkpoint", "--optim.offload"))]:
        parser.error(f"{taken[0]}: the policies are this benchmark's own")
    require_gpu(parser)
    heads = "policy", "tokens/s/GPU", "of the first", "MFU", "peak GiB (dry run)"
    print(f"| {' | '.join(heads)} |\n{'| --- ' * len(heads)}|", flush=True)
    failed = False
    first = None
    for policy in STATES if args.states else POLICIES:
        name = " ".join(policy).removeprefix("--")
        try:
            with tempfile.TemporaryDirectory() as out:
                result = measure(args.gpus, args.steps, [*words, *policy], Path(out, "run"), args.timeout)
        except SystemExit as failure:
            print(f"| {name} | {failure} | | | |", flush=True)
            failed = True
            continue
        cfg = parse([*words, *policy], "", world=args.gpus)
        dry = peak_bytes(memory_per_rank(cfg, Axes.of(cfg.parallel, args.gpus))) / 2**30
        rate = result["tokens_per_s_gpu"]
        first = first or rate
        mfu = "" if result["mfu"] is None else f"{result['mfu']:.1%}"
        print(
            f"| {name} | {rate:,.0f} | {rate / first:.1%} | {mfu} | {result['peak_gib']:.1f} ({dry:.1f}) |",
            flush=True,
        )
        if args.json:
            write_line(args.json, result)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
