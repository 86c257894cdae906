"""Mistral's entry: a dense Llama with a sliding window in every block, or in none.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.hf.architectures import common as c
from tmoe.hf.rules import Architecture, Windows

MISTRAL = Architecture(
    "mistral",
    "MistralForCausalLM",
    c.DECODER + c.DENSE,
    (*c.SIZES, c.key_heads(8), c.HEAD_DIM, c.FFN),
    ours={},
    theirs=c.PLAIN,
    layers=c.ALL_DENSE,
    windows=Windows(("sliding_window",), lambda hf, layer: True, 4096),
)
