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
from tmoe.ops.experts.fp8_table import Measured, entries, fastest, nearest, pays
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
    entry, rows = measured(cfg, axes, arch)
    shape = f"experts of {D} x {moe.ffn_dim} with {rows:.0f} rows each"
    if entry is None:
        return Choice(False, f"no measurement on {arch} of {shape}; --train.fp8-everywhere needs none")
    slower = f"a step with {shape} is slower in fp8 on {arch}"
    gains = pays(entry, cfg.train.accumulate, casts_of_a_step(cfg, axes))
    return Choice(True) if gains else Choice(False, slower)


def measured(cfg: Config, axes: Axes, arch: str) -> tuple[Measured | None, float]:
    """The measurement nearest to a run's layers, if there is one, and the rows of an expert in the run."""
    moe = cfg.model.moe
    rows = local_tokens(cfg, axes) * axes.ep * moe.top_k / moe.experts
    return nearest(entries(arch), cfg.model.expert_dim, moe.ffn_dim, rows), rows


def casts_of_a_step(cfg: Config, axes: Axes) -> int:
    """How often a step casts each matrix of experts."""
    again = cfg.parallel.checkpoint in ("moe", "block")
    return 1 if casts_once(cfg, axes) else cfg.train.accumulate * (1 + again)


class Gain(NamedTuple):
    """The time of experts in fp8, as a share of a layer's forward and backward in --train.dtype."""

    layer: float = 1.0
    """of a micro-batch, with casts of rows"""
    cast: float = 0.0
    """of one cast of the matrices"""


def gain(cfg: Config, axes: Axes) -> Gain:
    """The measured gain of a planned run; that of no fp8 if there is none, or no measurement."""
    if cfg.train.fp8 == "none" or not planned(cfg, axes):
        return Gain()
    entry, rows = measured(cfg, axes, planned_arch(cfg))
    if entry is None:
        return Gain()
    return Gain(entry.fp8 / entry.bf16, entry.cast / entry.bf16 * entry.rows / rows)


def casts_once(cfg: Config, axes: Axes) -> bool:
    """Whether a rank holds its experts whole, so that their codes stay valid for a step.

    FSDP2's gathered experts are cast after each gather.
    """
    if axes.sharers * axes.replicate == 1:
        return True
    moe = cfg.model.moe
    held = moe.experts // axes.ep
    layers = sum(map(cfg.model.is_moe, cfg.model.numbered)) / axes.pp
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


def narrow_gradients(cfg: Config, axes: Axes, arch: str) -> bool:
    """Whether gradients of trained matrices are in fp8 too, for experts that multiply in fp8."""
    _, rows = measured(cfg, axes, arch)
    D, F = cfg.model.expert_dim, cfg.model.moe.ffn_dim
    chosen = [fastest(kernel, arch, D, F, rows) for kernel in ("dw_up", "dw_down")]
    return all(kernel is not None and kernel.outs > 0 for kernel in chosen)


def describe(cfg: Config, axes: Axes, arch: str) -> list[str]:
    """The line about --train.fp8; none without it."""
    if cfg.train.fp8 == "none":
        return []
    choice = choose(cfg, axes, arch)
    layers = sum(map(cfg.model.is_moe, cfg.model.numbered))
    begin = f"fp8 ({cfg.train.fp8}): experts of {counted(layers, 'block')}"
    if not choice.on:
        return [f"{begin} multiply in {cfg.train.dtype}: {choice.why}"]
    way = " (emulated, slow)" if arch == "cpu" else ""
    gradients = "e4m3 too" if narrow_gradients(cfg, axes, arch) else cfg.train.dtype
    return [f"{begin} multiply in e4m3{way}; gradients of trained weights in {gradients}"]
