"""The tmoe command that does what a command of another framework does, or why there is none.

    python -m tmoe.migrate megatron --world 16 -- --num-layers 32 --hidden-size 4096 ...
    python -m tmoe.migrate tutel --world 8 -- --num_local_experts=-2 --top=2 --model_dim=2048 ...
    python -m tmoe.migrate fms --world 8 -- accelerated_moe.yaml --model_name_or_path HF_DIR ...

    python -m tmoe.migrate import megatron CKPT STEP -- --num-layers 32 ...
    python -m tmoe.migrate import tutel 'c/{rank}-of-{size}.ckpt' OUT.safetensors -- --size 8

The command goes to stdout, notes go to stderr. Exit code 0: the command does the same; 1: a flag has no
counterpart, named with the reason on stderr, and nothing is on stdout; 2: not a command line.
docs/migrate.md has every flag.

next: tables.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.tools import carry_out, one_message
from tmoe.config.check import ConfigError
from tmoe.migrate import fms, megatron, tutel
from tmoe.migrate.megatron_weights import plan_import
from tmoe.migrate.tables import Outcome, Row
from tmoe.migrate.tutel_weights import write
from tmoe.run.cli import parse

FRAMEWORKS: dict[str, tuple[tuple[Row, ...], Callable[[list[str], int | None], Outcome]]] = {
    "megatron": (megatron.ROWS, megatron.translate),
    "tutel": (tutel.ROWS, tutel.translate),
    "fms": (fms.ROWS, fms.translate),
}


def translate(framework: str, words: Sequence[str], world: int | None = None) -> Outcome:
    """The outcome of a command of a framework. ConfigError where the command itself cannot be."""
    return FRAMEWORKS[framework][1](list(words), world)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print((__doc__ or "").partition("\nnext:")[0])
        sys.exit(0 if words else 2)
    if words[0] == "import":
        return _import(words[1:])
    framework, *rest = words
    if framework not in FRAMEWORKS:
        _end(2, f"{framework}: must be one of {', '.join(FRAMEWORKS)}")
    cut = rest.index("--") if "--" in rest else len(rest)
    ours, theirs = rest[:cut], rest[cut + 1 :]
    try:
        outcome = translate(framework, theirs, _world(ours))
    except ConfigError as error:
        _end(1, str(error))
    for note in outcome.notes:
        print(f"note: {note}", file=sys.stderr)
    if outcome.refused:
        rest_of_it = outcome.command()
        _end(
            1,
            "no counterpart:\n  " + "\n  ".join(outcome.refused) + f"\nwithout these it is:\n  {rest_of_it}",
        )
    print(outcome.command())


def _import(words: list[str]) -> None:
    """`import FRAMEWORK FROM TO -- THEIR FLAGS`."""
    cut = words.index("--") if "--" in words else len(words)
    ours, theirs = words[:cut], words[cut + 1 :]
    if len(ours) != 3 or ours[0] not in ("megatron", "tutel"):
        _end(2, f"import {' '.join(ours)}: must be import megatron|tutel FROM TO -- FLAGS")
    framework, source, out = ours
    with one_message():
        if framework == "megatron":
            outcome = translate("megatron", theirs)
            refuse(
                "no counterpart, and so perhaps another model; leave out what is not of it", outcome.refused
            )
            cfg = parse([*outcome.words, "--dry-run"], "")
            carry_out(plan_import(Path(source), cfg.model), [Path(source)], Path(out), False)
        else:
            flags = dict(_pairs(theirs))
            size = flags.get("--size", "1")
            if flags.keys() - {"--size", "--namespace"} or not size.isdigit() or int(size) < 1:
                _end(2, f"{' '.join(theirs)}: must be --size RANKS and, where needed, --namespace KEY/KEY")
            count = write(source, int(size), Path(out), flags.get("--namespace", ""))
            print(f"{out}: {count} tensors")


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """Flags and values of `--flag value` and `--flag=value`."""
    flat = [part for word in words for part in word.split("=", 1)]
    yield from zip(flat[::2], [*flat[1::2], ""], strict=False)


def _world(ours: list[str]) -> int | None:
    """The N of `--world N`; what else stands before the `--` ends the process with code 2."""
    if not ours:
        return None
    words = [part for word in ours for part in word.split("=", 1)]
    if len(words) != 2 or words[0] != "--world" or not words[1].isdigit() or int(words[1]) < 1:
        _end(2, f"{' '.join(ours)}: must be --world N, and their flags must stand behind a --")
    return int(words[1])


def _end(code: int, text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(code)
