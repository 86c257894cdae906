"""The constants of the cost model: what one GPU and its links need for what a step does.

h200.json says of each whether it was measured, fitted (and on which points) or assumed.

next: step_time.py
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CONSTANTS = Path(__file__).with_name("h200.json")


def check_constant(name: str, value: Any, like: Any) -> None:
    """Raises ValueError unless a constant is of the shipped one's kind and in its range.

    A number must not be below 0, and above 0 if it is divided by; a curve must have two points or more.
    """
    kinds = [(int, float) if isinstance(v, (int, float)) else type(v) for v in (value, like)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{name}: {value} must be of the kind of {like}")
    if isinstance(value, (int, float)):
        divides = name.endswith("_rate") or name in ("peak", "memory", "memory_factor", "node")
        least = 1 if name in ("node", "skew") else 0
        if not (math.isfinite(value) and value >= least and (value > 0 or not divides)):
            range_ = "above 0" if divides and not least else f"{least} or more"
            raise ValueError(f"{name}: {value} must be finite and {range_}")
    if isinstance(value, list) and not (len(value) > 1 and all(len(p) == 2 and min(p) >= 0 for p in value)):
        raise ValueError(f"{name}: {value} must be two points or more, of two numbers not below 0 each")


def values(constants: dict[str, dict]) -> SimpleNamespace:
    return SimpleNamespace(**{name: c["value"] for name, c in constants.items()})
