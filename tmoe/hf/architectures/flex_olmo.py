"""FlexOlmo's entry: OLMoE with norms after attention and feed-forward, and none before them.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.hf.architectures import common as c
from tmoe.hf.rules import Architecture

NORMS = (
    c.one(f"{c.BLOCK}.attention_post_norm.weight", f"{c.LAYER}.post_attention_layernorm.weight"),
    c.one(f"{c.BLOCK}.ffn_post_norm.weight", f"{c.LAYER}.post_feedforward_layernorm.weight"),
)

FLEX_OLMO = Architecture(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    NORMS + c.DECODER + c.QK_NORM + c.MOE,
    (
        *c.SIZES,
        *c.BIASES,
        c.SAID_HEAD_DIM,
        c.EXPERT_FFN,
        c.EXPERTS._replace(default=7),
        c.TOP_K._replace(default=5),
        c.RENORMALIZE,
        c.AUXILIARY._replace(default=0.01),
    ),
    ours=dict(qk_norm="full", norms="post"),
    theirs=c.PLAIN,
    layers=c.ALL_MOE,
    theta=500000.0,
)
