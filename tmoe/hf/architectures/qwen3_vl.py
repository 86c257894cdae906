"""Qwen3-VL-MoE's entry: the text part of a model of images and text; other tensors are kept for an export.

For text alone, its three axes of positions are equal, and its RoPE is that of Qwen3. Experts are published
for x W; transformers 5 saves them for W x under the same names.

next: hf/architectures/qwen.py
"""

from __future__ import annotations

from tmoe.hf.architectures import common as c
from tmoe.hf.architectures.qwen import LAYERS, ONLY_DENSE, SPARSE_STEP
from tmoe.hf.rules import Architecture, TensorPart, TensorRule, under

MOE = (
    c.one(f"{c.BLOCK}.moe.router.weight", f"{c.LAYER}.mlp.gate.weight"),
    *(
        c.also(
            TensorRule(
                f"{c.BLOCK}.moe.experts.{name}", (TensorPart(f"{c.HELD}.{name}_proj", transposed=True),)
            ),
            f"{c.HELD}.{name}_proj",
        )
        for name in ("gate_up", "down")
    ),
)

QWEN3_VL_MOE = Architecture(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    under(c.DECODER + c.QK_NORM + c.DENSE + MOE, "model.", "model.language_model."),
    (
        *c.SIZES,
        c.key_heads(16),
        *c.BIASES,
        c.HEAD_DIM,
        c.FFN,
        c.MOE_FFN._replace(default=1408),
        c.EXPERTS._replace(default=60),
        c.TOP_K._replace(default=4),
        c.AUXILIARY,
    ),
    ours={"qk_norm": "head", "moe.renormalize": True},
    theirs=c.PLAIN
    | dict(tie_word_embeddings=False, norm_topk_prob=(True, None), use_sliding_window=(False, None)),
    layers=LAYERS,
    keys=(SPARSE_STEP, ONLY_DENSE),
    theta=500000.0,
    extra=(r"model\.visual\..*",),
    nested="text_config",
)
