"""Prints the tmoe command that does the same as a command of another framework, or why there is none.

    python -m tmoe.migrate megatron --world 16 -- --num-layers 32 --hidden-size 4096 ...
    python -m tmoe.migrate tutel --world 8 -- --num_local_experts=-2 --top=2 --model_dim=2048 ...
    python -m tmoe.migrate fms --world 8 -- accelerated_moe.yaml --model_name_or_path HF_DIR ...

    python -m tmoe.migrate import megatron CKPT STEP -- --num-layers 32 ...
    python -m tmoe.migrate import tutel 'c/{rank}-of-{size}.ckpt' OUT.safetensors -- --size 8

The whole command may be given, with its launchers and variables. The command of tmoe is printed on stdout,
notes on stderr. Exit code 0: the printed command does the same. Exit code 2: stdout is empty, and stderr has
a line for each flag that has no counterpart, has a wrong value, or is missing.
docs/migrate.md lists every flag.

next: frameworks.py, tables.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tmoe.config.check import ConfigError

if TYPE_CHECKING:
    from tmoe.extras.migrate.tables import TranslatedCommand


def __getattr__(name: str) -> object:
    """Imports `translate` at its first use, so that --help need not load torch."""
    if name != "translate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tmoe.extras.migrate.frameworks import translate

    return translate


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        _end("tmoe migrate: needs a command; valid: megatron, tutel, fms, import; --help shows all")
    if words[0] in ("-h", "--help"):
        print((__doc__ or "").partition("\nnext:")[0])
        sys.exit(0)
    from tmoe.extras.migrate.frameworks import FRAMEWORKS, translate  # late: --help need not load torch

    if words[0] == "import":
        return _import(words[1:])
    framework, *rest = words
    if framework not in FRAMEWORKS:
        _end(f"{framework}: must be one of {', '.join(FRAMEWORKS)}")
    cut = rest.index("--") if "--" in rest else len(rest)
    ours, theirs = rest[:cut], rest[cut + 1 :]
    try:
        outcome = translate(framework, theirs, _world(ours))
    except ConfigError as error:
        _end(error.spelt("flag"))
    for note in outcome.notes:
        print(f"note: {note}", file=sys.stderr)
    if outcome.refused:
        print(f"note: without these flags it is: {outcome.command()}", file=sys.stderr)
        _end("\n".join(outcome.refused))
    if why := _untrainable(outcome):
        _end(why)
    print(outcome.command())


def _untrainable(out: TranslatedCommand) -> str:
    """The reason why train.py would refuse the command, with their flag if it became the setting; else "".

    A model that --init names is checked only if its folder exists on this machine.
    """
    from tmoe.extras.migrate import names
    from tmoe.extras.migrate.tables import TranslatedCommand

    has_config = Path(out.flags.get("--init", [""])[0], "config.json").is_file()
    if not (out.preset or has_config):
        return ""
    left_out = {"--world"} if has_config else {"--world", "--init"}
    planned = {flag: values for flag, values in out.flags.items() if flag not in left_out}
    words = TranslatedCommand(flags=planned, preset=out.preset).words
    error = names.refusal((*words, "--world", str(out.world))).removeprefix("error: ")
    flag = error.partition("=")[0]
    values = out.flags.get(flag, [""])
    their_flag = out.source(flag, values[0])
    return f"{their_flag}={values[0]}: becomes {error}" if their_flag else error


def _import(words: list[str]) -> None:
    """Runs `import FRAMEWORK FROM TO -- THEIR FLAGS`."""
    cut = words.index("--") if "--" in words else len(words)
    ours, theirs = words[:cut], words[cut + 1 :]
    if len(ours) != 3 or ours[0] not in ("megatron", "tutel"):
        _end(f"import {' '.join(ours)}: must be import megatron|tutel FROM TO -- FLAGS")
    framework, source, out = ours
    if framework == "megatron":
        return _import_megatron(Path(source), Path(out), theirs)
    from tmoe.checkpoint.tools import one_message
    from tmoe.extras.migrate.tutel_weights import write

    with one_message():
        flags = dict(_pairs(theirs))
        size = flags.get("--size", "1")
        if flags.keys() - {"--size", "--namespace"} or not size.isdigit() or int(size) < 1:
            _end(f"{' '.join(theirs)}: must be --size RANKS and, where needed, --namespace KEY/KEY")
        count = write(source, int(size), Path(out), flags.get("--namespace", ""))
        print(f"{out}: {count} tensors")


def _import_megatron(source: Path, out: Path, theirs: list[str]) -> None:
    """Makes a step from a torch_dist folder. Reports a missing folder and all faults of the flags at once."""
    from tmoe.checkpoint.plans import carry_out
    from tmoe.checkpoint.tools import one_message
    from tmoe.cli.parse import parse
    from tmoe.extras.migrate.frameworks import translate
    from tmoe.extras.migrate.megatron_weights import plan_import
    from tmoe.extras.migrate.tables import TranslatedCommand

    outcome = TranslatedCommand()
    faults = [] if source.exists() else [f"{source}: no such folder"]
    try:
        outcome = translate("megatron", theirs)
        faults += outcome.refused
    except ConfigError as error:
        faults += error.spelt("flag").splitlines()
    if outcome.refused:
        print("note: flags that do not change the model may be left out", file=sys.stderr)
    if faults:
        _end("\n".join(faults))
    with one_message():
        cfg = parse([*outcome.words, "--dry-run"], "")
        carry_out(plan_import(source, cfg.model), [source], out, False)


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """Flags and values of `--flag value` and `--flag=value`."""
    flat = [part for word in words for part in word.split("=", 1)]
    yield from zip(flat[::2], [*flat[1::2], ""], strict=False)


def _world(ours: list[str]) -> int | None:
    """The N of `--world N`; any other word before the `--` ends the process with exit code 2."""
    if not ours:
        return None
    words = [part for word in ours for part in word.split("=", 1)]
    if len(words) != 2 or words[0] != "--world" or not words[1].isdigit() or int(words[1]) < 1:
        _end(f"{' '.join(ours)}: must be --world N, and their flags must follow a --")
    return int(words[1])


def _end(text: str) -> NoReturn:
    """Ends the process with exit code 2. text: a line for each fault."""
    from tmoe.front import Ended

    lines = "\n".join(f"error: {line}" for line in text.splitlines())
    print(lines, file=sys.stderr)
    raise Ended(lines)
