"""Reads --model.moe.balance: balancing losses by name, each with its coefficient.

next: model.py"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tmoe.config.check import FLOATS, ConfigError, Setting, require

# Names of the losses. moe/losses.py has a function for each; "none" is no loss.
NAMES = "batch", "sequence", "global", "gshard", "importance", "importance-tutel"
# Losses of the probability that the router's noise chooses an expert: they are not defined without noise.
OF_NOISE = "importance", "importance-tutel"
NAME = "model.moe.balance"
Balance = str | tuple[str, ...]


def read_balance(balance: str | Sequence[str], coeff: float) -> dict[str, float]:
    """The losses as name -> coefficient; empty for "none". ConfigError for a value that is no such list.

    balance: one "NAME" or "NAME:COEFFICIENT", or several. coeff: the coefficient of names without one.
    """
    words = [balance] if isinstance(balance, str) else list(balance)
    valid = f"NAME or NAME:COEFFICIENT, one or several; names: none, {', '.join(NAMES)}"
    require(len(words) > 0, NAME, f"{balance!r}", f"must be {valid}")
    terms: dict[str, float] = {}
    for word in words:
        name, colon, number = word.partition(":")
        known = name in NAMES or (name == "none" and not colon)
        require(known, NAME, word, f"must be {valid}")
        require(name not in terms, NAME, " ".join(words), f"{name} is given twice")
        terms[name] = _coefficient(word, number) if colon else coeff
    alone = "none" not in terms or len(terms) == 1
    require(alone, NAME, " ".join(words), "none must be the only name")
    both = all(name in terms for name in OF_NOISE)  # written so that dynamo of torch 2.11 can trace it
    require(not both, NAME, " ".join(words), f"not both {' and '.join(OF_NOISE)}")
    return {name: number for name, number in terms.items() if name != "none"}


def require_coefficient_read(words: Sequence[str], coeff: Any) -> None:
    """ConfigError where balance_coeff is given although all losses have their own coefficients."""
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
    """`balance` and `balance_coeff` in the one spelling that every config.json has for the same losses.

    A single loss is spelled as its bare name with its coefficient in balance_coeff, as in older runs:
    `sequence:0.02` becomes `sequence` with a balance_coeff of 0.02.
    """
    terms = read_balance(balance, coeff)
    if not terms:
        return "none", coeff
    if len(terms) == 1:
        return next(iter(terms.items()))
    return tuple([balance] if isinstance(balance, str) else balance), coeff


def require_noise(balance: Balance, coeff: float, noise: float) -> None:
    """ConfigError where a loss of the router's noise is asked for and the noise is 0."""
    names = [name for name in read_balance(balance, coeff) if name in OF_NOISE]
    if names and not noise > 0:
        needs = f"needs {Setting('model.moe.noise')} above 0, because it is computed from the noise"
        raise ConfigError.of(NAME, names[0], needs)
