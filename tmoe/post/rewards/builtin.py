"""The rewards that tmoe brings, by name, as functions of a sample; imported in workers, so without torch.

next: post/rewards/exact.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tmoe.post.rewards import sandbox
from tmoe.post.rewards.boxed import boxed
from tmoe.post.rewards.choice import choice
from tmoe.post.rewards.code import code
from tmoe.post.rewards.exact import exact
from tmoe.post.rewards.number import number
from tmoe.post.rewards.regex import regex
from tmoe.post.rewards.sample import RewardSample

Reward = Callable[[RewardSample], float | None]
PLAIN: dict[str, Reward] = dict(exact=exact, number=number, boxed=boxed, choice=choice)
SHARE_OF_LIMIT = 0.8  # of a reward's time that programs may take, before the reward itself counts as hung


def make(name: str, argument: str | None, timeout_s: float) -> Reward:
    """The reward of a name. OSError, with what is missing, where `code` cannot be had."""
    if name == "regex":
        return functools.partial(regex, pattern=argument)
    if name == "code":
        sandbox.check()
        return functools.partial(code, seconds=SHARE_OF_LIMIT * timeout_s)
    return PLAIN[name]
