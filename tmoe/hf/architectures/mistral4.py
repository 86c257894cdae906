"""Mistral 4's entry, its text model: latent attention with queries scaled by position, softmax in groups.

next: hf/architectures/deepseek.py
"""

from __future__ import annotations

from tmoe.hf.architectures.common import BY_A_FIELD, LEADING_DENSE, PLAIN, RENORMALIZE, all_heads, key_heads
from tmoe.hf.architectures.deepseek import (
    FIELDS,
    RULES,
    SHARED_EXPERTS,
    one_group,
    shared_width,
    write_latent_keys,
)
from tmoe.hf.rules import HF, Architecture, Field

YARN = dict(rope_type="yarn", rope_theta=1e4, factor=128.0, original_max_position_embeddings=8192)
YARN |= dict(beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)


def width_of_query(hf: HF) -> int:
    return hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]


def turning_share(hf: HF) -> float:
    return hf["qk_rope_head_dim"] / width_of_query(hf)


MISTRAL4 = Architecture(
    "mistral4",
    "Mistral4ForCausalLM",
    # transformers' class reads experts stacked, and in no other way
    tuple(rule._replace(parts=rule.held, held=()) if rule.held else rule for rule in RULES),
    (
        *FIELDS,
        key_heads(32, all_heads),
        Field("mla.q_rank", ("q_lora_rank",), 1024, 0, least=1),
        Field("mla.interleave", ("rope_interleave",), True, False),
        *one_group(scaling=1.0, renormalize=True),
        RENORMALIZE._replace(default=True, null=False),
        LEADING_DENSE,
        shared_width(1),
    ),
    ours={"attention": "mla", "moe.group_score": "top2"},
    theirs=PLAIN | dict(attention_bias=False),
    layers=BY_A_FIELD,
    keys=(SHARED_EXPERTS,),
    write=write_latent_keys,
    rope=YARN,
    query_beta="llama_4_scaling_beta",
    partial=turning_share,
    copies=dict(head_dim=width_of_query, qk_head_dim=width_of_query),
)
