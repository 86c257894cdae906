"""Layout never changes the mathematics, on this machine's GPUs: a small model in fp32, kernels and compile on, on every layout.

    python -m benchmarks.layouts --gpus 4

Losses and gradient norms of 20 steps are compared with those of one process with one micro-batch; exit code 1 beyond 1e-5.
"""

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.train import launch

SEQUENCES, STEPS, LIMIT = 8, 20, 1e-5
MODEL = """tiny --train.dtype fp32 --model.layers 3 --model.dense-layers 1 --model.dim 128 --model.moe.shared-dim 64 --train.seq 64
    --model.moe.balance-coeff 0.1 --optim.lr 3e-3 --optim.eps 1e-4 --optim.clip 0.5 --train.eval-every 0 --train.eval-batches 1
    --log.no-progress --data.path stdlib --optim.warmup 0"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=1, help="the most processes, one a GPU")
    parser.add_argument("--jobs", type=int, default=1, help="layouts that run at a time, sharing the GPUs")
    parser.add_argument("--timeout", type=float, default=200, help="seconds for each layout")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- --section.field value ... for every run")
    args = parser.parse_args()
    more = [w for w in args.train if w != "--"]
    want, worst = curves(1, 1, 1, "auto", more, args.timeout), 0.0
    print(
        "| processes | ep | micro-batches | dispatch | largest relative difference of losses, of norms |\n|---|---|---|---|---|"
    )
    with ThreadPoolExecutor(args.jobs) as pool:
        found = layouts(args.gpus)
        runs = pool.map(lambda layout: curves(*layout, more=more, timeout=args.timeout), found)
        for layout, got in zip(found, runs, strict=True):
            far = [max(abs(a - b) / abs(b) for a, b in zip(got[k], want[k], strict=True)) for k in want]
            worst = max(worst, *far)
            print(f"| {' | '.join(map(str, layout))} | {', '.join(f'{x:.1e}' for x in far)} |", flush=True)
    sys.exit(worst > LIMIT)


def layouts(gpus: int) -> list[tuple[int, int, int, str]]:
    """(processes, ep, micro-batches, dispatch) of which the batch is a multiple."""
    found = [(1, 1, micro, "auto") for micro in (2, 4)]
    for world in (n for n in (2, 4, 8) if n <= gpus):
        found += [(world, 1, 1, "auto")]
        for ep in (e for e in (2, 4, 8) if e <= world):
            found += [
                (world, ep, micro, how) for how in ("auto", "nccl") for micro in (1, 2) if micro * world <= SEQUENCES
            ]
    return found


def curves(world: int, ep: int, micro: int, dispatch: str, more: list[str], timeout: float) -> dict[str, list[float]]:
    batch = SEQUENCES // world // micro
    words = [*MODEL.split(), "--parallel.ep", str(ep), "--parallel.dispatch", dispatch, "--train.batch", str(batch)]
    with tempfile.TemporaryDirectory() as out:
        launch(world, STEPS, [*words, "--train.accumulate", str(micro), *more], Path(out), timeout)
        lines = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS and lines[-1]["loss"] < lines[0]["loss"] - 0.5, (
        "nothing was learnt: the test has no point"
    )
    return {key: [line[key] for line in lines] for key in ("loss", "grad_norm")}


if __name__ == "__main__":
    main()
