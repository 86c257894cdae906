"""RewardSample: what a reward is given of one answer; and the right answer that its data row holds.

next: post/rewards/exact.py
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple


class RewardSample(NamedTuple):
    """One answer of the model. A reward is a function of it: f(sample) -> float or None."""

    prompt: str
    answer: str
    row: dict[str, Any]
    """the data row that the prompt is of"""
    finish: Literal["stop", "length"]
    tokens: int
    """of the answer"""
    step: int
    number: int
    """the prompt's"""
    sample: int
    """which answer to the prompt"""


TRUTHS = "answer", "solution"


def truth_of(sample: RewardSample) -> str:
    """The right answer in words: the row's field "answer", or else "solution".

    ValueError without either, and for what is neither text nor a finite number.
    """
    for name in TRUTHS:
        value = sample.row.get(name)
        if value is None:
            continue
        fine = math.isfinite(value) if isinstance(value, float) else isinstance(value, str | int)
        if not fine or value == "":
            shown = f"{value!r:.80}, a {type(value).__name__}"
            raise ValueError(f"the row's {name} is {shown}; must be text, not empty, or a finite number")
        return str(value)
    found = [f"{name} (null)" if value is None else str(name) for name, value in sample.row.items()]
    raise ValueError(f"the row has no field {' or '.join(TRUTHS)}, only {', '.join(found) or 'none'}")
