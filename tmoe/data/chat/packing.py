"""Packs sequences into rows of a fixed length: best fit, longest first; no sequence is divided.

Only the lengths decide which of them share a row. So every epoch has the same number of rows, and any row of
any epoch is computed without the rows before it: `PackingPlan.row` permutes the sequences of equal length,
and the rows, by (seed, epoch).

next: data/chat/source.py
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tmoe.data.dataset import permute


class PackingPlan(NamedTuple):
    """A place in a row for every sequence. Places are ordered by row."""

    order: np.ndarray
    """numbers of the sequences, longest first, sequences of equal length in their order [n]"""
    places: np.ndarray
    """for each place the index in `order` of its sequence [n]"""
    starts: np.ndarray
    """first place of each row, then n [rows + 1]"""
    lengths: np.ndarray
    """lengths of the sequences, longest first [n]"""
    equal: np.ndarray
    """first index in `order` of each different length, then n"""

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    def row(self, number: int, epoch: int, key: str) -> list[int]:
        """The sequences of one row of an epoch."""
        row = permute(number, self.rows, f"{key}/{epoch}/rows")
        sequences = []
        for rank in self.places[self.starts[row] : self.starts[row + 1]].tolist():
            # Permute the sequences of this length.
            part = int(self.equal.searchsorted(rank, "right"))
            low, high = self.equal[part - 1 : part + 1].tolist()
            at = permute(rank - low, high - low, f"{key}/{epoch}/{low}")
            sequences.append(int(self.order[low + at]))
        return sequences


def plan(lengths: np.ndarray, size: int) -> PackingPlan:
    """Packs sequences into rows of `size` tokens by best fit decreasing (Johnson 1973); none may be longer.

    Rows with the same number of free tokens are handled together. So the number of steps is that of the
    different lengths and free spaces, and a million sequences take one second.
    """
    lengths = np.asarray(lengths, np.int64)
    assert lengths.size and lengths.min() > 0 and lengths.max() <= size
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    row_of = np.empty(len(lengths), np.int64)
    open_rows: list[list[np.ndarray]] = [[] for _ in range(size + 1)]  # rows, by their free tokens
    rooms = np.zeros(size + 1, np.int64)  # number of rows, by their free tokens
    rows = 0
    values, firsts, counts = np.unique(-descending, return_index=True, return_counts=True)
    for length, at, left in zip((-values).tolist(), firsts.tolist(), counts.tolist(), strict=True):
        while left:
            fits = np.flatnonzero(rooms[length:])
            if not fits.size:  # open as many rows as the remaining sequences of this length fill
                each = size // length
                new = -(-left // each)
                open_rows[size].append(np.arange(rows, rows + new))
                rooms[size] += new
                rows += new
                continue
            room = length + int(fits[0])
            # Fill the fullest row that has space with as many of these sequences as fit, then the next row.
            each = room // length
            taken = open_rows[room].pop()
            rooms[room] -= len(taken)
            full = min(left // each, len(taken))
            _put(row_of, at, np.repeat(taken[:full], each))
            at += full * each
            left -= full * each
            _give(open_rows, rooms, room - each * length, taken[:full])
            taken = taken[full:]
            if left and taken.size:
                _put(row_of, at, np.repeat(taken[:1], left))
                _give(open_rows, rooms, room - left * length, taken[:1])
                at += left
                left = 0
                taken = taken[1:]
            _give(open_rows, rooms, room, taken)
    places = np.argsort(row_of, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))])
    return PackingPlan(order, places, starts, descending, np.append(firsts, len(lengths)))


def _put(row_of: np.ndarray, at: int, rows: np.ndarray) -> None:
    row_of[at : at + len(rows)] = rows


def _give(open_rows: list[list[np.ndarray]], rooms: np.ndarray, room: int, rows: np.ndarray) -> None:
    if rows.size:
        open_rows[room].append(rows)
        rooms[room] += len(rows)
