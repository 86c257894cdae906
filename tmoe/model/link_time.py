"""Seconds to send bytes between the ranks of a group, by the cost model's constants.

`m` is the namespace of constants by name (tmoe/model/h200.json).

next: block_time.py
"""

import math
from types import SimpleNamespace

import numpy as np


def ring(whole: float, size: int, stride: int, m: SimpleNamespace) -> float:
    """Seconds to gather (or reduce and scatter) `whole` bytes in a group of `size` ranks, `stride` apart."""
    if size == 1:
        return 0.0
    local = min(size, max(1, m.node // stride))  # members in a node
    nodes = math.ceil(size / local)
    sent = whole * (size - 1) / size
    seconds = times(m.collective, sent) if local > 1 else 0.0
    if nodes > 1:
        seconds = max(seconds, sent / (local * m.nic_rate))
        seconds = seconds + (nodes - 1) * m.nic_hop + (size - nodes) * m.link_hop
    return seconds


def all_to_all(whole: float, size: int, stride: int, m: SimpleNamespace) -> float:
    """Seconds of an all-to-all of `whole` bytes per rank in a group of `size` ranks, `stride` apart."""
    local = min(size, max(1, m.node // stride))  # members in a node
    seconds = times(m.collective, whole * (local - 1) / size) if local > 1 else 0.0
    if size > local:
        seconds = max(seconds, whole * (size - local) / size / m.nic_rate)
        seconds = seconds + (math.ceil(size / local) - 1) * m.nic_hop
    return seconds


def times(curve: list[list[float]], moved: float) -> float:
    """Seconds for `moved` bytes on a curve of (bytes, seconds), linear between points and beyond the last."""
    sizes, seconds = zip(*curve, strict=True)
    if moved <= sizes[-1]:
        return float(np.interp(moved, sizes, seconds))
    return seconds[-1] + (moved - sizes[-1]) * (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
