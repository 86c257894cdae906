"""Hunyuan's entries: V3 (hy_v3) with the MoE of DeepSeek-V3 without groups, and V1 with norms after RoPE.

next: hf/architectures/deepseek.py
"""

from __future__ import annotations

from tmoe.config.check import ConfigError
from tmoe.hf.architectures import common as c
from tmoe.hf.architectures.deepseek import BALANCE, CHOICE_BIAS, SIGMOID, shared_width, write_shared
from tmoe.hf.rules import HF, Architecture, Field, Key

MLP = f"{c.LAYER}.mlp"
SHARED = [c.swiglu(f"{c.BLOCK}.moe.shared", f"{MLP}.{name}") for name in ("shared_mlp", "shared_experts")]
MOE = (  # published names, and names in transformers 5
    c.also(c.one(f"{c.BLOCK}.moe.router.weight", f"{MLP}.router.gate.weight"), f"{MLP}.gate.weight"),
    c.also(c.one(f"{c.BLOCK}.moe.router.choice_bias", f"{MLP}.expert_bias"), f"{MLP}.{CHOICE_BIAS}"),
    *c.experts(f"{MLP}.experts"),
    *(rule._replace(held=held.parts) for rule, held in zip(*SHARED, strict=True)),
)
ALWAYS = ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")
SHARED_EXPERTS = Key("num_shared_experts", least=0, null=False)

HY_V3 = Architecture(
    "hy_v3",
    "HYV3ForCausalLM",
    c.DECODER + c.QK_NORM + c.DENSE + MOE,
    (
        *c.SIZES,
        c.NORM_EPS,
        Field("init_std", ("initializer_range",), 0.006),
        c.key_heads(8),
        *c.BIASES,
        c.SAID_HEAD_DIM._replace(default=128),
        c.FFN,
        c.MOE_FFN,
        c.EXPERTS,
        c.TOP_K,
        BALANCE,
        shared_width(1, SHARED_EXPERTS.name),
        Field("moe.scaling", ("router_scaling_factor",), 2.826),
    ),
    ours={"qk_norm": "head"} | SIGMOID,
    theirs=c.PLAIN
    | dict(mlp_bias=False, enable_moe_fp32_combine=(True, False))
    | dict.fromkeys(ALWAYS, True),
    layers=c.typed_layers(1),
    keys=(SHARED_EXPERTS, c.MLP_TYPES),
    write=lambda cfg: write_shared(cfg, SHARED_EXPERTS.name),
    theta=11_158_840.0,
    copies=dict(first_k_dense_replace=c.leading_dense(1)),
    fp32=(CHOICE_BIAS, "expert_bias"),
)

V1 = (
    *(
        c.one(f"{c.BLOCK}.attention.{ours}_norm.weight", f"{c.LAYER}.self_attn.{theirs}_layernorm.weight")
        for ours, theirs in dict(q="query", k="key").items()
    ),
    c.one(f"{c.BLOCK}.moe.router.weight", f"{MLP}.gate.wg.weight"),
    *c.experts(f"{MLP}.experts"),
    *SHARED[0],
)
MOE_TOPK_NAMES = ("moe_topk", "num_experts_per_tok")
MOE_TOPK, PER_TOKEN = (Key(name, int | tuple[int, ...], null=False) for name in MOE_TOPK_NAMES)


def one_for_all(hf: HF) -> int:
    """Number of experts a token; config.json may list it for each block."""
    counts = [hf[name] for name in MOE_TOPK_NAMES if name in hf] or [1]
    values = {number for count in counts for number in ([count] if isinstance(count, int) else count)}
    if len(values) != 1:
        raise ConfigError(f"{MOE_TOPK.name}={counts[0]}: only one number for all blocks is computed")
    return values.pop()


HUNYUAN_V1_MOE = Architecture(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    c.DECODER + V1,
    (
        *c.SIZES,
        c.NORM_EPS,
        *c.BIASES,
        c.SAID_HEAD_DIM,
        c.EXPERT_FFN,
        Field("moe.shared_dim", ("intermediate_size",)),
        c.EXPERTS._replace(default=1),
        Field("moe.top_k", (), one_for_all),
    ),
    ours={"qk_norm": "rotated", "moe.renormalize": True},
    # features of the published code that transformers' does not use
    theirs=c.PLAIN | dict(use_qk_norm=True, use_mixed_mlp_moe=True, use_cla=(False, None), mlp_bias=False),
    layers=c.ALL_MOE,
    keys=(MOE_TOPK, PER_TOKEN),
    write=lambda cfg: {MOE_TOPK.name: cfg.moe.top_k},
    fp32=("mlp.gate.wg.weight",),
    rope_alpha=True,
)
