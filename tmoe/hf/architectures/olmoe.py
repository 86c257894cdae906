"""OLMoE's entry: an MoE in every block, and query and key norms over the whole width.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.hf.architectures import common as c
from tmoe.hf.rules import Architecture

OLMOE = Architecture(
    "olmoe",
    "OlmoeForCausalLM",
    c.DECODER + c.QK_NORM + c.MOE,
    (
        *c.SIZES,
        c.NORM_EPS,
        *c.BIASES,
        c.HEAD_DIM._replace(keys=()),  # always D/H, because the query norm is as wide as the model
        c.EXPERT_FFN,
        c.EXPERTS,
        c.TOP_K,
        c.RENORMALIZE,
        c.AUXILIARY._replace(default=0.01),
    ),
    ours=dict(qk_norm="full"),
    theirs=c.PLAIN | dict(clip_qkv=None),
    layers=c.ALL_MOE,
    copies=dict(head_dim=c.width_of_head),
)
