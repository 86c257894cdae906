"""EXAONE's entry: K-EXAONE, whose blocks without a window have no positions; the MoE of DeepSeek-V3.

next: hf/architectures/deepseek.py
"""

from __future__ import annotations

from typing import Any

from tmoe.hf.architectures import common as c
from tmoe.hf.architectures import deepseek
from tmoe.hf.rules import HF, INV_FREQ, Architecture, Key, MoELayers, Windows

MLP = f"{c.LAYER}.mlp"
SHARED_EXPERTS = Key("num_shared_experts", least=0, null=False)
FIRST_DENSE = Key("first_k_dense_replace", least=0, null=False)
PATTERN = Key("sliding_window_pattern", int | str)


def read_layers(said: HF, found: dict[str, Any]) -> list[str]:
    """MoE blocks by mlp_layer_types, else by first_k_dense_replace. Checks the key of windows as well.

    A sliding_window_pattern in letters is not read, so config.json must then have layer_types.
    """
    problems = c.typed_layers(said.get(FIRST_DENSE.name, 1)).read(said, found)
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
        *(c.DECODER + c.QK_NORM + c.DENSE + c.MOE),
        *c.swiglu(f"{c.BLOCK}.moe.shared", f"{MLP}.shared_experts"),
        c.also(
            c.one(f"{c.BLOCK}.moe.router.choice_bias", f"{MLP}.{deepseek.CHOICE_BIAS}"),
            f"{MLP}.gate.{deepseek.CHOICE_BIAS}",
        ),
    ),
    (
        *c.SIZES,
        c.NORM_EPS,
        c.key_heads(32),
        c.SAID_HEAD_DIM,
        c.FFN,
        *deepseek.one_group(scaling=2.5, renormalize=True),
        c.EXPERTS._replace(keys=("num_experts",), default=64),
        deepseek.shared_width(1, SHARED_EXPERTS.name),
    ),
    ours={"qk_norm": "head"} | deepseek.GROUPED,
    theirs=c.PLAIN | deepseek.SIGMOID_KEYS | dict(attention_bias=False),
    layers=MoELayers(read_layers, c.write_mlp_types),
    keys=(SHARED_EXPERTS, FIRST_DENSE, PATTERN, c.MLP_TYPES),
    write=lambda cfg: deepseek.write_shared(cfg, SHARED_EXPERTS.name),
    windows=Windows(("sliding_window", "layer_types"), slides, 4096, null=False, rotary=True),
    fp32=(deepseek.CHOICE_BIAS,),
    extra=(*INV_FREQ, r"mtp.*"),
)
