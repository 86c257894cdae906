"""The tmoe command that does what a command of another framework does, or why there is none.

    python -m tmoe.migrate megatron --world 16 -- --num-layers 32 --hidden-size 4096 ...
    python -m tmoe.migrate tutel --world 8 -- --num_local_experts=-2 --top=2 --model_dim=2048 ...
    python -m tmoe.migrate fms --world 8 -- accelerated_moe.yaml --model_name_or_path HF_DIR ...

The command goes to stdout, notes go to stderr. Exit code 0: the command does the same; 1: a flag has no
counterpart, named with the reason on stderr, and nothing is on stdout; 2: not a command line.
docs/migrate.md has every flag.

next: tables.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tmoe.config.check import ConfigError
from tmoe.migrate import fms, megatron, tutel
from tmoe.migrate.tables import Outcome, Row

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
