r"""boxed: 1 for an answer whose last \boxed{...} holds the right answer, as text or as a number.

next: post/rewards/number.py
"""

import re

from tmoe.post.rewards.number import read_number, same_number
from tmoe.post.rewards.sample import RewardSample, truth_of
from tmoe.post.rewards.tex import last_boxed


def boxed(sample: RewardSample) -> float:
    """0 for an answer without a box. The truth is its own last box, or all of it."""
    found, truth = last_boxed(sample.answer), truth_of(sample)
    if found is None:
        return 0.0
    wanted = last_boxed(truth)
    wanted = truth if wanted is None else wanted
    if plain(found) == plain(wanted):
        return 1.0
    numbers = [number for number in map(read_number, (found, wanted)) if number is not None]
    return float(len(numbers) == 2 and same_number(*numbers))


def plain(text: str) -> str:
    r"""Without what changes only the look: spaces, \left, \right, \text{...}, \dfrac's d, a full stop."""
    text = re.sub(r"\\(?:left|right|displaystyle|[,;:! ])", "", text)
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    return re.sub(r"\s|\$", "", text).removesuffix(".")
