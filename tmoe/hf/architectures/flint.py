"""Flint's entry: Qwen3-MoE with sinks, positions only in windows, sigmoid scores, ungated shared experts.

next: hf/architectures/qwen.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tmoe.hf.architectures import common as c
from tmoe.hf.architectures.qwen import ONLY_DENSE, QWEN3_MOE, SPARSE_STEP, read_layers, write_layers
from tmoe.hf.rules import HF, Field, MoELayers, Windows

ATTN = f"{c.LAYER}.self_attn"


def read_first_dense(said: HF, found: dict[str, Any]) -> list[str]:
    """MoE blocks as in Qwen's entry, but the first two are dense if mlp_only_layers is missing or null."""
    first = [i for i in range(found.get("layers") or 0) if i < 2]
    return read_layers({ONLY_DENSE.name: first} | said, found)


def slides(hf: HF, layer: int) -> bool:
    return layer >= 2 and layer % 4 != 1 and layer != hf["num_hidden_layers"] - 1


FLINT = replace(
    QWEN3_MOE,
    model_type="flint",
    class_name="FlintForCausalLM",
    rules=(
        *QWEN3_MOE.rules,
        *c.swiglu(f"{c.BLOCK}.moe.shared", f"{c.LAYER}.mlp.shared_expert"),
        c.also(c.one(f"{c.BLOCK}.attention.sinks", f"{ATTN}.softmax_offset"), f"{ATTN}.sinks"),
    ),
    fields=(
        *(
            *QWEN3_MOE.fields,
            c.SAID_HEAD_DIM._replace(default=128),
            c.EXPERTS._replace(keys=("num_experts",)),
        ),
        Field("moe.shared_dim", ("shared_expert_intermediate_size",), 1024),
        c.RENORMALIZE._replace(default=True),
        c.AUXILIARY._replace(default=0.0005),
    ),
    ours={"qk_norm": "head", "sinks": True, "moe.score": "sigmoid"},
    layers=MoELayers(read_first_dense, write_layers),
    keys=(SPARSE_STEP, ONLY_DENSE),
    windows=Windows(("sliding_window", "layer_types"), slides, 513, null=False, rotary=True),
    fp32=("mlp.gate.weight", "softmax_offset", "sinks"),
)
