"""Entry of Mistral 4's text model: latent attention with queries scaled by position, softmax in groups.

next: hf/architectures/deepseek.py
"""

from __future__ import annotations

from tmoe.hf.architectures import common as c
from tmoe.hf.architectures import deepseek
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
    # transformers' class reads only stacked experts
    tuple(rule._replace(parts=rule.held, held=()) if rule.held else rule for rule in deepseek.RULES),
    (
        *deepseek.FIELDS,
        c.key_heads(32, c.all_heads),
        Field("mla.q_rank", ("q_lora_rank",), 1024, 0, least=1),
        Field("mla.interleave", ("rope_interleave",), True, False),
        *deepseek.one_group(scaling=1.0, renormalize=True),
        c.RENORMALIZE._replace(default=True, null=False),
        c.LEADING_DENSE,
        deepseek.shared_width(1),
    ),
    ours={"attention": "mla", "moe.group_score": "top2"},
    theirs=c.PLAIN | dict(attention_bias=False),
    layers=c.BY_A_FIELD,
    keys=(deepseek.SHARED_EXPERTS,),
    write=deepseek.write_latent_keys,
    rope=YARN,
    query_beta="llama_4_scaling_beta",
    partial=turning_share,
    copies=dict(head_dim=width_of_query, qk_head_dim=width_of_query),
)
