"""regex: 1 for an answer in which a pattern is found; the pattern is the word's own or the row's."""

import re

from tmoe.post.rewards.sample import RewardSample


def regex(sample: RewardSample, pattern: str | None) -> float:
    """`.` is any character, a line's end too. pattern: None: the row's field "pattern"."""
    wanted = sample.row["pattern"] if pattern is None else pattern
    return float(re.search(wanted, sample.answer, re.DOTALL) is not None)
