"""Hugging Face's architectures, one table entry each: tensor names, how they stack and join, and fields of config.json.

Every tensor of theirs is a box of one of ours: `q_proj` is the first rows of `qkv`, an expert's `up_proj` the lower half of one
expert of `gate_up`. `pieces` works the boxes out; import, export and direct start all read them, so no direction has its own code.

A new architecture is one entry of ARCHITECTURES; docs/huggingface.md shows it.

next: hf_config.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tmoe.config import ModelConfig
from tmoe.model import Transformer

HF = dict[str, Any]  # the contents of a config.json


# ---- what an entry is made of ----


class Part(NamedTuple):
    """One of the tensors that make up one of ours. {layer} and {expert} stand for numbers.

    rows: how many of our rows (second axis of a stack of experts, else first) it fills; None: an equal share.
    transposed: its last two axes are the other way round.
    """

    name: str
    rows: Callable[[ModelConfig], int] | None = None
    transposed: bool = False


class Rule(NamedTuple):
    """One of our tensors and their parts, joined along the rows; parts named with {expert} are stacked first."""

    ours: str
    parts: tuple[Part, ...]


class Field(NamedTuple):
    """A setting of ModelConfig ("moe.top_k") and its key of config.json; the first of several keys is the one written.

    default: what Hugging Face's class takes where the key is missing or null, or a function of the other keys.
    """

    ours: str
    keys: tuple[str, ...]
    default: Any = None


@dataclass(frozen=True)
class Architecture:
    """All that tmoe knows of one of Hugging Face's architectures."""

    model_type: str
    class_name: str
    rules: tuple[Rule, ...]
    fields: tuple[Field, ...]
    ours: dict[str, Any]
    """settings of ModelConfig that the architecture implies"""
    theirs: dict[str, Any]
    """keys of config.json for which tmoe computes one value only; missing and null are fine too"""
    layers: str = "dense"
    """which blocks are MoE: dense (none), moe (all) or qwen (decoder_sparse_step and mlp_only_layers)"""
    theta: float = 10000.0
    """RoPE base where config.json names none"""
    extra: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    """patterns of tensors that are computed from the config: kept for the way back, never read"""


class Piece(NamedTuple):
    """One of their tensors as a box of one of ours; stacked: it lacks our first axis, of length one in the box."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    stacked: bool
    transposed: bool

    def to_theirs(self, axes: tuple) -> tuple:
        """Their order of something that is given for each of our axes: sizes, slices."""
        axes = tuple(axes[1:]) if self.stacked else tuple(axes)
        return (*axes[:-2], axes[-1], axes[-2]) if self.transposed else axes


# ---- tensors ----


def one(ours: str, theirs: str) -> Rule:
    return Rule(ours, (Part(theirs),))


def swiglu(ours: str, theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple:
    """Gate rows above up rows, and down. `theirs` is the module that holds the three projections, or {expert}'s."""
    weight = (
        "" if ours.endswith("experts") else ".weight"
    )  # ours are parameters of Experts, but Linear layers elsewhere
    both = (Part(f"{theirs}.{gate}.weight"), Part(f"{theirs}.{up}.weight"))
    return Rule(f"{ours}.gate_up{weight}", both), one(f"{ours}.down{weight}", f"{theirs}.{down}.weight")


A, B = "model.layers.{layer}", "blocks.{layer}"
QKV = (
    Part(f"{A}.self_attn.q_proj.weight", lambda cfg: cfg.heads * cfg.head_dim),
    Part(f"{A}.self_attn.k_proj.weight", lambda cfg: cfg.kv_heads * cfg.head_dim),
    Part(f"{A}.self_attn.v_proj.weight", lambda cfg: cfg.kv_heads * cfg.head_dim),
)
DECODER = (
    one("embedding.weight", "model.embed_tokens.weight"),
    one("norm.weight", "model.norm.weight"),
    one("head.weight", "lm_head.weight"),
    one(f"{B}.attention_norm.weight", f"{A}.input_layernorm.weight"),
    one(f"{B}.ffn_norm.weight", f"{A}.post_attention_layernorm.weight"),
    Rule(f"{B}.attention.qkv.weight", QKV),
    one(f"{B}.attention.o.weight", f"{A}.self_attn.o_proj.weight"),
)
QK_NORM = tuple(one(f"{B}.attention.{n}_norm.weight", f"{A}.self_attn.{n}_norm.weight") for n in "qk")
DENSE = swiglu(f"{B}.ffn", f"{A}.mlp")
MOE = (
    one(f"{B}.moe.router.weight", f"{A}.mlp.gate.weight"),
    *swiglu(f"{B}.moe.experts", f"{A}.mlp.experts.{{expert}}"),
)
MIXTRAL_MOE = (
    one(f"{B}.moe.router.weight", f"{A}.block_sparse_moe.gate.weight"),
    *swiglu(f"{B}.moe.experts", f"{A}.block_sparse_moe.experts.{{expert}}", "w1", "w3", "w2"),
)


# ---- settings ----


def width_of_head(hf: HF) -> int:
    return hf["hidden_size"] // hf["num_attention_heads"]


SIZES = (
    Field("vocab", ("vocab_size",)),
    Field("dim", ("hidden_size",)),
    Field("layers", ("num_hidden_layers",)),
    Field("heads", ("num_attention_heads",)),
    Field("kv_heads", ("num_key_value_heads",), lambda hf: hf["num_attention_heads"]),
    Field("norm_eps", ("rms_norm_eps",), 1e-6),
    Field("tied", ("tie_word_embeddings",), False),
    Field("init_std", ("initializer_range",), 0.02),
)
HEAD_DIM = Field("head_dim", ("head_dim",), width_of_head)
FFN = Field("ffn_dim", ("intermediate_size",))
EXPERTS = Field("moe.experts", ("num_experts", "num_local_experts"))
TOP_K = Field("moe.top_k", ("num_experts_per_tok",))
RENORMALIZE = Field("moe.renormalize", ("norm_topk_prob",), False)
AUXILIARY = Field("moe.balance_coeff", ("router_aux_loss_coef",), 0.001)
PLAIN = dict(hidden_act="silu", attention_bias=False, attention_dropout=0.0, quantization_config=None)
FULL = PLAIN | dict(use_sliding_window=False)

ARCHITECTURES = (
    Architecture(
        "llama",
        "LlamaForCausalLM",
        DECODER + DENSE,
        (*SIZES, HEAD_DIM, FFN),
        ours={},
        theirs=PLAIN | dict(mlp_bias=False),
    ),
    Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        DECODER + QK_NORM + DENSE,
        (*SIZES, HEAD_DIM._replace(default=128), FFN),
        ours=dict(qk_norm="head"),
        theirs=FULL,
    ),
    Architecture(
        "mixtral",
        "MixtralForCausalLM",
        DECODER + MIXTRAL_MOE,
        (
            *SIZES,
            HEAD_DIM,
            Field("moe.ffn_dim", ("intermediate_size",)),
            EXPERTS._replace(keys=("num_local_experts", "num_experts")),
            TOP_K,
            AUXILIARY,
        ),
        ours={"moe.softmax": "after"},
        theirs=PLAIN | dict(sliding_window=None, router_jitter_noise=0.0),
        layers="moe",
        theta=1e6,
    ),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        DECODER + QK_NORM + DENSE + MOE,
        (
            *SIZES,
            HEAD_DIM,
            FFN,
            Field("moe.ffn_dim", ("moe_intermediate_size",)),
            EXPERTS,
            TOP_K,
            RENORMALIZE,
            AUXILIARY,
        ),
        ours=dict(qk_norm="head"),
        theirs=FULL,
        layers="qwen",
    ),
    Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        DECODER + QK_NORM + MOE,
        (
            *SIZES,
            HEAD_DIM._replace(keys=()),  # always D/H: the query norm is as wide as the model
            Field("moe.ffn_dim", ("intermediate_size",)),
            EXPERTS,
            TOP_K,
            RENORMALIZE,
            AUXILIARY._replace(default=0.01),
        ),
        ours=dict(qk_norm="full"),
        theirs=PLAIN | dict(clip_qkv=None),
        layers="moe",
    ),
)

# swap_experts: model_type -> the module of a transformers model, inside a decoder layer, that holds the experts' weights. Its router,
# attention and shared experts stay transformers' own, so an entry needs no ModelConfig that could express the model.
SWAPPABLE = dict(
    mixtral="mlp.experts",
    qwen2_moe="mlp.experts",
    qwen3_moe="mlp.experts",
    olmoe="mlp.experts",
    granitemoe="block_sparse_moe.experts",
    deepseek_v2="mlp.experts",
    deepseek_v3="mlp.experts",
)


# ---- boxes ----


def pieces(arch: Architecture, cfg: ModelConfig, ours: str, shape: tuple[int, ...]) -> list[Piece]:
    """Their tensors that make up our tensor `ours` of `shape`, expert by expert; empty: the architecture lacks it."""
    numbers = [word for word in ours.split(".") if word.isdigit()]
    generic = ".".join("{layer}" if word.isdigit() else word for word in ours.split("."))
    parts = next((rule.parts for rule in arch.rules if rule.ours == generic), ())
    found, layer = [], numbers[0] if numbers else ""
    stacked = any("{expert}" in part.name for part in parts)
    for expert in range(shape[0]) if stacked else (None,):
        axis = 1 if len(shape) == 3 else 0
        start = 0
        for part in parts:
            rows = part.rows(cfg) if part.rows else shape[axis] // len(parts)
            offset, box = [0] * len(shape), list(shape)
            offset[axis], box[axis] = start, rows
            if expert is not None:
                offset[0], box[0] = expert, 1
            name = part.name.format(layer=layer, expert=expert)
            found.append(Piece(name, tuple(offset), tuple(box), stacked, part.transposed))
            start += rows
    assert sum(math.prod(piece.shape) for piece in found) in (0, math.prod(shape)), f"{ours}: parts leave a hole"
    return found


def model_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every parameter of the Transformer."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Transformer(cfg).named_parameters()}


def divide(arch: Architecture, cfg: ModelConfig, present: Iterable[str]) -> tuple[dict[str, list[Piece]], list[str]]:
    """Our tensors' pieces, and which of the tensors `present` are computed ones (inv_freq).

    A tied model's folder may hold the head as well, a copy of the embedding: it is one more piece, before the one that counts.
    """
    present = set(present)
    found = {name: pieces(arch, cfg, name, shape) for name, shape in model_shapes(cfg).items()}
    if cfg.tied and "lm_head.weight" in present:
        embedding = found["embedding.weight"]
        embedding.insert(0, embedding[0]._replace(name="lm_head.weight"))
    return found, [name for name in present if any(re.fullmatch(pattern, name) for pattern in arch.extra)]


def their_shapes(found: dict[str, list[Piece]]) -> dict[str, tuple[int, ...]]:
    return {piece.name: piece.to_theirs(piece.shape) for group in found.values() for piece in group}
