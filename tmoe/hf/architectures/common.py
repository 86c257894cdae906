"""Definitions that several families share: rules of tensors, fields of config.json, which blocks are MoE.

next: hf/architectures/olmoe.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tmoe.base.activations import ACTIVATIONS
from tmoe.config.model import ModelConfig
from tmoe.hf.rules import (
    BLOCK,
    FURTHER,
    HF,
    LAYER,
    NO_NULL,
    Field,
    Key,
    MoELayers,
    TensorPart,
    TensorRule,
    further,
    kinds_of_layers,
)

# ---- tensors ----


HELD = f"{LAYER}.mlp.experts"  # the module in which transformers 5 holds most families' experts


def one(ours: str, theirs: str) -> TensorRule:
    """The rule of one of our tensors that equals one tensor of a Hugging Face folder."""
    return TensorRule(ours, (TensorPart(theirs),))


def swiglu(
    ours: str, theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[TensorRule, TensorRule]:
    """The rules of gate_up (gate rows above up rows) and of down.

    ours, theirs: the modules in our and their names; `theirs` has the three projections, and may
        contain {expert}.
    """
    weight = "" if ours.endswith("experts") else ".weight"  # parameters of Experts, Linear layers elsewhere
    both = (TensorPart(f"{theirs}.{gate}.weight"), TensorPart(f"{theirs}.{up}.weight"))
    return TensorRule(f"{ours}.gate_up{weight}", both), one(f"{ours}.down{weight}", f"{theirs}.{down}.weight")


def also(rule: TensorRule, held: str) -> TensorRule:
    """The rule for a tensor that transformers 5, like tmoe, holds as one tensor, under the name `held`."""
    return rule._replace(held=(TensorPart(held),))


def experts(
    theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[TensorRule, TensorRule]:
    """The rules of experts that are published one by one in the module `theirs`, or stacked.

    The stacked tensors are gate_up_proj [E, 2F, D] and down_proj [E, D, F].
    """
    gate_up, downs = swiglu(f"{BLOCK}.moe.experts", f"{theirs}.{{expert}}", gate, up, down)
    return also(gate_up, f"{HELD}.gate_up_proj"), also(downs, f"{HELD}.down_proj")


def qkv(kind: str) -> TensorRule:
    """The rule of qkv: their three projections are one matrix in tmoe. kind: weight or bias."""
    rows = dict(
        q=lambda cfg: cfg.heads * cfg.head_dim,
        k=lambda cfg: cfg.kv_heads * cfg.head_dim,
        v=lambda cfg: cfg.kv_heads * cfg.value_dim,
    )
    parts = (TensorPart(f"{LAYER}.self_attn.{n}_proj.{kind}", rows[n]) for n in rows)
    return TensorRule(f"{BLOCK}.attention.qkv.{kind}", tuple(parts))


DECODER = (
    one("embedding.weight", "model.embed_tokens.weight"),
    one("norm.weight", "model.norm.weight"),
    one("head.weight", "lm_head.weight"),
    one(f"{BLOCK}.attention_norm.weight", f"{LAYER}.input_layernorm.weight"),
    one(f"{BLOCK}.ffn_norm.weight", f"{LAYER}.post_attention_layernorm.weight"),
    *(qkv(kind) for kind in ("weight", "bias")),
    *(one(f"{BLOCK}.attention.o.{kind}", f"{LAYER}.self_attn.o_proj.{kind}") for kind in ("weight", "bias")),
)
QK_NORM = tuple(one(f"{BLOCK}.attention.{n}_norm.weight", f"{LAYER}.self_attn.{n}_norm.weight") for n in "qk")
DENSE = swiglu(f"{BLOCK}.ffn", f"{LAYER}.mlp")
MOE = (
    one(f"{BLOCK}.moe.router.weight", f"{LAYER}.mlp.gate.weight"),
    *experts(f"{LAYER}.mlp.experts"),
)


def blocks_after_the_last(rules: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
    """The rules of blocks that predict further tokens, as DeepSeek-V3 and GLM-4 publish them."""
    place = "model.layers.{ahead}"
    names = dict(enorm="enorm", hnorm="hnorm", eh_proj="eh_proj", norm="shared_head.norm")
    own = (one(f"{FURTHER}.{n}.weight", f"{place}.{theirs}.weight") for n, theirs in names.items())
    return further(rules, place, *own)


# ---- settings ----


# A function of the other keys gets the keys that are not null. Its KeyError names a missing key.


def width_of_head(hf: HF) -> int:
    # Zero heads are refused later, together with the other settings.
    return hf["hidden_size"] // (hf["num_attention_heads"] or 1)


def all_heads(hf: HF) -> int:
    return hf["num_attention_heads"]


# transformers' name of a gate's activation -> tmoe's name of the activation with a gate.
HIDDEN_ACTS = {e.hidden_act: name for name, e in ACTIVATIONS.items() if e.gated and not e.constants}
HIDDEN_ACTS |= {"swish": "swiglu", "gelu_new": "geglu", "gelu_fast": "geglu"}

SIZES = (
    Field("vocab", ("vocab_size",)),
    Field("dim", ("hidden_size",)),
    Field("layers", ("num_hidden_layers",)),
    Field("heads", ("num_attention_heads",)),
    Field("kv_heads", ("num_key_value_heads",), all_heads, all_heads),
    Field("norm_eps", ("rms_norm_eps",), 1e-6),
    Field("tied", ("tie_word_embeddings",), False),
    Field("init_std", ("initializer_range",), 0.02),
    Field("moe.activation", ("hidden_act",), "silu", words=HIDDEN_ACTS),
)
NORM_EPS = Field("norm_eps", ("rms_norm_eps",), 1e-5)  # replaces the default in SIZES, so it must follow it
HEAD_DIM = Field("head_dim", ("head_dim",), width_of_head, width_of_head)
SAID_HEAD_DIM = HEAD_DIM._replace(null=NO_NULL)
FFN = Field("ffn_dim", ("intermediate_size",))
EXPERT_FFN = Field("moe.ffn_dim", ("intermediate_size",))
MOE_FFN = Field("moe.ffn_dim", ("moe_intermediate_size",))
# Two names of one setting, for architectures whose class has both.
EXPERTS = Field("moe.experts", ("num_experts", "num_local_experts"))
LOCAL_EXPERTS = EXPERTS._replace(keys=("num_local_experts", "num_experts"))
TOP_K = Field("moe.top_k", ("num_experts_per_tok",))
RENORMALIZE = Field("moe.renormalize", ("norm_topk_prob",), False)
AUXILIARY = Field("moe.balance_coeff", ("router_aux_loss_coef",), 0.001)
LEADING_DENSE = Field("dense_layers", ("first_k_dense_replace",), 0)
BIASES = tuple(Field(f"{part}_bias", ("attention_bias",), False) for part in ("qkv", "o"))


def key_heads(default: int, null: Any = NO_NULL) -> Field:
    """The field kv_heads with another default than in SIZES; it must follow SIZES."""
    return Field("kv_heads", ("num_key_value_heads",), default, null)


# Keys that most classes have, with the only value that tmoe supports.
PLAIN: HF = dict(quantization_config=None, per_layer_config=None)


# ---- which blocks are MoE ----


def _none(said: HF, found: dict[str, Any]) -> list[str]:
    found["dense_layers"] = found.get("layers") or 0
    return []


def _all(said: HF, found: dict[str, Any]) -> list[str]:
    found["dense_layers"] = 0
    return []


ALL_DENSE = MoELayers(_none)
ALL_MOE = MoELayers(_all)


BY_A_FIELD = MoELayers(lambda said, found: [])  # LEADING_DENSE states it


def put_sparse(found: dict[str, Any], sparse: list[int]) -> None:
    """Sets dense_layers, moe_every and dense_blocks in `found`, so that the blocks `sparse` have an MoE."""
    layers = found.get("layers") or 0
    first = sparse[0] if sparse else layers
    every = sparse[1] - first if len(sparse) > 1 else max(layers - first, 1)
    if sparse != list(range(first, layers, every)):
        every = 1
        found["dense_blocks"] = tuple(i for i in range(first, layers) if i not in sparse)
    found["dense_layers"] = first
    found["moe_every"] = every


MLP_TYPES = Key("mlp_layer_types", tuple[str, ...])


def typed_layers(dense: int) -> MoELayers:
    """The MoE blocks of a config.json with mlp_layer_types, "dense" or "sparse" for each block.

    dense: number of leading dense blocks, the only dense ones, if the key is missing or null.
    The entry's keys must include MLP_TYPES.
    """

    def read(said: HF, found: dict[str, Any]) -> list[str]:
        layers = found.get("layers") or 0
        leading = min(dense, layers)
        usual = ["dense"] * leading + ["sparse"] * (layers - leading)
        kinds, problems = kinds_of_layers(said, MLP_TYPES.name, ("dense", "sparse"), usual)
        put_sparse(found, [i for i, kind in enumerate(kinds) if kind == "sparse"])
        return problems

    return MoELayers(read, write_mlp_types)


def leading_dense(dense: int) -> Callable[[HF], int]:
    """A function that counts the leading dense blocks in mlp_layer_types, as first_k_dense_replace must.

    dense: the number if mlp_layer_types is missing.
    """

    def count(hf: HF) -> int:
        kinds = hf.get(MLP_TYPES.name)
        return dense if kinds is None else [*kinds, "sparse"].index("sparse")

    return count


def write_mlp_types(cfg: ModelConfig) -> HF:
    return {MLP_TYPES.name: ["sparse" if cfg.is_moe(i) else "dense" for i in range(cfg.layers)]}
