"""Packs sequences into rows of a fixed length: best fit, longest first, none divided.

Which lengths share a row depends on the lengths alone. So every epoch has the same number of rows, and any
row of any epoch is found without those before it: `Plan.row` puts another sequence of the same length into
each place, and shuffles the rows, by (seed, epoch).

next: data/chat/source.py
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tmoe.data.dataset import permute


class Plan(NamedTuple):
    """Places for all sequences in rows. Places are ordered by row."""

    order: np.ndarray
    """sequences, longest first, equal ones in their order [n]"""
    places: np.ndarray
    """which of `order` lies at each place [n]"""
    starts: np.ndarray
    """first place of each row, and n [rows + 1]"""
    lengths: np.ndarray
    """of the sequences, longest first [n]"""
    equal: np.ndarray
    """where in `order` each length begins, and n"""

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    def row(self, number: int, epoch: int, key: str) -> list[int]:
        """The sequences of one row of an epoch."""
        row = permute(number, self.rows, f"{key}/{epoch}/rows")
        found = []
        for rank in self.places[self.starts[row] : self.starts[row + 1]].tolist():
            # Sequences of one length change places.
            part = int(self.equal.searchsorted(rank, "right"))
            low, high = self.equal[part - 1 : part + 1].tolist()
            at = permute(rank - low, high - low, f"{key}/{epoch}/{low}")
            found.append(int(self.order[low + at]))
        return found


def plan(lengths: np.ndarray, size: int) -> Plan:
    """Best fit decreasing (Johnson 1973) of sequences into rows of `size` tokens; none may be longer.

    Rows with equal room are handled together, so it takes as many steps as there are lengths and rooms: one
    second for a million sequences.
    """
    lengths = np.asarray(lengths, np.int64)
    assert lengths.size and lengths.min() > 0 and lengths.max() <= size
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    row_of = np.empty(len(lengths), np.int64)
    open_rows: list[list[np.ndarray]] = [[] for _ in range(size + 1)]  # by room
    rooms = np.zeros(size + 1, np.int64)  # how many rows have this room
    rows = 0
    values, firsts, counts = np.unique(-descending, return_index=True, return_counts=True)
    for length, at, left in zip((-values).tolist(), firsts.tolist(), counts.tolist(), strict=True):
        while left:
            fits = np.flatnonzero(rooms[length:])
            if not fits.size:  # new rows, as many as the rest fills
                each = size // length
                new = -(-left // each)
                open_rows[size].append(np.arange(rows, rows + new))
                rooms[size] += new
                rows += new
                continue
            room = length + int(fits[0])
            # The fullest row that has room takes as many as it can before the next one is touched.
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
    return Plan(order, places, starts, descending, np.append(firsts, len(lengths)))


def _put(row_of: np.ndarray, at: int, rows: np.ndarray) -> None:
    row_of[at : at + len(rows)] = rows


def _give(open_rows: list[list[np.ndarray]], rooms: np.ndarray, room: int, rows: np.ndarray) -> None:
    if rows.size:
        open_rows[room].append(rows)
        rooms[room] += len(rows)
