"""Sequences packed into rows in which sequences with the same beginning share its tokens.

A row is a tree of tokens, written in depth-first order: a shared beginning, then each continuation of it. A
token attends to its ancestors and itself. Its position is the one in its sequence. So a question with four
answers is computed once, and answers of one token cost no token at all.

next: eval/score.py
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

# Fewest tokens of a beginning that is shared. For fewer, the blocks of attention that all sequences of a row
# would then visit cost more than the tokens saved.
SHARED = 16


class Row(NamedTuple):
    """One row of S tokens: trees of sequences, one after the other."""

    ids: list[int]
    at: list[int]
    """positions in their sequences"""
    ends: list[int]
    """where the tree below a token ends, exclusively: token q attends to token k if k <= q < ends[k]"""
    members: list[int]
    """the sequences in this row, by number"""
    places: list[list[int]]
    """the places in the row of each member's tokens"""


class _Filling:
    """A row while sequences are added to it, in sorted order."""

    def __init__(self, share: bool) -> None:
        self.share = share
        self.row = Row([], [], [], [], [])
        self.last: Sequence[int] = ()
        self.path: list[int] = []  # places of the last sequence's tokens

    def shared(self, ids: Sequence[int]) -> int:
        """Number of tokens that a sequence would share with the last one."""
        if not self.share:
            return 0
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(self.last, ids, strict=False))
        count = sum(1 for _ in pairs)
        return count if count >= SHARED or count == len(ids) else 0

    def add(self, number: int, ids: Sequence[int], shared: int) -> None:
        row, first = self.row, len(self.row.ids)
        for place in self.path[shared:]:
            row.ends[place] = first
        new = range(first, first + len(ids) - shared)
        self.path = [*self.path[:shared], *new]
        row.ids.extend(ids[shared:])
        row.at.extend(range(shared, len(ids)))
        row.ends.extend([0] * len(new))
        row.members.append(number)
        row.places.append(self.path)
        self.last = ids

    def done(self) -> Row:
        for place in self.path:
            self.row.ends[place] = len(self.row.ids)
        return self.row


def rows(sequences: Sequence[Sequence[int]], most: int, share: bool = True) -> list[Row]:
    """Rows of at most `most` tokens that hold all sequences; a longer sequence is alone in a longer row.

    Sequences are sorted, so that equal beginnings are neighbours, and rows are filled in this order. A
    beginning that several rows share is computed in each of them. Empty sequences are not valid.

    share: sequences share equal beginnings. A model with linear layers needs False: its state after a
    beginning is not kept.
    """
    found: list[Row] = []
    filling = _Filling(share)
    for number in sorted(range(len(sequences)), key=lambda i: tuple(sequences[i])):
        ids = sequences[number]
        shared = filling.shared(ids)
        if filling.row.ids and len(filling.row.ids) + len(ids) - shared > most:
            found.append(filling.done())
            filling, shared = _Filling(share), 0
        filling.add(number, ids, shared)
    return [*found, filling.done()] if filling.row.ids else found
