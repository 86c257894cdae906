"""Hunyuan's entries: V3 (hy_v3), whose MoE is DeepSeek-V3's without groups, and V1, with norms behind RoPE.

next: hf/architectures/deepseek.py
"""

from __future__ import annotations

from tmoe.config.check import ConfigError
from tmoe.hf.architectures.common import (
    ALL_MOE,
    BIASES,
    BLOCK,
    DECODER,
    DENSE,
    EXPERT_FFN,
    EXPERTS,
    FFN,
    LAYER,
    MLP_TYPES,
    MOE_FFN,
    NORM_EPS,
    PLAIN,
    QK_NORM,
    SAID_HEAD_DIM,
    SIZES,
    TOP_K,
    also,
    experts,
    key_heads,
    leading_dense,
    one,
    swiglu,
    typed_layers,
)
from tmoe.hf.architectures.deepseek import BALANCE, CHOICE_BIAS, SIGMOID, shared_width, write_shared
from tmoe.hf.rules import HF, Architecture, Field, Key

MLP = f"{LAYER}.mlp"
SHARED = [swiglu(f"{BLOCK}.moe.shared", f"{MLP}.{name}") for name in ("shared_mlp", "shared_experts")]
MOE = (  # names as published, and those of transformers 5
    also(one(f"{BLOCK}.moe.router.weight", f"{MLP}.router.gate.weight"), f"{MLP}.gate.weight"),
    also(one(f"{BLOCK}.moe.router.choice_bias", f"{MLP}.expert_bias"), f"{MLP}.{CHOICE_BIAS}"),
    *experts(f"{MLP}.experts"),
    *(rule._replace(held=held.parts) for rule, held in zip(*SHARED, strict=True)),
)
ALWAYS = ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")
SHARED_EXPERTS = Key("num_shared_experts", least=0, null=False)

HY_V3 = Architecture(
    "hy_v3",
    "HYV3ForCausalLM",
    DECODER + QK_NORM + DENSE + MOE,
    (
        *SIZES,
        NORM_EPS,
        Field("init_std", ("initializer_range",), 0.006),
        key_heads(8),
        *BIASES,
        SAID_HEAD_DIM._replace(default=128),
        FFN,
        MOE_FFN,
        EXPERTS,
        TOP_K,
        BALANCE,
        shared_width(1, SHARED_EXPERTS.name),
        Field("moe.scaling", ("router_scaling_factor",), 2.826),
    ),
    ours={"qk_norm": "head"} | SIGMOID,
    theirs=PLAIN | dict(mlp_bias=False, enable_moe_fp32_combine=(True, False)) | dict.fromkeys(ALWAYS, True),
    layers=typed_layers(1),
    keys=(SHARED_EXPERTS, MLP_TYPES),
    write=lambda cfg: write_shared(cfg, SHARED_EXPERTS.name),
    theta=11_158_840.0,
    copies=dict(first_k_dense_replace=leading_dense(1)),
    fp32=(CHOICE_BIAS, "expert_bias"),
)

V1 = (
    *(
        one(f"{BLOCK}.attention.{ours}_norm.weight", f"{LAYER}.self_attn.{theirs}_layernorm.weight")
        for ours, theirs in dict(q="query", k="key").items()
    ),
    one(f"{BLOCK}.moe.router.weight", f"{MLP}.gate.wg.weight"),
    *experts(f"{MLP}.experts"),
    *SHARED[0],
)
MOE_TOPK_NAMES = ("moe_topk", "num_experts_per_tok")
MOE_TOPK, PER_TOKEN = (Key(name, int | tuple[int, ...], null=False) for name in MOE_TOPK_NAMES)


def one_for_all(hf: HF) -> int:
    """Experts a token, which config.json may list for each block."""
    said = [hf[name] for name in MOE_TOPK_NAMES if name in hf] or [1]
    values = {number for one in said for number in ([one] if isinstance(one, int) else one)}
    if len(values) != 1:
        raise ConfigError(f"{MOE_TOPK.name}={said[0]}: only one number for all blocks is computed")
    return values.pop()


HUNYUAN_V1_MOE = Architecture(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    DECODER + V1,
    (
        *SIZES,
        NORM_EPS,
        *BIASES,
        SAID_HEAD_DIM,
        EXPERT_FFN,
        Field("moe.shared_dim", ("intermediate_size",)),
        EXPERTS._replace(default=1),
        Field("moe.top_k", (), one_for_all),
    ),
    ours={"qk_norm": "rotated", "moe.renormalize": True},
    # what the published code can do and transformers' does not ask for
    theirs=PLAIN | dict(use_qk_norm=True, use_mixed_mlp_moe=True, use_cla=(False, None), mlp_bias=False),
    layers=ALL_MOE,
    keys=(MOE_TOPK, PER_TOKEN),
    write=lambda cfg: {MOE_TOPK.name: cfg.moe.top_k},
    fp32=("mlp.gate.wg.weight",),
    rope_alpha=True,
)
