"""Granite's entries: GraniteMoE, whose experts are published in stacks, as in tmoe; two with shared experts.

next: hf/architectures/common.py
"""

from __future__ import annotations

from dataclasses import replace

from tmoe.config.model import ModelConfig
from tmoe.hf.architectures import common as c
from tmoe.hf.rules import HF, Architecture, Field, Key, Windows

SPARSE = f"{c.LAYER}.block_sparse_moe"
MOE = (
    c.also(c.one(f"{c.BLOCK}.moe.router.weight", f"{SPARSE}.router.layer.weight"), f"{SPARSE}.router.weight"),
    c.also(
        c.one(f"{c.BLOCK}.moe.experts.gate_up", f"{SPARSE}.input_linear.weight"),
        f"{SPARSE}.experts.gate_up_proj",
    ),
    c.also(
        c.one(f"{c.BLOCK}.moe.experts.down", f"{SPARSE}.output_linear.weight"), f"{SPARSE}.experts.down_proj"
    ),
)
FACTORS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")

GRANITEMOE = Architecture(
    "granitemoe",
    "GraniteMoeForCausalLM",
    c.DECODER + MOE,
    (
        *c.SIZES,
        *c.BIASES,
        c.SAID_HEAD_DIM,
        *(Field(name, (name,), 1.0) for name in FACTORS),
        c.EXPERT_FFN,
        c.EXPERTS._replace(keys=("num_local_experts",)),
        c.TOP_K,
        c.AUXILIARY._replace(null=0.001),
    ),
    ours={"moe.softmax": "after"},
    theirs=c.PLAIN,
    layers=c.ALL_MOE,
)

SHARED = f"{c.LAYER}.shared_mlp"
GRANITEMOESHARED = replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    class_name="GraniteMoeSharedForCausalLM",
    rules=(
        *GRANITEMOE.rules,
        c.one(f"{c.BLOCK}.moe.shared.gate_up.weight", f"{SHARED}.input_linear.weight"),
        c.one(f"{c.BLOCK}.moe.shared.down.weight", f"{SHARED}.output_linear.weight"),
    ),
    fields=(*GRANITEMOE.fields, Field("moe.shared_dim", ("shared_intermediate_size",), 0)),
)

BASES = Key("layer_rope_theta", tuple[float, ...])


def write_bases(cfg: ModelConfig) -> HF:
    ropes = [cfg.rope_of(i) for i in range(cfg.layers)]
    return {BASES.name: [rope.theta if rope else 0.0 for rope in ropes]}


GRANITEMOE_SWA = replace(  # sinks, windows in three blocks of four, and a RoPE base for each block
    GRANITEMOESHARED,
    model_type="granitemoe_swa",
    class_name="GraniteMoeSWAForCausalLM",
    rules=(  # tensors are published in the form in which transformers 5 holds them
        *(rule._replace(parts=rule.held or rule.parts, held=()) for rule in GRANITEMOESHARED.rules),
        c.one(f"{c.BLOCK}.attention.sinks", f"{c.LAYER}.self_attn.sinks"),
    ),
    ours=GRANITEMOESHARED.ours | dict(sinks=True),
    keys=(BASES,),
    write=write_bases,
    windows=Windows(("sliding_window", "layer_types"), lambda hf, layer: layer % 4 != 0, 128, null=False),
    rope_bases=BASES.name,
)
