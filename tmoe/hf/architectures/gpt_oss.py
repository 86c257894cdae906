"""gpt-oss's entry: weights for x W, alternating gate and up rows, biases, sinks, windows in every 2nd block.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.base.activations import ACTIVATIONS
from tmoe.hf.architectures import common as c
from tmoe.hf.rules import Architecture, Field, TensorPart, TensorRule, Windows

ACTIVATION = "clamped"


def woven(theirs: str, transposed: bool = False) -> tuple[TensorPart, TensorPart]:
    """The two parts of a tensor with alternating rows: gate, up, gate, up. The even rows are gate rows."""
    return TensorPart(theirs, None, transposed, 2, 0), TensorPart(theirs, None, transposed, 2, 1)


MLP = (  # weights for x W; tmoe and the other architectures have W x
    c.one(f"{c.BLOCK}.attention.sinks", f"{c.LAYER}.self_attn.sinks"),
    *(c.one(f"{c.BLOCK}.moe.router.{kind}", f"{c.LAYER}.mlp.router.{kind}") for kind in ("weight", "bias")),
    TensorRule(
        f"{c.BLOCK}.moe.experts.gate_up", woven(f"{c.LAYER}.mlp.experts.gate_up_proj", transposed=True)
    ),
    TensorRule(f"{c.BLOCK}.moe.experts.gate_up_bias", woven(f"{c.LAYER}.mlp.experts.gate_up_proj_bias")),
    TensorRule(
        f"{c.BLOCK}.moe.experts.down", (TensorPart(f"{c.LAYER}.mlp.experts.down_proj", transposed=True),)
    ),
    c.one(f"{c.BLOCK}.moe.experts.down_bias", f"{c.LAYER}.mlp.experts.down_proj_bias"),
)

GPT_OSS = Architecture(
    "gpt_oss",
    "GptOssForCausalLM",
    c.DECODER + MLP,
    (
        *c.SIZES,
        c.NORM_EPS,
        c.key_heads(8),
        *(bias._replace(default=True) for bias in c.BIASES),
        c.SAID_HEAD_DIM._replace(default=64),
        c.EXPERT_FFN,
        c.LOCAL_EXPERTS,
        c.TOP_K,
        c.AUXILIARY,
        Field("moe.activation", (), ACTIVATION),
    ),
    ours={
        "sinks": True,
        "moe.softmax": "after",
        "moe.router_bias": True,
        "moe.bias": True,
    },
    theirs=c.PLAIN | ACTIVATIONS[ACTIVATION].keys | dict(hidden_act=ACTIVATIONS[ACTIVATION].hidden_act),
    layers=c.ALL_MOE,
    theta=150000.0,
    rope=dict(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096),
    windows=Windows(("sliding_window", "layer_types"), lambda hf, layer: layer % 2 == 0, 128, null=False),
)
