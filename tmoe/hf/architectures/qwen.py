"""Qwen's entries: the dense Qwen2 (Qwen2.5 too) and Qwen3, and Qwen2-MoE and Qwen3-MoE.

Their config.json says by decoder_sparse_step and mlp_only_layers which blocks are MoE.

next: hf/architectures/common.py
"""

from __future__ import annotations

from typing import Any

from tmoe.config.model import ModelConfig
from tmoe.hf.architectures.common import (
    ALL_DENSE,
    AUXILIARY,
    BIASES,
    BLOCK,
    DECODER,
    DENSE,
    EXPERTS,
    FFN,
    LAYER,
    MOE,
    MOE_FFN,
    PLAIN,
    QK_NORM,
    RENORMALIZE,
    SAID_HEAD_DIM,
    SIZES,
    TOP_K,
    all_heads,
    key_heads,
    one,
    put_sparse,
    swiglu,
)
from tmoe.hf.rules import HF, INV_FREQ, Architecture, Field, Key, Layers, Windows

SHARED = (
    *swiglu(f"{BLOCK}.moe.shared", f"{LAYER}.mlp.shared_expert"),
    one(f"{BLOCK}.moe.shared_gate.weight", f"{LAYER}.mlp.shared_expert_gate.weight"),
)

NO_SHARED = r"model\.layers\.\d+\.mlp\.shared_expert(_gate|\.\w+_proj)\.weight"  # where its width is 0

SPARSE_STEP = Key("decoder_sparse_step", least=1, null=False)
SHARED_WIDTH = "shared_expert_intermediate_size"
ONLY_DENSE = Key("mlp_only_layers", tuple[int, ...])
USE_WINDOW = Key("use_sliding_window", bool, null=False)
FULL_LAYERS = Key("max_window_layers")


def read_layers(said: HF, found: dict[str, Any]) -> list[str]:
    """A block is MoE if the step divides its number, counted from 1, and mlp_only_layers does not name it."""
    layers = found.get("layers") or 0
    step = said.get(SPARSE_STEP.name, 1)
    dense = said.get(ONLY_DENSE.name, [])
    if not all(0 <= i < layers for i in dense):
        return [f"mlp_only_layers={dense}: must be numbers of the {layers} layers, from 0 to {layers - 1}"]
    sparse = [i for i in range(layers) if (i + 1) % step == 0 and i not in dense]
    put_sparse(found, sparse)
    return []


def write_layers(cfg: ModelConfig) -> HF:
    return dict(decoder_sparse_step=1, mlp_only_layers=[i for i in range(cfg.layers) if not cfg.is_moe(i)])


LAYERS = Layers(read_layers, write_layers)


def last_full_layer(hf: HF) -> int:
    return hf.get(FULL_LAYERS.name, 28)


LATE = Windows(
    ("sliding_window", "use_sliding_window", "layer_types"),
    lambda hf, layer: layer >= last_full_layer(hf),
    4096,
)

QWEN2 = Architecture(
    "qwen2",
    "Qwen2ForCausalLM",
    DECODER + DENSE,
    (*SIZES, key_heads(32, all_heads), SAID_HEAD_DIM, FFN),
    ours=dict(qkv_bias=True),
    theirs=PLAIN,
    layers=ALL_DENSE,
    keys=(USE_WINDOW, FULL_LAYERS._replace(null=False)),
    windows=LATE,
)

QWEN3 = Architecture(
    "qwen3",
    "Qwen3ForCausalLM",
    DECODER + QK_NORM + DENSE,
    (*SIZES, key_heads(32, all_heads), *BIASES, SAID_HEAD_DIM._replace(default=128), FFN),
    ours=dict(qk_norm="head"),
    theirs=PLAIN,
    layers=ALL_DENSE,
    keys=(USE_WINDOW, FULL_LAYERS._replace(null=False)),
    windows=LATE,
)

QWEN2_MOE = Architecture(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    DECODER + DENSE + MOE + SHARED,
    (
        *SIZES,
        key_heads(16),
        BIASES[0]._replace(keys=("qkv_bias",), default=True),
        SAID_HEAD_DIM,
        FFN,
        MOE_FFN,
        Field("moe.shared_dim", (SHARED_WIDTH,), 5632),
        Field("moe.shared_gate", (), lambda hf: hf.get(SHARED_WIDTH, 5632) > 0),
        EXPERTS._replace(keys=("num_experts",)),
        TOP_K,
        RENORMALIZE,
        AUXILIARY,
    ),
    ours={},
    theirs=PLAIN,
    layers=LAYERS,
    keys=(SPARSE_STEP, ONLY_DENSE, USE_WINDOW, FULL_LAYERS._replace(null=False)),
    windows=Windows(
        ("sliding_window", "use_sliding_window", "layer_types"),
        lambda hf, layer: layer % 2 == 0 and layer < last_full_layer(hf),
        4096,
        null=False,
    ),
    extra=(*INV_FREQ, NO_SHARED),
)

QWEN3_MOE = Architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    DECODER + QK_NORM + DENSE + MOE,
    (
        *SIZES,
        key_heads(4),
        *BIASES,
        SAID_HEAD_DIM,
        FFN,
        MOE_FFN,
        EXPERTS,
        TOP_K,
        RENORMALIZE,
        AUXILIARY,
    ),
    ours=dict(qk_norm="head"),
    theirs=PLAIN,
    layers=LAYERS,
    keys=(SPARSE_STEP, ONLY_DENSE, USE_WINDOW, FULL_LAYERS),
    windows=Windows(("sliding_window", "use_sliding_window"), lambda hf, layer: True, 4096),
)
