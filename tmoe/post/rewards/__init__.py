"""Rewards of sampled answers: a weighted sum of functions, computed in processes that can be killed.

    with Rewards(["number", "my_rewards.py:brief:0.2"], workers=4) as rewards:
        scores = rewards.score(samples)                # samples: RewardSample

next: post/rewards/reward_terms.py
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from tmoe.config.check import FLOATS, require
from tmoe.post.losses.sequences import overlong_penalty
from tmoe.post.rewards.builtin import OF_ROW
from tmoe.post.rewards.pool import Fault, Outcome, Pool
from tmoe.post.rewards.reward_sample import RewardSample
from tmoe.post.rewards.reward_terms import Term, longest_and_margin, parse

__all__ = ["RewardSample", "Rewards", "Scores"]

NONE = "returned None"
log = logging.getLogger(__name__)


class Scores(NamedTuple):
    """The rewards of samples, in the order of the samples."""

    rewards: list[float | None]
    """the weighted sum; None: the sample is left out of the mean of its prompt, and its advantage is 0"""
    parts: dict[str, list[float | None]]
    """each reward by its name, without its weight"""
    faults: dict[str, int]
    """how often a reward gave no number, by its name and the fault: {"exact: raised ValueError": 2}"""


def is_length(term: Term) -> bool:
    """Whether this is the reward `length`, a formula of the number of tokens, which needs no process."""
    return term.name == "length" and term.file is None


class Rewards:
    """A weighted sum of rewards.

    A reward that returns None does not apply to the sample: the sum is over the other rewards, and it is None
    if there is none. A reward that raises, hangs, dies, or does not return a finite number has failed: the
    sample's sum is then None. Both cases are counted in `faults`, and the first of each kind is logged with
    its traceback.

    Args:
        words: rewards and weights, in the form that reward_terms.py describes.
        workers: number of processes.
        timeout_s: seconds that one reward may take for one sample.
        code: whether the reward `code` may run what the model wrote.

    Raises ConfigError for a word that names no reward, and for a file or a function that cannot be imported.
    `score` raises RuntimeError if no worker can be started any more.
    """

    def __init__(
        self, words: Sequence[str], *, workers: int = 4, timeout_s: float = 10.0, code: bool = False
    ) -> None:
        require(workers >= 1, f"workers={workers}: rewards need at least 1 process")
        ok = 0 < timeout_s < math.inf
        require(ok, f"timeout_s={timeout_s}: the time for a reward must be above 0 and finite")
        self.terms = parse(words, code=code)
        pooled = [term for term in self.terms if not is_length(term)]
        self.pool = Pool(pooled, workers, timeout_s) if pooled else None
        self.told: set[str] = set()

    def require_row(self, prompt: str, row: dict[str, Any]) -> None:
        """ValueError if a data row lacks a column that one of tmoe's own rewards needs."""
        sample = RewardSample(prompt, "", row, "stop", 0, 0, 0, 0)
        for term in self.terms:
            if term.file is None and term.argument is None and term.name in OF_ROW:
                try:
                    OF_ROW[term.name](sample)
                except ValueError as error:
                    raise ValueError(f"--grpo.rewards={term.word}: {error}") from None

    def score(self, samples: Sequence[RewardSample]) -> Scores:
        """Rewards all samples, in their order; it makes no difference which worker gets which sample."""
        results = self.pool.run(samples) if self.pool and samples else [[] for _ in samples]
        by_worker = iter(zip(*results, strict=True))
        lengths = torch.tensor([sample.tokens for sample in samples])
        columns: dict[str, list[Outcome]] = {}
        for term in self.terms:
            if is_length(term):
                columns[term.label] = overlong_penalty(lengths, *longest_and_margin(term)).tolist()
            else:
                columns[term.label] = list(next(by_worker, ()))
        faults: Counter[str] = Counter()
        by_sample = [{name: column[i] for name, column in columns.items()} for i in range(len(samples))]
        rewards = [self._sum(outcomes, faults) for outcomes in by_sample]
        parts = {
            name: [None if isinstance(outcome, Fault) else outcome for outcome in column]
            for name, column in columns.items()
        }
        return Scores(rewards, parts, dict(sorted(faults.items())))

    def _sum(self, outcomes: dict[str, Outcome], faults: Counter[str]) -> float | None:
        """The weighted sum of one sample; counts its faults."""
        values = []
        failed = False
        for term in self.terms:
            outcome = outcomes[term.label]
            if isinstance(outcome, Fault):
                self._count(f"{term.label}: {outcome.kind}", outcome.told, faults)
                failed = failed or outcome.kind != NONE
            else:
                values.append(term.weight * outcome)
        if failed or not values:
            return None
        try:
            total = math.fsum(values)
        except (OverflowError, ValueError):  # too large, or an infinity and its negative
            total = math.inf
        if abs(total) > FLOATS[1]:  # in float32, in which losses are
            self._count("sum: is not finite", "", faults)
            return None
        return total

    def _count(self, what: str, details: str, faults: Counter[str]) -> None:
        faults[what] += 1
        if what not in self.told and not what.endswith(NONE):
            self.told.add(what)
            log.warning(
                "reward %s (shown once, counted always)%s", what, f"\n{details.rstrip()}" if details else ""
            )

    def close(self) -> None:
        """Ends all workers. A second call does nothing."""
        if self.pool:
            self.pool.close()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
