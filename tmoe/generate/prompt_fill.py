"""Prompts that are being cached: which pieces are next, and what is recorded of their tokens.

next: generate/prompt_chunks.py, generate/forward.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe.generate.cache import PAGE
from tmoe.generate.forward import PromptBatch, head_input
from tmoe.generate.pages import Pages, keys_of
from tmoe.generate.prompt_chunks import PromptPiece, aligned
from tmoe.generate.requests import Asked, Request, Tops
from tmoe.generate.row_settings import top_tokens
from tmoe.model.transformer import Transformer
from tmoe.moe.router import Routing

AT_ONCE = 512  # tokens of a prompt whose logits exist at the same time


@dataclass
class Filling:
    """A prompt whose tokens, except the last, are being cached."""

    asked: Asked
    pages: list[int]
    done: int  # tokens that are cached
    keys: Sequence[bytes] = ()  # of its full pages, if later prompts may share them
    notes: Sequence[Experts | None] = field(default=())  # of pages that it shares with earlier prompts
    prompt: int = 0  # number of the prompt

    def __post_init__(self) -> None:
        for note in self.notes:
            if note is not None:
                self.asked.routes += note.routes
                self.asked.weights += note.weights

    @property
    def total(self) -> int:
        """Number of tokens to cache."""
        return len(self.asked.ids) - 1

    @property
    def left(self) -> int:
        """Number of these tokens that are not cached yet."""
        return self.total - self.done

    @property
    def complete(self) -> bool:
        """Whether all these tokens are cached."""
        return self.left == 0

    @property
    def records(self) -> bool:
        """Whether anything of its tokens is recorded."""
        return self.asked.details.of_experts or self.asked.details.prompt_logprobs

    def advance(self, tokens: int, packed: bool, pages: Pages) -> None:
        """Counts a piece as cached, and gives the pages that are full now their keys."""
        self.done += tokens
        self.asked.packed |= packed
        if self.keys and not self.asked.alone:
            for i in range((self.done - tokens) // PAGE, self.done // PAGE):
                pages.publish(self.pages[i], self.keys[i], experts_of(self.asked, i))


@dataclass
class Experts:
    """The experts of a page's tokens, and their weights: lists of at most one tensor [Y, PAGE, K]."""

    routes: list[Tensor]
    weights: list[Tensor]


def experts_of(asked: Asked, i: int, request: Request | None = None) -> Experts | None:
    """The experts of the tokens of page number i of a prompt, or of the prompt with an answer."""
    if not asked.details.of_experts:
        return None
    page = slice(i * PAGE, (i + 1) * PAGE)

    def cut(pieces: list[Tensor], tokens: list[Tensor]) -> list[Tensor]:
        every = [*pieces, torch.stack(tokens, 1)] if tokens else pieces
        return [torch.cat(every, 1)[:, page].clone()] if every else []

    routes, weights = (request.routes, request.weights) if request else ([], [])
    return Experts(cut(asked.routes, routes), cut(asked.weights, weights))


def publish_answer(request: Request, pages: Pages) -> None:
    """Gives the pages that an answer fills their keys, for a prompt that continues with the answer."""
    asked = request.asked
    if asked.kind is None or asked.alone:
        return
    # each launched step has cached one token; the experts are known of the steps whose results were read
    cached = request.first + min(request.launched, len(request.ids))
    if cached // PAGE <= request.first // PAGE:
        return
    keys = keys_of([*asked.ids, *request.ids][:cached], asked.kind, asked.keys)
    for i in range(request.first // PAGE, len(keys)):
        pages.publish(request.pages[i], keys[i], experts_of(asked, i, request))


def pieces_of(prompts: Iterable[Filling], most: int, budget: int | None) -> list[tuple[Filling, PromptPiece]]:
    """The next pieces of prompts in order, each of at most `most` tokens.

    budget: most tokens of all pieces, counted in whole pages; a piece that the budget shortens ends with a
    page. None: no bound.
    """
    work = []
    for filling in prompts:
        start = filling.done
        while start < filling.total:
            count = min(most, filling.total - start)
            if budget is not None:
                if budget < PAGE:
                    return work
                count = min(count, budget // PAGE * PAGE)
                budget -= aligned(count, blocks=True)
            ids = filling.asked.ids[start : start + count]
            work.append((filling, PromptPiece(ids, filling.pages, start, filling.asked.alone)))
            start += count
    return work


def record(
    model: Transformer,
    chunk: PromptBatch,
    parts: Sequence[tuple[Filling, PromptPiece]],
    routings: Sequence[Routing],
    x_1SD: Tensor,
) -> None:
    """Adds to prompts what is asked of a chunk's tokens.

    parts: the chunk's pieces. routings: of each MoE layer. x_1SD: the residual stream after the last block.
    """
    if not any(filling.records for filling, _ in parts):
        return
    kinds = [filling.asked.details for filling, _ in parts]
    ids_TK = [routing.ids_TK for routing in routings]
    weights_TK = [routing.weights_TK for routing in routings]
    routes = _of_pieces(chunk, ids_TK, torch.int16) if any(kind.routes for kind in kinds) else ()
    weights = (
        _of_pieces(chunk, weights_TK, torch.float16) if any(kind.route_weights for kind in kinds) else ()
    )
    for i, (filling, _) in enumerate(parts):
        if routes and kinds[i].routes:
            filling.asked.routes.append(routes[i])
        if weights and kinds[i].route_weights:
            filling.asked.weights.append(weights[i])
    if not any(kind.prompt_logprobs for kind in kinds):
        return
    h_ND = head_input(model, x_1SD, chunk).split(chunk.lengths)
    for (filling, piece), h in zip(parts, h_ND, strict=True):
        if filling.asked.details.prompt_logprobs:
            after = piece.start + 1
            targets = filling.asked.ids[after : after + len(piece.ids)]
            filling.asked.tops += of_tokens(model, h, targets, filling.asked.details.top_logprobs)


def _of_pieces(chunk: PromptBatch, layers: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A value of each token and expert in each MoE layer, [Y, n, K] on the CPU for each piece of a chunk."""
    if not layers:
        return ()
    whole = torch.stack([chunk.tokens(t_TK[None]) for t_TK in layers]).to("cpu", dtype)
    return whole.split(chunk.lengths, 1)


def of_tokens(model: Transformer, h_ND: Tensor, targets: Sequence[int], k: int) -> list[Tops]:
    """Log-probs of the tokens `targets` after hidden states, with those of the k most probable tokens."""
    parts = []
    targets_N = torch.tensor(targets, device=h_ND.device)
    for h, ids in zip(h_ND.split(AT_ONCE), targets_N.split(AT_ONCE), strict=True):
        tops = top_tokens(F.linear(h, model.head_weight), ids)
        parts.append(Tops(tops.ids_BK[:, :k].cpu(), tops.logprobs_BK[:, :k].cpu(), tops.own_B.cpu()))
    return parts
