"""Mixtral's entry: a Llama with an MoE in every block.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.hf.architectures import common as c
from tmoe.hf.rules import Architecture, Windows

SPARSE = f"{c.LAYER}.block_sparse_moe"
MOE = (
    c.also(c.one(f"{c.BLOCK}.moe.router.weight", f"{SPARSE}.gate.weight"), f"{c.LAYER}.mlp.gate.weight"),
    *c.experts(f"{SPARSE}.experts", "w1", "w3", "w2"),
)

MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    c.DECODER + MOE,
    (*c.SIZES, c.NORM_EPS, c.key_heads(8), c.HEAD_DIM, c.EXPERT_FFN, c.LOCAL_EXPERTS, c.TOP_K, c.AUXILIARY),
    ours={"moe.softmax": "after"},
    theirs=c.PLAIN | dict(router_jitter_noise=0.0),
    layers=c.ALL_MOE,
    theta=1e6,
    windows=Windows(("sliding_window",), lambda hf, layer: True),
)
