"""Nemotron-H's and Nemotron-3's entry: a block is Mamba-2, attention, experts or a dense feed-forward.

Experts, shared experts and dense feed-forwards are relu squared, without a gate. Experts may work on a
latent. Attention has no positions. The block that predicts a further token (mtp) has attention and experts,
as two blocks of one branch; it is trained or kept for an export.

next: hf/architectures/granite4.py
"""

from __future__ import annotations

from collections.abc import Iterator

from tmoe.config.linear_settings import LayerType
from tmoe.hf.architectures import common as c
from tmoe.hf.architectures.deepseek import CHOICE_BIAS, GROUPED, ROUTED
from tmoe.hf.architectures.granite4 import LIMITS, TYPES, mamba
from tmoe.hf.architectures.granite4 import listed as listed_kinds
from tmoe.hf.rules import HF, INV_FREQ, Architecture, Field, Key, Linear, MoELayers, TensorRule, under

BLOCK, MIXER = "backbone.layers.{layer}", "backbone.layers.{layer}.mixer"
EXPERTS = f"{MIXER}.experts"
PATTERN, LIST = Key("hybrid_override_pattern", str), "layers_block_type"
# keys that decide nothing in tmoe, and for which transformers accepts no null, by their types
IDLE = {
    int: ("chunk_size", "mamba_chunk_size", "expand", "n_shared_experts", "num_logits_to_keep"),
    bool: ("moe_shared_expert_overlap", "rescale_prenorm_residual", "residual_in_fp32", "use_mamba_kernels"),
    float: ("hidden_dropout", "time_step_floor", "time_step_max"),
    str: ("mamba_ssm_cache_dtype",),
}
WORDS: tuple[tuple[str, LayerType], ...] = (
    ("linear_attention", "linear"),
    ("full_attention", "full"),
    ("moe", "moe"),
    ("mlp", "dense"),
)
OLDER = ("mamba", "linear_attention"), ("attention", "full_attention")
LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


def listed(said: HF) -> list[str]:
    """The kinds of blocks by a config.json."""
    if (kinds := listed_kinds(said)) is not None:
        return kinds
    if PATTERN.name in said:
        return [LETTERS.get(letter, letter) for letter in said[PATTERN.name]]
    return ["linear_attention", "moe", "full_attention", "mlp"]


def read_branches(said: HF, found: dict) -> list[str]:
    """A problem if no block is a feed-forward: tmoe's blocks then have two branches."""
    if {"moe", "mlp"}.isdisjoint(listed(said)):
        return [f"{LIST}={listed(said)!r}: only with one or more of 'moe' and 'mlp' is computed"]
    return []


# the kinds of mtp's blocks in transformers' configuration, and in letters
AHEAD = Key("mtp_layers_block_type", tuple[str, ...])
AHEAD_LETTERS = Key("mtp_hybrid_override_pattern", str, null=False)
# the first names of our tensors in mtp.layers.0 and in mtp.layers.1
AHEAD_PARTS = ("attention_norm.", "attention.qkv.", "attention.o."), ("ffn_norm.", "moe.")


def other_ahead(said: HF) -> str:
    """The reason why mtp's blocks are not trained: other kinds than attention, then experts."""
    known = ["full_attention", "moe"]
    kinds = [dict(OLDER).get(kind, kind) for kind in said.get(AHEAD.name) or known]
    if kinds == known:  # the default of transformers, which letters replace
        kinds = [LETTERS.get(letter, letter) for letter in said.get(AHEAD_LETTERS.name) or "*E"]
    if kinds == known:
        return ""
    return f"{AHEAD.name}={kinds!r}: only full_attention and moe (*E) are computed"


def further(rules: tuple[TensorRule, ...]) -> Iterator[TensorRule]:
    """The rules of mtp, whose two blocks of one branch are one block in tmoe."""
    for name in ("enorm", "hnorm", "eh_proj"):
        yield c.one(f"{c.FURTHER}.{name}.weight", f"mtp.layers.0.{name}.weight")
    yield c.one(f"{c.FURTHER}.norm.weight", "mtp.layers.1.final_layernorm.weight")
    for place, kinds in enumerate(AHEAD_PARTS):
        for rule in under(rules, BLOCK, f"mtp.layers.{place}"):
            ours = rule.ours.removeprefix(f"{c.BLOCK}.")
            if ours.startswith(kinds):
                yield rule._replace(ours=f"{c.FURTHER}.{ours}")


RULES = (
    c.one("embedding.weight", "backbone.embeddings.weight"),
    c.one("norm.weight", "backbone.norm_f.weight"),
    c.one("head.weight", "lm_head.weight"),
    c.one(f"{c.BLOCK}.attention_norm.weight", f"{BLOCK}.norm.weight"),
    c.one(f"{c.BLOCK}.ffn_norm.weight", f"{BLOCK}.norm.weight"),
    *under((c.qkv("weight"),), f"{c.LAYER}.self_attn", MIXER),
    c.one(f"{c.BLOCK}.attention.o.weight", f"{MIXER}.o_proj.weight"),
    *mamba(MIXER),
    c.one(f"{c.BLOCK}.ffn.gate_up.weight", f"{MIXER}.up_proj.weight"),
    c.one(f"{c.BLOCK}.ffn.down.weight", f"{MIXER}.down_proj.weight"),
    c.one(f"{c.BLOCK}.moe.router.weight", f"{MIXER}.gate.weight"),
    c.one(f"{c.BLOCK}.moe.router.choice_bias", f"{MIXER}.gate.{CHOICE_BIAS}"),
    *(
        c.also(
            c.one(f"{c.BLOCK}.moe.experts.{ours}", f"{EXPERTS}.{{expert}}.{theirs}.weight"),
            f"{EXPERTS}.{theirs}",
        )
        for ours, theirs in (("gate_up", "up_proj"), ("down", "down_proj"))
    ),
    c.one(f"{c.BLOCK}.moe.shared.gate_up.weight", f"{MIXER}.shared_experts.up_proj.weight"),
    c.one(f"{c.BLOCK}.moe.shared.down.weight", f"{MIXER}.shared_experts.down_proj.weight"),
    c.one(f"{c.BLOCK}.moe.to_latent.weight", f"{MIXER}.fc1_latent_proj.weight"),
    c.one(f"{c.BLOCK}.moe.from_latent.weight", f"{MIXER}.fc2_latent_proj.weight"),
)

NEMOTRON_H = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    (*RULES, *further(RULES)),
    (
        Field("vocab", ("vocab_size",), 131072),
        Field("dim", ("hidden_size",), 4096),
        Field("layers", ("num_hidden_layers",), lambda hf: len(listed(hf))),
        Field("heads", ("num_attention_heads",), 32),
        c.key_heads(8),
        c.SAID_HEAD_DIM._replace(default=128),
        Field("norm_eps", ("layer_norm_epsilon",), 1e-5),
        Field("init_std", ("initializer_range",), 0.02),
        c.FFN._replace(default=21504),
        Field("moe.activation", ("mlp_hidden_act",), "relu2", words=dict(relu2="relu2")),
        c.MOE_FFN._replace(default=7688),
        Field("moe.shared_dim", ("moe_shared_expert_intermediate_size",), 7688),
        Field("moe.latent_dim", ("moe_latent_size",), 0, 0),
        ROUTED._replace(default=8),
        c.TOP_K._replace(default=2),
        Field("moe.scaling", ("routed_scaling_factor",), 1.0),
        Field("moe.groups", ("n_group",), 1),
        Field("moe.top_groups", ("topk_group",), 1),
        c.RENORMALIZE._replace(default=True),
        Field("linear.key_heads", ("n_groups", "mamba_n_groups"), 8, least=1),
        Field("linear.value_heads", ("mamba_num_heads",), 128, least=1),
        Field("linear.key_dim", ("ssm_state_size",), 128, least=1),
        Field("linear.value_dim", ("mamba_head_dim",), 64, least=1),
        Field("linear.conv", ("conv_kernel", "mamba_d_conv"), 4, least=1),
        Field("linear.conv_bias", ("use_conv_bias", "mamba_conv_bias"), True),
        Field("linear.least_step", ("time_step_min", "mamba_dt_min"), 0.001),
    ),
    ours=GROUPED | {"linear.kind": "mamba2", "moe.shared_activation": "relu2", "rotary": (0,)},
    theirs=c.PLAIN
    | dict(mamba_hidden_act=("silu", "swish"), tie_word_embeddings=False)
    | dict(use_bias=False, mlp_bias=False, attention_bias=False, mamba_proj_bias=False),
    layers=MoELayers(read_branches),
    keys=(
        *TYPES,
        PATTERN,
        AHEAD,
        AHEAD_LETTERS,
        LIMITS,
        Key("num_nextn_predict_layers", null=False),
        *(Key(name, kind, null=False) for kind, names in IDLE.items() for name in names),
    ),
    linear=Linear(older=OLDER, words=WORDS, key=LIST, listed=listed),
    fp32=(CHOICE_BIAS, "A_log", "dt_bias", ".D"),
    extra=(*INV_FREQ, r"mtp\..*"),
    ahead=other_ahead,
)
