r"""boxed: 1 for an answer whose last \boxed{...} holds the right answer.

Two answers are equal as numbers (number.py), as values of TeX (expression.py), or as text without markup that
changes only the look. Tuples and intervals are compared element by element between equal brackets, sets and
unions in any order.

next: post/rewards/expression.py
"""

import re

from tmoe.post.rewards.expression import same_value, value_of
from tmoe.post.rewards.multiple_choice import LETTERS, letter_in
from tmoe.post.rewards.number import read_number, same_number
from tmoe.post.rewards.reward_sample import RewardSample, truth_of
from tmoe.post.rewards.tex import group_at, last_boxed, without_looks

MOST = 1000  # characters of a box that is read
DEPTH = 4  # of brackets in brackets, and of fractions in fractions
ASSIGNED = re.compile(r"^(?:[a-zA-Z]|\\theta|[a-zA-Z]\([a-z]\))(?:=|\\in(?![a-zA-Z]))(?=.)")
LETTER = re.compile(r"^\(([A-Z])\)$")
PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])\s*")
WORDS = re.compile(r"[a-zA-Z]{2,}(?:\s+[a-zA-Z]+)*")


def boxed(sample: RewardSample) -> float:
    """The reward; 0 for an answer without a box. The right answer is the last box of the row's, or all of it.

    If the right answer is a letter of a choice, text may follow the letter in the box: (C) 12.
    """
    answer, truth = last_boxed(sample.answer), truth_of(sample)
    if answer is None:
        return 0.0
    wanted = last_boxed(truth)
    wanted = truth if wanted is None else wanted
    letter = LETTER.sub(r"\1", without_looks(wanted))
    return float(same(answer, wanted) or (letter in tuple(LETTERS) and letter_in(answer) == letter))


def same(a: str, b: str, depth: int = DEPTH) -> bool:
    """Whether two answers mean the same to a reader."""
    if max(len(a), len(b)) > MOST:
        return a.split() == b.split()
    looks = a, b
    a, b = (ASSIGNED.sub("", LETTER.sub(r"\1", without_looks(text)), count=1) for text in looks)
    for pair in (looks, (a, b)):
        numbers = [number for number in map(read_number, pair) if number is not None]
        if len(numbers) == 2:
            return same_number(*numbers)
    if plain(a) == plain(b):
        return True
    values = [value for value in map(value_of, (a, b)) if value is not None]
    if len(values) == 2:
        return same_value(*values)
    return depth > 0 and _by_parts(a, b, depth - 1)


def _both_signs(text: str) -> list[str]:
    r"""The two values of a text with one \pm; [] for another text."""
    parts = PLUS_MINUS.split(text)
    return [sign.join(parts).removeprefix("+") for sign in "+-"] if len(parts) == 2 else []


def _by_parts(a: str, b: str, depth: int) -> bool:
    r"""Whether answers of several parts are equal: unions, sets and the values of \pm in any order.

    Tuples and intervals must have equal brackets, and lists the same order.
    """
    if _both_signs(a) or _both_signs(b):
        listed = [text.removeprefix("\\{").removesuffix("\\}") for text in (a, b)]
        some, others = (_both_signs(text) or _split(text, ",") for text in listed)
        return _in_any_order(some, others, depth)
    some, others = (_split(text, "\\cup") for text in (a, b))
    if len(some) > 1 or len(others) > 1:
        return _in_any_order(some, others, depth)
    if all(text.startswith("\\{") and text.endswith("\\}") for text in (a, b)):
        return _in_any_order(_split(a[2:-2], ","), _split(b[2:-2], ","), depth)
    (around, inner_a), (around_b, inner_b) = map(_inside, (a, b))
    lists = _split(inner_a, ","), _split(inner_b, ",")
    if around != around_b or len(lists[0]) != len(lists[1]) or (len(lists[0]) == 1 and not around):
        return False
    return all(same(part, other, depth) for part, other in zip(*lists, strict=True))


def _in_any_order(some: list[str], others: list[str], depth: int) -> bool:
    left = list(others)
    for item in some:
        equal = next((other for other in left if same(item, other, depth)), None)
        if equal is None:
            return False
        left.remove(equal)
    return not left


def _inside(text: str) -> tuple[str, str]:
    """The brackets around a whole text ("" if there are none), and the text between them."""
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return "", text
    depth = 0
    for i, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0 and i < len(text) - 1:
            return "", text
    return text[0] + text[-1], text[1:-1]


def _split(text: str, at: str) -> list[str]:
    """The parts of a text between separators, but not at separators inside brackets."""
    parts, depth, first, i = [], 0, 0, 0
    while i < len(text):
        if depth == 0 and text.startswith(at, i):
            parts.append(text[first:i])
            i = first = i + len(at)
            continue
        depth += (text[i] in "([{") - (text[i] in ")]}")
        i += 1
    return [*parts, text[first:]]


def plain(text: str) -> str:
    r"""A text of `without_looks` with one spelling of braces, fractions, products and words."""
    words = WORDS.fullmatch(text)
    text = re.sub(r"\\(?:cdot|times)(?![a-zA-Z])|\*", "", text)
    text = re.sub(r"(?<![_^\d])(\d+)\s+(?=\d)", r"\1;", _fractions(text, DEPTH))  # 1 2 is not 12
    text = re.sub(r"\s", "", text)
    text = re.sub(r"([_^]|\\[a-zA-Z]+)\{(\w)\}", r"\1\2", text)
    return text.lower() if words else text


def _fractions(text: str, depth: int) -> str:
    r"""Writes \frac{a}{b} and \frac ab as (a)/(b), nested ones too; brackets around one word are left out."""
    parts, at = [], 0
    for match in re.finditer(r"\\frac(?![a-zA-Z])", text):
        arguments, end = [], match.end()
        while match.start() >= at and depth and len(arguments) < 2 and (argument := _argument(text, end)):
            arguments.append(_fractions(argument[0], depth - 1))
            end = argument[1]
        if len(arguments) == 2:
            a, b = (argument if re.fullmatch(r"\w+", argument) else f"({argument})" for argument in arguments)
            parts += [text[at : match.start()], a, "/", b]
            at = end
    return "".join([*parts, text[at:]])


def _argument(text: str, at: int) -> tuple[str, int] | None:
    """The argument of a command at a place: a group in braces, or one letter or digit; and where it ends."""
    while text[at : at + 1].isspace():
        at += 1
    return group_at(text, at) or ((text[at], at + 1) if text[at : at + 1].isalnum() else None)
