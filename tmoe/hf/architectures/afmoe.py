"""AFMoE's entry (Trinity): sandwich norms, a gate on attention's output, positions only in windowed blocks.

next: hf/architectures/common.py
"""

from __future__ import annotations

import math

from tmoe.config.model import ModelConfig
from tmoe.hf.architectures import common as c
from tmoe.hf.architectures.deepseek import SIGMOID, shared_width, write_shared
from tmoe.hf.rules import HF, Architecture, Field, Key, TensorPart, TensorRule, Windows

ATTN, MLP = f"{c.LAYER}.self_attn", f"{c.LAYER}.mlp"
GATE = TensorPart(f"{ATTN}.gate_proj.weight", lambda cfg: cfg.heads * cfg.head_dim)
RULES = (  # rules that differ precede the usual rules, since the first rule of a tensor is used
    c.one(f"{c.BLOCK}.attention_post_norm.weight", f"{c.LAYER}.post_attention_layernorm.weight"),
    c.one(f"{c.BLOCK}.ffn_norm.weight", f"{c.LAYER}.pre_mlp_layernorm.weight"),
    c.one(f"{c.BLOCK}.ffn_post_norm.weight", f"{c.LAYER}.post_mlp_layernorm.weight"),
    TensorRule(f"{c.BLOCK}.attention.qkv.weight", (*c.qkv("weight").parts, GATE)),
    *(c.DECODER + c.QK_NORM + c.DENSE),
    c.one(f"{c.BLOCK}.moe.router.weight", f"{MLP}.router.gate.weight"),
    c.one(f"{c.BLOCK}.moe.router.choice_bias", f"{MLP}.expert_bias"),
    *c.experts(f"{MLP}.experts"),
    *c.swiglu(f"{c.BLOCK}.moe.shared", f"{MLP}.shared_experts"),
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
        *c.SIZES,
        c.NORM_EPS,
        c.SAID_HEAD_DIM._replace(default=128),
        c.FFN,
        c.MOE_FFN._replace(default=1408),
        c.EXPERTS._replace(keys=("num_experts",), default=64),
        c.TOP_K._replace(default=6),
        c.LEADING_DENSE._replace(keys=("num_dense_layers",), default=1),
        Field("moe.scaling", ("route_scale",), 1.0),
        shared_width(2, SHARED_EXPERTS.name),
        Field("embedding_multiplier", (), embedding_multiplier),
    ),
    ours={"qk_norm": "head", "norms": "sandwich", "attention_gate": True, "moe.renormalize": True} | SIGMOID,
    # features of the published code that transformers' does not use
    theirs=c.PLAIN
    | dict(attention_bias=False, score_func=("sigmoid", None), route_norm=(True, None))
    | dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (1, None)),
    layers=c.BY_A_FIELD,
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
