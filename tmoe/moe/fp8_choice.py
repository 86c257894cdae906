"""Decides whether a run's experts multiply in fp8 (--train.fp8), and says why not.

next: ops/experts/fp8_table.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from tmoe.base.listing import counted
from tmoe.config.axes import Axes
from tmoe.config.run import Config
from tmoe.config.sizes import compute_bytes, local_tokens
from tmoe.ops.experts.fp8_codes import Codes
from tmoe.ops.experts.fp8_table import entries, nearest, pays
from tmoe.ops.launch.kernel_launch import device_facts
from tmoe.parallel.mesh import keeps_whole

KERNELS = ("cpu", "cuda:90")  # architectures on which experts have fp8 products; on a CPU emulated


class Choice(NamedTuple):
    """Whether experts multiply in fp8; if they do not although it was asked for, the reason."""

    on: bool
    why: str = ""


def choose(cfg: Config, axes: Axes, arch: str) -> Choice:
    """The choice for a run on GPUs of this architecture ("cuda:90"), or on a CPU ("cpu")."""
    if cfg.train.fp8 == "none":
        return Choice(False)
    if arch not in KERNELS:
        return Choice(False, f"{arch} has no kernels of experts in fp8")
    moe, D = cfg.model.moe, cfg.model.expert_dim
    if arch != "cpu" and (D % 64 or moe.ffn_dim % 64 or cfg.train.dtype != "bf16"):
        return Choice(False, f"on {arch} both widths must be multiples of 64, and --train.dtype bf16")
    if cfg.train.fp8_everywhere:
        return Choice(True)
    rows = local_tokens(cfg, axes) * axes.ep * moe.top_k / moe.experts
    shape = f"experts of {D} x {moe.ffn_dim} with {rows:.0f} rows each"
    entry = nearest(entries(arch), D, moe.ffn_dim, rows)
    if entry is None:
        return Choice(False, f"no measurement on {arch} of {shape}; --train.fp8-everywhere needs none")
    passes = cfg.train.accumulate
    again = cfg.parallel.checkpoint in ("moe", "block")
    casts = 1 if casts_once(cfg, axes) else passes * (1 + again)
    slower = f"a step with {shape} is slower in fp8 on {arch}"
    return Choice(True) if pays(entry, passes, casts) else Choice(False, slower)


def casts_once(cfg: Config, axes: Axes) -> bool:
    """Whether a rank holds its experts whole, so that their codes stay valid for a step.

    FSDP2's gathered experts are cast after each gather.
    """
    if axes.sharers * axes.replicate == 1:
        return True
    moe = cfg.model.moe
    held = moe.experts // axes.ep
    layers = sum(map(cfg.model.is_moe, range(cfg.model.layers))) / axes.pp
    elements = layers * held * (moe.halves + 1) * moe.ffn_dim * cfg.model.expert_dim
    size = compute_bytes(cfg) * elements
    return axes.replicate == 1 and keeps_whole(axes.sharers, [held], size, cfg.parallel.gathered_gib)


def frees_values(cfg: Config) -> bool:
    """Whether the values of frozen experts are freed while their codes stand for them.

    They are not where other code reads the values on the device: a rollout in each step, or an average that
    includes frozen weights (--optim.freeze, not adapters).
    """
    return cfg.task != "grpo" and (not cfg.optim.ema or cfg.lora.rank > 0)


def planned_arch(cfg: Config) -> str:
    """The architecture of this process's GPU; without one that of `cfg.gpu`, an H100's or H200's if unset."""
    if torch.cuda.is_available():
        return arch_of("cuda")
    return "cuda:90" if cfg.gpu in (None, "h100", "h200") else str(cfg.gpu)


def arch_of(device_type: str) -> str:
    """The architecture of this process's GPU, or "cpu"."""
    if device_type != "cuda":
        return device_type
    return device_facts(torch.device("cuda", torch.cuda.current_device()))[0]


def planned(cfg: Config, axes: Axes) -> bool:
    """Whether the experts of a planned run multiply in fp8."""
    return choose(cfg, axes, planned_arch(cfg)).on


def code_bytes(cfg: Config, axes: Axes, layers: Iterable[int]) -> int:
    """Bytes of the codes of these layers' experts on a rank: two bytes an element, and scales.

    0 if the experts of the planned run do not multiply in fp8.
    """
    sparse = sum(map(cfg.model.is_moe, layers))
    if not planned(cfg, axes):
        return 0
    moe, W = cfg.model.moe, cfg.model.expert_dim
    L = moe.experts // axes.ep
    up, down = (L, moe.halves * moe.ffn_dim, W), (L, W, moe.ffn_dim)
    return sparse * (Codes.size(up, moe.halves) + Codes.size(down, 1))


def describe(cfg: Config, axes: Axes, arch: str) -> list[str]:
    """The line about --train.fp8; none without it."""
    if cfg.train.fp8 == "none":
        return []
    choice = choose(cfg, axes, arch)
    layers = sum(map(cfg.model.is_moe, range(cfg.model.layers)))
    begin = f"fp8 ({cfg.train.fp8}): experts of {counted(layers, 'block')}"
    if not choice.on:
        return [f"{begin} multiply in {cfg.train.dtype}: {choice.why}"]
    way = " (emulated, slow)" if arch == "cpu" else ""
    return [f"{begin} multiply in e4m3{way}; gradients of their weights in {cfg.train.dtype}"]
