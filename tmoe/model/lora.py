"""Low-rank adapters on a frozen model: which matrices get one, and how they are turned off.

Parameters are named after the matrix: `attention.qkv.a` and `.b` adapt `attention.qkv.weight`, and
`experts.gate_up_a` and `_b` adapt `experts.gate_up`.

next: model/adapted.py, moe/experts.py
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import nn

from tmoe.base.types import FLOATS
from tmoe.config.check import Section, Setting, require
from tmoe.config.model import ModelConfig
from tmoe.config.run import Config, Dtype, LoraConfig
from tmoe.model.adapted import Adapted
from tmoe.model.nf4 import in_nf4, require_nf4
from tmoe.model.transformer import Transformer
from tmoe.moe.experts import Experts
from tmoe.moe.own_experts import OwnExperts
from tmoe.parallel.precise import type_in

ADAPTER = re.compile(r"\.(a|b|(gate_up|down)_[ab])$")
EXPERTS = re.compile(r"\.experts\.(gate_up|down)$")
NOT = re.compile(r"(^head|\.shared_gate)$")  # layers that get no adapter


class Matrix(NamedTuple):
    """The place of a matrix that can have an adapter: an attribute of a module."""

    owner: nn.Module
    leaf: str


def is_adapter(name: str) -> bool:
    """Whether this is the name of an adapter's parameter."""
    return ADAPTER.search(name) is not None


def matrices_of(model: nn.Module) -> dict[str, Matrix]:
    """The matrices that can have an adapter, by name: `blocks.0.attention.qkv`, `blocks.1.moe.experts.down`.

    They do not include embedding, router and head.
    """
    found: dict[str, Matrix] = {}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            leaves = () if isinstance(module, OwnExperts) else ("gate_up", "down")
            found |= {f"{name}.{leaf}": Matrix(module, leaf) for leaf in leaves}
        elif isinstance(module, nn.Linear) and not NOT.search(name):
            owner, _, leaf = name.rpartition(".")
            found[name] = Matrix(model.get_submodule(owner), leaf)
    return found


def lora_of_settings(said: Mapping[str, Any]) -> LoraConfig | None:
    """The settings of adapters, from those in a manifest; None for a run without adapters."""
    if not said.get("rank"):
        return None
    known: dict[str, Any] = {one.name: said[one.name] for one in fields(LoraConfig) if one.name in said}
    known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    known["init"] = None
    return LoraConfig(**known)


def chosen(lora: LoraConfig, names: Iterable[str]) -> list[str]:
    """The names that --lora.targets chooses; without targets, all."""
    picks = [re.compile(pattern) for pattern in lora.targets]
    return [name for name in names if not picks or any(pick.search(name) for pick in picks)]


def hold(model: nn.Module, names: Iterable[str], dtype: Dtype, trained: bool = False) -> None:
    """Converts these parameters to `dtype`, with no master copy. Unless `trained`, they are frozen."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        value = getattr(module, leaf).detach().to(type_in(module, FLOATS[dtype]))
        setattr(module, leaf, nn.Parameter(value, requires_grad=trained))


def adapt(model: Transformer, lora: LoraConfig, dtype: Dtype) -> list[str]:
    """Freezes the whole model and adds the adapters; returns the names of the matrices that have one.

    Call it before `parallelize`. Adapters are fp32, with values that `init_weights` draws.
    """
    hold(model, [name for name, _ in model.named_parameters()], dtype)
    return add_adapters(model, lora)


def add_adapters(model: Transformer, lora: LoraConfig) -> list[str]:
    """Adds the adapters of these settings to a model; returns the names of the matrices that have one."""
    matrices = matrices_of(model)
    names = chosen(lora, matrices)
    for name in names:
        owner, leaf = matrices[name]
        rank = lora.rank_of(name, model.cfg.moe.top_k)
        scale = lora.scale_of(name, rank)
        if isinstance(owner, Experts):
            owner.adapt(leaf, rank, scale)
        else:
            setattr(owner, leaf, Adapted(getattr(owner, leaf), rank, scale, lora.dropout))
    if lora.base == "nf4":
        in_nf4(model, list(matrices))
    return names


def require_targets(cfg: Config) -> None:
    """ConfigError if a target of --lora.targets matches no name, or the layout does not support adapters."""
    if not cfg.lora.rank:
        return
    require_nf4(cfg)
    with torch.device("meta"):
        names = list(matrices_of(Transformer(cfg.model)))
    some = sorted({re.sub(r"\bblocks\.\d+\.", "", name) for name in names})
    wrong = f"found in the name of no matrix that can have an adapter; names end in {some}"
    for pattern in cfg.lora.targets:
        found = chosen(LoraConfig(targets=(pattern,)), names)
        require(len(found) > 0, "lora.targets", pattern, wrong)
    picked = chosen(cfg.lora, names)
    for setting, values in (("lora.ranks", cfg.lora.ranks), ("lora.alphas", cfg.lora.alphas)):
        wrong = f"found in the name of no matrix that has an adapter; names end in {some}"
        for text in values:
            found = chosen(LoraConfig(targets=(text.rpartition(":")[0],)), picked)
            require(len(found) > 0, setting, text, wrong)
    if not any(map(EXPERTS.search, chosen(cfg.lora, names))):
        return
    for name, other in (("parallel.dispatch", "symm"), ("parallel.dispatch_dtype", "fp8")):
        run = Section(cfg)
        wrong = f"symm has no adapters on experts, which {Setting('lora.rank', cfg.lora.rank)} gives them"
        run.require(run.value(name) != other, name, wrong, "auto or nccl" if other == "symm" else "same")


def require_ranks(cfg: Config) -> None:
    """ConfigError if an adapter has a rank above the smaller side of its matrix.

    Such an adapter computes no more functions than one of that side's rank. Adapters of --lora.init have the
    ranks that they were trained with.
    """
    lora, top_k = cfg.lora, cfg.model.moe.top_k
    if not lora.rank or lora.init:
        return
    with torch.device("meta"):
        matrices = matrices_of(Transformer(cfg.model))
    for name in chosen(lora, matrices):
        found = getattr(*matrices[name])
        shape = found.weight.shape if isinstance(found, nn.Linear) else found.shape
        require_low(lora, name, lora.rank_of(name, top_k), min(shape[-2:]), "lora.")


def require_low(lora: LoraConfig, name: str, rank: int, side: int, section: str = "") -> None:
    """ConfigError if the rank of a matrix's adapter is above the matrix's smaller side.

    section: "lora." where the settings are flags, "" where they are arguments.
    """
    setting, value = lora.source_of(name)
    wrong = f"gives {name} the rank {rank}, above {side}, the smaller side of that matrix"
    other = f"{Setting('lora.ranks')} with its own rank" if section else "targets without this matrix"
    require(rank <= side, f"{section}{setting}", value, wrong, f"a rank of {side} or less there, or {other}")


@contextmanager
def off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes without its adapters, with the products and the bits of its base.

    The base is the reference of a finetune, so no second model is needed.
    """
    found = [m for m in model.modules() if isinstance(m, Adapted | Experts)]
    modules = [m for m in found if isinstance(m, Adapted) or getattr(m, "scales", None)]
    were = [module.adapters_on for module in modules]
    for module in modules:
        module.adapters_on = False
    try:
        yield
    finally:
        for module, was in zip(modules, were, strict=True):
            module.adapters_on = was


def describe(cfg: Config, ep: int) -> list[str]:
    """Lines on a run's adapters: how many numbers are trained, and how rows are sent to experts."""
    lora = cfg.lora
    if not lora.rank:
        return []
    dense, experts, *_ = adapter_counts(cfg.model, lora, range(cfg.model.layers))
    ranks = f"rank {lora.rank}" if dense else ""
    if experts:
        of_experts = f"rank {lora.rank_of_experts(cfg.model.moe.top_k)} on each expert"
        ranks = f"{ranks}, {of_experts}" if ranks else of_experts
    if lora.ranks:
        ranks = f"{ranks}, but {' '.join(lora.ranks)}"
    base = cfg.train.dtype
    base += ", their matrices in NF4" if lora.base == "nf4" else ""
    lines = [f"adapters: {dense + experts:,} numbers are trained ({ranks}); all others are frozen, in {base}"]
    if experts and ep > 1:
        lines.append(
            "adapters on experts: rows are exchanged by all-to-all, as with --parallel.dispatch nccl"
        )
    pairs = cfg.task == "preference" and cfg.preference.loss not in ("simpo", "orpo")
    if lora.init and (pairs or (cfg.task == "grpo" and cfg.grpo.kl)):
        lines.append(
            f"the reference is the base, without the adapters of --lora.init={lora.init}; "
            "python -m tmoe.hf merge writes a model that has them, for --init"
        )
    return lines


def expert_ranks(cfg: Config) -> tuple[tuple[int, int], ...]:
    """Ranks of the adapters of gate_up and of down, 0 for none, that the MoE layers have; () without any."""
    if not cfg.lora.rank:
        return ()
    lora, top_k = cfg.lora, cfg.model.moe.top_k
    found: set[tuple[int, int]] = set()
    for layer in filter(cfg.model.is_moe, range(cfg.model.layers)):
        names = [f"blocks.{layer}.moe.experts.{matrix}" for matrix in ("gate_up", "down")]
        picked = chosen(lora, names)
        up, down = (lora.rank_of(name, top_k) if name in picked else 0 for name in names)
        found.add((up, down))
    return tuple(sorted(found - {(0, 0)}))


@functools.lru_cache(64)
def dense_sizes(model: ModelConfig, lora: LoraConfig) -> tuple[tuple[int, int, int], ...]:
    """Columns, rows and rank of the dense layers that have adapters, each combination once."""
    if not lora.rank:
        return ()
    with torch.device("meta"):
        whole = Transformer(model)
    add_adapters(whole, lora)
    layers = (m for m in whole.modules() if isinstance(m, Adapted))
    return tuple(sorted({(m.in_features, m.out_features, len(m.a)) for m in layers}))


class AdapterCounts(NamedTuple):
    """Sizes of the adapters of some blocks."""

    dense: int
    """numbers on dense layers"""
    experts: int
    """numbers on experts"""
    ranks: int
    """sum of the ranks of dense layers' adapters"""
    moe_ranks: int
    """sum of the ranks of the adapters of gate_up and of down, over MoE layers"""


@functools.lru_cache(64)
def adapter_counts(model: ModelConfig, lora: LoraConfig, span: range) -> AdapterCounts:
    """The adapters of these blocks."""
    with torch.device("meta"):
        part = Transformer(model, span)
    names = add_adapters(part, lora)
    sizes = {name: p.numel() for name, p in part.named_parameters() if is_adapter(name)}
    experts = sum(n for name, n in sizes.items() if ".experts." in name)
    ranks = {name: lora.rank_of(name, model.moe.top_k) for name in names}
    dense = sum(rank for name, rank in ranks.items() if not EXPERTS.search(name))
    moe = sum(rank for name, rank in ranks.items() if EXPERTS.search(name))
    return AdapterCounts(sum(sizes.values()) - experts, experts, dense, moe)
