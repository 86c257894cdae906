"""What --model.moe.balance says: balancing losses by name, each with its coefficient.

next: model.py"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tmoe.config.check import FLOATS, ConfigError, Setting, require

# The names. moe/losses.py has a function for each; "none" is no loss.
NAMES = "batch", "sequence", "global", "gshard", "importance", "importance-tutel"
# Losses of how likely the router's noise is to choose an expert: without noise they are not defined.
OF_NOISE = "importance", "importance-tutel"
NAME = "model.moe.balance"
Balance = str | tuple[str, ...]


def read_balance(balance: str | Sequence[str], coeff: float) -> dict[str, float]:
    """Name to coefficient; empty for "none". ConfigError for what says no such list.

    balance: one "NAME" or "NAME:COEFFICIENT", or several. coeff: of a name that comes without its own.
    """
    words = [balance] if isinstance(balance, str) else list(balance)
    valid = f"NAME or NAME:COEFFICIENT, one or several; names: none, {', '.join(NAMES)}"
    require(len(words) > 0, NAME, f"{balance!r}", f"must be {valid}")
    terms: dict[str, float] = {}
    for word in words:
        name, colon, number = word.partition(":")
        known = name in NAMES or (name == "none" and not colon)
        require(known, NAME, word, f"must be {valid}")
        require(name not in terms, NAME, " ".join(words), f"{name} comes twice")
        terms[name] = _coefficient(word, number) if colon else coeff
    alone = "none" not in terms or len(terms) == 1
    require(alone, NAME, " ".join(words), "none comes alone, or not at all")
    both = all(name in terms for name in OF_NOISE)  # in words that dynamo of torch 2.11 traces
    require(not both, NAME, " ".join(words), f"not both {' and '.join(OF_NOISE)}")
    return {name: number for name, number in terms.items() if name != "none"}


def require_coefficient_read(words: Sequence[str], coeff: Any) -> None:
    """ConfigError where balance_coeff is given beside losses that all have their own coefficients."""
    unused = len(words) > 0 and all(":" in word for word in words)
    wrong = f"unused with {Setting(NAME, ' '.join(words))}, whose losses have their own"
    require(not unused, "model.moe.balance_coeff", coeff, wrong, "leave one of them out")


def _coefficient(word: str, number: str) -> float:
    try:
        coeff = float(number)
    except ValueError:
        coeff = -1.0
    valid = "must be a number, at least 0 and finite in float32"
    require(0 <= coeff <= FLOATS[1], NAME, word, f"the coefficient {valid}")
    return coeff


def one_spelling(balance: str | Sequence[str], coeff: float) -> tuple[Balance, float]:
    """`balance` and `balance_coeff` as every config.json spells the same losses.

    One loss is its bare name beside its coefficient, as runs have always had it: `sequence:0.02` is
    `sequence` with a balance_coeff of 0.02.
    """
    terms = read_balance(balance, coeff)
    if not terms:
        return "none", coeff
    if len(terms) == 1:
        return next(iter(terms.items()))
    return tuple([balance] if isinstance(balance, str) else balance), coeff


def require_noise(balance: Balance, coeff: float, noise: float) -> None:
    """ConfigError where a loss of the router's noise is asked for and there is none."""
    names = [name for name in read_balance(balance, coeff) if name in OF_NOISE]
    if names and not noise > 0:
        needs = f"needs {Setting('model.moe.noise')} above 0, whose chances it is made of"
        raise ConfigError.of(NAME, names[0], needs)
