"""MiniMax-M2's entry: RoPE on the first rotary_dim channels of a head, sigmoid scores with a choice bias.

next: hf/architectures/common.py
"""

from __future__ import annotations

from tmoe.config.model import ModelConfig
from tmoe.hf.architectures import common as c
from tmoe.hf.architectures.deepseek import CHOICE_BIAS
from tmoe.hf.rules import HF, Architecture

SPARSE = f"{c.LAYER}.block_sparse_moe"
MOE = (
    c.also(c.one(f"{c.BLOCK}.moe.router.weight", f"{SPARSE}.gate.weight"), f"{c.LAYER}.mlp.gate.weight"),
    c.also(
        c.one(f"{c.BLOCK}.moe.router.choice_bias", f"{SPARSE}.{CHOICE_BIAS}"), f"{c.LAYER}.mlp.{CHOICE_BIAS}"
    ),
    *c.experts(f"{SPARSE}.experts", "w1", "w3", "w2"),
)


def partial(hf: HF) -> float:
    """The share of a head's channels that RoPE rotates; published configs have their number, rotary_dim."""
    return hf["rotary_dim"] / (hf.get("head_dim") or 128) if hf.get("rotary_dim") is not None else 1.0


def write_keys(cfg: ModelConfig) -> HF:
    return dict(rotary_dim=cfg.rotary_dim)


MINIMAX_M2 = Architecture(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    c.DECODER + c.QK_NORM + MOE,
    (
        *c.SIZES,
        c.key_heads(8),
        c.SAID_HEAD_DIM._replace(default=128),
        c.EXPERT_FFN,
        c.LOCAL_EXPERTS,
        c.TOP_K,
        c.AUXILIARY,
    ),
    ours={"qk_norm": "full", "moe.score": "sigmoid", "moe.choice_bias": True},
    # features of the published code that neither its configs nor transformers use
    theirs=c.PLAIN
    | dict(
        attention_bias=False,
        router_jitter_noise=0.0,
        scoring_func=("sigmoid", None),
        use_qk_norm=True,
        qk_norm_type="per_layer",
        use_routing_bias=True,
        shared_intermediate_size=0,
        sliding_window=None,
    ),
    layers=c.ALL_MOE,
    write=write_keys,
    theta=5e6,
    partial=partial,
    fp32=(CHOICE_BIAS,),
)
