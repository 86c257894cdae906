"""Chunks of prompts as CUDA graphs: one launch a chunk in place of a thousand.

The host needs 37 ms to launch a chunk of olmoe-1b-7b, and the GPU a few (docs/decisions/114). A graph needs
tensors of fixed shapes, so each place of a row is computed like a token, and documents and padding are always
given.

next: generate/graphs.py
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch
from torch import Tensor

from tmoe.generate.cache import Cache
from tmoe.generate.forward import AllTurns, PromptBatch, prefill
from tmoe.generate.graphs import CudaGraphs
from tmoe.model.transformer import Transformer
from tmoe.moe.router import Routing

# Places of the longest row that is a graph. The host launches a longer one while the GPU computes the one
# before; intermediate tensors of graphs stay allocated.
LONGEST = 2048


def filled(chunk: PromptBatch) -> PromptBatch:
    """The same chunk in tensors whose shapes depend on the numbers of places and of keys alone."""
    at_1S = chunk.at_1S
    padding, documents = chunk.padding_1S, chunk.documents_1S
    if padding is None:
        padding = torch.zeros_like(at_1S, dtype=torch.bool)
    if documents is None and chunk.seen_J is None:
        documents = torch.zeros_like(at_1S)
    seen_documents = chunk.seen_documents_1J
    if chunk.seen_J is not None and seen_documents is None:
        seen_documents = torch.zeros_like(chunk.seen_J)[None]
    return chunk._replace(
        documents_1S=documents,
        padding_1S=padding,
        rows_N=None,
        lengths=(at_1S.shape[1],),
        seen_documents_1J=seen_documents,
    )


class PromptGraphs:
    """Forwards of chunks, each a graph of `graphs`. The next run overwrites a result."""

    def __init__(self, model: Transformer, cache: Cache, turns: AllTurns, graphs: CudaGraphs):
        """graphs: also those of steps, which share their memory."""
        self.model, self.cache, self.turns, self.graphs = model, cache, turns, graphs
        self.inputs: dict[Hashable, PromptBatch] = {}

    def take(self, chunk: PromptBatch) -> bool:
        """Whether a chunk can be a graph. Linear blocks need a call for each piece."""
        return chunk.tokens_1S.shape[1] <= LONGEST and not self.model.cfg.linear_layers

    def run(self, chunk: PromptBatch, rows: int, last: bool) -> tuple[list[Routing], Tensor]:
        """`prefill` of a chunk that `take` accepts."""
        whole = filled(chunk)
        keys = 0 if whole.seen_J is None else len(whole.seen_J)
        key = "prompt", whole.tokens_1S.shape[1], keys, rows, last
        inputs = self.inputs.setdefault(key, whole)
        if inputs is not whole:
            for new, old in zip(whole, inputs, strict=True):
                if isinstance(new, Tensor):
                    old.copy_(new)
        return self.graphs.run(key, partial(prefill, self.model, self.cache, inputs, self.turns, rows, last))
