"""ERNIE-4.5's entry: RoPE on pairs of adjacent channels, and softmax scores with a choice bias.

Its config.json states the MoE blocks by the first block, the last block and the step between them.

next: hf/architectures/common.py
"""

from __future__ import annotations

from typing import Any

from tmoe.config.model import ModelConfig
from tmoe.hf.architectures import common as c
from tmoe.hf.architectures.deepseek import CHOICE_BIAS
from tmoe.hf.rules import HF, INV_FREQ, Architecture, Field, Key, MoELayers, TensorPart, TensorRule

STATICS = f"moe_statics.{CHOICE_BIAS}"  # [1, E]
BIAS = TensorRule(
    f"{c.BLOCK}.moe.router.choice_bias",
    (TensorPart(f"{c.LAYER}.mlp.{STATICS}", framed=True),),
    (TensorPart(f"{c.LAYER}.mlp.gate.{STATICS}", framed=True),),
)
FIRST, LAST, STEP = (
    Key(f"moe_layer_{name}", least=least, null=False)
    for name, least in dict(start_index=0, end_index=-1, interval=1).items()
)
SHARED_EXPERTS = Key("moe_num_shared_experts", least=0, null=False)


def read_layers(said: HF, found: dict[str, Any]) -> list[str]:
    """MoE blocks: those from first to last (-1: the model's last) whose number, from 1, the step divides."""
    layers = found.get("layers") or 0
    last = said.get(LAST.name, -1)
    last = layers - 1 if last == -1 else last
    numbers = range(said.get(FIRST.name, 1), min(last, layers - 1) + 1)
    c.put_sparse(found, [i for i in numbers if (i + 1) % said.get(STEP.name, 1) == 0])
    return []


def write_layers(cfg: ModelConfig) -> HF:
    sparse = [i for i in range(cfg.layers) if cfg.is_moe(i)] or [cfg.layers]
    step = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return {FIRST.name: sparse[0], LAST.name: sparse[-1], STEP.name: step}


def write_keys(cfg: ModelConfig) -> HF:
    return {SHARED_EXPERTS.name: cfg.moe.shared_dim // cfg.moe.ffn_dim}


def shared_width(hf: HF) -> int:
    return hf["moe_intermediate_size"] * hf.get(SHARED_EXPERTS.name, 2)


ERNIE4_5_MOE = Architecture(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    (
        *(c.DECODER + c.DENSE + c.MOE),
        BIAS,
        *c.swiglu(f"{c.BLOCK}.moe.shared", f"{c.LAYER}.mlp.shared_experts"),
    ),
    (
        *c.SIZES,
        c.NORM_EPS,
        Field("tied", ("tie_word_embeddings",), True),
        c.key_heads(4),
        c.SAID_HEAD_DIM,
        c.FFN,
        c.MOE_FFN,
        Field("moe.experts", ("moe_num_experts", "num_experts"), 64),
        c.TOP_K._replace(keys=("moe_k", "num_experts_per_tok"), default=6),
        Field("moe.shared_dim", (), shared_width),
        c.AUXILIARY._replace(null=0.001),
    ),
    ours={"rope.interleave": True, "moe.choice_bias": True, "moe.renormalize": True},
    theirs=c.PLAIN | dict(use_bias=(False, None), moe_norm_min=1e-12),
    layers=MoELayers(read_layers, write_layers),
    keys=(FIRST, LAST, STEP, SHARED_EXPERTS),
    write=write_keys,
    theta=500000.0,
    fp32=(CHOICE_BIAS, "mlp.gate.weight"),
    extra=(*INV_FREQ, r"(model\.)?mtp.*"),
)
