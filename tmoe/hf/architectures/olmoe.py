"""OLMoE's entry.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.hf.architectures.common import (
    ALL_MOE,
    AUXILIARY,
    BIASES,
    DECODER,
    EXPERT_FFN,
    EXPERTS,
    HEAD_DIM,
    MOE,
    NORM_EPS,
    PLAIN,
    QK_NORM,
    RENORMALIZE,
    SIZES,
    TOP_K,
    width_of_head,
)
from tmoe.hf.rules import Architecture

OLMOE = Architecture(
    "olmoe",
    "OlmoeForCausalLM",
    DECODER + QK_NORM + MOE,
    (
        *SIZES,
        NORM_EPS,
        *BIASES,
        HEAD_DIM._replace(keys=()),  # always D/H, because the query norm is as wide as the model
        EXPERT_FFN,
        EXPERTS,
        TOP_K,
        RENORMALIZE,
        AUXILIARY._replace(default=0.01),
    ),
    ours=dict(qk_norm="full"),
    theirs=PLAIN | dict(clip_qkv=None),
    layers=ALL_MOE,
    copies=dict(head_dim=width_of_head),
)
