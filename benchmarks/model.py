"""Predicts the time of a training step for any layout, to choose what to rent. The model is benchmarks/cost.

    python -m benchmarks.model --tokens 1e12 -- olmoe-1b-7b           8 to 4096 GPUs: every dp x ep, then the
                                                                      ten best of all axes
    python -m benchmarks.model --gpu h100 --gpus 64 --batch-tokens 4e6 olmoe-1b-7b
    python -m benchmarks.model --gpus 4 --parts -- olmoe-1b-7b --parallel.ep 4
                                                                      where the time of one layout goes
    python -m benchmarks.model --check                                against shipped steps; code 1 beyond 10%
    python -m benchmarks.model --check --published                    against published steps of others
    python -m benchmarks.model --fit glue_passes --check FILES        the constants that fit these points best

Everything after `--` is parsed like train.py's words. benchmarks/cost/step_time.py lists the parts whose sum
is a step, and what is left out. The constants (tmoe/model/h200.json) record whether they were measured,
fitted (and on which points) or assumed. They describe the version of the code that took those points: when
the code has become faster, measure again, `--fit` the constants that have changed, and write the printed
values into the file.

The page of dp x ep uses the given micro-batches and recomputation on every rank. The ten best are searched
among all mixtures of pp (1f1b, interleaved, v), replicate, dp, ep, etp, cp (keys, heads) and tp that train.py
accepts, in which tp stays in a node, a rank has at least 256 tokens of a sequence, and replicas fill nodes;
with every --parallel.checkpoint, with and without --optim.offload, and with as many micro-batches as fit into
--batch-tokens, or fewer. The last line says for each axis whether its constants were measured or assumed.

--check reads the busiest rank's share of the tokens from the lines that have it (`busiest_rank`), and uses
`skew` for all other lines; benchmarks/cost/points.py says which lines it reads. A point counts as fitted if
any run of its layout set a constant. With --gpu the constants are those of that GPU, for steps measured on
it. --published compares with benchmarks/cost/published.jsonl instead, each row with its own GPU.

next: cost/step_time.py
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from benchmarks.cost.compare import check, fit, ratio, unheld
from benchmarks.cost.constants import CONSTANTS, check_constant, of_gpu, standing, title, values
from benchmarks.cost.page import best_table, memory_table, page, parts_table, refused
from benchmarks.cost.points import fitted_layouts, held, read_points, summary
from benchmarks.cost.published import compared, not_expressed, published_summary, published_table
from benchmarks.cost.search import Search
from benchmarks.cost.step_time import predict
from tmoe import front
from tmoe.cli.parse import parse
from tmoe.config.axes import Axes
from tmoe.config.check import MOST
from tmoe.config.gpus import GPUS
from tmoe.config.presets import presets

AXES = {
    *("--parallel.dp", "--parallel.ep", "--parallel.tp", "--parallel.cp", "--parallel.pp"),
    *("--parallel.replicate", "--parallel.etp", "--parallel.cp-exchange", "--parallel.schedule"),
    *("--parallel.chunks", "--parallel.cut", "--parallel.head"),
}
OURS = {"--gpus", "--tokens", "--batch-tokens", "--parts", "--check", "--fit", "--gpu", "--constants"}
OURS |= {"--published"}
WORLDS = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]


def main() -> None:
    parser = command()
    args = parser.parse_args(marked(sys.argv[1:]))
    constants = constants_of(args, parser)
    console = Console(width=170)
    if args.published:
        show_published(constants, console)
        return
    constants = of_gpu(constants, args.gpu)
    if args.check is not None:
        raise SystemExit(not show_check(args, constants, console))
    words = words_of(args, parser)
    m = values(constants)
    require_layouts(args, words, m, parser)
    if args.parts:
        show_parts(args.gpus, words, m, console)
    else:
        show_layouts(args, words, constants, console)


def command() -> argparse.ArgumentParser:
    """The parser of this program's words."""
    parser = front.Parser(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--tokens", type=float, default=1e12, help="tokens to train, for days and GPU-hours")
    parser.add_argument(
        "--batch-tokens", type=float, default=2**24, help="most tokens of a step, for the best of all axes"
    )
    parser.add_argument(
        "--parts", action="store_true", help="parts of the one layout that the words of train.py name"
    )
    parser.add_argument(
        "--check",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="files of benchmarks.train --json; without a file: the shipped steps",
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help="with --check: predicted over published speeds of other programs",
    )
    parser.add_argument(
        "--fit", nargs="+", default=[], metavar="CONSTANT", help="print the values that fit the points best"
    )
    parser.add_argument(
        "--gpu",
        choices=list(GPUS),
        default="h200",
        help="h200 was measured; every other GPU is scaled from it by data sheets (tmoe/config/gpus.py)",
    )
    parser.add_argument(
        "--constants",
        type=Path,
        default=CONSTANTS,
        help="a file like tmoe/model/h200.json, for your own GPU",
    )
    parser.add_argument("train", nargs=argparse.REMAINDER, help="-- PRESET --section.field value ...")
    return parser


def constants_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, dict]:
    """The constants of --constants, once the flags are found to agree with them and with each other."""
    try:
        constants = json.loads(args.constants.read_text())
        shipped = json.loads(CONSTANTS.read_text())
        if unknown := shipped.keys() - constants.keys():
            raise ValueError(f"lacks {', '.join(sorted(unknown))}")
        for name in shipped:
            check_constant(name, constants[name]["value"], shipped[name]["value"])
        numbers = [name for name, c in constants.items() if isinstance(c["value"], (int, float))]
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        parser.error(f"--constants={args.constants}: {error}")
    if unknown := set(args.fit) - set(numbers):
        raise SystemExit(f"--fit {' '.join(unknown)}: must be among {', '.join(numbers)}")
    if args.fit and args.check is None:
        parser.error("--fit: needs --check, the points to fit")
    if args.constants != CONSTANTS and args.gpu != "h200":
        parser.error(f"--gpu={args.gpu}: --constants are of one GPU already; leave one of the two out")
    if args.published and (args.check is None or args.check or args.fit or args.gpu != "h200"):
        parser.error("--published: needs --check, without files, --fit and --gpu: each row names its GPU")
    return constants


def show_published(constants: dict[str, dict], console: Console) -> None:
    """--check --published: predicted over published speeds."""
    found = compared(constants)
    console.print(published_table(found))
    console.print("\n".join([*not_expressed(found), published_summary(found)]), soft_wrap=True)


def show_check(args: argparse.Namespace, constants: dict[str, dict], console: Console) -> bool:
    """--check: predicted against measured steps, after --fit; returns whether all are within 10%."""
    points = read_points(args.check or held())
    fitted = fit(points, args.fit, values(constants)) if args.fit else {}
    for name, value in fitted.items():
        console.print(f"{name}: {constants[name]['value']:.4g} -> {value:.4g}")
        runs = [dict(gpus=p.axes.world, command=p.command) for p in points]
        constants[name] |= dict(value=value, points=runs)
    table, good = check(points, constants)
    console.print(table)
    m = values(constants)
    console.print(summary(points, [ratio(p, m) - 1 for p in points], fitted_layouts(constants)))
    console.print("\n".join([] if args.check else unheld(m)), soft_wrap=True)
    return good


def words_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The words of train.py. A layout among them is refused, except with --parts."""
    words = [w for w in args.train if w != "--"]
    if late := [w for w in words if w.split("=")[0] in OURS]:
        parser.error(f"{late[0]}: must come before train.py's words: {late[0]} ... -- {words[0]}")
    taken = [w for w in words if w.split("=")[0] in AXES]
    if taken and not args.parts:
        parser.error(f"{taken[0]}: leave it out: the page compares every layout; --parts takes one")
    return words


def require_layouts(
    args: argparse.Namespace, words: list[str], m: SimpleNamespace, parser: argparse.ArgumentParser
) -> None:
    """End the program with one line if a number of GPUs or the words of train.py cannot be predicted."""
    # Checked before `parse`, whose message would call the number a world size.
    if wrong := [n for n in args.gpus if not 1 <= n <= MOST["world"]]:
        parser.error(f"--gpus {wrong[0]}: must be 1 or more, at most {MOST['world']}")
    for world in args.gpus if args.parts else (1,):
        if no := refused(parse(words, "", world=world), args.gpus, args.tokens, m, args.parts):
            parser.error(no)
    if not (args.parts or 1 <= args.batch_tokens < 2**62):
        parser.error(f"--batch-tokens {args.batch_tokens}: must be 1 or more and finite")


def show_parts(worlds: list[int], words: list[str], m: SimpleNamespace, console: Console) -> None:
    """--parts: where the time and the memory of one layout go, for each number of GPUs."""
    for world in worlds:
        cfg = parse(words, "", world=world)
        axes = Axes.of(cfg.parallel, world)
        step = predict(cfg, axes, m)
        console.print(parts_table(step))
        console.print(memory_table(cfg, axes, step, m))


def show_layouts(
    args: argparse.Namespace, words: list[str], constants: dict[str, dict], console: Console
) -> None:
    """The page of dp x ep, then the ten best of all axes for each number of GPUs."""
    cfg = parse(words, "")
    m = values(constants)
    console.print(page(cfg, args.gpus, args.tokens, m, title(args.gpu, m, args.constants != CONSTANTS)))
    search = Search(cfg, m, int(args.batch_tokens))
    for world in args.gpus:
        console.print(best_table(search.best(world), world, search.batch_tokens, m))
    console.print("constants, " + "; ".join(f"{axis} {how}" for axis, how in standing(constants).items()))


def marked(words: list[str]) -> list[str]:
    """Inserts `--` before the preset, because argparse would add it to a list of numbers before it."""
    known = presets()
    at = next((i for i, word in enumerate(words) if word in known), None)
    return words if "--" in words or at is None else [*words[:at], "--", *words[at:]]


if __name__ == "__main__":
    main()
