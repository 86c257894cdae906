"""AFMoE's entry (Trinity): sandwich norms, a gate on attention's result, positions in windowed blocks alone.

next: hf/architectures/common.py
"""

from __future__ import annotations

import math

from tmoe.config.model import ModelConfig
from tmoe.hf.architectures.common import (
    BLOCK,
    BY_A_FIELD,
    DECODER,
    DENSE,
    EXPERTS,
    FFN,
    LAYER,
    LEADING_DENSE,
    MOE_FFN,
    NORM_EPS,
    PLAIN,
    QK_NORM,
    SAID_HEAD_DIM,
    SIZES,
    TOP_K,
    experts,
    one,
    qkv,
    swiglu,
)
from tmoe.hf.architectures.deepseek import SIGMOID, shared_width, write_shared
from tmoe.hf.rules import HF, Architecture, Field, Key, Part, Rule, Windows

ATTN, MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"
GATE = Part(f"{ATTN}.gate_proj.weight", lambda cfg: cfg.heads * cfg.head_dim)
RULES = (  # those that differ go before the usual ones
    one(f"{BLOCK}.attention_post_norm.weight", f"{LAYER}.post_attention_layernorm.weight"),
    one(f"{BLOCK}.ffn_norm.weight", f"{LAYER}.pre_mlp_layernorm.weight"),
    one(f"{BLOCK}.ffn_post_norm.weight", f"{LAYER}.post_mlp_layernorm.weight"),
    Rule(f"{BLOCK}.attention.qkv.weight", (*qkv("weight").parts, GATE)),
    *(DECODER + QK_NORM + DENSE),
    one(f"{BLOCK}.moe.router.weight", f"{MLP}.router.gate.weight"),
    one(f"{BLOCK}.moe.router.choice_bias", f"{MLP}.expert_bias"),
    *experts(f"{MLP}.experts"),
    *swiglu(f"{BLOCK}.moe.shared", f"{MLP}.shared_experts"),
)
SHARED_EXPERTS = Key("num_shared_experts", least=0, null=False)
MUP = Key("mup_enabled", bool)
GLOBAL_EVERY = Key("global_attn_every_n_layers", least=1, null=False)


def embedding_multiplier(hf: HF) -> float:
    return hf["hidden_size"] ** 0.5 if hf.get(MUP.name, False) else 1.0


def write_keys(cfg: ModelConfig) -> HF:
    return write_shared(cfg, SHARED_EXPERTS.name) | {MUP.name: math.sqrt(cfg.dim) == cfg.embedding_multiplier}


AFMOE = Architecture(
    "afmoe",
    "AfmoeForCausalLM",
    RULES,
    (
        *SIZES,
        NORM_EPS,
        SAID_HEAD_DIM._replace(default=128),
        FFN,
        MOE_FFN._replace(default=1408),
        EXPERTS._replace(keys=("num_experts",), default=64),
        TOP_K._replace(default=6),
        LEADING_DENSE._replace(keys=("num_dense_layers",), default=1),
        Field("moe.scaling", ("route_scale",), 1.0),
        shared_width(2, SHARED_EXPERTS.name),
        Field("embedding_multiplier", (), embedding_multiplier),
    ),
    ours={"qk_norm": "head", "norms": "sandwich", "attention_gate": True, "moe.renormalize": True} | SIGMOID,
    # what the published code can do and transformers' does not ask for
    theirs=PLAIN
    | dict(attention_bias=False, score_func=("sigmoid", None), route_norm=(True, None))
    | dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (1, None)),
    layers=BY_A_FIELD,
    keys=(SHARED_EXPERTS, MUP, GLOBAL_EVERY),
    write=write_keys,
    windows=Windows(
        ("sliding_window", "layer_types"),
        lambda hf, layer: (layer + 1) % hf.get(GLOBAL_EVERY.name, 4) != 0,
        1024,
        null=False,
        rotary=True,
    ),
    fp32=("expert_bias",),
)
