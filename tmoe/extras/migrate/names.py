"""Names of tmoe's settings in the tables of tmoe/extras/migrate, and train.py's error for a command.

next: tables.py
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from typing import Any

from tmoe import front
from tmoe.cli.flags import flags_of_settings
from tmoe.cli.parse import parse
from tmoe.config.check import ConfigError
from tmoe.config.run import Config

# Routing
SCORE = "--model.moe.score"
SELECTION = "--model.moe.selection"
SELECTIONS = dict(sinkhorn="sinkhorn", quantile_balancing="quantile")
GROUP_SCORE_TOP = "top"  # a value of --model.moe.group-score: the sum of a group's best top-k / top-groups
ROUTER_DTYPE = "--model.moe.router-dtype"
QUANTILE_EMA = "--model.moe.quantile-ema"
NOISE = "--model.moe.noise"
FORCE, FORCE_SKEW = "--model.moe.force", "--model.moe.force-skew"
# Balance
BALANCE, BALANCE_COEFF = "--model.moe.balance", "--model.moe.balance-coeff"
LOSSES = dict(aux_loss="batch", seq_aux_loss="sequence", global_aux_loss="global")
GSHARD, IMPORTANCE = "gshard", "importance-tutel"
# Capacity
CAPACITY = "--model.moe.capacity-factor"
DROP = "--model.moe.drop"
DROPS = dict(probs="probs", position="position", first_choices="choice", prioritized="priority")
PAD = "--model.moe.pad"
ROUNDING = "--model.moe.rounding"
# Experts
LATENT = "--model.moe.latent-dim"
WEIGH = "--model.moe.weigh"


@functools.cache
def kinds() -> dict[str, Any]:
    """Every flag of this version's train.py, and the type of its value."""
    return dict(flags_of_settings(Config))


@functools.cache
def refusal(words: tuple[str, ...]) -> str:
    """The error with which this version's parser refuses a command of train.py; "" if it accepts it."""
    printed: list[str] = []
    write, sys.stderr = sys.stderr, _Into(printed)  # parse prints to stderr
    try:
        parse([*words, "--dry-run"], "")
    except (SystemExit, ConfigError) as error:
        return "".join(printed).strip() or front.spelt(error)
    finally:
        sys.stderr = write
    return ""


class _Into:
    """A stream that collects the texts written to it."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def write(self, text: str) -> int:
        self.said.append(text)
        return len(text)

    def flush(self) -> None:
        pass


def lacking(words: Sequence[str]) -> str:
    """The flags and values of a command that this version lacks, in the parser's words; "" if there are none.

    A combination of flags that the parser refuses is not included.
    """
    error = refusal(tuple(words))
    return error if re.search(": (no such flag|must be one of) ", error) else ""
