"""Solar-Open's entry: the attention of Llama, the MoE of DeepSeek-V3 in every block.

next: hf/architectures/deepseek.py
"""

from __future__ import annotations

from tmoe.hf.architectures.common import (
    ALL_MOE,
    BIASES,
    DECODER,
    NORM_EPS,
    PLAIN,
    SAID_HEAD_DIM,
    SIZES,
    key_heads,
)
from tmoe.hf.architectures.deepseek import (
    CHOICE_BIAS,
    GROUPED,
    SHARED_EXPERTS,
    SIGMOID_KEYS,
    V3_MOE,
    one_group,
    shared_width,
    write_shared,
)
from tmoe.hf.rules import Architecture

SOLAR_OPEN = Architecture(
    "solar_open",
    "SolarOpenForCausalLM",
    DECODER + V3_MOE,
    (
        *SIZES,
        NORM_EPS,
        key_heads(8),
        BIASES[0],  # queries, keys and values; the output has none
        SAID_HEAD_DIM._replace(default=128),
        *one_group(scaling=1.0, renormalize=True),
        shared_width(1),
    ),
    ours=GROUPED,
    theirs=PLAIN | SIGMOID_KEYS | dict(first_k_dense_replace=0, use_qk_norm=False),
    layers=ALL_MOE,
    keys=(SHARED_EXPERTS,),
    write=write_shared,
    theta=1e6,
    fp32=(CHOICE_BIAS,),
)
