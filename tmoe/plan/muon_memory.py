"""Elements that Muon trains on a rank: they have one moment instead of two.

next: tmoe/plan/memory.py
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from tmoe.config.axes import Axes
from tmoe.config.model import ModelConfig
from tmoe.config.run import Config
from tmoe.config.sizes import FP32
from tmoe.model.freeze import freeze
from tmoe.model.transformer import Transformer
from tmoe.ops.newton_schulz import CHUNK
from tmoe.optim.matrices import chosen
from tmoe.optim.owners import WAVE


@functools.lru_cache(256)
def muon_shapes(
    model: ModelConfig, muon: str | None, frozen: str | None, span: range
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Shapes of the weights of these blocks that Muon trains: dense, experts.

    muon, frozen: the patterns of --optim.muon and --optim.freeze.
    """
    if muon is None:
        return (), ()
    with torch.device("meta"):
        # blocks that predict further tokens are a part of the last chunk
        part = Transformer(model, range(span.start, min(span.stop, model.layers)))
    freeze(part, frozen)
    names = chosen(muon, part.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in part.named_parameters()}
    dense = tuple(shapes[name] for name in names if ".experts." not in name)
    return dense, tuple(shapes[name] for name in names if ".experts." in name)


def whole_experts(cfg: Config, layer: int) -> bool:
    """Whether each expert of a block lies whole on a rank, because Muon trains it."""
    return bool(muon_shapes(cfg.model, cfg.optim.muon, cfg.optim.freeze, range(layer, layer + 1))[1])


def muon_elements(cfg: Config, axes: Axes, spans: Sequence[range]) -> int:
    """Elements on the fullest rank of the stage that has these chunks."""
    total = 0
    for span in spans:
        dense, experts = muon_shapes(cfg.model, cfg.optim.muon, cfg.optim.freeze, span)
        total += sum(-(-rows // axes.shard) * columns for rows, columns in dense)
        total += sum(-(-(E // axes.ep) // axes.sharers) * rows * columns for E, rows, columns in experts)
    return total


def product_bytes(cfg: Config) -> int:
    """Bytes of a number in Muon's products."""
    return 2 if cfg.train.dtype == "bf16" else FP32


def muon_scratch(cfg: Config, axes: Axes, spans: Sequence[range]) -> int:
    """Bytes of a wave's temporaries: look ahead, update and products (bf16, or fp32), and copies in fp32."""
    most = 0
    for span in spans:
        dense, experts = muon_shapes(cfg.model, cfg.optim.muon, cfg.optim.freeze, span)
        stacks = [-(-(E // axes.ep) // axes.sharers) * rows * columns for E, rows, columns in experts]
        held = sum(rows * columns for rows, columns in dense) // axes.shard + sum(stacks)
        largest = max(
            [rows * columns for rows, columns in dense] + [min(n, CHUNK) for n in stacks], default=0
        )
        most = max(most, largest, min(held, WAVE))
    return most * (4 * product_bytes(cfg) + 2 * FP32)
