"""regex: 1 for an answer in which a pattern is found; the pattern is the word's own or the row's."""

import re

from tmoe.post.rewards.sample import RewardSample


def regex(sample: RewardSample, pattern: str | None) -> float:
    """`.` is any character, a line's end too. pattern: None: the row's field "pattern"."""
    wanted = pattern_of_row(sample) if pattern is None else pattern
    return float(re.search(wanted, sample.answer, re.DOTALL) is not None)


def pattern_of_row(sample: RewardSample) -> str:
    """The row's own pattern. ValueError for a field "pattern" that is none, or not there."""
    found = sample.row.get("pattern")
    if not isinstance(found, str):
        fields = ", ".join(map(str, sample.row))
        raise ValueError(
            f"the row's pattern is {found!r:.80}; must be a regular expression (fields: {fields})"
        )
    try:
        re.compile(found, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the row's pattern {found[:80]!r} is no regular expression: {error}") from None
    return found
