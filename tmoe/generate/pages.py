"""Assigns pages to sequences: the answers to a prompt share its full pages, and each has further pages.

An answer is admitted once every page that it can ever fill is free, and it then gets all of them. So an
admitted answer always ends, however many answers wait, and no answer is computed twice (docs/decisions/068).

    prompt of 300 tokens, 3 answers of at most 80 (a page has 128)

    tokens    0-127      128-255     256-383
    prompt    page 1     page 2      page 3
    answer 0  page 1     page 2      page 4, its first 43 tokens copied from page 3
    answer 1  page 1     page 2      page 5, likewise
    answer 2  page 1     page 2      page 3: no other answer needs a copy

A page that a prompt or its answer fills may have a key, a hash of all tokens up to its end. A later prompt
that begins with these tokens shares the page. Without users it stays until its memory is needed. The pages
used last stay longest; of one prompt the last page is freed first.

next: generate/forward.py
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    reused: int = 0  # pages at the beginning of `fresh` that hold their tokens already


def keys_of(ids: Sequence[int], kind: str = "", known: Sequence[bytes] = ()) -> list[bytes]:
    """The keys of the pages that tokens fill, from the tokens up to each page's end.

    kind: tokens of different kinds share no page. known: the keys of the first pages.
    """
    keys = list(known)
    key = keys[-1] if keys else kind.encode()
    for end in range((len(keys) + 1) * PAGE, len(ids) + 1, PAGE):
        key = hashlib.sha256(key + array("q", ids[end - PAGE : end]).tobytes()).digest()
        keys.append(key)
    return keys


class Pages:
    """The pages of a cache, the number of users of each, and the pages kept for prompts' waiting answers."""

    def __init__(self, count: int, spans: Sequence[Span] = ()):
        """count: number of pages. spans: of answers that wait, in the order in which they are admitted."""
        self.free = list(range(count - 1, NOWHERE, -1))
        self.users: Counter[int] = Counter()
        self.waiting = Counter(span.prompt for span in spans)
        self.kept: dict[int, list[int]] = {}  # a prompt's pages, while answers to it wait
        self.page_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.unused: OrderedDict[int, None] = OrderedDict()  # pages with a key and without users
        self.notes: dict[int, Any] = {}  # of pages with a key: what else is known of their tokens

    def expect(self, prompt: int, answers: int) -> None:
        """Further answers to a prompt wait."""
        self.waiting[prompt] += answers

    def forget(self, prompt: int, answers: int) -> None:
        """Answers to a prompt do not wait any longer: they are not made."""
        self.waiting[prompt] -= answers
        if self.waiting[prompt] == 0:
            del self.waiting[prompt]
            self.drop(self.kept.pop(prompt, []))

    def admit(self, span: Span, keys: Sequence[bytes] = ()) -> Seat | None:
        """Pages for one more answer; None if too few are free. keys: of its prompt's pages, to reuse them."""
        last = self.waiting[span.prompt] == 1
        kept = self.kept.get(span.prompt)
        fresh = kept is None
        known = self._known(keys[: span.whole]) if kept is None else []
        needs = span.own - span.begun * last + (span.whole + span.begun) * fresh
        unused = sum(page in self.unused for page in known)
        if needs - len(known) > len(self.free) + len(self.unused) - unused:
            return None
        if kept is None:
            self.users.update(known)
            for page in known:
                self.unused.pop(page, None)
            kept = known + self._take(span.whole + span.begun - len(known))
        self.waiting[span.prompt] -= 1
        if last:
            del self.waiting[span.prompt]
            self.kept.pop(span.prompt, None)
            own = self._take(span.own - span.begun)
            return Seat(kept + own, kept if fresh else [], None, len(known))
        self.kept[span.prompt] = kept
        shared, own = kept[: span.whole], self._take(span.own)
        self.users.update(shared)
        copied = (kept[-1], own[0]) if span.begun else None
        return Seat(shared + own, kept if fresh else [], copied, len(known))

    def _known(self, keys: Sequence[bytes]) -> list[int]:
        """The pages that hold the beginning of a prompt already."""
        pages = []
        for key in keys:
            if (page := self.page_of.get(key)) is None:
                break
            pages.append(page)
        return pages

    def _take(self, count: int) -> list[int]:
        pages = [self.free.pop() if self.free else self._oldest() for _ in range(count)]
        self.users.update(pages)
        return pages

    def _oldest(self) -> int:
        page, _ = self.unused.popitem(last=False)
        del self.page_of[self.key_of.pop(page)]
        self.notes.pop(page, None)
        return page

    def publish(self, page: int, key: bytes, note: Any = None) -> None:
        """Gives a filled page its key. A key that another page has already stays with that page."""
        if key not in self.page_of and page not in self.key_of:
            self.page_of[key], self.key_of[page], self.notes[page] = page, key, note

    def unpublish(self, pages: Sequence[int]) -> None:
        """Takes the keys of pages away, so that no further prompt shares the pages."""
        for page in pages:
            if (key := self.key_of.pop(page, None)) is not None:
                del self.page_of[key]
                self.notes.pop(page, None)
                if page in self.unused:
                    del self.unused[page]
                    self.free.append(page)

    def drop(self, pages: Sequence[int]) -> None:
        """Frees the pages of an answer that is over, except pages that other answers use."""
        self.users.subtract(pages)
        over = [page for page in pages if not self.users[page]]
        self.free += [page for page in over if page not in self.key_of]
        for page in reversed(over):
            del self.users[page]
            if page in self.key_of:
                self.unused[page] = None

    @property
    def in_use(self) -> int:
        """Number of pages that answers use."""
        return len(self.users)


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
