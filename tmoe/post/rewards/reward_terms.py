"""Reads and checks --grpo.rewards: words of a name and a weight.

    exact               number:0.5        regex(<think>.*</think>):0.1       length(1024,256)
    my_rewards.py:brief                   my_rewards.py:brief:-0.2

next: post/rewards/pool.py
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tmoe.config.check import FLOATS, ConfigError, Setting

SETTING = "grpo.rewards"
NAMES = "exact", "number", "boxed", "choice", "regex", "length", "code"
VALID = f"{', '.join(NAMES)} or FILE.py:FUNCTION, each with :WEIGHT or without"
FROM_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)(?::(?P<weight>[^:]*))?")
BY_NAME = re.compile(r"(?P<name>\w+)(?:\((?P<argument>.*)\))?(?::(?P<weight>[^:()]*))?", re.DOTALL)


class Term(NamedTuple):
    """One reward of a weighted sum."""

    word: str
    label: str
    """the reward's name in parts and faults"""
    said: str
    """the word without its weight"""
    name: str
    """name of a built-in reward, or of a function"""
    weight: float
    argument: str | None = None
    file: Path | None = None
    source: str = ""
    """the file's text at the start of the run, so that later edits do not change the run"""

    def refuse(self, why: str) -> ConfigError:
        return ConfigError.of(SETTING, self.word, why)


def parse(words: Sequence[str], *, code: bool) -> list[Term]:
    """The rewards of words. ConfigError for a word that names no reward, and for a reward given twice."""
    if isinstance(words, str) or not words:
        raise ConfigError.of(SETTING, repr(words), "must be a list of at least one reward", VALID)
    terms = [_term(word, code) for word in words]
    count = Counter(term.name for term in terms)
    # two functions of the same name, or two patterns, are labelled by their whole words
    longer = [term._replace(label=term.said) if count[term.name] > 1 else term for term in terms]
    for label, times in Counter(term.label for term in longer).items():
        if times > 1:
            wrong = f"{label} is given {times} times; give it once"
            raise ConfigError.of(SETTING, " ".join(words), wrong)
    return longer


def _term(word: str, code: bool) -> Term:
    match = FROM_FILE.fullmatch(word) or BY_NAME.fullmatch(word)
    if match is None or (match.re is BY_NAME and match["name"] not in NAMES):
        nameless = f"names no function, as {word}:FUNCTION does; " if word.endswith(".py") else ""
        raise ConfigError.of(SETTING, word, f"{nameless}valid: {VALID}")
    name = match["name"]
    weight = match["weight"]
    label = word if weight is None else word.removesuffix(f":{weight}")
    term = Term(word, name, label, name, _weight(word, weight))
    if match.re is FROM_FILE:
        return _from_file(term, Path(match["file"]))
    return _by_name(term._replace(argument=match["argument"]), code)


def _weight(word: str, text: str | None) -> float:
    try:
        weight = 1.0 if text is None else float(text)
    except ValueError:
        weight = math.nan
    if not FLOATS[0] <= abs(weight) <= FLOATS[1]:
        valid = "must be a finite number other than 0, in float32"
        raise ConfigError.of(SETTING, word, f"the weight {text!r} {valid}")
    return weight


def _from_file(term: Term, file: Path) -> Term:
    try:
        source = file.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise term.refuse(f"{file} cannot be read: {why}") from error
    return term._replace(file=file.absolute(), source=source)


def _by_name(term: Term, code: bool) -> Term:
    given = term.argument
    if term.name not in ("regex", "length") and given is not None:
        raise term.refuse(f"{term.name} takes nothing in brackets, got ({given})")
    if term.name == "code" and not code:
        raise term.refuse(f"runs programs that the model has written; allow that with {Setting('grpo.code')}")
    if term.name == "length":
        longest_and_margin(term)
    if term.name == "regex" and given is not None:
        try:
            re.compile(given, re.DOTALL)
        except (re.error, RecursionError, OverflowError) as error:
            raise term.refuse(f"no regular expression: {error}") from error
    return term


def longest_and_margin(term: Term) -> tuple[int, int]:
    """The two numbers of `length`, in tokens."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*,\s*(\d{1,9})\s*", term.argument or "")
    longest, margin = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 < margin <= longest:
        raise term.refuse("must be length(LONGEST,MARGIN) in tokens, MARGIN above 0 and at most LONGEST")
    return longest, margin
