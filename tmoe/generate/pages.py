"""Assigns pages to sequences: the answers to a prompt share its full pages, and each has further pages.

An answer is admitted once every page that it can ever fill is free, and it then gets all of them. So an
admitted answer always ends, however many answers wait, and no answer is computed twice (docs/decisions/068).

    prompt of 300 tokens, 3 answers of at most 80 (a page has 128)

    tokens    0-127      128-255     256-383
    prompt    page 1     page 2      page 3
    answer 0  page 1     page 2      page 4, its first 43 tokens copied from page 3
    answer 1  page 1     page 2      page 5, likewise
    answer 2  page 1     page 2      page 3: no other answer needs a copy

next: generate/forward.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tmoe.generate.cache import PAGE

NOWHERE = 0  # a page that no sequence has; rows of a step without a sequence write to it


class Span(NamedTuple):
    """One answer's tokens in the cache."""

    prompt: int  # number of the prompt
    first: int  # tokens of the prompt that are cached before the answer's first step
    tokens: int  # most tokens that it may have in the cache at the end

    @property
    def whole(self) -> int:
        """Number of pages that the prompt fills, which all its answers share."""
        return self.first // PAGE

    @property
    def begun(self) -> int:
        """1 if the prompt ends within a page, of which each answer needs a copy; else 0."""
        return int(self.first % PAGE > 0)

    @property
    def own(self) -> int:
        """Number of pages that only this answer has."""
        return -(-self.tokens // PAGE) - self.whole


class Seat(NamedTuple):
    """The pages of an admitted answer."""

    pages: list[int]
    fresh: list[int]  # pages to which the prompt must be written, if it is not cached yet
    copied: tuple[int, int] | None  # a page that must be copied, and the copy's page


class Pages:
    """The pages of a cache, the number of users of each, and the pages kept for prompts' waiting answers."""

    def __init__(self, count: int, spans: Sequence[Span]):
        """count: number of pages. spans: of all answers, in the order in which they are admitted."""
        self.free = list(range(count - 1, NOWHERE, -1))
        self.users: Counter[int] = Counter()
        self.waiting = Counter(span.prompt for span in spans)
        self.kept: dict[int, list[int]] = {}  # a prompt's pages, while answers to it wait

    def admit(self, span: Span) -> Seat | None:
        """Pages for one more answer; None if too few are free."""
        last = self.waiting[span.prompt] == 1
        kept = self.kept.get(span.prompt)
        fresh = kept is None
        needs = span.own - span.begun * last + (span.whole + span.begun) * fresh
        if needs > len(self.free):
            return None
        kept = self._take(span.whole + span.begun) if kept is None else kept
        self.waiting[span.prompt] -= 1
        if last:
            self.kept.pop(span.prompt, None)
            return Seat(kept + self._take(span.own - span.begun), kept if fresh else [], None)
        self.kept[span.prompt] = kept
        shared, own = kept[: span.whole], self._take(span.own)
        self.users.update(shared)
        return Seat(shared + own, kept if fresh else [], (kept[-1], own[0]) if span.begun else None)

    def _take(self, count: int) -> list[int]:
        pages = [self.free.pop() for _ in range(count)]
        self.users.update(pages)
        return pages

    def drop(self, pages: Sequence[int]) -> None:
        """Frees the pages of an answer that is over, except pages that other answers use."""
        self.users.subtract(pages)
        self.free += [page for page in pages if not self.users[page]]


def most_needed(spans: Sequence[Span], slots: int) -> int:
    """The most pages that `slots` neighbouring answers use at the same time, without NOWHERE."""
    most = needs = 0
    inside: Counter[int] = Counter()
    for i, span in enumerate(spans):
        needs += span.own + (0 if inside[span.prompt] else span.whole + span.begun)
        inside[span.prompt] += 1
        if i >= slots:
            gone = spans[i - slots]
            inside[gone.prompt] -= 1
            needs -= gone.own + (0 if inside[gone.prompt] else gone.whole + gone.begun)
        most = max(most, needs)
    return most


def alone(span: Span, answers: int) -> int:
    """Number of pages that an answer needs to be admitted. answers: number of answers to its prompt."""
    return span.whole + span.own + span.begun * (answers > 1)
