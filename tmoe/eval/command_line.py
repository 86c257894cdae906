"""The command line: a model is scored on lm_eval's tasks, on texts, and by rewards of its answers.

    python -m tmoe.eval runs/tiny --text book.txt                    nats a token, bits a byte, perplexity
    python -m tmoe.eval HF_DIR --tasks arc_easy,hellaswag --few-shot 5 --out scores.json
    python -m tmoe.eval HF_DIR --tasks mine --tasks-path tasks       tasks of your own, YAML files
    python -m tmoe.eval STEP --pass-at 1,8 --rewards number --file prompts.jsonl --out passed.json
    torchrun --nproc-per-node 8 -m tmoe eval HF_DIR --parallel.ep 8 --tasks gsm8k

Figures are written to stdout, notes to stderr; --out keeps everything, so that an
interrupted call can be repeated, and continues.
Exit code 0: done; 2: refused, with the reason on stderr; 1: failed or interrupted.

The model is imported when the command runs, so that --help loads no compiler.

next: eval/flags.py, eval/evaluation.py
"""

from __future__ import annotations

from collections.abc import Sequence

import tyro

from tmoe.base.disk import expand_home
from tmoe.checkpoint.errors import CheckpointError
from tmoe.eval.flags import Flags
from tmoe.front import call, flags_of, one_message


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line. An error ends the process with one message."""
    description = (__doc__ or "").partition("\nnext:")[0]
    shape = dict(description=description, config=(tyro.conf.FlagCreatePairsOff,))
    with one_message(CheckpointError):
        known = [*flags_of(Flags), "--parallel.ep"]
        flags = call(Flags, "python -m tmoe.eval", expand_home(argv), known=known, **shape)
        from tmoe.eval.evaluation import run  # here, so that --help loads no compiler

        run(flags)
