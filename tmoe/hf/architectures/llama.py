"""Llama's entry: dense, without anything special.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.hf.architectures.common import ALL_DENSE, BIASES, DECODER, DENSE, FFN, HEAD_DIM, PLAIN, SIZES
from tmoe.hf.rules import Architecture

LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    DECODER + DENSE,
    (*SIZES, *BIASES, HEAD_DIM, FFN),
    ours={},
    theirs=PLAIN | dict(mlp_bias=False),
    layers=ALL_DENSE,
)
