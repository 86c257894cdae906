"""The built-in rewards by name, as functions of a sample; workers import this file, so it needs no torch.

next: post/rewards/exact.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tmoe.post.rewards import sandbox
from tmoe.post.rewards.boxed import boxed
from tmoe.post.rewards.code import code, tests_of
from tmoe.post.rewards.exact import exact
from tmoe.post.rewards.multiple_choice import choice, letter_of_row
from tmoe.post.rewards.number import number, number_of_row
from tmoe.post.rewards.regex import pattern_of_row, regex
from tmoe.post.rewards.reward_sample import RewardSample, truth_of

Reward = Callable[[RewardSample], float | None]
PLAIN: dict[str, Reward] = dict(exact=exact, number=number, boxed=boxed, choice=choice)
# The functions that read what a reward needs from a data row. They raise ValueError for a row without it.
OF_ROW: dict[str, Callable[[RewardSample], Any]] = dict(
    exact=truth_of,
    number=number_of_row,
    boxed=truth_of,
    choice=letter_of_row,
    regex=pattern_of_row,
    code=tests_of,
)
SHARE_OF_LIMIT = 0.8  # share of --grpo.reward-timeout for programs, which must time out before the reward


def make(name: str, argument: str | None, timeout_s: float) -> Reward:
    """The reward of a name. OSError, which says what is missing, where `code` cannot run programs."""
    if name == "regex":
        return functools.partial(regex, pattern=argument)
    if name == "code":
        sandbox.check()
        return functools.partial(code, seconds=SHARE_OF_LIMIT * timeout_s)
    return PLAIN[name]
