"""Which rank's engine answers a request: of those with a free slot, the one that then has most free pages.

The front knows the pages of requests without a question: an answer gets all pages that it can fill when it
gets a slot, and gives them back at its end. Pages that a rank has kept of an earlier prompt with the same
beginning need not be filled there, so a conversation usually stays on its rank.

next: serve/engine_client.py
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tmoe.generate.pages import Span, keys_of


class Needs(NamedTuple):
    """Pages of a request's n answers, and the keys of those that its prompt fills."""

    n: int
    shared: int
    """pages of the prompt, of which answers may have copies"""
    own: int
    """pages of each answer"""
    keys: tuple[bytes, ...]

    def pages(self, left: int) -> int:
        """Pages while `left` answers are not over."""
        return (self.shared + left * self.own) if left else 0


@dataclass
class Load:
    """The requests of one rank.

    pages: of its pool. slots: most answers that it makes at the same time.
    """

    pages: int
    slots: int
    under_way: dict[int, tuple[Needs, int]] = field(default_factory=dict)
    """by the key of a request: its needs, and the number of its answers that are not over"""
    kept: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """keys of pages that the rank may still have, the oldest first"""

    @property
    def answers(self) -> int:
        """Answers that are not over."""
        return sum(left for _, left in self.under_way.values())

    @property
    def free(self) -> int:
        """Pages without an answer; below 0 if requests wait for pages."""
        return self.pages - sum(needs.pages(left) for needs, left in self.under_way.values())

    def after(self, needs: Needs) -> tuple[bool, int, int]:
        """Larger for a rank that suits the request better."""
        known = 0
        while known < len(needs.keys) and needs.keys[known] in self.kept:
            known += 1
        fits = self.answers < self.slots
        return fits, self.free - needs.pages(needs.n) + known, -self.answers

    def add(self, key: int, needs: Needs) -> None:
        """A request has been sent to this rank."""
        self.under_way[key] = needs, needs.n
        for page in needs.keys:
            self.kept[page] = None
            self.kept.move_to_end(page)
        while len(self.kept) > self.pages:
            self.kept.popitem(last=False)

    def ended(self, key: int) -> None:
        """One answer of a request is over."""
        if (found := self.under_way.get(key)) is not None:
            self.under_way[key] = found[0], found[1] - 1

    def drop(self, key: int) -> None:
        """All answers of a request are over."""
        self.under_way.pop(key, None)


def needs_of(ids: Sequence[int], most: int, n: int, kind: str | None) -> Needs:
    """The pages of n answers of up to `most` tokens to a prompt. kind: as `Details.kind`."""
    span = Span(0, len(ids) - 1, len(ids) - 1 + most)
    keys = [] if kind is None else keys_of(ids[:-1], kind)
    return Needs(n, span.whole, span.own, tuple(keys))


def choose(loads: Iterable[Load], needs: Needs) -> int:
    """The number of the rank that gets the request; of equal ones the first."""
    ranked = [load.after(needs) for load in loads]
    return ranked.index(max(ranked))
