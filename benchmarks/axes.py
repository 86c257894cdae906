"""Times the steps of one model along each parallel axis, with the same global batch, against the cost model.

    python -m benchmarks.axes --gpus 2 --json axes.jsonl -- olmoe-1b-7b --model.layers 4
    python -m benchmarks.axes --gpus 2 --gpu h100 --only "tp2" "pp2 v" -- olmoe-1b-7b --model.layers 4

Layouts: dp, ep, tp, cp by keys and by heads, pp by 1f1b and by v, and etp, each over all GPUs. Everything
after `--` is passed to train.py. --train.batch is the batch of a data-parallel rank; for tp, cp and pp it is
multiplied by the number of GPUs. A layout that fails is named, and the remaining layouts continue. The losses
of the first and the last step are printed with the times, because all layouts compute the same.

Each measured step is printed with the cost model's prediction, their ratio, and whether the constants of its
axis were measured or assumed (benchmarks/cost/constants.py, OF_AXIS). To turn assumed constants into measured
ones: `python -m benchmarks.model --fit tp_factor --check FILE`, where FILE holds only the layout's line.

next: train.py
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cost.compare import ratio
from benchmarks.cost.constants import CONSTANTS, of_gpu, standing, values
from benchmarks.cost.page import refused
from benchmarks.cost.points import point_of
from benchmarks.train import at_least_one, measure, write_line
from tmoe.cli.parse import parse
from tmoe.config.gpus import GPUS


def layouts(gpus: int, batch: int) -> Iterator[tuple[str, list[str]]]:
    """Yields name and words of each layout for this number of GPUs; the global batch is `batch` per GPU."""
    whole = ["--train.batch", str(batch * gpus)]
    n = str(gpus)
    yield f"dp{n}", ["--train.batch", str(batch)]
    yield f"ep{n}", ["--train.batch", str(batch), "--parallel.ep", n]
    yield f"tp{n}", [*whole, "--parallel.tp", n]
    yield f"tp{n} ep{n}", [*whole, "--parallel.tp", n, "--parallel.ep", n]
    yield f"cp{n} keys", [*whole, "--parallel.cp", n]
    yield f"cp{n} heads", [*whole, "--parallel.cp", n, "--parallel.cp-exchange", "heads"]
    size = batch // 2 if batch % 2 == 0 else batch
    micros = ["--train.batch", str(size), "--train.accumulate", str(batch * gpus // size)]
    yield f"pp{n}", [*micros, "--parallel.pp", n]
    yield f"pp{n} v", [*micros, "--parallel.pp", n, "--parallel.schedule", "v"]
    yield f"etp{n}", ["--train.batch", str(batch), "--parallel.etp", n]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=at_least_one, default=2)
    parser.add_argument("--gpu", choices=list(GPUS), default="h200", help="whose constants predict")
    parser.add_argument("--steps", type=at_least_one, default=20)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for each layout")
    parser.add_argument("--only", nargs="+", help="layouts, for example 'tp2'")
    parser.add_argument("--json", type=Path, help="append a line for each layout to this file")
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- PRESET --section.field value ...")
    args = parser.parse_args()
    words = [word for word in args.train if word != "--"]
    known = dict(layouts(args.gpus, parse(words, "", world=1).train.batch))
    if unknown := set(args.only or ()) - known.keys():
        parser.error(f"--only {', '.join(sorted(unknown))}: valid: {', '.join(known)}")
    constants = of_gpu(json.loads(CONSTANTS.read_text()), args.gpu)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only or known:
            out = Path(folder, name.replace(" ", "-"))
            try:
                result = measure(args.gpus, args.steps, [*words, *known[name]], out, args.timeout)
                result |= prediction(result, constants)
            except SystemExit as error:
                result = dict(failed=str(error))
            rows.append((name, result))
            print(row(name, result), flush=True)
            if args.json:
                write_line(args.json, dict(layout=name) | result)
    print(f"\npredicted by the constants of {args.gpu}\n{HEAD}")
    for name, result in rows:
        print(row(name, result))


def prediction(result: dict[str, Any], constants: dict[str, dict]) -> dict[str, Any]:
    """The cost model's milliseconds for a measured step, and the origin of the constants of its axes.

    If the model does not cover such steps, the result holds the reason instead.
    """
    point = point_of(result)
    m = values(constants)
    if why := refused(point.cfg, [point.axes.world], 1, m, True):
        return dict(predicted_ms=None, constants=why)
    used = {axis: how for axis, how in standing(constants).items() if getattr(point.axes, axis) > 1}
    origins = "; ".join(f"{axis} {how}" for axis, how in used.items())
    return dict(predicted_ms=1e3 * point.seconds * ratio(point, m), constants=origins)


HEAD = (
    "layout       measured ms predicted ms  ratio   tokens/s a GPU   GiB   first loss   last loss  constants"
)


def row(name: str, result: dict[str, Any]) -> str:
    """A layout's line under HEAD. ratio: predicted time divided by measured time."""
    if "failed" in result:
        return f"{name:12}  failed: {result['failed']}"
    numbers = (result[key] for key in ("tokens_per_s_gpu", "peak_gib", "first_loss", "last_loss"))
    rate, gib, first, last = numbers
    ms, predicted = 1e3 * result["tokens_per_step"] / (rate * result["gpus"]), result["predicted_ms"]
    beside = f"{'none':>12} {'':6}" if predicted is None else f"{predicted:12.1f} {predicted / ms:6.3f}"
    figures = f"{rate:16,.0f} {gib:5.1f} {first:12.4f} {last:11.4f}"
    return f"{name:12} {ms:11.1f} {beside} {figures}  {result['constants']}"


if __name__ == "__main__":
    main()
