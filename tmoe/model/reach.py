"""The number of ranks and of nodes to which the exchange sends a token.

A row is sent once for each rank that holds one of a token's K experts, and across nodes once for each such
node first. A gate may bound these numbers: by groups of experts, by devices, or because a token's experts are
neighbours.

This is a part of block_time.py; nothing is measured here.

next: link_time.py
"""

import math
from types import SimpleNamespace

from tmoe.config.axes import Axes
from tmoe.config.model import MoEConfig
from tmoe.config.run import Config
from tmoe.config.sizes import local_tokens


def rows(cfg: Config, axes: Axes, m: SimpleNamespace) -> int:
    """Rows that arrive on a rank for one layer, its own tokens' included: one for each (token, rank)."""
    moe = cfg.model.moe
    return round(local_tokens(cfg, axes) * reached(moe, axes.ep, axes.ep, m.gate))


def reached(moe: MoEConfig, parts: int, ranks: int, gate: str = "learned") -> float:
    """Mean number of parts that hold at least one of a token's K experts.

    parts: number of equal parts of neighbouring experts: the ranks of an expert group, or its nodes.
    ranks: ranks of the expert group, which `top_devices` counts.
    gate: "learned": all experts that a token may choose are equally likely, with many more of them than K.
        "neighbours": K neighbouring experts, from a multiple of K on, as benchmarks' fake balanced gates
        choose.
    """
    K = moe.top_k
    if gate == "neighbours":
        size = moe.experts // parts
        starts = range(0, moe.experts, K)
        return sum(len({(s + i) % moe.experts // size for i in range(K)}) for s in starts) / len(starts)
    units, chosen = parts, parts  # equal units of experts, of which a token may reach some
    if moe.top_groups < moe.groups:
        units, chosen = moe.groups, moe.top_groups
    elif 0 < moe.top_devices < ranks:
        units, chosen = ranks, moe.top_devices
    if units % parts and parts % units:  # parts that cut units
        units, chosen = parts, parts
    if units < parts:  # a unit lies on several parts
        return parts * chosen / units * hit(units / (chosen * parts), K)
    own = units // parts  # units of a part
    ways = math.comb(units, chosen)
    some = range(1, min(own, chosen) + 1)
    return parts * sum(
        math.comb(own, n) * math.comb(units - own, chosen - n) / ways * hit(n / chosen, K) for n in some
    )


def hit(share: float, draws: int) -> float:
    """The probability that one of some draws is in a part with this share of the experts."""
    return 1.0 - (1.0 - share) ** draws
