"""The records of a call: what is asked of a prompt, and an answer with the tokens that it has so far.

next: generate/slots.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tmoe.config.check import check
from tmoe.generate.pages import Span
from tmoe.generate.sampler import Sampling
from tmoe.generate.text import Text

MOST_TOP = 20  # most log-probs of a token's alternatives


@dataclass(frozen=True)
class Details:
    """The values that are recorded of tokens in addition to their log-probs, and what the text shows."""

    routes: bool = False
    """the experts of each token"""
    route_weights: bool = False
    """the routers' weights of these experts"""
    top_logprobs: int = 0
    """log-probs of this many most probable tokens at each place, at most 20"""
    prompt_logprobs: bool = False
    """log-probs of the prompt's own tokens, and with top_logprobs of their alternatives"""
    skip_special: bool = False
    """the text leaves out special tokens, as transformers' skip_special_tokens"""

    def __post_init__(self) -> None:
        own = check(self, "", zero="top_logprobs")
        own.require(self.top_logprobs <= MOST_TOP, "top_logprobs", f"must be at most {MOST_TOP}")

    @property
    def of_experts(self) -> bool:
        """Whether any of it is read from the routers."""
        return self.routes or self.route_weights

    @property
    def kind(self) -> str | None:
        """Prompts of one kind share pages; None: the whole prompt is computed."""
        if self.prompt_logprobs:
            return None
        return f"{self.routes}{self.route_weights}" if self.of_experts else ""


@dataclass(eq=False)
class Asked:
    """A prompt, what is asked of it, and the results of its prefill; its answers share it."""

    ids: list[int]
    sampling: Sampling
    ends: frozenset[int]  # tokens that end an answer
    details: Details = Details()
    number: int = 0  # on which draws depend
    kind: str | None = None  # of prompts with which it shares pages; None: with none
    keys: Sequence[bytes] = ()  # of its full pages, if it shares them
    alone: bool = False  # its tokens share no row, and no page, with other prompts
    cached: int = 0  # tokens that were taken from pages of earlier prompts
    packed: bool = False  # whether its prefill shared a row with other prompts
    routes: list[Tensor] = field(default_factory=list)  # int16 [Y, n, K] of pieces
    weights: list[Tensor] = field(default_factory=list)  # fp16 [Y, n, K] of pieces
    tops: list[Tops] = field(default_factory=list)  # of pieces

    def begin(self, cached: int) -> None:
        """Its prefill begins. cached: tokens that are cached already."""
        self.cached, self.packed = cached, False
        for pieces in (self.routes, self.weights, self.tops):
            pieces.clear()


@dataclass(eq=False)
class Tops:
    """The most probable tokens at n places. Log-probs are of the softmax of logits without temperature."""

    ids: Tensor
    """int64 [n, k], the most probable first"""
    logprobs: Tensor
    """fp32 [n, k], nats"""
    own: Tensor
    """fp32 [n], nats: of the answer's own token at each place, by the same softmax"""


@dataclass(eq=False)
class Request:
    """An answer to be made, with the tokens that it has so far."""

    prompt: int  # index of its prompt in the call
    sample: int  # its number among the answers to the prompt
    most: int  # most tokens that it may have
    asked: Asked
    text: Text | None
    pages: list[int] = field(default_factory=list)  # its pages of the cache, once it is admitted
    launched: int = 0  # steps that the host has launched for it
    barred: bool = False  # whether its slot bars its end tokens
    seated: bool = False  # whether it has a slot
    doubtful: bool = False  # whether its prompt's keys may depend on another prompt that is not finite
    finish: str = ""  # 'stop', 'length', 'cancel' or 'error' once it is over; 'again': it begins again
    error: str = ""  # why, for 'error'
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)
    routes: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    tops: list[tuple[list[int], list[float], float]] = field(default_factory=list)

    @property
    def first(self) -> int:
        """Position of the prompt's last token."""
        return len(self.asked.ids) - 1

    @property
    def span(self) -> Span:
        """Its tokens in the cache; its last token is not cached."""
        return Span(self.prompt, self.first, self.first + self.most)

    @property
    def leaves(self) -> bool:
        """Whether it needs no further step."""
        return bool(self.finish) or self.launched == self.most

    @property
    def early(self) -> bool:
        """Whether its next step may not draw a token that ends it."""
        return self.launched < self.asked.sampling.min_tokens


def tops_of(tokens: Sequence[tuple[list[int], list[float], float]]) -> Tops | None:
    """The Tops of an answer's tokens: of each the ids, their log-probs, and its own log-prob."""
    if not tokens:
        return None
    ids, logprobs, own = zip(*tokens, strict=True)
    return Tops(torch.tensor(ids, dtype=torch.int64), torch.tensor(logprobs), torch.tensor(own))


def joined(parts: Sequence[Tops]) -> Tops | None:
    """Tops of consecutive places as one."""
    if not parts:
        return None
    return Tops(*(torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "logprobs", "own")))
