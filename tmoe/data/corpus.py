"""Holds consecutive tokens of a source, and cuts a source into training, validation and test data.

next: data/sources.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from tmoe.data.tokenizer import DataError

Split = Literal["train", "val", "test"]


class TokenRun(NamedTuple):
    """Consecutive tokens of one file, in memory or memory-mapped."""

    tokens: np.ndarray
    where: str
    offset: int = 0
    """bytes of the file before the first of these tokens"""
    inserted: Callable[[int], int] = lambda position: 0
    """how many of the tokens before a position are not in the file"""

    def bad_id(self, position: int, vocab: int) -> DataError:
        """The error for an id outside the model's vocabulary. position: index of the token in this run."""
        at = self.offset + (position - self.inserted(position)) * self.tokens.itemsize
        token = int(self.tokens[position])
        return DataError(
            f"{self.where}: token id {token} at byte {at}: valid ids are 0 to --model.vocab={vocab} - 1; "
            "the model needs the tokenizer's vocabulary"
        )


class Corpus(NamedTuple):
    """One split of one source."""

    name: str
    runs: list[TokenRun]
    eos: int
    fingerprint: str
    """fingerprint of the tokenizer that made the ids"""
    taken: str
    """the source in words: how it is read, its documents, how the first begins, what was left out"""


class HeldOut(NamedTuple):
    """Shares of the documents that are held out of training, for validation and for the test."""

    val: float
    test: float = 0.0


def cut(run: TokenRun, shares: HeldOut, split: Split, eos: int) -> TokenRun:
    """One split of a run that is cut at the ends of documents: training, then validation, then test data."""
    both = shares.val + shares.test
    if split == "train":
        return _cut(run, both, True, eos)
    rest = _cut(run, both, False, eos)
    return _cut(rest, shares.test / both, split == "val", eos) if shares.test else rest


def _cut(run: TokenRun, fraction: float, first: bool, eos: int) -> TokenRun:
    """The first part of a run, 1 - fraction of its tokens, or (not first) the second part.

    The cut follows the first eos in the first half of the second part. Without an eos in that half, the cut
    splits a document: otherwise validation could have almost no data.
    """
    at = len(run.tokens) - int(len(run.tokens) * fraction)
    half = at + (len(run.tokens) - at) // 2
    # Search in pieces: the first eos is near, and the rest of the file should not be read from disk.
    for low in range(at, half, 1 << 20):
        ends = np.flatnonzero(run.tokens[low : min(low + (1 << 20), half)] == eos)
        if ends.size:
            at = low + int(ends[0]) + 1
            break
    if first:
        return run._replace(tokens=run.tokens[:at])
    return run._replace(tokens=run.tokens[at:], offset=run.offset + at * run.tokens.itemsize)
