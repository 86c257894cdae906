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
from tmoe.config.model import ModelConfig
from tmoe.config.run import Config
from tmoe.config.sizes import compute_bytes
from tmoe.model.count import Shape, block_shapes
from tmoe.model.lora import matrices_of
from tmoe.model.nf4 import NARROW
from tmoe.model.transformer import Transformer

EXPERTS = re.compile(r"blocks\.\d+\.moe\.experts\.")


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


@functools.lru_cache(256)
def nf4_shapes(model: ModelConfig, span: range) -> dict[str, Shape]:
    """The shapes of the matrices in NF4 of these blocks, by name."""
    with torch.device("meta"):
        part = Transformer(model, span)
    shapes = {}
    for name, (owner, leaf) in matrices_of(part).items():
        if leaf in NARROW:
            continue
        found = getattr(owner, leaf)
        weight: torch.Tensor = found.weight if isinstance(found, nn.Linear) else found
        shapes[name] = tuple(weight.shape)
    return shapes


@functools.lru_cache(64)
def nf4_sizes(model: ModelConfig, span: range) -> Nf4Sizes:
    """The matrices of these blocks."""
    shapes = nf4_shapes(model, span)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        if match := EXPERTS.match(name):
            layers[match[0]] = layers.get(match[0], 0) + size
    experts = sum(layers.values())
    held = sum(size_of("nf4", shape) for shape in shapes.values())
    largest = max([*layers.values(), *sizes.values()], default=0)
    return Nf4Sizes(sum(sizes.values()) - experts, experts, held, largest)


def in_nf4(cfg: Config) -> bool:
    """Whether the base is in NF4."""
    return cfg.lora.base == "nf4" and cfg.lora.rank > 0


def parameter_shapes(cfg: Config, layer: int) -> tuple[list[Shape], list[Shape]]:
    """`block_shapes` of one block without the matrices in NF4, which are buffers, whole on every rank."""
    dense, experts = block_shapes(cfg.model, layer)
    if in_nf4(cfg):
        for name, shape in nf4_shapes(cfg.model, range(layer, layer + 1)).items():
            (experts if EXPERTS.match(name) else dense).remove(shape)
    return dense, experts


def values_bytes(cfg: Config, span: range) -> int:
    """Bytes of the values of a layer, which a block's forward and backward compute; the loss has none."""
    return compute_bytes(cfg) * nf4_sizes(cfg.model, span).layer if in_nf4(cfg) else 0


def with_nf4(parts: dict[str, int], cfg: Config, spans: Sequence[range]) -> dict[str, int]:
    """The same parts, which count parameters alone, with the buffers of a base in NF4.

    The values of a layer are added to the memory of a rollout, since products of prompts need them.
    """
    if not in_nf4(cfg):
        return parts
    sizes = [nf4_sizes(cfg.model, span) for span in spans if span]
    layer = max(values_bytes(cfg, span) for span in spans if span)
    more = dict(parameters=sum(size.bytes for size in sizes), rollout=layer)
    return {name: size + more.get(name, 0) for name, size in parts.items()}
