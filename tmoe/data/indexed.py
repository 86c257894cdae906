"""Reads Megatron's indexed data sets: token ids in NAME.bin, bounds of sequences and documents in NAME.idx.

NAME.idx is little-endian and holds, in this order:
    the magic MMIDIDX\\0\\0, the version 1 (uint64), a code for the type of the ids (one byte);
    the number of sequences, and the number of documents plus one (uint64 each);
    the number of ids of each sequence (int32), then the first byte of each sequence in NAME.bin (int64);
    the first sequence of each document (int64), and at the end the number of sequences.
A data set of pictures has one byte more for each sequence and is refused.

The split is the one that Megatron makes: sequences in order, training data first. Documents end with the
tokenizer's eos if the data set was made with --append-eod. Otherwise eos is added after each document while
reading, so that tokens do not attend across documents.

next: data/sources.py
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tmoe.data.corpus import HeldOut, Split, TokenRun
from tmoe.data.tokenizer import DataError

MAGIC = b"MMIDIDX\0\0"
HEAD = len(MAGIC) + 8 + 1 + 8 + 8
TYPES = dict(enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1))
PIECE = 1 << 22  # sequences that are checked at a time
LOOKED = 1000  # documents whose last ids are read to find out whether documents end with eos


def index_path(path: Path) -> Path:
    """The path of the index (.idx) that belongs to a .bin."""
    return path.with_suffix(".idx")


def is_indexed(path: Path) -> bool:
    """Whether this is the .bin of a Megatron data set: its .idx is in the same folder."""
    return path.suffix == ".bin" and index_path(path).is_file()


def open_indexed(path: Path) -> Indexed:
    """Opens a data set and checks its index. DataError names the file, the place in it and the fault."""
    index = index_path(path)
    for file in (path, index):
        if not file.is_file():  # opening a pipe would block until something writes to it
            raise DataError(f"{file}: missing or no regular file; a Megatron data set is a .bin and its .idx")
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEAD)
    if len(head) < HEAD or not head.startswith(MAGIC):
        what = f"truncated: ends at byte {size}, inside its head of {HEAD}"
        no = f"begins with {head[:9]!r}, not as the index of a Megatron data set does ({MAGIC!r})"
        raise DataError(f"{index}: {no if head[:9] != MAGIC[: len(head[:9])] else what}")
    version, code, sequences, entries = struct.unpack_from("<QBQQ", head, len(MAGIC))
    if version != 1:
        raise DataError(f"{index}: version {version} at byte 9; only 1 is known")
    if code not in TYPES:
        raise DataError(f"{index}: type {code} of ids at byte 17; must be 1 to {len(TYPES)}")
    promised = HEAD + 12 * sequences + 8 * entries
    if size == promised + sequences and sequences:
        raise DataError(f"{index}: has a mode for each sequence: a data set of pictures, not of text")
    if size != promised:
        what = "truncated" if size < promised else "too long"
        counts = f"its head promises {sequences} sequences and {entries} ends of documents"
        raise DataError(f"{index}: {what}: ends at byte {size}; {counts}, {promised}")
    if sequences == 0 or entries < 2:
        raise DataError(f"{index}: empty: {sequences} sequences, {max(entries - 1, 0)} documents")
    data = Indexed(path, np.dtype(TYPES[code]), sequences, entries)
    data.check()
    return data


@dataclass(frozen=True)
class Indexed:
    """An opened data set; make one with `open_indexed`."""

    path: Path
    dtype: np.dtype
    sequences: int
    entries: int
    """number of documents plus one"""

    @cached_property
    def lengths(self) -> np.ndarray:
        return self._array("<i4", self.sequences, HEAD)

    @cached_property
    def pointers(self) -> np.ndarray:
        return self._array("<i8", self.sequences, HEAD + 4 * self.sequences)

    @cached_property
    def documents(self) -> np.ndarray:
        """First sequence of each document, and at the end the number of sequences."""
        return self._array("<i8", self.entries, HEAD + 12 * self.sequences)

    @cached_property
    def ids(self) -> np.ndarray:
        return np.memmap(self.path, dtype=self.dtype, mode="r")

    def _array(self, kind: str, count: int, offset: int) -> np.ndarray:
        return np.memmap(index_path(self.path), dtype=kind, mode="r", offset=offset, shape=(count,))

    def check(self) -> None:
        """DataError unless the sequences cover the .bin without gaps, and the documents the sequences."""
        index = index_path(self.path)
        at = 0
        for low in range(0, self.sequences, PIECE):
            lengths = self.lengths[low : low + PIECE].astype(np.int64)
            if (bad := np.flatnonzero(lengths < 0)).size:
                raise DataError(f"{index}: sequence {low + bad[0]} has {lengths[bad[0]]} ids")
            ends = at + np.cumsum(lengths) * self.dtype.itemsize
            starts = np.concatenate([[at], ends[:-1]])
            if (bad := np.flatnonzero(self.pointers[low : low + PIECE] != starts)).size:
                first = int(bad[0])
                begins = f"begins at byte {self.pointers[low + first]} of the .bin, the one before ends at"
                raise DataError(f"{index}: sequence {low + first} {begins} {starts[first]}")
            at = int(ends[-1])
        size = self.path.stat().st_size
        if size != at:
            what = "truncated" if size < at else "too long"
            raise DataError(f"{self.path}: {what}: ends at byte {size}, its .idx promises {at}")
        if at == 0:
            raise DataError(f"{self.path}: empty: its {self.sequences} sequences hold no ids")
        documents = self.documents
        in_order = documents[0] == 0 and documents[-1] == self.sequences
        if not in_order or (np.diff(documents) < 0).any():
            raise DataError(f"{index}: the documents' first sequences do not rise from 0 to {self.sequences}")

    def starts(self, documents: int | None = None) -> np.ndarray:
        """Position of the first id of each document that is not empty, and the end of the last document.

        documents: only the first `documents` documents; None: all.
        """
        first = self.documents[: None if documents is None else documents + 1]
        at = self.pointers[np.minimum(first, self.sequences - 1)] // self.dtype.itemsize
        return np.unique(np.where(first == self.sequences, len(self.ids), at))

    @cached_property
    def last_ids(self) -> set[int]:
        """The ids that the first LOOKED documents end with."""
        return {int(n) for n in self.whole(self.ids[self.starts(LOOKED)[1:] - 1])}

    def whole(self, ids: np.ndarray) -> np.ndarray:
        """The ids as int64. DataError if they are stored as floats and are not whole numbers."""
        if self.dtype.kind == "f":
            odd = ~np.isfinite(ids) | (ids != np.trunc(ids)) | (np.abs(ids) > 2**53)
            if odd.any():
                raise DataError(f"{self.path}: holds numbers that are no whole ids, as {ids[odd][0]}")
        return ids.astype(np.int64)

    def run(self, shares: HeldOut, split: Split, eos: int) -> TokenRun:
        """One split, cut as by Megatron's --split: by the number of sequences, in order.

        If documents do not end with eos, eos is added after each.
        """
        cuts = (0.0, 1 - shares.val - shares.test, 1 - shares.test, 1.0)
        number = ("train", "val", "test").index(split)
        first, last = (round(self.sequences * cut) for cut in cuts[number : number + 2])
        itemsize = self.dtype.itemsize
        low, high = (
            len(self.ids) if at == self.sequences else int(self.pointers[at]) // itemsize
            for at in (first, last)
        )
        if self.last_ids == {eos} and self.dtype.kind != "f":
            return TokenRun(self.ids[low:high], str(self.path), low * itemsize)
        tokens: Any = Separated(self, low, high, None if self.last_ids == {eos} else eos)
        return TokenRun(tokens, str(self.path), low * itemsize, tokens.separators)


class Separated:
    """Ids `low` to `high` of a data set, read when they are sliced; `eos`, if given, follows each document.

    It offers the parts of an array's interface that a source needs: length, slices, single ids, itemsize.
    """

    def __init__(self, data: Indexed, low: int, high: int, eos: int | None) -> None:
        self.data = data
        self.eos = eos
        self.itemsize = data.dtype.itemsize
        starts = data.starts()
        inside = starts[(starts > low) & (starts < high)]
        self.edges = np.concatenate([[low], inside, [high]]) if high > low else np.array([low])
        # Position at which each document begins in this object, with the separators before it counted.
        extra = np.arange(len(self.edges)) if eos is not None else 0
        self.places = self.edges - low + extra

    def __len__(self) -> int:
        return int(self.places[-1])

    def separators(self, position: int) -> int:
        """How many of the tokens before a position are added separators, which are not in the file."""
        number = int(np.searchsorted(self.places, position, side="right")) - 1
        return number if self.eos is not None else 0

    def __getitem__(self, wanted: int | slice) -> Any:
        if not isinstance(wanted, slice):
            return self[wanted : wanted + 1][0]
        low, high, _ = wanted.indices(len(self))
        parts = []
        number = int(np.searchsorted(self.places, low, side="right")) - 1
        while low < high:
            end = min(int(self.places[number + 1]), high)
            first = int(self.edges[number]) + low - int(self.places[number])
            size = end - low
            ids = self.data.ids[first : min(first + size, int(self.edges[number + 1]))]
            parts.append(self.data.whole(ids))
            if len(ids) < size:
                parts.append(np.array([self.eos], np.int64))
            low = end
            number += 1
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def eos_of(data: list[Indexed], known: int | None) -> int:
    """The id that ends documents: the tokenizer's, or without a tokenizer the last id of every document.

    DataError if no tokenizer is known and documents end with different ids.
    """
    if known is not None:
        return known
    ends = set().union(*(part.last_ids for part in data))
    if len(ends) == 1:
        return ends.pop()
    shown = ", ".join(map(str, sorted(ends)[:5])) + ", …" * (len(ends) > 5)
    raise DataError(
        f"{data[0].path}: a Megatron data set does not say which tokenizer made it, and its documents end "
        f"with different ids ({shown}): name the tokenizer with --data.tokenizer"
    )
