"""GLM's entries for GLM-4.5 to 4.7 and 4.5V: half of a head's channels turn, and an MoE as DeepSeek-V3's.

next: hf/architectures/common.py
"""

from __future__ import annotations

from dataclasses import replace

from tmoe.config.model import ModelConfig
from tmoe.hf.architectures.common import (
    AUXILIARY,
    BIASES,
    BLOCK,
    DECODER,
    DENSE,
    EXPERTS,
    FFN,
    LAYER,
    MOE,
    MOE_FFN,
    NORM_EPS,
    PLAIN,
    QK_NORM,
    RENORMALIZE,
    SAID_HEAD_DIM,
    SIZES,
    TOP_K,
    key_heads,
    one,
    swiglu,
)
from tmoe.hf.architectures.deepseek import CHOICE_BIAS, SHARED_EXPERTS, shared_width
from tmoe.hf.rules import HF, Architecture, Field, Key, Layers, under

USE_QK_NORM = Key("use_qk_norm", bool, null=False)
SHARED = swiglu(f"{BLOCK}.moe.shared", f"{LAYER}.mlp.shared_experts")


def write_keys(cfg: ModelConfig) -> HF:
    shared = cfg.moe.shared_dim // cfg.moe.ffn_dim
    return dict(n_shared_experts=shared, use_qk_norm=cfg.qk_norm == "head", num_nextn_predict_layers=0)


GLM4_MOE = Architecture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (
        *(DECODER + QK_NORM + DENSE + MOE + SHARED),
        one(f"{BLOCK}.moe.router.choice_bias", f"{LAYER}.mlp.gate.{CHOICE_BIAS}"),
    ),
    (
        *SIZES,
        NORM_EPS,
        key_heads(8),
        SAID_HEAD_DIM,
        BIASES[0],  # the output projection has none
        Field("qk_norm", (), lambda hf: "head" if hf.get(USE_QK_NORM.name, False) else "none"),
        FFN,
        MOE_FFN,
        EXPERTS._replace(keys=("n_routed_experts", "num_local_experts")),
        TOP_K,
        RENORMALIZE._replace(default=True),
        shared_width(1),
        Field("dense_layers", ("first_k_dense_replace",), 1),
        Field("moe.scaling", ("routed_scaling_factor",), 1.0),
        Field("moe.groups", ("n_group",), 1),
        Field("moe.top_groups", ("topk_group",), 1),
        AUXILIARY._replace(keys=(), default=0.001),
    ),
    ours={"moe.score": "sigmoid", "moe.choice_bias": True, "moe.group_score": "top2"},
    theirs=PLAIN | dict(scoring_func=("sigmoid", None), topk_method=("noaux_tc", None)),
    layers=Layers(lambda said, found: []),  # dense_layers says it
    keys=(USE_QK_NORM, SHARED_EXPERTS, Key("num_mtp_layers", null=False)),
    write=write_keys,
    partial=lambda hf: 0.5,
    fp32=(CHOICE_BIAS,),
)

GLM4V_MOE = replace(  # the text part of GLM-4.5V, without norms on queries and keys
    GLM4_MOE,
    model_type="glm4v_moe",
    class_name="Glm4vMoeForConditionalGeneration",
    rules=under(GLM4_MOE.rules, "model.", "model.language_model."),
    fields=(
        *(field for field in GLM4_MOE.fields if field.ours != "qk_norm"),
        BIASES[0]._replace(default=True),
        AUXILIARY._replace(keys=(), default=0.0001),
    ),
    theirs=GLM4_MOE.theirs | dict(tie_word_embeddings=False),
    keys=(SHARED_EXPERTS,),
    extra=(r"model\.visual\..*",),
    nested="text_config",
)
