"""The settings by which answers are sampled. tmoe/ops/decode/sample.py draws tokens with them.

next: generate/engine.py
"""

from __future__ import annotations

from dataclasses import dataclass

from tmoe.config.check import COLDEST, FLOATS, check
from tmoe.ops.decode.sample import Drawn, draw, keep, uniforms

__all__ = ["Drawn", "Sampling", "draw", "keep", "uniforms"]

LONGEST = 2**20  # most tokens of an answer: its uniforms are computed in one call


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled, and where they end.

    First repetition_penalty changes the logits of tokens that the prompt or the answer has already, then
    suppressed tokens are removed, then all logits are divided by the temperature. At last top_k, top_p and
    min_p remove tokens, in this order, as in transformers.
    """

    temperature: float = 1.0
    """divisor of the logits; 0: always the most probable token"""
    top_k: int = 0
    """keep the k most probable tokens, and any token as probable as the last of them; 0: all"""
    top_p: float = 1.0
    """keep the smallest set of most probable tokens whose probabilities sum to this; 1: all"""
    min_p: float = 0.0
    """keep tokens at least this many times as probable as the most probable one; 0: all"""
    max_tokens: int = 128
    """most tokens of an answer; an answer also ends at the end of the model's range of positions"""
    min_tokens: int = 0
    """fewest tokens of an answer: until then end tokens are not drawn, and stop texts do not end it"""
    stop: tuple[str, ...] = ()
    """texts that end an answer, and are left out of its text"""
    stop_ids: tuple[int, ...] = ()
    """tokens that end an answer, in addition to the model's own; such a token is the answer's last id"""
    repetition_penalty: float = 1.0
    """divisor of positive logits, and factor of negative ones, of tokens that prompt or answer has; 1: none
    (Keskar et al. 2019, as in transformers)"""
    suppress: tuple[int, ...] = ()
    """tokens that are never drawn"""
    seed: int = 0
    """a token depends on its probabilities, this seed, the numbers of prompt and answer, and its place"""

    def __post_init__(self) -> None:
        section = check(self, "", one="max_tokens", zero="top_k min_tokens temperature seed")
        heat = self.temperature
        section.require(heat == 0 or heat >= COLDEST, "temperature", f"must be 0, or at least {COLDEST}")
        section.require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        section.require(0 <= self.min_p <= 1, "min_p", "must be from 0 to 1")
        divides = FLOATS[0] <= self.repetition_penalty <= FLOATS[1]
        section.require(divides, "repetition_penalty", "must be above 0, in float32")
        section.require(self.max_tokens <= LONGEST, "max_tokens", f"must be at most {LONGEST}")
        rule = f"must be at most {section.said('max_tokens')}"
        section.require(self.min_tokens <= self.max_tokens, "min_tokens", rule)
        section.require("" not in self.stop, "stop", "must not hold an empty text")
        for name in ("stop_ids", "suppress"):
            ids = getattr(self, name)
            section.require(min(ids, default=0) >= 0, name, "must be 0 or more")
