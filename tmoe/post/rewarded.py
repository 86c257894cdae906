"""Counts the answers of a step, or of a validation, that had a reward; ends a run whose answers have none.

next: post/rewards/__init__.py
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tmoe.post.task import NothingToLearn

MOST_KINDS = 3  # of faults, in a message


class Rewarded:
    """Counts of the current step's answers, and of those with a reward; equal on every rank.

    words: the words of --grpo.rewards. allowed: steps in a row that may be without any reward.
    """

    def __init__(self, words: Sequence[str], allowed: int) -> None:
        self.words, self.allowed = words, allowed
        self.in_a_row = 0
        self.begin()

    def begin(self) -> None:
        """Begins a new step: sets all counts to 0."""
        self.answers = self.known = 0
        self.faults: Counter[str] = Counter()

    def add(self, rewards: Iterable[float], faults: Iterable[Mapping[str, int]]) -> None:
        """Adds rewards of answers, NaN for none, and each rank's faults, as in `Scores.faults`."""
        for reward in rewards:
            self.answers += 1
            self.known += not math.isnan(reward)
        for some in faults:
            self.faults.update(some)

    def judge(self, where: str) -> None:
        """Ends the step. Raises NothingToLearn after more than `allowed` steps in a row without a reward.

        where: the step or the validation, for the message.
        """
        if self.known or not self.answers:
            self.in_a_row = 0
            return
        if self.in_a_row >= self.allowed:
            kinds = [f"{kind}, {count} times" for kind, count in self.faults.most_common(MOST_KINDS)]
            none = f"none of {self.answers} answers has a reward ({'; '.join(kinds)})"
            allowed = f"--grpo.allow-empty={self.allowed} such steps in a row are allowed"
            raise NothingToLearn(
                f"--grpo.rewards={' '.join(self.words)}: {where}: {none}; valid: rewards that give some "
                f"answer of a step a number; {allowed}"
            )
        self.in_a_row += 1
