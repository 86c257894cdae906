"""GLM's entries for GLM-4.5 to 4.7 and 4.5V: RoPE on half of a head's channels, and the MoE of DeepSeek-V3.

next: hf/architectures/common.py
"""

from __future__ import annotations

from dataclasses import replace

from tmoe.config.model import ModelConfig
from tmoe.hf.architectures import common as c
from tmoe.hf.architectures.deepseek import CHOICE_BIAS, SHARED_EXPERTS, shared_width
from tmoe.hf.rules import HF, Architecture, Field, Key, MoELayers, under

USE_QK_NORM = Key("use_qk_norm", bool, null=False)
SHARED = c.swiglu(f"{c.BLOCK}.moe.shared", f"{c.LAYER}.mlp.shared_experts")


def write_keys(cfg: ModelConfig) -> HF:
    shared = cfg.moe.shared_dim // cfg.moe.ffn_dim
    return dict(n_shared_experts=shared, use_qk_norm=cfg.qk_norm == "head", num_nextn_predict_layers=0)


RULES = (
    *(c.DECODER + c.QK_NORM + c.DENSE + c.MOE + SHARED),
    c.one(f"{c.BLOCK}.moe.router.choice_bias", f"{c.LAYER}.mlp.gate.{CHOICE_BIAS}"),
)
GLM4_MOE = Architecture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    RULES + c.blocks_after_the_last(RULES),
    (
        *c.SIZES,
        c.NORM_EPS,
        c.key_heads(8),
        c.SAID_HEAD_DIM,
        c.BIASES[0],  # the output projection has no bias
        Field("qk_norm", (), lambda hf: "head" if hf.get(USE_QK_NORM.name, False) else "none"),
        c.FFN,
        c.MOE_FFN,
        c.EXPERTS._replace(keys=("n_routed_experts", "num_local_experts")),
        c.TOP_K,
        c.RENORMALIZE._replace(default=True),
        shared_width(1),
        Field("dense_layers", ("first_k_dense_replace",), 1),
        Field("moe.scaling", ("routed_scaling_factor",), 1.0),
        Field("moe.groups", ("n_group",), 1),
        Field("moe.top_groups", ("topk_group",), 1),
        c.AUXILIARY._replace(keys=(), default=0.001),
    ),
    ours={"moe.score": "sigmoid", "moe.choice_bias": True, "moe.group_score": "top2"},
    theirs=c.PLAIN | dict(scoring_func=("sigmoid", None), topk_method=("noaux_tc", None)),
    layers=MoELayers(lambda said, found: []),  # the field of dense_layers states it
    keys=(USE_QK_NORM, SHARED_EXPERTS, Key("num_mtp_layers", null=False)),
    write=write_keys,
    partial=lambda hf: 0.5,
    fp32=(CHOICE_BIAS,),
)

GLM4V_MOE = replace(  # the text part of GLM-4.5V, without norms on queries and keys
    GLM4_MOE,
    model_type="glm4v_moe",
    class_name="Glm4vMoeForConditionalGeneration",
    rules=under(RULES, "model.", "model.language_model."),
    fields=(
        *(field for field in GLM4_MOE.fields if field.ours != "qk_norm"),
        c.BIASES[0]._replace(default=True),
        c.AUXILIARY._replace(keys=(), default=0.0001),
    ),
    theirs=GLM4_MOE.theirs | dict(tie_word_embeddings=False),
    keys=(SHARED_EXPERTS,),
    extra=(r"model\.visual\..*",),
    nested="text_config",
)
