"""Prompts packed into rows of bounded length, for the forward that fills the cache.

next: generate/forward.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.generate.cache import PAGE
from tmoe.generate.forward import PromptBatch

# On a GPU flex attention compiles a kernel for each length, so rows, and the keys of later pieces, have one
# of these lengths.
LENGTHS = (128, 512, 2048, 8192)


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

    pieces: of at most `most` tokens each. A piece that is not the first of its prompt has a chunk alone.
    blocks: align pieces with the blocks of flex attention. A prompt then gets the same bits as at the
        beginning of a row.
    """
    some: list[PromptPiece] = []
    length = 0
    for piece in pieces:
        more = aligned(len(piece.ids), blocks)
        if some and (length + more > most or piece.start or piece.alone):
            yield row(some, most, device, blocks)
            some, length = [], 0
        some.append(piece)
        length += most if piece.start or piece.alone else more
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
    last = pieces[-1]
    end = last.start + len(last.ids)
    S = len(tokens)
    rest = next((min(n, most) for n in LENGTHS if n >= S), S) - S if blocks else 0
    tokens += [0] * rest
    at += [end - 1] * rest
    documents += [len(pieces)] * rest
    seen = places_of(last.pages, 0, end) if last.start else []
    if blocks and seen:
        seen += seen[-1:] * (-end % LENGTHS[2])  # after all queries, so none attends to them

    def put(values: list) -> Tensor:
        return torch.tensor(values, device=device)

    gaps = len(rows) < len(tokens)
    padding_1S = rows_N = None
    if gaps:
        rows_N = put(rows)
        padding_1S = torch.ones(1, len(tokens), dtype=torch.bool, device=device)
        padding_1S[0, rows_N] = False
    documents_1S = put([documents]) if documents[-1] and not seen else None
    keys = put(places), put(seen) if seen else None
    lengths = tuple(len(piece.ids) for piece in pieces)
    return PromptBatch(put([tokens]), put([at]), documents_1S, padding_1S, rows_N, *keys, lengths)


def places_of(pages: Sequence[int], start: int, end: int) -> list[int]:
    """The places in the cache of the tokens at positions start to end - 1."""
    return [pages[i // PAGE] * PAGE + i % PAGE for i in range(start, end)]


Piece = PromptPiece  # the name until version 0.2
