"""How answers are sampled: the settings. tmoe/ops/decode/sample.py draws a token by them.

next: generate/engine.py
"""

from __future__ import annotations

from dataclasses import dataclass

from tmoe.config.check import COLDEST, FLOATS, check, require
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
        check(self, "--", one="max_tokens", zero="top_k min_tokens temperature seed")
        heat = self.temperature
        require(heat == 0 or heat >= COLDEST, f"--temperature={heat}: must be 0, or at least {COLDEST}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            low = value > 0 if name == "top_p" else value >= 0
            valid = "above 0 and at most 1" if name == "top_p" else "from 0 to 1"
            require(low and value <= 1, f"--{name.replace('_', '-')}={value}: must be {valid}")
        penalty = self.repetition_penalty
        valid = "must be above 0, in float32"
        require(FLOATS[0] <= penalty <= FLOATS[1], f"--repetition-penalty={penalty}: {valid}")
        most = self.max_tokens
        require(most <= LONGEST, f"--max-tokens={most}: must be at most {LONGEST}")
        require(
            self.min_tokens <= most, f"--min-tokens={self.min_tokens}: must be at most --max-tokens={most}"
        )
        require("" not in self.stop, f"--stop={self.stop}: must not hold an empty text")
        for name in ("stop_ids", "suppress"):
            ids = getattr(self, name)
            require(min(ids, default=0) >= 0, f"--{name.replace('_', '-')}={ids}: must be 0 or more")
