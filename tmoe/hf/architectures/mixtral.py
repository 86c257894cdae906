"""Mixtral's entry.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.hf.architectures.common import (
    ALL_MOE,
    AUXILIARY,
    BLOCK,
    DECODER,
    EXPERT_FFN,
    HEAD_DIM,
    LAYER,
    LOCAL_EXPERTS,
    NORM_EPS,
    PLAIN,
    SIZES,
    TOP_K,
    also,
    experts,
    key_heads,
    one,
)
from tmoe.hf.rules import Architecture, Windows

SPARSE = f"{LAYER}.block_sparse_moe"
MOE = (
    also(one(f"{BLOCK}.moe.router.weight", f"{SPARSE}.gate.weight"), f"{LAYER}.mlp.gate.weight"),
    *experts(f"{SPARSE}.experts", "w1", "w3", "w2"),
)

MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    DECODER + MOE,
    (*SIZES, NORM_EPS, key_heads(8), HEAD_DIM, EXPERT_FFN, LOCAL_EXPERTS, TOP_K, AUXILIARY),
    ours={"moe.softmax": "after"},
    theirs=PLAIN | dict(router_jitter_noise=0.0),
    layers=ALL_MOE,
    theta=1e6,
    windows=Windows(("sliding_window",), lambda hf, layer: True),
)
