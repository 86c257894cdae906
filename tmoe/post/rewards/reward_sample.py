"""RewardSample: the input of a reward, one answer; and the right answer in its data row.

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
    """the data row of the prompt"""
    finish: Literal["stop", "length"]
    tokens: int
    """number of tokens of the answer"""
    step: int
    number: int
    """number of the prompt"""
    sample: int
    """number of the answer among those to its prompt"""


TRUTHS = "answer", "solution"


def truth_of(sample: RewardSample) -> str:
    """The right answer as text: the row's field "answer", or else "solution".

    ValueError if the row has neither, or if the field is neither text nor a finite number.
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
    fields = [f"{name} (null)" if value is None else str(name) for name, value in sample.row.items()]
    raise ValueError(f"the row has no field {' or '.join(TRUTHS)}, only {', '.join(fields) or 'none'}")
