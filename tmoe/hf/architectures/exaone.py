"""EXAONE's entry: K-EXAONE, whose blocks without a window have no positions; an MoE as DeepSeek-V3's.

next: hf/architectures/deepseek.py
"""

from __future__ import annotations

from typing import Any

from tmoe.hf.architectures.common import (
    BLOCK,
    DECODER,
    DENSE,
    EXPERTS,
    FFN,
    LAYER,
    MLP_TYPES,
    MOE,
    NORM_EPS,
    PLAIN,
    QK_NORM,
    SAID_HEAD_DIM,
    SIZES,
    also,
    key_heads,
    one,
    swiglu,
    typed_layers,
    write_mlp_types,
)
from tmoe.hf.architectures.deepseek import (
    CHOICE_BIAS,
    GROUPED,
    SIGMOID_KEYS,
    one_group,
    shared_width,
    write_shared,
)
from tmoe.hf.rules import HF, INV_FREQ, Architecture, Key, Layers, Windows

MLP = f"{LAYER}.mlp"
SHARED_EXPERTS = Key("num_shared_experts", least=0, null=False)
FIRST_DENSE = Key("first_k_dense_replace", least=0, null=False)
PATTERN = Key("sliding_window_pattern", int | str)


def read_layers(said: HF, found: dict[str, Any]) -> list[str]:
    """mlp_layer_types goes before first_k_dense_replace. A pattern in letters is read by nobody."""
    problems = typed_layers(said.get(FIRST_DENSE.name, 1)).read(said, found)
    every = said.get(PATTERN.name, 4)
    if "layer_types" not in said and not (isinstance(every, int) and every > 0):
        problems.append(f"{PATTERN.name}={every!r}: needs layer_types, or must be at least 1")
    return problems


def slides(hf: HF, layer: int) -> bool:
    every = hf.get(PATTERN.name, 4)
    return not isinstance(every, int) or every < 1 or (layer + 1) % every != 0


EXAONE_MOE = Architecture(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    (
        *(DECODER + QK_NORM + DENSE + MOE),
        *swiglu(f"{BLOCK}.moe.shared", f"{MLP}.shared_experts"),
        also(one(f"{BLOCK}.moe.router.choice_bias", f"{MLP}.{CHOICE_BIAS}"), f"{MLP}.gate.{CHOICE_BIAS}"),
    ),
    (
        *SIZES,
        NORM_EPS,
        key_heads(32),
        SAID_HEAD_DIM,
        FFN,
        *one_group(scaling=2.5, renormalize=True),
        EXPERTS._replace(keys=("num_experts",), default=64),
        shared_width(1, SHARED_EXPERTS.name),
    ),
    ours={"qk_norm": "head"} | GROUPED,
    theirs=PLAIN | SIGMOID_KEYS | dict(attention_bias=False),
    layers=Layers(read_layers, write_mlp_types),
    keys=(SHARED_EXPERTS, FIRST_DENSE, PATTERN, MLP_TYPES),
    write=lambda cfg: write_shared(cfg, SHARED_EXPERTS.name),
    windows=Windows(("sliding_window", "layer_types"), slides, 4096, null=False, rotary=True),
    fp32=(CHOICE_BIAS,),
    extra=(*INV_FREQ, r"mtp.*"),
)
