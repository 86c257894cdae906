"""How answers are sampled: the settings. tmoe/ops/decode/sample.py draws a token by them.

next: generate/engine.py
"""

from __future__ import annotations

from dataclasses import dataclass

from tmoe.config.check import COLDEST, FLOATS, check
from tmoe.ops.decode.sample import Drawn, draw, keep, uniforms

__all__ = ["Drawn", "Sampling", "draw", "keep", "uniforms"]

LONGEST = 2**20  # tokens of one answer: rows of uniforms are made at once


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled, and where they end.

    Logits of tokens that are there already are changed by repetition_penalty, suppressed tokens left out, and
    all logits divided by the temperature. Then top_k, top_p and min_p, in this order, leave out what they do
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
    repetition_penalty: float = 1.0
    """divisor of positive logits, and factor of negative ones, of tokens that prompt or answer has; 1: none
    (Keskar et al. 2019, as in transformers)"""
    suppress: tuple[int, ...] = ()
    """tokens that no answer has"""
    seed: int = 0
    """a token is a function of its probabilities, this, its prompt's number, its answer's, and its place"""

    def __post_init__(self) -> None:
        own = check(self, "", one="max_tokens", zero="top_k min_tokens temperature seed")
        heat = self.temperature
        own.require(heat == 0 or heat >= COLDEST, "temperature", f"must be 0, or at least {COLDEST}")
        own.require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        own.require(0 <= self.min_p <= 1, "min_p", "must be from 0 to 1")
        divides = FLOATS[0] <= self.repetition_penalty <= FLOATS[1]
        own.require(divides, "repetition_penalty", "must be above 0, in float32")
        own.require(self.max_tokens <= LONGEST, "max_tokens", f"must be at most {LONGEST}")
        most = f"must be at most {own.said('max_tokens')}"
        own.require(self.min_tokens <= self.max_tokens, "min_tokens", most)
        own.require("" not in self.stop, "stop", "must not hold an empty text")
        for name in ("stop_ids", "suppress"):
            ids = getattr(self, name)
            own.require(min(ids, default=0) >= 0, name, "must be 0 or more")
