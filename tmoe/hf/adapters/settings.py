"""Makes the settings of adapters (`LoraConfig`) from the ranks and alphas of their matrices.

next: config/run.py
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tmoe.config.run import LoraConfig
from tmoe.model.lora import EXPERTS

BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


class Sizes(NamedTuple):
    """The rank and the alpha of one matrix's adapter."""

    rank: int
    alpha: float


def settings_of_sizes(
    sizes: Mapping[str, Sizes], matrices: Iterable[str], rs: bool, dropout: float = 0.0
) -> LoraConfig:
    """The settings with which a model gets exactly these adapters.

    sizes: of the matrices that have one. matrices: all that can have one. rs: rank-stabilised factors.
    """
    matrices = list(matrices)
    dense = [name for name in sizes if not EXPERTS.search(name)]
    experts = [name for name in sizes if EXPERTS.search(name)]
    ranks = {name: size.rank for name, size in sizes.items()}
    of_experts = _usual(ranks[name] for name in experts) if experts else None
    rank = _usual(ranks[name] for name in dense) if dense else of_experts
    alpha = _usual(size.alpha for size in sizes.values())
    targets = () if len(sizes) == len(matrices) else tuple(patterns(sizes, matrices))
    usual = {name: of_experts if EXPERTS.search(name) else rank for name in sizes}
    others = {name: ranks[name] for name in sizes if ranks[name] != usual[name]}
    alphas = {name: size.alpha for name, size in sizes.items() if size.alpha != alpha}
    return LoraConfig(
        rank=rank or 0,
        expert_rank=of_experts,
        alpha=float(alpha),
        rs=rs,
        targets=targets,
        ranks=_values(others, sizes),
        alphas=_values(alphas, sizes),
        dropout=dropout,
    )


def _usual(values: Iterable[Any]) -> Any:
    """The commonest value; of several the largest."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value))


def _values(of: Mapping[str, Any], among: Iterable[str]) -> tuple[str, ...]:
    """PATTERN:VALUE for each value of some matrices."""
    among = list(among)
    groups: dict[Any, list[str]] = {}
    for name, value in of.items():
        groups.setdefault(value, []).append(name)
    return tuple(f"{p}:{value}" for value, names in groups.items() for p in patterns(names, among))


def patterns(names: Iterable[str], among: Iterable[str]) -> list[str]:
    """Regular expressions that are found in these names, and in no others of `among`.

    A matrix that all blocks of `among` have is named once, another with the numbers of its blocks.
    """
    there = _blocks(among)
    found = []
    for leaf, blocks in _blocks(names).items():
        if blocks == there[leaf]:
            found.append(rf"\.{re.escape(leaf)}$")
        else:
            found.append(rf"^blocks\.({'|'.join(map(str, sorted(blocks)))})\.{re.escape(leaf)}$")
    return found


def _blocks(names: Iterable[str]) -> dict[str, set[int]]:
    """A matrix's name within its block -> the blocks."""
    found: dict[str, set[int]] = {}
    for name in names:
        match = BLOCK.fullmatch(name)
        assert match is not None, name
        found.setdefault(match[2], set()).add(int(match[1]))
    return found
