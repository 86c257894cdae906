"""Bytes of a frozen base in NF4 (--lora.base nf4), in closed form.

next: tmoe/plan/memory.py
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from tmoe.base.quantised import size_of
from tmoe.config.axes import Axes
from tmoe.config.model import ModelConfig
from tmoe.config.run import Config
from tmoe.config.sizes import compute_bytes
from tmoe.model.lora import matrices_of
from tmoe.model.transformer import Transformer


class Nf4Sizes(NamedTuple):
    """The matrices in NF4 of some blocks."""

    dense: int
    """elements of dense matrices"""
    experts: int
    """elements of experts' matrices"""
    bytes: int
    """of all of them in NF4"""
    layer: int
    """elements of the experts' matrices of the largest layer, whose values are in memory together"""


@functools.lru_cache(64)
def nf4_sizes(model: ModelConfig, span: range) -> Nf4Sizes:
    """The matrices of these blocks."""
    with torch.device("meta"):
        part = Transformer(model, span)
    shapes = {}
    for name, (owner, leaf) in matrices_of(part).items():
        found = getattr(owner, leaf)
        weight: torch.Tensor = found.weight if isinstance(found, nn.Linear) else found
        shapes[name] = tuple(weight.shape)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        if match := re.match(r"blocks\.\d+\.moe\.experts\.", name):
            layers[match[0]] = layers.get(match[0], 0) + size
    experts = sum(layers.values())
    held = sum(size_of("nf4", shape) for shape in shapes.values())
    largest = max([*layers.values(), *sizes.values()], default=0)
    return Nf4Sizes(sum(sizes.values()) - experts, experts, held, largest)


def with_nf4(
    parts: dict[str, int], cfg: Config, axes: Axes, spans: Sequence[range], copied: bool
) -> dict[str, int]:
    """The same parts, of a base in the compute type, for a base in NF4, which every rank holds whole.

    copied: whether experts are kept whole besides the ranks' shards. The values of a layer are added to the
    working memory, since its products need them.
    """
    if cfg.lora.base != "nf4" or not cfg.lora.rank:
        return parts
    sizes = [nf4_sizes(cfg.model, span) for span in spans]
    dense, experts, held, _ = (sum(column) for column in zip(*sizes, strict=True))
    width = compute_bytes(cfg)
    sharded = dense // axes.shard + experts // axes.sharers
    more = {
        "parameters": held - width * sharded,
        "gathered": -width * experts if copied else 0,
        "working": width * max(size.layer for size in sizes),
    }
    return {name: size + more.get(name, 0) for name, size in parts.items()}
