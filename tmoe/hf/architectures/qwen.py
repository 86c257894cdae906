"""Qwen's entries: the dense Qwen2 (Qwen2.5 too) and Qwen3, and Qwen2-MoE and Qwen3-MoE.

The keys decoder_sparse_step and mlp_only_layers state which blocks are MoE.

next: hf/architectures/common.py
"""

from __future__ import annotations

from typing import Any

from tmoe.config.model import ModelConfig
from tmoe.hf.architectures import common as c
from tmoe.hf.rules import HF, INV_FREQ, Architecture, Field, Key, MoELayers, Windows

SHARED = (
    *c.swiglu(f"{c.BLOCK}.moe.shared", f"{c.LAYER}.mlp.shared_expert"),
    c.one(f"{c.BLOCK}.moe.shared_gate.weight", f"{c.LAYER}.mlp.shared_expert_gate.weight"),
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
    c.put_sparse(found, sparse)
    return []


def write_layers(cfg: ModelConfig) -> HF:
    return dict(decoder_sparse_step=1, mlp_only_layers=[i for i in range(cfg.layers) if not cfg.is_moe(i)])


LAYERS = MoELayers(read_layers, write_layers)


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
    c.DECODER + c.DENSE,
    (*c.SIZES, c.key_heads(32, c.all_heads), c.SAID_HEAD_DIM, c.FFN),
    ours=dict(qkv_bias=True),
    theirs=c.PLAIN,
    layers=c.ALL_DENSE,
    keys=(USE_WINDOW, FULL_LAYERS._replace(null=False)),
    windows=LATE,
)

QWEN3 = Architecture(
    "qwen3",
    "Qwen3ForCausalLM",
    c.DECODER + c.QK_NORM + c.DENSE,
    (*c.SIZES, c.key_heads(32, c.all_heads), *c.BIASES, c.SAID_HEAD_DIM._replace(default=128), c.FFN),
    ours=dict(qk_norm="head"),
    theirs=c.PLAIN,
    layers=c.ALL_DENSE,
    keys=(USE_WINDOW, FULL_LAYERS._replace(null=False)),
    windows=LATE,
)

QWEN2_MOE = Architecture(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    c.DECODER + c.DENSE + c.MOE + SHARED,
    (
        *c.SIZES,
        c.key_heads(16),
        c.BIASES[0]._replace(keys=("qkv_bias",), default=True),
        c.SAID_HEAD_DIM,
        c.FFN,
        c.MOE_FFN,
        Field("moe.shared_dim", (SHARED_WIDTH,), 5632),
        Field("moe.shared_gate", (), lambda hf: hf.get(SHARED_WIDTH, 5632) > 0),
        c.EXPERTS._replace(keys=("num_experts",)),
        c.TOP_K,
        c.RENORMALIZE,
        c.AUXILIARY,
    ),
    ours={},
    theirs=c.PLAIN,
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
    c.DECODER + c.QK_NORM + c.DENSE + c.MOE,
    (
        *c.SIZES,
        c.key_heads(4),
        *c.BIASES,
        c.SAID_HEAD_DIM,
        c.FFN,
        c.MOE_FFN,
        c.EXPERTS,
        c.TOP_K,
        c.RENORMALIZE,
        c.AUXILIARY,
    ),
    ours=dict(qk_norm="head"),
    theirs=c.PLAIN,
    layers=LAYERS,
    keys=(SPARSE_STEP, ONLY_DENSE, USE_WINDOW, FULL_LAYERS),
    windows=Windows(("sliding_window", "use_sliding_window"), lambda hf, layer: True, 4096),
)
