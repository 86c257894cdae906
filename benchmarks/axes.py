"""Times the steps of one model along each parallel axis, the same global batch in every layout.

    python -m benchmarks.axes --gpus 2 --json axes.jsonl -- olmoe-1b-7b --model.layers 4

Layouts: dp, ep, tp, cp by keys and by heads, pp and etp, each over all GPUs. Everything behind `--` goes to
train.py; --train.batch is that of a data-parallel rank, which tp, cp and pp multiply by the GPUs. A layout
that fails is named, and the others go on. Losses of the first and the last step stand beside the times:
layouts compute the same.

next: train.py
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.train import at_least_one, measure, write_line
from tmoe.run.cli import parse


def layouts(gpus: int, batch: int) -> Iterator[tuple[str, list[str]]]:
    """Name and words of each layout of so many GPUs, for the global batch of `batch` sequences a GPU."""
    whole = ["--train.batch", str(batch * gpus)]
    n = str(gpus)
    yield f"dp{n}", ["--train.batch", str(batch)]
    yield f"ep{n}", ["--train.batch", str(batch), "--parallel.ep", n]
    yield f"tp{n}", [*whole, "--parallel.tp", n]
    yield f"tp{n} ep{n}", [*whole, "--parallel.tp", n, "--parallel.ep", n]
    yield f"cp{n} keys", [*whole, "--parallel.cp", n]
    yield f"cp{n} heads", [*whole, "--parallel.cp", n, "--parallel.cp-by", "heads"]
    micros = ["--train.batch", str(batch // 2), "--train.accumulate", str(2 * gpus)]
    yield f"pp{n}", [*micros, "--parallel.pp", n]
    yield f"etp{n}", ["--train.batch", str(batch), "--parallel.etp", n]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=at_least_one, default=2)
    parser.add_argument("--steps", type=at_least_one, default=20)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each layout")
    parser.add_argument("--only", nargs="+", help="layouts, 'tp2' for example")
    parser.add_argument("--json", type=Path, help="append a line for each layout to this file")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- PRESET --section.field value ...")
    args = parser.parse_args()
    words = [word for word in args.train if word != "--"]
    batch = parse(words, "", world=1).train.batch
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, more in layouts(args.gpus, batch):
            if args.only and name not in args.only:
                continue
            out = Path(folder, name.replace(" ", "-"))
            try:
                result = measure(args.gpus, args.steps, [*words, *more], out, args.timeout)
            except SystemExit as error:
                result = dict(failed=str(error))
            rows.append((name, result))
            print(row(name, result), flush=True)
            if args.json:
                write_line(args.json, dict(layout=name) | result)
    print("\nlayout         ms a step   tokens/s a GPU   GiB   first loss   last loss")
    for name, result in rows:
        print(row(name, result))


def row(name: str, result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"{name:12}  failed: {result['failed']}"
    numbers = (result[key] for key in ("tokens_per_s_gpu", "peak_gib", "first_loss", "last_loss"))
    rate, gib, first, last = numbers
    ms = 1e3 * result["tokens_per_step"] / (rate * result["gpus"])
    return f"{name:12} {ms:11.1f} {rate:16,.0f} {gib:5.1f} {first:12.4f} {last:11.4f}"


if __name__ == "__main__":
    main()
