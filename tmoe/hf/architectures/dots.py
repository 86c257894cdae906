"""dots.llm1's entry: the attention of Qwen3, the MoE of DeepSeek-V3, windows from a block on.

next: hf/architectures/deepseek.py, hf/architectures/qwen.py
"""

from __future__ import annotations

from tmoe.hf.architectures.common import (
    BIASES,
    BY_A_FIELD,
    DECODER,
    DENSE,
    FFN,
    LEADING_DENSE,
    PLAIN,
    QK_NORM,
    RENORMALIZE,
    SAID_HEAD_DIM,
    SIZES,
    all_heads,
    key_heads,
)
from tmoe.hf.architectures.deepseek import (
    CHOICE_BIAS,
    GROUPED,
    SHARED_EXPERTS,
    SIGMOID_KEYS,
    V3_MOE,
    one_group,
    write_shared,
)
from tmoe.hf.architectures.qwen import FULL_LAYERS
from tmoe.hf.rules import Architecture, Field, Windows

DOTS1 = Architecture(
    "dots1",
    "Dots1ForCausalLM",
    DECODER + QK_NORM + DENSE + V3_MOE,
    (
        *SIZES,
        key_heads(32, all_heads),
        *BIASES,
        SAID_HEAD_DIM,
        FFN,
        *one_group(scaling=1.0, renormalize=False),
        RENORMALIZE._replace(null=False),
        Field("moe.shared_dim", (), lambda hf: hf["moe_intermediate_size"] * hf[SHARED_EXPERTS.name]),
        LEADING_DENSE,
    ),
    ours={"qk_norm": "head"} | GROUPED,
    theirs=PLAIN | SIGMOID_KEYS | dict(moe_layer_freq=1),
    layers=BY_A_FIELD,
    keys=(SHARED_EXPERTS, FULL_LAYERS._replace(null=False)),
    write=write_shared,
    windows=Windows(
        ("sliding_window", "layer_types"), lambda hf, layer: layer >= hf.get(FULL_LAYERS.name, 62), 4096
    ),
    fp32=(CHOICE_BIAS,),
)
