"""gpt-oss's entry: weights for x W, gate and up rows in turns, biases, sinks, windows in every second block.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.base.activations import ACTIVATIONS
from tmoe.hf.architectures.common import (
    ALL_MOE,
    AUXILIARY,
    BIASES,
    BLOCK,
    DECODER,
    EXPERT_FFN,
    LAYER,
    LOCAL_EXPERTS,
    NORM_EPS,
    PLAIN,
    SAID_HEAD_DIM,
    SIZES,
    TOP_K,
    key_heads,
    one,
)
from tmoe.hf.rules import Architecture, Field, Part, Rule, Windows

ACTIVATION = "clamped"


def woven(theirs: str, transposed: bool = False) -> tuple[Part, Part]:
    """Parts of a tensor whose rows take turns: gate, up, gate, up. The even rows are the gate's."""
    return Part(theirs, None, transposed, 2, 0), Part(theirs, None, transposed, 2, 1)


MLP = (  # weights for x W, where tmoe and the others have W x
    one(f"{BLOCK}.attention.sinks", f"{LAYER}.self_attn.sinks"),
    *(one(f"{BLOCK}.moe.router.{kind}", f"{LAYER}.mlp.router.{kind}") for kind in ("weight", "bias")),
    Rule(f"{BLOCK}.moe.experts.gate_up", woven(f"{LAYER}.mlp.experts.gate_up_proj", transposed=True)),
    Rule(f"{BLOCK}.moe.experts.gate_up_bias", woven(f"{LAYER}.mlp.experts.gate_up_proj_bias")),
    Rule(f"{BLOCK}.moe.experts.down", (Part(f"{LAYER}.mlp.experts.down_proj", transposed=True),)),
    one(f"{BLOCK}.moe.experts.down_bias", f"{LAYER}.mlp.experts.down_proj_bias"),
)

GPT_OSS = Architecture(
    "gpt_oss",
    "GptOssForCausalLM",
    DECODER + MLP,
    (
        *SIZES,
        NORM_EPS,
        key_heads(8),
        *(bias._replace(default=True) for bias in BIASES),
        SAID_HEAD_DIM._replace(default=64),
        EXPERT_FFN,
        LOCAL_EXPERTS,
        TOP_K,
        AUXILIARY,
        Field("moe.activation", (), ACTIVATION),
    ),
    ours={
        "sinks": True,
        "moe.softmax": "after",
        "moe.router_bias": True,
        "moe.bias": True,
    },
    theirs=PLAIN | ACTIVATIONS[ACTIVATION].keys | dict(hidden_act=ACTIVATIONS[ACTIVATION].hidden_act),
    layers=ALL_MOE,
    theta=150000.0,
    rope=dict(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096),
    windows=Windows(("sliding_window", "layer_types"), lambda hf, layer: layer % 2 == 0, 128, null=False),
)
