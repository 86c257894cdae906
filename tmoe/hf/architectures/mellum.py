"""Mellum's entry: Qwen3-MoE, where blocks with a window have a RoPE base of their own.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.hf.architectures.common import (
    AUXILIARY,
    BIASES,
    DECODER,
    DENSE,
    EXPERTS,
    FFN,
    MLP_TYPES,
    MOE,
    MOE_FFN,
    PLAIN,
    QK_NORM,
    RENORMALIZE,
    SAID_HEAD_DIM,
    SIZES,
    TOP_K,
    key_heads,
    typed_layers,
)
from tmoe.hf.rules import INV_FREQ, Architecture, Windows

MELLUM = Architecture(
    "mellum",
    "MellumForCausalLM",
    DECODER + QK_NORM + DENSE + MOE,
    (
        *SIZES,
        key_heads(4),
        *BIASES,
        SAID_HEAD_DIM._replace(default=128),
        FFN,
        MOE_FFN,
        EXPERTS,
        TOP_K,
        RENORMALIZE._replace(default=True),
        AUXILIARY,
    ),
    ours=dict(qk_norm="head"),
    theirs=PLAIN,
    layers=typed_layers(0),
    keys=(MLP_TYPES,),
    rope=dict(full_attention=dict(rope_theta=500000.0), sliding_attention=dict(rope_theta=10000.0)),
    rope_by_kind=True,
    windows=Windows(("sliding_window", "layer_types"), lambda hf, layer: False, 1024),
    extra=(*INV_FREQ, r"mtp\..*"),
)
