"""Solar-Open's entry: the attention of Llama, and the MoE of DeepSeek-V3 in every block.

next: hf/architectures/deepseek.py
"""

from __future__ import annotations

from tmoe.hf.architectures import common as c
from tmoe.hf.architectures import deepseek
from tmoe.hf.rules import Architecture

SOLAR_OPEN = Architecture(
    "solar_open",
    "SolarOpenForCausalLM",
    c.DECODER + deepseek.V3_MOE,
    (
        *c.SIZES,
        c.NORM_EPS,
        c.key_heads(8),
        c.BIASES[0],  # only queries, keys and values have a bias
        c.SAID_HEAD_DIM._replace(default=128),
        *deepseek.one_group(scaling=1.0, renormalize=True),
        deepseek.shared_width(1),
    ),
    ours=deepseek.GROUPED,
    theirs=c.PLAIN | deepseek.SIGMOID_KEYS | dict(first_k_dense_replace=0, use_qk_norm=False),
    layers=c.ALL_MOE,
    keys=(deepseek.SHARED_EXPERTS,),
    write=deepseek.write_shared,
    theta=1e6,
    fp32=(deepseek.CHOICE_BIAS,),
)
