r"""choice: 1 for an answer that ends in the right letter of A to J.

The letter is read from the first of these that the answer has: the last \boxed{...}; the last <answer>; a
line of a letter after the last ####; the letter after the last "answer is" or "answer:"; the whole answer;
the last letter in brackets; the beginning of the last line, "B." or "B)". Text before the last #### is
ignored from the third on.

next: post/rewards/tex.py
"""

from __future__ import annotations

import re

from tmoe.post.rewards.reward_sample import RewardSample, truth_of
from tmoe.post.rewards.tex import OF_WORDS, last_boxed

LETTERS = "ABCDEFGHIJ"  # MMLU-Pro has ten
NAMED = r"(?:the\s{1,9})?(?:answer|choice|option)\b(?:\s{1,9}is\b)?[\s:=]{0,20}"
ALONE = re.compile(rf"(?:[\s*(]{{0,9}}(?i:{NAMED}))?[\s(\[*\"'“.]*([A-Ja-j])[\s)\]*\"'”.:]*")
IS = r"\s{1,9}(?:is|(?:must|should|would)\s{1,9}be)\b|\s{0,9}[:=]"
SAID = re.compile(
    rf"\b(?i:answer|choice|option)(?i:{IS})[\s:*$]{{0,20}}(?i:option\s{{1,9}}|choice\s{{1,9}})?"
    r"(?:[(\[*\"'“]{1,4}([A-Ja-j])(?![\w'])|([A-HJ]|I(?!\s+[a-z]))(?![\w']))"
)
BRACKETS = re.compile(r"(?<!\w)[(\[]\s{0,9}([A-J])\s{0,9}[)\]]")
BEGINS = re.compile(r"\W*([A-J])\s*[.):]")
TAG = re.compile(r"<answer>([^<]*)</answer>")


def choice(sample: RewardSample) -> float:
    """The reward; 0 for an answer without a letter. The row's answer is a letter, or a number from 0."""
    wanted = letter_of_row(sample)
    return float(letter_of(sample.answer) == wanted)


def letter_of_row(sample: RewardSample) -> str:
    truth = truth_of(sample).strip().removesuffix(".0")  # a table of floats has 2.0 for 2
    letter = LETTERS[int(truth)] if truth in tuple("0123456789") else letter_of(truth)
    if letter is None:
        raise ValueError(
            f"the row's answer {truth[:80]!r} is no letter of {LETTERS}, nor a number from 0 to 9"
        )
    return letter


def letter_in(box: str) -> str | None:
    """The capital letter in a box's text: alone, after "option", in brackets, or before "." or ")".

    None if the text has different letters in brackets, such as "(A) or (B)".
    """
    box = OF_WORDS.sub(r"\1", box)
    match = ALONE.fullmatch(box) or BRACKETS.search(box) or BEGINS.match(box)
    several = len(set(BRACKETS.findall(box))) > 1
    return match[1] if match and match[1].isupper() and not several else None


def letter_of(text: str) -> str | None:
    box = last_boxed(text)
    if box is None and (tags := TAG.findall(text)):
        box = tags[-1]
    if box is not None:
        alone = ALONE.fullmatch(OF_WORDS.sub(r"\1", box))
        return alone[1].upper() if alone else letter_in(box)
    _, mark, text = text.rpartition("####")
    text = OF_WORDS.sub(r"\1", text)
    if mark and (
        alone := ALONE.fullmatch(text.lstrip().partition("\n")[0])
    ):  # a line with more text is not read
        return alone[1].upper()
    letters = [match[1] or match[2] for match in SAID.finditer(text)]
    if letters:
        return letters[-1].upper()
    alone = ALONE.fullmatch(text)
    if alone:
        return alone[1].upper()
    brackets = BRACKETS.findall(text)
    if brackets:
        return brackets[-1]
    lines = text.strip().splitlines()
    begins = BEGINS.match(lines[-1]) if lines else None
    return begins[1] if begins else None
