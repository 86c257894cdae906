"""Granite-4's entry: blocks of Mamba-2 or of attention, each with experts and a shared expert, or dense.

A dense model has no experts, and the shared expert's tensors are its feed-forward.

next: hf/architectures/granite.py
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tmoe.config.check import fits
from tmoe.config.model import ModelConfig
from tmoe.hf.architectures import common as c
from tmoe.hf.architectures.granite import GRANITEMOESHARED, SHARED
from tmoe.hf.rules import HF, Field, Key, Linear, MoELayers, TensorPart, TensorRule

OLDER = ("mamba", "linear_attention"), ("attention", "full_attention")
POSITIONS = Key("position_embedding_type", str)
LIMITS = Key("time_step_limit", tuple[float | dict, ...], null=False)
TYPES = tuple(Key(name, tuple[str, ...], null=False) for name in ("layer_types", "layers_block_type"))
INFINITE = {"__float__": "Infinity"}  # as transformers 5 writes it, since JSON has no infinity


def parts_of(theirs: str, sizes: tuple[str, ...], order: tuple[str, ...], inner: bool = False) -> TensorRule:
    """The rule, without our name, of a tensor whose rows are several sections in another order than ours.

    sizes: the sections in their order, each z, x, B, C or dt. order: the sections of ours.
    """

    def rows(cfg: ModelConfig, section: str) -> int:
        n = cfg.linear
        return dict(z=n.value_width, x=n.value_width, B=n.key_width, C=n.key_width, dt=n.value_heads)[section]

    def part(section: str) -> TensorPart:
        def within(cfg: ModelConfig) -> tuple[int, int, int]:
            first = sum(rows(cfg, one) for one in sizes[: sizes.index(section)])
            return 1, sum(rows(cfg, one) for one in sizes), first

        return TensorPart(theirs, lambda cfg: rows(cfg, section), within=within, inner=inner)

    return TensorRule("", tuple(map(part, order)))


def mamba(theirs: str) -> tuple[TensorRule, ...]:
    """The rules of a Mamba-2 layer. theirs: the name of its module."""
    net, every, mixed = f"{c.BLOCK}.attention", ("z", "x", "B", "C", "dt"), ("C", "B", "x")
    projected, conv = f"{theirs}.in_proj.weight", f"{theirs}.conv1d"
    return (
        parts_of(projected, every, (*mixed, "z", "dt"))._replace(ours=f"{net}.qkvz.weight"),
        parts_of(f"{conv}.weight", every[1:4], mixed, inner=True)._replace(ours=f"{net}.rates.conv"),
        parts_of(f"{conv}.bias", every[1:4], mixed)._replace(ours=f"{net}.rates.conv_bias"),
        *(c.one(f"{net}.rates.{name}", f"{theirs}.{name}") for name in ("A_log", "dt_bias", "D")),
        c.one(f"{net}.norm.weight", f"{theirs}.norm.weight"),
        c.one(f"{net}.out.weight", f"{theirs}.out_proj.weight"),
    )


def listed(said: HF) -> list[str] | None:
    """The kinds of blocks by a config.json, under either name."""
    return next((list(said[key.name]) for key in TYPES if key.name in said), None)


def width_of_mamba_head(hf: HF) -> int:
    return hf.get("mamba_expand", 2) * hf["hidden_size"] // (hf.get("mamba_n_heads", 128) or 1)


def expansion(hf: HF) -> float:
    """mamba_expand by the other keys."""
    heads = hf.get("mamba_n_heads", 128) * hf.get("mamba_d_head", width_of_mamba_head(hf))
    return heads / (hf["hidden_size"] or 1)


def read_blocks(said: HF, found: dict[str, Any]) -> list[str]:
    """Whether blocks have experts, rotary positions, and limits of Mamba-2's step."""
    problems, positions = [], said.get(POSITIONS.name, "nope")
    if positions not in ("rope", "nope"):
        problems.append(f"{POSITIONS.name}={positions!r}: only 'rope' or 'nope' (or null) is computed")
    found["rotary"] = (int(positions == "rope"),)
    limits = said.get(LIMITS.name, (0.0, math.inf))
    numbers = [math.inf if one == INFINITE else one for one in limits]
    if len(numbers) == 2 and all(fits(one, float) for one in numbers):
        found |= {"linear.least_step": numbers[0], "linear.most_step": numbers[1]}
        if numbers[1] == math.inf:
            found["linear.most_step"] = 0.0
    else:
        problems.append(f"{LIMITS.name}={limits!r}: must be two numbers")
    found["dense_layers"] = 0
    if found.get("moe.experts") == 0:
        found["dense_layers"] = found.get("layers") or 0
        found["ffn_dim"] = found["moe.shared_dim"]
        for name in ("experts", "top_k", "ffn_dim", "shared_dim", "balance_coeff"):
            found.pop(f"moe.{name}", None)
    return problems


def write_blocks(cfg: ModelConfig) -> HF:
    """The keys that `read_blocks` reads."""
    n = cfg.linear
    keys: HF = {POSITIONS.name: "rope" if any(cfg.rope_of(i) for i in range(cfg.layers)) else "nope"}
    keys["mamba_expand"] = n.value_width // cfg.dim
    if n.least_step or n.most_step:
        keys[LIMITS.name] = [n.least_step, n.most_step or INFINITE]
    if not any(map(cfg.is_moe, range(cfg.layers))):
        keys |= dict(num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=cfg.ffn_dim)
    return keys


GRANITEMOEHYBRID = replace(
    GRANITEMOESHARED,
    model_type="granitemoehybrid",
    class_name="GraniteMoeHybridForCausalLM",
    rules=(
        *GRANITEMOESHARED.rules,
        c.one(f"{c.BLOCK}.ffn.gate_up.weight", f"{SHARED}.input_linear.weight"),
        c.one(f"{c.BLOCK}.ffn.down.weight", f"{SHARED}.output_linear.weight"),
        *mamba(f"{c.LAYER}.mamba"),
    ),
    fields=(
        *GRANITEMOESHARED.fields,
        Field("moe.activation", ("hidden_act",), "silu", words=dict(silu="swiglu", swish="swiglu")),
        Field("moe.shared_dim", ("shared_intermediate_size",), 1024),
        c.EXPERT_FFN._replace(default=11008),
        c.EXPERTS._replace(keys=("num_local_experts",), default=8),
        c.TOP_K._replace(default=2),
        Field("linear.key_heads", ("mamba_n_groups",), 1, least=1),
        Field("linear.value_heads", ("mamba_n_heads",), 128, least=1),
        Field("linear.key_dim", ("mamba_d_state",), 256, least=1),
        Field("linear.value_dim", ("mamba_d_head",), width_of_mamba_head, least=1),
        Field("linear.conv", ("mamba_d_conv",), 4, least=1),
        Field("linear.conv_bias", ("mamba_conv_bias",), True),
    ),
    ours=GRANITEMOESHARED.ours | {"linear.kind": "mamba2"},
    theirs=c.PLAIN | dict(mamba_proj_bias=(False, None)),
    layers=MoELayers(read_blocks, write_blocks),
    keys=(POSITIONS, LIMITS, *TYPES, Key("mamba_chunk_size", null=False)),
    copies=dict(mamba_expand=expansion),
    linear=Linear(older=OLDER, listed=listed),
    fp32=("A_log", "dt_bias", ".D"),
)
