"""Scores texts and answers prompts on all processes, without what an earlier call has done.

next: eval/team.py, eval/worker.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from tmoe.data.chat.template import ChatTemplate
from tmoe.eval.store import Store, key_of
from tmoe.eval.team import Team
from tmoe.eval.tokens import Tokens
from tmoe.eval.worker import Asked, Scored, Worker
from tmoe.generate.load import Loaded
from tmoe.generate.sampler import Sampling


class Evaluator(NamedTuple):
    """Rank 0 of an evaluation."""

    team: Team
    worker: Worker
    store: Store
    loaded: Loaded
    tokens: Tokens
    template: ChatTemplate
    longest: int
    """most tokens of an input"""

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """For each pair of inputs and targets, what `Worker.score` says; equal pairs are computed once."""
        texts = [Scored(key_of("score", ids, targets), list(ids), list(targets)) for ids, targets in pairs]
        new = {text.key: text for text in texts if text.key not in self.store.known}
        # sorted, so that texts with the same beginning are scored by the same rank
        ordered = sorted(new.values(), key=lambda text: text.ids)
        self._each("score", _parts(ordered, self.team.size))
        return [tuple(self.store.known[text.key]) for text in texts]

    def answer(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, numbers: Sequence[int]
    ) -> list[list[Any]]:
        """For each prompt, what `Worker.answer` says. numbers: of the prompts, on which draws depend."""
        greedy = sampling.temperature == 0
        how = asdict(replace(sampling, seed=0) if greedy else sampling)
        asked = [
            Asked(key_of("answer", list(ids), n, how, None if greedy else number), list(ids), number)
            for ids, number in zip(prompts, numbers, strict=True)
        ]
        new = {prompt.key: prompt for prompt in asked if prompt.key not in self.store.known}
        ordered = sorted(new.values(), key=lambda prompt: -len(prompt.ids))
        size = self.team.size
        self._each("answer", [ordered[rank::size] for rank in range(size)], n, sampling)
        return [self.store.known[prompt.key] for prompt in asked]

    def _each(self, job: str, shares: list[Any], *settings: Any) -> None:
        if any(shares):
            for found in self.team.each(self.worker, job, shares, *settings):
                self.store.known.update(found)


def _parts(texts: Sequence[Scored], count: int) -> list[list[Scored]]:
    """Consecutive parts of about equal numbers of tokens; a part may be empty."""
    total = sum(len(text.ids) for text in texts)
    parts: list[list[Scored]] = [[] for _ in range(count)]
    done = 0
    for text in texts:
        parts[min(done * count // max(total, 1), count - 1)].append(text)
        done += len(text.ids)
    return parts
