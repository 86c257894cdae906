"""One split of one source of conversations: its memory-mapped sequences, and their packing into rows.

next: data/chat/packing.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from tmoe.config.run import DataConfig
from tmoe.data.chat.encoding import Tokens
from tmoe.data.chat.packing import plan
from tmoe.data.corpus import Split
from tmoe.data.sources import NAMED
from tmoe.data.survey import none_in_split
from tmoe.data.tokenizer import DataError

SPLITS: tuple[Split, ...] = ("train", "val", "test")


class RowCounts(NamedTuple):
    """Counts of the rows and sequences of one source, or of all sources."""

    rows: int
    """rows that were read, without malformed ones"""
    sequences: int
    """sequences to train on in this split; a preference counts as two"""
    tokens: int
    """tokens of these sequences"""
    trained: int
    """trained tokens among them"""
    truncated: int
    """sequences cut to fit"""
    dropped: int
    """rows of this split left out because they are too long"""
    skipped: int
    """malformed rows left out"""


class ChatSource:
    """One split of one source: its memory-mapped sequences, and their packing into rows."""

    def __init__(
        self,
        name: str,
        made: Path,
        seq: int,
        split: Split,
        cfg: DataConfig,
        origin: str,
        pairs: bool,
    ) -> None:
        self.name = name
        self.seq = seq
        facts = json.loads((made / "facts.json").read_text())
        # views as plain arrays, because a slice of a memmap costs several times as much
        self.ids = np.memmap(made / "ids.bin", facts["dtype"], "r").view(np.ndarray)
        self.trained = np.memmap(made / "trained.bin", np.bool_, "r").view(np.ndarray)
        arrays = load_file(made / "sequences.safetensors")
        self.starts = arrays["starts"]
        self.lengths = np.diff(self.starts)
        self.firsts = arrays["firsts"]
        """for each sequence the position of its first trained token"""
        self.desirable = arrays.get("desirable", np.zeros(0, np.bool_))
        """for --preference.loss kto: whether each sequence's answer is a good one"""
        self._files = facts["files"]
        self.forms: set[str] = set(facts["forms"])
        """forms of its rows: "conversation", "text" """
        self._places = arrays["places"]
        self.rows = arrays["rows"]
        self.of_unit = 2 if pairs else 1
        """number of sequences of a unit, which is kept together in one row: 2 for a preference, else 1"""

        units = np.flatnonzero((arrays["splits"] == SPLITS.index(split))[:: self.of_unit])
        if not len(units):
            raise DataError(none_in_split(name, "rows", split))
        self.units, cut, dropped = self._fit(
            units, arrays["firsts"], cfg.overlong, cfg.skip_malformed - facts["skipped"]
        )
        if not len(self.units):
            raise DataError(
                f"{name}: no row of its {split} split is left to train on, of {len(units)}; raise "
                f"--train.seq={seq}, change --data.val-fraction, or give more data"
            )
        self.plan = plan(self._of_units(self.lengths)[self.units].sum(1), seq)
        self.samples = self.plan.rows
        numbers = self._of_units(np.arange(len(self.lengths)))[self.units].ravel()
        self.tokens = int(self.lengths[numbers].sum())
        trained = arrays["counts"][numbers].sum()
        if cut.any():
            trained = sum(int(self.sequence(i)[1][1:].sum()) for i in numbers)
        self.predicted = int(trained)
        self.counts = RowCounts(
            facts["rows"],
            len(numbers),
            self.tokens,
            self.predicted,
            int(cut[numbers].sum()),
            dropped,
            facts["skipped"],
        )
        self.taken = self._tell(origin, facts)

    def _of_units(self, values: np.ndarray) -> np.ndarray:
        """The values of each unit: [units, 1], or [units, 2] for preferences."""
        return values.reshape(-1, self.of_unit)

    def _fit(
        self, units: np.ndarray, firsts: np.ndarray, overlong: str, skip: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """The units that fit into a row, which sequences are cut to fit, and how many units are left out.

        The lengths of cut sequences are set in `lengths`.
        skip: how many pairs may be left out because their answers are equal once they are cut.
        """
        lengths = self._of_units(self.lengths)
        long = units[lengths[units].sum(1) > self.seq]
        cut = np.zeros(len(self.lengths), bool)
        self.examples = self._examples(long)
        if overlong == "error" and long.size:
            raise DataError(
                f"{self.name}: {len(long)} rows are longer than --train.seq={self.seq}: {self.examples}; "
                "raise it, or say --data.overlong drop or truncate"
            )
        if overlong == "truncate":
            for unit in long.tolist():
                sequences = range(unit * self.of_unit, (unit + 1) * self.of_unit)
                # Each of two sequences may use half the row, the longer one also what the other leaves free.
                share = self.seq // self.of_unit
                for i in sequences:
                    others = sum(int(self.lengths[j]) for j in sequences if j != i)
                    limit = max(share, self.seq - others) if self.of_unit == 2 else self.seq
                    cut[i] = self.lengths[i] > limit
                    self.lengths[i] = min(int(self.lengths[i]), limit)
        lost = (lengths[long].sum(1) > self.seq) | (self._of_units(firsts)[long] >= lengths[long]).any(1)
        equal = long[self._equal_cut(long) & ~lost]
        if len(equal) > skip:
            raise DataError(
                f"{self.name}: {len(equal)} pairs are equal once cut to --train.seq={self.seq}, so no answer "
                f"is preferred: {self._examples(equal)}; raise it, say --data.overlong drop, or leave them "
                f"out by --data.skip-malformed {len(equal)}"
            )
        self.equal = self._examples(equal)
        left = np.setdiff1d(units, [*long[lost], *equal], assume_unique=True)
        return left, cut, int(lost.sum())

    def _equal_cut(self, long: np.ndarray) -> np.ndarray:
        """[long] bool: whether the two sequences of a pair are equal in their cut lengths."""
        if self.of_unit == 1:
            return np.zeros(len(long), bool)
        both = ([Tokens(*self.sequence(2 * int(unit) + i)) for i in range(2)] for unit in long)
        return np.array([_equal(*pair) for pair in both], bool)

    def _tell(self, origin: str, facts: dict[str, Any]) -> str:
        """The source in words: how it was read, how many rows are trained on, and what was left out."""
        c = self.counts
        parts = [origin, f"{c.rows:,} rows"]
        sequences = len(self.lengths)
        if sequences != c.rows * self.of_unit:
            parts.append(
                f"of which the template made {sequences:,} sequences, as it renders earlier turns differently"
            )
        parts.append(f"trained {c.trained / max(c.tokens, 1):.1%} of the tokens")
        parts.append(f"packed to {c.tokens / (self.samples * self.seq):.1%}")
        long = f"longer than --train.seq={self.seq}"
        if c.dropped:
            parts.append(f"{c.dropped:,} rows {long} left out ({self.examples})")
        if c.truncated:
            parts.append(f"{c.truncated:,} sequences {long} cut")
        if self.equal:
            parts.append(f"pairs that are equal once cut left out: {self.equal}")
        return ", ".join([*parts, *filter(None, [facts["malformed"], facts["left"]])])

    def _examples(self, units: np.ndarray) -> str:
        return ", ".join(self.where(int(unit) * self.of_unit) for unit in units[:NAMED])

    def where(self, sequence: int) -> str:
        """File and line, or file and row, of a sequence."""
        file, line = self._places[self.rows[sequence]]
        path, by_line = self._files[file]
        return f"{path}:{line}" if by_line else f"{path}: row {line}"

    def sequence(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a sequence, and which of them are trained."""
        part = slice(self.starts[i], self.starts[i] + self.lengths[i])
        return self.ids[part], self.trained[part]

    def row(self, position: int, epoch: int, key: str) -> list[int]:
        """The sequences of a packed row of an epoch, in their order."""
        units = self.units[self.plan.row(position, epoch, key)]
        return [int(unit) * self.of_unit + i for unit in units for i in range(self.of_unit)]


def _equal(one: Tokens, other: Tokens) -> bool:
    return np.array_equal(one.ids, other.ids) and np.array_equal(one.trained, other.trained)
