"""How a token is drawn from logits: settings, the filtered softmax, and numbers that depend on no batch.

next: generate/engine.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tmoe.config.check import check, require

LONGEST = 2**20  # tokens of one answer: rows of uniforms are made at once


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled, and where they end.

    Logits are divided by the temperature. Then top_k, top_p and min_p, in this order, leave out what they do
    not keep, as in transformers.
    """

    temperature: float = 1.0
    """divisor of the logits; 0: always the most probable token"""
    top_k: int = 0
    """keep the k most probable tokens, and any as probable as the last of them; 0: all"""
    top_p: float = 1.0
    """keep the most probable tokens that together reach this probability; 1: all"""
    min_p: float = 0.0
    """keep tokens at least this many times as probable as the most probable one; 0: all"""
    max_tokens: int = 128
    """end an answer after so many tokens; it also ends where the model's range of positions does"""
    min_tokens: int = 0
    """no answer ends by itself before so many tokens"""
    stop: tuple[str, ...] = ()
    """texts that end an answer, and are left out of its text"""
    stop_ids: tuple[int, ...] = ()
    """tokens that end an answer, beside the model's own; the last id of an answer may be one"""
    seed: int = 0
    """a token is a function of its probabilities, this, its prompt's number, its answer's, and its place"""

    def __post_init__(self) -> None:
        check(self, "--", one="max_tokens", zero="top_k min_tokens temperature seed")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            low = value > 0 if name == "top_p" else value >= 0
            valid = "above 0 and at most 1" if name == "top_p" else "from 0 to 1"
            require(low and value <= 1, f"--{name.replace('_', '-')}={value}: must be {valid}")
        most = self.max_tokens
        require(most <= LONGEST, f"--max-tokens={most}: must be at most {LONGEST}")
        require(
            self.min_tokens <= most, f"--min-tokens={self.min_tokens}: must be at most --max-tokens={most}"
        )
        require("" not in self.stop, f"--stop={self.stop}: must not hold an empty text")
        require(min(self.stop_ids, default=0) >= 0, f"--stop-ids={self.stop_ids}: must be 0 or more")


class Drawn(NamedTuple):
    """A token for each row, and its log-probabilities, fp32."""

    tokens_B: Tensor
    logprobs_B: (
        Tensor  # by the softmax of logits / temperature over the whole vocabulary; greedy: of the logits
    )
    sampler_logprobs_B: Tensor  # by what it was drawn from; greedy: 0


def uniforms(seed: int, prompt: int, sample: int, count: int) -> Tensor:
    """Numbers [count] in [0, 1) for the tokens of one answer: functions of the seed, both numbers, the place.

    Philox 4x64 (Salmon et al. 2011), counted by place: the first numbers do not depend on `count`.
    """
    raw = np.random.Philox(key=[seed, 0], counter=[0, prompt, sample, 0]).random_raw(count)
    return torch.from_numpy((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def draw(logits_BV: Tensor, uniform_B: Tensor, sampling: Sampling, barred: Tensor | None = None) -> Drawn:
    """One token a row, the one at which the filtered probabilities, added up in order of ids, pass uniform.

    barred: bool [B, V] or [V], True at tokens that may not come; log-probabilities over the whole vocabulary
    know nothing of it.
    """
    z_BV = logits_BV.float()
    greedy = sampling.temperature == 0
    if not greedy:
        z_BV = z_BV / sampling.temperature
    full_B = z_BV.logsumexp(-1)
    open_BV = z_BV if barred is None else z_BV.masked_fill(barred, -math.inf)
    if greedy:
        tokens_B = open_BV.argmax(-1)
        own_B = z_BV.gather(-1, tokens_B[:, None])[:, 0]
        return Drawn(tokens_B, own_B - full_B, torch.zeros_like(own_B))
    kept_BV = keep(open_BV, sampling)
    tokens_B = pick(kept_BV.softmax(-1), uniform_B)
    own_B = z_BV.gather(-1, tokens_B[:, None])[:, 0]
    return Drawn(tokens_B, own_B - full_B, own_B - kept_BV.logsumexp(-1))


def keep(z_BV: Tensor, sampling: Sampling) -> Tensor:
    """Logits over the temperature with -inf at tokens that top_k, top_p or min_p leave out."""
    V = z_BV.shape[-1]
    if 0 < sampling.top_k < V:
        least_B1 = z_BV.topk(sampling.top_k, -1).values[:, -1:]
        z_BV = z_BV.masked_fill(z_BV < least_B1, -math.inf)
    if sampling.top_p < 1:
        # from the least probable on: what all up to and with a token have together
        sorted_BV, order_BV = z_BV.sort(dim=-1, descending=False)
        below_BV = sorted_BV.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        below_BV[:, -1] = False  # the most probable one stays
        z_BV = z_BV.masked_fill(below_BV.scatter(-1, order_BV, below_BV), -math.inf)
    if sampling.min_p > 0:
        p_BV = z_BV.softmax(-1)
        z_BV = z_BV.masked_fill(p_BV < sampling.min_p * p_BV.amax(-1, keepdim=True), -math.inf)
    return z_BV


def pick(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Ids [B] at which sums of the probabilities pass uniform's share of the whole.

    Never one whose probability is 0.
    """
    sums_BV = p_BV.double().cumsum(-1)
    whole_B1 = sums_BV[:, -1:]
    at_B1 = torch.minimum(uniform_B[:, None] * whole_B1, whole_B1.nextafter(torch.zeros_like(whole_B1)))
    return torch.searchsorted(sums_BV, at_B1, right=True)[:, 0]
