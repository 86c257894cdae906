"""What the tables of tmoe/migrate call settings of tmoe, and which of them this version has.

next: tables.py
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import get_type_hints

from tmoe.config.check import ConfigError
from tmoe.config.run import Config
from tmoe.run.cli import parse

# Routing
SCORE = "--model.moe.score"
SELECTION = "--model.moe.selection"
SELECTIONS = dict(sinkhorn="sinkhorn", quantile_balancing="quantile")
GROUP_SCORE_TOP = "top"  # of --model.moe.group-score: the sum of its best top-k / top-groups
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


def flags(config: type = Config, before: str = "--") -> set[str]:
    """All flags of this version's train.py."""
    found = set()
    for name, kind in get_type_hints(config).items():
        flag = before + name.replace("_", "-")
        found |= flags(kind, f"{flag}.") if is_dataclass(kind) else {flag}
    return found


@functools.cache
def refusal(words: tuple[str, ...]) -> str:
    """Why this version's parser refuses a command of train.py; "" where it takes it."""
    said: list[str] = []
    write, sys.stderr = sys.stderr, _Into(said)  # parse prints there
    try:
        parse([*words, "--dry-run"], "")
    except (SystemExit, ConfigError) as error:
        return "".join(said).strip() or str(error)
    finally:
        sys.stderr = write
    return ""


class _Into:
    """A stream that keeps what is written to it."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def write(self, text: str) -> int:
        self.said.append(text)
        return len(text)

    def flush(self) -> None:
        pass


def lacking(words: Sequence[str]) -> str:
    """The flags and values of a command that this version does not have, in the parser's words; "" for none.

    A combination that it refuses is not among these.
    """
    said = refusal(tuple(words))
    return said if re.search(": (no such flag|must be one of) ", said) else ""
