"""Prompts packed into rows of bounded length, for the forward that fills the cache.

next: generate/forward.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.generate.cache import PAGE
from tmoe.generate.forward import Chunk
from tmoe.generate.pages import NOWHERE

# On a GPU flex attention compiles a kernel for each length, so rows have few; keys of later pieces likewise.
LENGTHS = (128, 512, 2048, 8192)


class Piece(NamedTuple):
    """Tokens of a prompt, from position `start` on."""

    ids: list[int]
    pages: list[int]  # of the prompt
    start: int


def chunks(
    prompts: Sequence[tuple[list[int], list[int]]], most: int, device: torch.device
) -> Iterator[Chunk]:
    """Chunks of at most `most` tokens that hold these prompts, each a pair of ids and pages, in order."""
    gpu = device.type == "cuda"
    align = PAGE if gpu else 1  # a document that begins on a block has the bits of one that begins a row
    some: list[Piece] = []
    length = 0
    for ids, pages in prompts:
        more = -(-len(ids) // align) * align
        if some and length + more > most:
            yield row(some, align, gpu, most, device)
            some, length = [], 0
        if len(ids) > most:
            for at in range(0, len(ids), most):
                yield row([Piece(ids[at : at + most], pages, at)], align, gpu, most, device)
        else:
            some.append(Piece(ids, pages, 0))
            length += more
    if some:
        yield row(some, align, gpu, most, device)


def row(pieces: Sequence[Piece], align: int, gpu: bool, most: int, device: torch.device) -> Chunk:
    """Pieces one behind the other, each beginning at a multiple of `align`."""
    begins = [0]
    for piece in pieces:
        begins.append(begins[-1] + -(-len(piece.ids) // align) * align)
    S = begins[-1]
    if gpu:
        S = next((n for n in LENGTHS if S <= n <= most), S)
    tokens, at, documents = [0] * S, [0] * S, [-1] * S
    rows: list[int] = []
    places: list[int] = []
    for number, (begin, (ids, pages, start)) in enumerate(zip(begins, pieces, strict=False)):
        n = len(ids)
        tokens[begin : begin + n] = ids
        at[begin : begin + n] = range(start, start + n)
        documents[begin : begin + n] = [number] * n
        rows += range(begin, begin + n)
        places += places_of(pages, start, start + n)
    gaps = len(rows) < S
    last = pieces[-1]
    end = last.start + len(last.ids)
    seen = places_of(last.pages, 0, end) if last.start else []
    if seen and gpu:
        seen += [NOWHERE * PAGE] * (-end % LENGTHS[2])  # behind all queries: seen by none
    t = lambda values: torch.tensor(values, device=device)  # noqa: E731
    documents_1S: Tensor | None = t([documents]) if gaps or len(pieces) > 1 else None
    return Chunk(
        t([tokens]),
        t([at]),
        documents_1S,
        documents_1S < 0 if gaps and documents_1S is not None else None,
        t(rows) if gaps else None,
        t(places),
        t(seen) if seen else None,
    )


def places_of(pages: Sequence[int], start: int, end: int) -> list[int]:
    """Where the tokens of these positions lie in the cache."""
    return [pages[i // PAGE] * PAGE + i % PAGE for i in range(start, end)]
