"""Llama's entry: the plain dense model.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.hf.architectures import common as c
from tmoe.hf.rules import Architecture

LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    c.DECODER + c.DENSE,
    (*c.SIZES, *c.BIASES, c.HEAD_DIM, c.FFN),
    ours={},
    theirs=c.PLAIN | dict(mlp_bias=False),
    layers=c.ALL_DENSE,
)
