"""Mistral's entry: a dense Llama with a sliding window in every block, or in none.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.hf.architectures.common import (
    ALL_DENSE,
    DECODER,
    DENSE,
    FFN,
    HEAD_DIM,
    PLAIN,
    SIZES,
    key_heads,
)
from tmoe.hf.rules import Architecture, Windows

MISTRAL = Architecture(
    "mistral",
    "MistralForCausalLM",
    DECODER + DENSE,
    (*SIZES, key_heads(8), HEAD_DIM, FFN),
    ours={},
    theirs=PLAIN,
    layers=ALL_DENSE,
    windows=Windows(("sliding_window",), lambda hf, layer: True, 4096),
)
