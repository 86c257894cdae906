"""A.X-K1's entry: a DeepSeek-V3 with a norm on the output of an MoE, and a list of which blocks are MoE.

next: hf/architectures/deepseek.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tmoe.hf.architectures import common as c
from tmoe.hf.architectures.deepseek import DEEPSEEK_V3, SHARED_EXPERTS, write_latent_keys
from tmoe.hf.rules import HF, Field, Key, MoELayers

FIRST_DENSE = Key("first_k_dense_replace", least=0, null=False)
STEP = Key("moe_layer_freq", least=1, null=False)


def read_layers(said: HF, found: dict[str, Any]) -> list[str]:
    """MoE blocks by mlp_layer_types, else by two older keys; if both are present, they must agree."""
    layers = found.get("layers") or 0
    first, step = said.get(FIRST_DENSE.name, 1), said.get(STEP.name, 1)
    sparse = [i for i in range(layers) if i >= first and i % step == 0]
    if c.MLP_TYPES.name not in said:
        c.put_sparse(found, sparse)
        return []
    problems = c.typed_layers(1).read(said, found)
    older = {FIRST_DENSE.name: first, STEP.name: step} if {FIRST_DENSE.name, STEP.name} & said.keys() else {}
    if (
        older
        and not problems
        and sparse != [i for i, k in enumerate(said[c.MLP_TYPES.name]) if k == "sparse"]
    ):
        problems.append(
            f"{older}: the dense blocks differ from those of {c.MLP_TYPES.name}; must be the same"
        )
    return problems


AXK1 = replace(
    DEEPSEEK_V3,
    model_type="axk1",
    class_name="AXK1ForCausalLM",
    rules=(
        *DEEPSEEK_V3.rules,
        c.also(
            c.one(f"{c.BLOCK}.ffn_post_norm.weight", f"{c.LAYER}.post_mlp_layernorm.weight"),
            f"{c.LAYER}.mlp.post_mlp_layernorm.weight",
        ),
    ),
    fields=(
        *(field for field in DEEPSEEK_V3.fields if field.ours != "dense_layers"),
        c.key_heads(64),
        Field("mla.q_rank", ("q_lora_rank",), 1536, least=1),
    ),
    ours=DEEPSEEK_V3.ours | {"norms": "moe"},
    layers=MoELayers(read_layers, c.write_mlp_types),
    keys=(SHARED_EXPERTS, c.MLP_TYPES, FIRST_DENSE, STEP, Key("n_group"), Key("topk_group")),
    write=write_latent_keys,
)
