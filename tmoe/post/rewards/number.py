r"""number: 1 for an answer that ends in the right number, compared exactly, as fractions.

An answer's number is the one in its last \boxed{...}; without a box the number right after the last ####;
without #### the last number in the answer. Thousands separators, signs of money and per cent, and TeX are
read: 1,234.50, \$5, 50\%, \frac{1}{2}, 3\frac{1}{2}, 2 \times 10^{3}.

next: post/rewards/tex.py
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from tmoe.post.rewards.expression import CLOSE, value_of
from tmoe.post.rewards.reward_sample import RewardSample, truth_of
from tmoe.post.rewards.tex import (
    RAISED_UNIT,
    SIGNS,
    group_at,
    last_boxed,
    without_looks,
    without_periods,
)

MOST_DIGITS = 1000  # most digits of a number; Python's arithmetic with more digits is slow
MOST_EXPONENT = 400
TOP, BOTTOM, END = "\ue000\ue001\ue002"  # marks around a fraction's parts, which no script uses
MOST_OF_PART = 200  # characters of a fraction's numerator or denominator
DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# The pattern begins with no white space, and no two neighbouring parts match the same text, so that long
# answers take linear time.
NUMBER = re.compile(
    rf"""(?:(?P<sign>(?<![\w)}}{END}])[-+])\s*)?
    (?:(?:(?P<whole>\d+)\s*(?={TOP}))?                                          # of a mixed number
       {TOP}(?P<top>[-+]?(?:{DECIMAL})){BOTTOM}(?P<bottom>[-+]?(?:{DECIMAL})){END}
      |(?:(?P<ones>\d{{1,9}})\ {{1,3}}(?=\d{{1,9}}/\d))?                                  # 3 1/2
       (?P<value>{DECIMAL})
       (?:[eE](?P<e>[-+]?\d+)|\s*(?:\\times|\\cdot|[x*×])\s*10\s*\^\s*\{{?\s*(?P<power>[-+]?\d+)\s*\}}?
         |\s*\^\s*\{{?\s*(?P<raised>[-+]?\d+)\s*\}}?)?
       (?:\s*/\s*(?P<below>{DECIMAL}))?)
    (?:\s*(?P<percent>%))?""",
    re.VERBOSE,
)


EXPRESSION = re.compile(r"\\(?:sqrt|pi)(?![a-zA-Z])|[√π]")
HEADING = re.compile(r"[.):]\s*[*_]*[A-Za-z]")
HALVES = {sign: word for sign, word in SIGNS.items() if "frac" in word}


class Number(NamedTuple):
    value: Fraction
    percent: bool
    """whether it was written with a per cent sign; `value` is not divided by 100"""
    exact: bool = True
    """whether `value` is exact, and not the first digits of a root"""


def number(sample: RewardSample) -> float:
    """The reward; 0 for an answer without a number."""
    wanted = number_of_row(sample)
    answer = number_of(sample.answer)
    return float(answer is not None and same_number(answer, wanted))


def number_of_row(sample: RewardSample) -> Number:
    """The right number. ValueError where the row's answer has none."""
    truth = number_of(truth_of(sample))
    if truth is None:
        raise ValueError(f"the row's answer {truth_of(sample)[:80]!r} has no number")
    return truth


def number_of(text: str) -> Number | None:
    """The number of a text: in its last box, right after its last ####, or the last one in the text."""
    box = last_boxed(text)
    if box is not None:
        return last_number(box)
    _, mark, rest = text.rpartition("####")
    opening = _opening_number(rest.lstrip().partition("\n")[0]) if mark else None
    return opening or last_number(rest)


def _opening_number(line: str) -> Number | None:
    """The number at the beginning of a line after ####; in an equation or with a root, the number at its end.

    None for a line that begins otherwise, and for a heading, "1. Addition". Text after the number is ignored,
    as in the graders of GSM8K (Cobbe et al. 2021).
    """
    readable = _readable(line)
    match = NUMBER.search(readable)
    if not match or re.search(r"\w", readable[: match.start()]) or HEADING.match(readable[match.end() :]):
        return None
    return last_number(line) if "=" in line or EXPRESSION.search(line) else _value(match)


def same_number(a: Number, b: Number) -> bool:
    """Whether two numbers are equal. 50% equals 0.5, and also 50, because the sign may have been left out."""
    if not (a.exact and b.exact):
        return abs(a.value - b.value) <= Fraction(CLOSE) * max(abs(a.value), 1)
    if a.percent == b.percent:
        return a.value == b.value
    signed, other = (a, b) if a.percent else (b, a)
    return other.value in (signed.value, signed.value / 100)


def read_number(text: str) -> Number | None:
    """The number that a whole text consists of; None for another text."""
    text = _readable(text).strip().removesuffix(".")
    match = NUMBER.fullmatch(text)
    return _value(match) if match else None


def last_number(text: str) -> Number | None:
    r"""The number that a whole text is, also as an expression with roots or \pi; else its last number."""
    whole = read_number(text)
    if whole is not None:
        return whole
    if EXPRESSION.search(text) and (value := value_of(without_looks(text))) is not None:
        return Number(Fraction(value), False, isinstance(value, Fraction))
    matches = list(NUMBER.finditer(_readable(text)))
    return _value(matches[-1]) if matches else None


def _readable(text: str) -> str:
    r"""A text with ASCII signs, and with the marks TOP, BOTTOM and END around the parts of \frac{a}{b}."""
    text = re.sub(f"[{TOP}{BOTTOM}{END}]", "", text)
    text = RAISED_UNIT.sub(r"\1", without_periods(text))
    for sign, word in HALVES.items():
        text = text.replace(sign, word)
    text = text.replace("−", "-").replace("{,}", ",").replace("\\%", "%").replace("％", "%")
    text = re.sub(r"\\[,;:! ]|\\(?:left|right)(?![a-zA-Z])|\^\s*\{?\\circ\}?|\\?\$", "", text)
    parts = []
    at = 0
    for match in re.finditer(r"\\[dt]?frac", text):
        top = _argument(text, match.end())
        bottom = _argument(text, top[1]) if top else None
        if match.start() < at or not top or not bottom:
            continue
        parts += [text[at : match.start()], TOP, top[0].strip(), BOTTOM, bottom[0].strip(), END]
        at = bottom[1]
    return "".join([*parts, text[at:]])


def _argument(text: str, at: int) -> tuple[str, int] | None:
    r"""A TeX command's argument and where it ends: a group in braces, or a single digit, as in \frac12."""
    digit = re.compile(r"\s*(\d)").match(text, at)
    return (digit[1], digit.end()) if digit else group_at(text, at, MOST_OF_PART)


def _value(match: re.Match[str]) -> Number | None:
    """The number of a match; None for unreasonably long numbers, and for a division by zero."""
    part = {name: (text or "").replace(",", "") for name, text in match.groupdict().items()}
    exponent = part["e"] or part["power"] or part["raised"] or "1"
    if len(match[0]) > MOST_DIGITS or len(exponent) > 5 or abs(int(exponent)) > MOST_EXPONENT:
        return None
    value = Fraction(part["top"] or part["value"])
    if part["raised"]:
        if abs(int(exponent)) * len(match[0]) > MOST_DIGITS or (value == 0 and int(exponent) < 0):
            return None
        value **= int(exponent)
    elif part["e"] or part["power"]:
        value *= Fraction(10) ** int(exponent)
    below = Fraction(part["bottom"] or part["below"] or "1")
    return None if below == 0 else _number(part, value / below)


def _number(part: dict[str, str], value: Fraction) -> Number:
    """The number of its whole part, the fraction `value`, its sign and its per cent sign."""
    value += int(part["whole"] or part["ones"] or "0")
    return Number(-value if part["sign"] == "-" else value, bool(part["percent"]))
