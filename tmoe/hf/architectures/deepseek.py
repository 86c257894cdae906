"""DeepSeek's entries V2 and V3, with latent attention, groups of experts and shared experts; Kimi's entries.

Kimi's models are DeepSeek-V3s. The keys first_k_dense_replace and moe_layer_freq state which blocks are MoE.

next: hf/architectures/common.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tmoe.config.model import ModelConfig
from tmoe.hf.architectures import common as c
from tmoe.hf.rules import HF, INV_FREQ, Architecture, Field, Key, MoELayers, TensorPart, TensorRule, under

CHOICE_BIAS = "e_score_correction_bias"


def query_rows(cfg: ModelConfig) -> int:
    """Number of rows of q_proj, 0 if queries have a latent."""
    return 0 if cfg.mla.q_rank else cfg.heads * (cfg.mla.nope_dim + cfg.mla.rope_dim)


QKV_A = (  # q_a_proj if queries have a latent, else q_proj
    TensorPart(f"{c.LAYER}.self_attn.q_proj.weight", query_rows),
    TensorPart(f"{c.LAYER}.self_attn.q_a_proj.weight", lambda cfg: cfg.mla.q_rank),
    TensorPart(
        f"{c.LAYER}.self_attn.kv_a_proj_with_mqa.weight", lambda cfg: cfg.mla.kv_rank + cfg.mla.rope_dim
    ),
)
LATENT = (
    TensorRule(f"{c.BLOCK}.attention.qkv_a.weight", QKV_A),
    *(
        c.one(f"{c.BLOCK}.attention.{n}_norm.weight", f"{c.LAYER}.self_attn.{n}_a_layernorm.weight")
        for n in ("q", "kv")
    ),
    *(
        c.one(f"{c.BLOCK}.attention.{n}_b.weight", f"{c.LAYER}.self_attn.{n}_b_proj.weight")
        for n in ("q", "kv")
    ),
)
SHARED = (  # the parts of V3's MoE besides experts and router; other families have them too
    *c.swiglu(f"{c.BLOCK}.moe.shared", f"{c.LAYER}.mlp.shared_experts"),
    c.one(f"{c.BLOCK}.moe.router.choice_bias", f"{c.LAYER}.mlp.gate.{CHOICE_BIAS}"),
)
V3_MOE = c.MOE + SHARED
RULES = (*c.DECODER, *LATENT, *c.DENSE, *V3_MOE)
V3_RULES = RULES + c.blocks_after_the_last(RULES)

BALANCE = c.AUXILIARY._replace(keys=("aux_loss_alpha",), null=0.001)
ROUTED = c.EXPERTS._replace(keys=("n_routed_experts", "num_local_experts"))
SIGMOID = {"moe.score": "sigmoid", "moe.choice_bias": True}
GROUPED = SIGMOID | {"moe.group_score": "top2"}
SIGMOID_KEYS = dict(scoring_func=("sigmoid", None), topk_method=("noaux_tc", None))
FIELDS = (
    *c.SIZES,
    Field("mla.q_rank", ("q_lora_rank",), 1536, 0, least=1),
    Field("mla.kv_rank", ("kv_lora_rank",)),
    Field("mla.nope_dim", ("qk_nope_head_dim",)),
    Field("mla.rope_dim", ("qk_rope_head_dim",)),
    Field("mla.v_dim", ("v_head_dim",)),
    c.FFN,
    c.MOE_FFN,
    c.TOP_K,
    BALANCE,
)
SHARED_EXPERTS = Key("n_shared_experts", null=False)
KEYS = (
    SHARED_EXPERTS,
    Key("moe_layer_freq", least=1),
    Key("n_group"),
    Key("topk_group"),
)


def one_group(scaling: float, renormalize: bool) -> tuple[Field, ...]:
    """Fields of an MoE like V3's in other families. All experts are one group if config.json has no groups.

    scaling, renormalize: the defaults of the family's class.
    """
    return (
        c.MOE_FFN,
        c.TOP_K,
        BALANCE,
        ROUTED,
        Field("moe.scaling", ("routed_scaling_factor",), scaling),
        Field("moe.groups", ("n_group",), 1),
        Field("moe.top_groups", ("topk_group",), 1),
        c.RENORMALIZE._replace(default=renormalize),
    )


def shared_width(default: int, number: str = SHARED_EXPERTS.name) -> Field:
    """The field of the shared experts' summed width. number: the key of their number, with its default."""
    return Field("moe.shared_dim", (), lambda hf: hf["moe_intermediate_size"] * hf.get(number, default))


def write_shared(cfg: ModelConfig, number: str = SHARED_EXPERTS.name) -> HF:
    return {number: cfg.moe.shared_dim // cfg.moe.ffn_dim}


def rope_width(hf: HF) -> int:
    """The width of RoPE, which head_dim repeats if config.json has it."""
    return hf["qk_rope_head_dim"]


def v2_groups(hf: HF) -> bool:
    # The default of transformers' class is greedy.
    return hf.get("topk_method") == "group_limited_greedy"


def read_layers(said: HF, found: dict[str, Any]) -> list[str]:
    """After the dense blocks, the blocks whose number moe_layer_freq divides are MoE."""
    step = found["moe_every"] = said.get("moe_layer_freq", 1)
    found["dense_layers"] = -(-found.get("dense_layers", 0) // step) * step  # rounded up to the step
    return []


LAYERS = MoELayers(read_layers)


def write_latent_keys(cfg: ModelConfig) -> HF:
    """Keys that the config.json of a model with latent attention needs besides those of its fields.

    num_key_value_heads is the number of all heads: for fewer, transformers would repeat keys and values.
    """
    return dict(q_lora_rank=cfg.mla.q_rank or None, num_key_value_heads=cfg.heads) | write_shared(cfg)


def write_keys(cfg: ModelConfig) -> HF:
    # transformers supports only moe_layer_freq 1
    return write_latent_keys(cfg) | dict(moe_layer_freq=1)


def write_v2_keys(cfg: ModelConfig) -> HF:
    method = "greedy" if cfg.moe.groups == 1 else "group_limited_greedy"
    return write_keys(cfg) | dict(topk_method=method, n_group=cfg.moe.groups, topk_group=cfg.moe.top_groups)


DEEPSEEK_V2 = Architecture(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    RULES,
    (
        *FIELDS,
        c.EXPERTS._replace(keys=("n_routed_experts", "num_experts")),
        shared_width(2),
        c.LEADING_DENSE,
        Field("moe.scaling", ("routed_scaling_factor",), 1.0),
        Field("moe.groups", (), lambda hf: hf["n_group"] if v2_groups(hf) else 1),
        Field("moe.top_groups", (), lambda hf: hf["topk_group"] if v2_groups(hf) else 1),
    ),
    ours={"attention": "mla", "moe.renormalize": False},
    # DeepSeek's own code and transformers disagree on norm_topk_prob.
    theirs=c.PLAIN
    | dict(
        attention_bias=False,
        mlp_bias=False,
        scoring_func=("softmax", None),
        norm_topk_prob=(False, None),
        topk_method=("greedy", "group_limited_greedy"),
    ),
    layers=LAYERS,
    keys=KEYS,
    write=write_v2_keys,
    fp32=(CHOICE_BIAS,),
)

DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    V3_RULES,
    (
        *FIELDS,
        c.key_heads(128, c.all_heads),
        ROUTED,
        shared_width(1),
        c.LEADING_DENSE._replace(default=3),
        Field("mla.interleave", ("rope_interleave",), True, False),
        Field("moe.scaling", ("routed_scaling_factor",), 2.5),
        Field("moe.groups", ("n_group",), 8),
        Field("moe.top_groups", ("topk_group",), 4),
        c.RENORMALIZE._replace(default=True, null=False),
    ),
    ours={"attention": "mla"} | GROUPED,
    theirs=c.PLAIN | SIGMOID_KEYS | dict(attention_bias=False),
    layers=LAYERS,
    keys=(*KEYS, Key("num_mtp_layers", null=False)),
    write=write_keys,
    copies=dict(head_dim=rope_width),
    fp32=(CHOICE_BIAS,),
)

# DeepSeek-V3.2 is a V3 in which an indexer chooses the keys of each query. Its tensors are carried.
INDEXER = (r"model\.layers\.\d+\.self_attn\.indexer\.((wq_b|wk|weights_proj|k_norm)\.weight|k_norm\.bias)",)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    class_name="DeepseekV32ForCausalLM",
    fields=(
        *DEEPSEEK_V3.fields,
        c.key_heads(128),
        c.LEADING_DENSE._replace(default=3, least=0),
        c.RENORMALIZE._replace(default=True),
        Field("mla.q_rank", ("q_lora_rank",), 1536, least=1),
        Field("index_topk", ("index_topk",), 2048, least=1),
    ),
    theirs=DEEPSEEK_V3.theirs | dict(mlp_bias=False, moe_layer_freq=(1, None), rope_interleave=True),
    layers=MoELayers(lambda said, found: c.typed_layers(found.get("dense_layers", 0)).read(said, found)),
    keys=(
        SHARED_EXPERTS,
        c.MLP_TYPES,
        *(Key(f"index_{name}", null=False) for name in ("head_dim", "n_heads")),
    ),
    extra=(*INV_FREQ, *INDEXER),
)

# Kimi K2 is a DeepSeek-V3 with another name. transformers has no class with this name.
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")

# The text part of Kimi K2.5, a model of images and text; its other tensors are kept unchanged for an export.
KIMI_K25 = replace(
    KIMI_K2,
    model_type="kimi_k25",
    class_name="KimiK25ForConditionalGeneration",
    rules=under(under(RULES, "model.", "language_model.model."), "lm_head.", "language_model.lm_head."),
    theirs=KIMI_K2.theirs | dict(tie_word_embeddings=False, model_type=("kimi_k2", "deepseek_v3", None)),
    extra=(r"(vision_tower|mm_projector)\..*",),
    nested="text_config",
)
