"""Qwen3-VL-MoE's entry: the text part of a model that sees, whose other tensors are carried as they are.

For text alone its three axes of positions are one, and its RoPE is Qwen3's. Experts are published for x W;
transformers 5 saves them for W x under the same names.

next: hf/architectures/qwen.py
"""

from __future__ import annotations

from tmoe.hf.architectures.common import (
    AUXILIARY,
    BIASES,
    BLOCK,
    DECODER,
    DENSE,
    EXPERTS,
    FFN,
    HEAD_DIM,
    HELD,
    LAYER,
    MOE_FFN,
    PLAIN,
    QK_NORM,
    SIZES,
    TOP_K,
    also,
    key_heads,
    one,
)
from tmoe.hf.architectures.qwen import LAYERS, ONLY_DENSE, SPARSE_STEP
from tmoe.hf.rules import Architecture, Part, Rule, under

MOE = (
    one(f"{BLOCK}.moe.router.weight", f"{LAYER}.mlp.gate.weight"),
    *(
        also(
            Rule(f"{BLOCK}.moe.experts.{name}", (Part(f"{HELD}.{name}_proj", transposed=True),)),
            f"{HELD}.{name}_proj",
        )
        for name in ("gate_up", "down")
    ),
)

QWEN3_VL_MOE = Architecture(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    under(DECODER + QK_NORM + DENSE + MOE, "model.", "model.language_model."),
    (
        *SIZES,
        key_heads(16),
        *BIASES,
        HEAD_DIM,
        FFN,
        MOE_FFN._replace(default=1408),
        EXPERTS._replace(default=60),
        TOP_K._replace(default=4),
        AUXILIARY,
    ),
    ours={"qk_norm": "head", "moe.renormalize": True},
    theirs=PLAIN
    | dict(tie_word_embeddings=False, norm_topk_prob=(True, None), use_sliding_window=(False, None)),
    layers=LAYERS,
    keys=(SPARSE_STEP, ONLY_DENSE),
    theta=500000.0,
    extra=(r"model\.visual\..*",),
    nested="text_config",
)
