"""GLM's entry: GLM-4.7-Flash (glm4_moe_lite), a DeepSeek-V3 whose config.json lists which blocks are MoE.

next: hf/architectures/deepseek.py
"""

from __future__ import annotations

from tmoe.hf.architectures.common import (
    MLP_TYPES,
    NORM_EPS,
    PLAIN,
    key_heads,
    leading_dense,
    typed_layers,
)
from tmoe.hf.architectures.deepseek import (
    CHOICE_BIAS,
    FIELDS,
    GROUPED,
    RULES,
    SHARED_EXPERTS,
    SIGMOID_KEYS,
    one_group,
    rope_width,
    shared_width,
    write_latent_keys,
)
from tmoe.hf.rules import Architecture, Field

GLM4_MOE_LITE = Architecture(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    RULES,
    (
        *FIELDS,
        NORM_EPS,
        key_heads(20),
        Field("mla.q_rank", ("q_lora_rank",), 768, 0, least=1),
        Field("mla.interleave", ("rope_interleave",), True),
        *one_group(scaling=1.8, renormalize=True),
        shared_width(1),
    ),
    ours={"attention": "mla"} | GROUPED,
    theirs=PLAIN | SIGMOID_KEYS | dict(attention_bias=False),
    layers=typed_layers(1),
    keys=(SHARED_EXPERTS, MLP_TYPES),
    write=write_latent_keys,
    copies=dict(head_dim=rope_width, first_k_dense_replace=leading_dense(1)),
    fp32=(CHOICE_BIAS,),
)
