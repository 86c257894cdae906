"""GLM's entry: GLM-4.7-Flash (glm4_moe_lite), a DeepSeek-V3 whose config.json lists which blocks are MoE.

next: hf/architectures/deepseek.py
"""

from __future__ import annotations

from dataclasses import replace

from tmoe.hf.architectures import common as c
from tmoe.hf.architectures import deepseek
from tmoe.hf.rules import Architecture, Field, Key

GLM4_MOE_LITE = Architecture(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    deepseek.V3_RULES,
    (
        *deepseek.FIELDS,
        c.NORM_EPS,
        c.key_heads(20),
        Field("mla.q_rank", ("q_lora_rank",), 768, 0, least=1),
        Field("mla.interleave", ("rope_interleave",), True),
        *deepseek.one_group(scaling=1.8, renormalize=True),
        deepseek.shared_width(1),
    ),
    ours={"attention": "mla"} | deepseek.GROUPED,
    theirs=c.PLAIN | deepseek.SIGMOID_KEYS | dict(attention_bias=False),
    layers=c.typed_layers(1),
    keys=(deepseek.SHARED_EXPERTS, c.MLP_TYPES),
    write=deepseek.write_latent_keys,
    copies=dict(head_dim=deepseek.rope_width, first_k_dense_replace=c.leading_dense(1)),
    fp32=(deepseek.CHOICE_BIAS,),
)

# GLM-5 is a DeepSeek-V3.2 whose blocks may share the keys that one indexer chooses.
GLM_MOE_DSA = replace(
    deepseek.DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    class_name="GlmMoeDsaForCausalLM",
    fields=(
        *deepseek.DEEPSEEK_V32.fields,
        c.NORM_EPS,
        c.key_heads(64),
        Field("mla.q_rank", ("q_lora_rank",), 2048, least=1),
        *deepseek.one_group(scaling=2.5, renormalize=True),
    ),
    keys=(*deepseek.DEEPSEEK_V32.keys, Key("indexer_types", tuple[str, ...])),
)
