"""dots.llm1's entry: the attention of Qwen3, the MoE of DeepSeek-V3, and windows in the later blocks.

next: hf/architectures/deepseek.py, hf/architectures/qwen.py
"""

from __future__ import annotations

from tmoe.hf.architectures import common as c
from tmoe.hf.architectures import deepseek
from tmoe.hf.architectures.qwen import FULL_LAYERS
from tmoe.hf.rules import Architecture, Field, Windows

DOTS1 = Architecture(
    "dots1",
    "Dots1ForCausalLM",
    c.DECODER + c.QK_NORM + c.DENSE + deepseek.V3_MOE,
    (
        *c.SIZES,
        c.key_heads(32, c.all_heads),
        *c.BIASES,
        c.SAID_HEAD_DIM,
        c.FFN,
        *deepseek.one_group(scaling=1.0, renormalize=False),
        c.RENORMALIZE._replace(null=False),
        Field(
            "moe.shared_dim", (), lambda hf: hf["moe_intermediate_size"] * hf[deepseek.SHARED_EXPERTS.name]
        ),
        c.LEADING_DENSE,
    ),
    ours={"qk_norm": "head"} | deepseek.GROUPED,
    theirs=c.PLAIN | deepseek.SIGMOID_KEYS | dict(moe_layer_freq=1),
    layers=c.BY_A_FIELD,
    keys=(deepseek.SHARED_EXPERTS, FULL_LAYERS._replace(null=False)),
    write=deepseek.write_shared,
    windows=Windows(
        ("sliding_window", "layer_types"), lambda hf, layer: layer >= hf.get(FULL_LAYERS.name, 62), 4096
    ),
    fp32=(deepseek.CHOICE_BIAS,),
)
