"""Mellum's entry: Qwen3-MoE, in which blocks with a window have a separate RoPE base.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.hf.architectures import common as c
from tmoe.hf.rules import INV_FREQ, Architecture, Windows

MELLUM = Architecture(
    "mellum",
    "MellumForCausalLM",
    c.DECODER + c.QK_NORM + c.DENSE + c.MOE,
    (
        *c.SIZES,
        c.key_heads(4),
        *c.BIASES,
        c.SAID_HEAD_DIM._replace(default=128),
        c.FFN,
        c.MOE_FFN,
        c.EXPERTS,
        c.TOP_K,
        c.RENORMALIZE._replace(default=True),
        c.AUXILIARY,
    ),
    ours=dict(qk_norm="head"),
    theirs=c.PLAIN,
    layers=c.typed_layers(0),
    keys=(c.MLP_TYPES,),
    rope=dict(full_attention=dict(rope_theta=500000.0), sliding_attention=dict(rope_theta=10000.0)),
    rope_by_kind=True,
    windows=Windows(("sliding_window", "layer_types"), lambda hf, layer: False, 1024),
    extra=(*INV_FREQ, r"mtp\..*"),
)
