"""Prompts packed into rows of bounded length, for the forward that fills the cache.

next: generate/forward.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tmoe.generate.cache import PAGE
from tmoe.generate.forward import PromptBatch
from tmoe.generate.upload import upload

# On a GPU flex attention compiles a kernel for each length, so rows, and the keys of later pieces, have one
# of these lengths.
LENGTHS = (128, 512, 2048, 8192)
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
    tokens: list[int] = []
    at: list[int] = []
    documents: list[int] = []
    places: list[int] = []
    rows: list[int] = []
    for number, (ids, pages, start, _) in enumerate(pieces):
        end = start + len(ids)
        gap = aligned(len(ids), blocks) - len(ids)
        rows += range(len(tokens), len(tokens) + len(ids))
        places += places_of(pages, start, end)
        tokens += ids + [0] * gap
        at += [*range(start, end), *[end - 1] * gap]
        documents += [number] * (len(ids) + gap)
    S = len(tokens)
    rest = next((min(n, most) for n in LENGTHS if n >= S), S) - S if blocks else 0
    tokens += [0] * rest
    at += at[-1:] * rest
    documents += [len(pieces)] * rest
    seen, seen_documents, queries = keys_of_later(pieces, blocks) if pieces[0].start else ([], [], [])
    queries += queries[-1:] * rest

    def put(values: list) -> Tensor:
        return upload(values, device)

    gaps = len(rows) < len(tokens)
    padding_1S = rows_N = None
    if gaps:
        rows_N = put(rows)
        padding_1S = torch.ones(1, len(tokens), dtype=torch.bool, device=device)
        padding_1S[0, rows_N] = False
    documents_1S = put([documents]) if documents[-1] and not seen else None
    whole = PromptBatch(
        put([tokens]),
        put([at]),
        documents_1S,
        padding_1S,
        rows_N,
        put(places),
        lengths=tuple(len(piece.ids) for piece in pieces),
    )
    if not seen:
        return whole
    several = put([seen_documents]) if len(pieces) > 1 else None
    return whole._replace(seen_J=put(seen), seen_documents_1J=several, queries_S=put(queries))


def keys_of_later(pieces: Sequence[PromptPiece], blocks: bool) -> tuple[list[int], list[int], list[int]]:
    """The keys of later pieces: their places, the piece of each, and of each query its own key.

    The keys of a piece are those of its whole prompt up to the piece's end. blocks: align them with blocks. A
    gap after them has later positions than their queries, so no token attends to it.
    """
    seen: list[int] = []
    documents: list[int] = []
    queries: list[int] = []
    for number, (ids, pages, start, _) in enumerate(pieces):
        end, first = start + len(ids), len(seen)
        gap = aligned(end, blocks) - end
        seen += places_of(pages, 0, end)
        seen += seen[-1:] * gap
        documents += [number] * (end + gap)
        queries += range(first + start, first + end)
        queries += queries[-1:] * (aligned(len(ids), blocks) - len(ids))
    rest = -len(seen) % LENGTHS[2] if blocks else 0
    return seen + seen[-1:] * rest, documents + [len(pieces)] * rest, queries


def places_of(pages: Sequence[int], start: int, end: int) -> list[int]:
    """The places in the cache of the tokens at positions start to end - 1."""
    at = np.arange(start, end)
    return (np.asarray(pages, np.int64)[at // PAGE] * PAGE + at % PAGE).tolist()


Piece = PromptPiece  # the name until version 0.2
