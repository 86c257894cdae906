"""Prompts packed into rows of bounded length, for the forward that fills the cache.

next: generate/forward.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tmoe.generate.cache import PAGE
from tmoe.generate.forward import PromptBatch
from tmoe.generate.pages import NOWHERE
from tmoe.generate.upload import upload

# On a GPU flex attention compiles a kernel for each length, so rows, and the keys of later pieces, have one
# of these lengths.
LENGTHS = (128, 512, 2048, 4096, 8192)
KEYS = 8192  # most keys of several later pieces in a chunk


class PromptPiece(NamedTuple):
    """Tokens of a prompt, from position `start` on."""

    ids: list[int]
    pages: list[int]  # of the prompt
    start: int
    alone: bool = False  # whether no other piece may be in its chunk


def chunks(
    pieces: Sequence[PromptPiece], most: int, device: torch.device, blocks: bool
) -> Iterator[PromptBatch]:
    """Chunks of at most `most` tokens with these pieces in order.

    pieces: of at most `most` tokens each. A chunk has only first pieces of prompts, or only later pieces.
    blocks: align pieces with the blocks of flex attention. A prompt then gets the same bits as at the
        beginning of a row.
    """
    some: list[PromptPiece] = []
    length = keys = 0
    for piece in pieces:
        more, end = aligned(len(piece.ids), blocks), aligned(piece.start + len(piece.ids), blocks)
        full = length + more > most or (piece.start > 0 and keys + end > KEYS)
        if some and (full or piece.alone or some[-1].alone or (piece.start > 0) != (some[-1].start > 0)):
            yield row(some, most, device, blocks)
            some, length, keys = [], 0, 0
        some.append(piece)
        length, keys = length + more, keys + end
    if some:
        yield row(some, most, device, blocks)


def aligned(length: int, blocks: bool) -> int:
    """Number of places that `length` tokens take in a row."""
    return -(-length // PAGE) * PAGE if blocks else length


def row(pieces: Sequence[PromptPiece], most: int, device: torch.device, blocks: bool) -> PromptBatch:
    """Pieces one after the other in a row. A gap belongs to the piece before it; no token attends to it."""
    tokens, at, documents, places, rows = [], [], [], [], []
    length = 0
    for number, (ids, pages, start, _) in enumerate(pieces):
        end, more = start + len(ids), aligned(len(ids), blocks)
        gap = more - len(ids)
        rows.append(np.arange(length, length + len(ids)))
        places.append(places_of(pages, start, start + more))
        tokens += [np.asarray(ids, np.int64), np.zeros(gap, np.int64)]
        at += [np.arange(start, end), np.full(gap, end - 1)]
        documents.append(np.full(more, number))
        length += more
    S = next((min(n, most) for n in LENGTHS if n >= length), length) if blocks else length
    later = pieces[0].start > 0
    parts = dict(
        tokens=lengthened(tokens, S, 0),
        at=lengthened(at, S),
        documents=lengthened(documents, S, len(pieces)),
        rows=np.concatenate(rows),
        places=lengthened(places, S, NOWHERE * PAGE),
    )
    if later:
        parts |= zip(("seen", "seen_documents", "queries"), keys_of_later(pieces, blocks, S), strict=True)
    # one copy to the device
    values = upload(np.concatenate(list(parts.values())), device).split(
        [len(part) for part in parts.values()]
    )
    on = dict(zip(parts, values, strict=True))
    rows_N = padding_1S = None
    if len(on["rows"]) < S:
        rows_N = on["rows"]
        padding_1S = torch.ones(1, S, dtype=torch.bool, device=device)
        padding_1S[0, rows_N] = False
    several = parts["documents"][-1] > 0
    whole = PromptBatch(
        on["tokens"][None],
        on["at"][None],
        on["documents"][None] if several and not later else None,
        padding_1S,
        rows_N,
        on["places"],
        lengths=tuple(len(piece.ids) for piece in pieces),
    )
    if not later:
        return whole
    documents_1J = on["seen_documents"][None] if len(pieces) > 1 else None
    return whole._replace(seen_J=on["seen"], seen_documents_1J=documents_1J, queries_S=on["queries"])


def lengthened(parts: Sequence[np.ndarray], length: int, value: int | None = None) -> np.ndarray:
    """The parts in a row, followed by `value`, or by the last value, up to a length."""
    whole = np.concatenate(parts)
    return np.append(whole, np.full(length - len(whole), whole[-1] if value is None else value))


def keys_of_later(
    pieces: Sequence[PromptPiece], blocks: bool, S: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The keys of later pieces: their places [J], the piece of each [J], and of each query its own key [S].

    The keys of a piece are those of its whole prompt up to the piece's end. blocks: align them with blocks. A
    gap after them has later positions than their queries, so no token attends to it.
    """
    seen, documents, queries = [], [], []
    first = 0
    for number, (ids, pages, start, _) in enumerate(pieces):
        end = start + len(ids)
        more = aligned(end, blocks)
        seen.append(lengthened([places_of(pages, 0, end)], more))
        documents.append(np.full(more, number))
        queries.append(lengthened([np.arange(first + start, first + end)], aligned(len(ids), blocks)))
        first += more
    J = keys_in_row(first) if blocks else first
    return lengthened(seen, J), lengthened(documents, J, len(pieces)), lengthened(queries, S)


def keys_in_row(keys: int) -> int:
    """The length to which keys are filled up: flex attention compiles a kernel for each."""
    short = [n for n in LENGTHS[2:] if n >= keys]
    return short[0] if short else -(-keys // KEYS) * KEYS


def places_of(pages: Sequence[int], start: int, end: int) -> np.ndarray:
    """The places in the cache of positions start to end - 1. Positions beyond the pages have NOWHERE's."""
    at = np.arange(start, end)
    own = np.asarray([*pages, NOWHERE], np.int64)
    return own[np.minimum(at // PAGE, len(pages))] * PAGE + at % PAGE


Piece = PromptPiece  # the name until version 0.2
