"""FlexOlmo's entry: OLMoE with norms behind attention and feed-forward, and none before them.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.hf.architectures.common import (
    ALL_MOE,
    AUXILIARY,
    BIASES,
    BLOCK,
    DECODER,
    EXPERT_FFN,
    EXPERTS,
    LAYER,
    MOE,
    PLAIN,
    QK_NORM,
    RENORMALIZE,
    SAID_HEAD_DIM,
    SIZES,
    TOP_K,
    one,
)
from tmoe.hf.rules import Architecture

NORMS = (
    one(f"{BLOCK}.attention_post_norm.weight", f"{LAYER}.post_attention_layernorm.weight"),
    one(f"{BLOCK}.ffn_post_norm.weight", f"{LAYER}.post_feedforward_layernorm.weight"),
)

FLEX_OLMO = Architecture(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    NORMS + DECODER + QK_NORM + MOE,
    (
        *SIZES,
        *BIASES,
        SAID_HEAD_DIM,
        EXPERT_FFN,
        EXPERTS._replace(default=7),
        TOP_K._replace(default=5),
        RENORMALIZE,
        AUXILIARY._replace(default=0.01),
    ),
    ours=dict(qk_norm="full", norms="post"),
    theirs=PLAIN,
    layers=ALL_MOE,
    theta=500000.0,
)
