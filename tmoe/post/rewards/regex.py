"""regex: 1 for an answer in which a pattern is found; the pattern is given with the reward or by the row."""

import re

from tmoe.post.rewards.reward_sample import RewardSample


def regex(sample: RewardSample, pattern: str | None) -> float:
    """The reward. `.` matches any character, also a line's end. pattern: None: the row's field "pattern"."""
    wanted = pattern_of_row(sample) if pattern is None else pattern
    return float(re.search(wanted, sample.answer, re.DOTALL) is not None)


def pattern_of_row(sample: RewardSample) -> str:
    """The row's own pattern. ValueError if the field "pattern" is missing or no regular expression."""
    pattern = sample.row.get("pattern")
    if not isinstance(pattern, str):
        fields = ", ".join(map(str, sample.row))
        raise ValueError(
            f"the row's pattern is {pattern!r:.80}; must be a regular expression (fields: {fields})"
        )
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the row's pattern {pattern[:80]!r} is no regular expression: {error}") from None
    return pattern
