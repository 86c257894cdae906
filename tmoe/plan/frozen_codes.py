"""Bytes of frozen experts in fp8, whose values are freed while their codes stand for them.

next: tmoe/plan/memory.py
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from tmoe.config.axes import Axes
from tmoe.config.model import ModelConfig
from tmoe.config.run import Config
from tmoe.config.sizes import compute_bytes
from tmoe.model.freeze import frozen_pattern, matching
from tmoe.model.transformer import Transformer
from tmoe.moe.fp8_choice import choose, frees_values


class FrozenMatrices(NamedTuple):
    """Elements of the frozen matrices of experts in some blocks, of all ranks of an expert group."""

    all: int
    layer: int  # of the block with most of them


@functools.lru_cache(64)
def frozen_matrices(model: ModelConfig, pattern: str, span: range) -> FrozenMatrices:
    """The matrices of experts in whose names the pattern is found."""
    with torch.device("meta"):
        part = Transformer(model, span)
    sizes = {name: math.prod(p.shape) for name, p in part.named_parameters() if p.dim() == 3}
    blocks: dict[str, int] = {}
    for name in matching(pattern, (name for name in sizes if ".moe.experts." in name)):
        block = name.partition(".moe.")[0]
        blocks[block] = blocks.get(block, 0) + sizes[name]
    return FrozenMatrices(sum(blocks.values()), max(blocks.values(), default=0))


def freed(cfg: Config, axes: Axes, span: range, arch: str) -> FrozenMatrices:
    """The frozen matrices of these blocks on a rank of a GPU of this architecture, if they are freed.

    The layout must let a rank hold or keep its experts whole.
    """
    if not span or not frozen_pattern(cfg) or not frees_values(cfg) or not choose(cfg, axes, arch).on:
        return FrozenMatrices(0, 0)
    found = frozen_matrices(cfg.model, frozen_pattern(cfg), span)
    return FrozenMatrices(found.all // axes.ep, found.layer // axes.ep)


def describe_freed(cfg: Config, axes: Axes, arch: str) -> list[str]:
    """The line about values of frozen experts in host memory; none without them."""
    if axes.sharers * axes.replicate > 1 or arch == "cpu":
        return []
    size = compute_bytes(cfg) * freed(cfg, axes, cfg.model.numbered, arch).all / axes.pp
    line = (
        f"fp8: frozen experts are codes alone on the GPU; their values, {size / 2**30:.1f} GiB a rank, are "
    )
    return [f"{line}in host memory"] if size else []
