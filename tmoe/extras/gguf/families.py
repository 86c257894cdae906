"""llama.cpp's architectures that tmoe writes and reads: their keys, and the function that each computes.

Every entry gives the settings that a file's keys and tensors stand for in llama.cpp. A model is written only
if reading its keys back gives the same function, so a setting that llama.cpp lacks or computes otherwise is
refused by name. Source: src/models/*.cpp of llama.cpp 0c1e57098.

next: extras/gguf/names.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from tmoe.base.listing import listed
from tmoe.config.check import ConfigError
from tmoe.config.compare import build_config, facts, nested
from tmoe.config.model import ModelConfig
from tmoe.extras.gguf import mamba
from tmoe.extras.gguf.keys import (
    EXPERT_FFN,
    EXPERTS,
    FFN,
    HEADS,
    LOG_MULTIPLIER,
    PARTIAL_HEADS,
    ROPE,
    SHARED_FFN,
    SIZES,
    Key,
    Part,
    Settings,
    Values,
    canonical,
    number,
    read_keys,
    read_names,
    usual_factor,
    write_keys,
)
from tmoe.extras.gguf.linear import SECTIONS, STATES


class Seen(NamedTuple):
    """A tensor of blocks, and the values of the setting with it and without it."""

    leaf: str
    there: Any = True
    absent: Any = False


class Family(NamedTuple):
    """One of llama.cpp's architectures."""

    name: str
    types: tuple[str, ...]
    """the model_types that are written as it; the first with rules for all tensors names them in an import"""
    keys: tuple[Key | Part, ...]
    ours: Settings
    """settings that the architecture implies"""
    tensors: Mapping[str, Seen]
    """settings that a tensor of blocks says"""
    pairs: bool = False
    """whether neighbours rotate (2i, 2i + 1); else (i, i + half)"""
    factors: bool = False
    """whether rope_freqs.weight is read, with which llama3's scaling is written"""
    head: bool = False
    """whether output.weight must be there; a tied model's is then a copy"""
    square: bool = False
    """whether all query heads together must be as wide as the model"""
    tiled: bool = False
    """whether value heads of linear layers are in the order of extras/gguf/linear.py"""
    compared: bool = True
    """whether llama.cpp's logits of such files were compared with tmoe's"""
    limits: Callable[[ModelConfig], list[str]] = lambda cfg: []
    """what llama.cpp refuses to load besides, a line each"""


QKV_BIAS = dict(qkv_bias=Seen("attn_q.bias"))
O_BIAS = dict(o_bias=Seen("attn_output.bias"))
CHOICE_BIAS = {"moe.choice_bias": Seen("exp_probs_b.bias")}
HEAD_NORMS = dict(qk_norm=Seen("attn_q_norm.weight", "head", "none"))
SOFTMAX = {"moe.softmax": "before", "moe.renormalize": True}


def _write_width(cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    sparse = any(map(cfg.is_moe, range(cfg.layers)))
    found: dict[str, tuple[str, Any]] = {
        "feed_forward_length": ("uint32", cfg.moe.ffn_dim if sparse else cfg.ffn_dim)
    }
    if sparse:
        found |= dict(expert_count=("uint32", cfg.moe.experts), expert_used_count=("uint32", cfg.moe.top_k))
    return found


def _read_width(values: Values, found: Settings) -> None:
    width = number(values, "feed_forward_length")
    if not values.get("expert_count"):
        found |= {"ffn_dim": width, "dense_layers": found.get("layers") or 0}
        return
    found |= {"moe.ffn_dim": width, "moe.experts": number(values, "expert_count")}
    found["moe.top_k"] = number(values, "expert_used_count")


ONE_WIDTH = Part(_write_width, _read_width, ("feed_forward_length", "expert_count", "expert_used_count"))


def _all_dense(values: Values, found: Settings) -> None:
    found["dense_layers"] = found.get("layers") or 0


DENSE = Part(lambda cfg: {}, _all_dense, ())

LLAMA = Family(
    "llama",
    ("llama", "mistral", "mixtral"),
    (*SIZES, *HEADS, ONE_WIDTH, ROPE),
    SOFTMAX,
    QKV_BIAS | O_BIAS,
    pairs=True,
    factors=True,
)
QWEN2 = Family("qwen2", ("qwen2",), (*SIZES, *HEADS, FFN, DENSE, ROPE), {}, QKV_BIAS, square=True)
QWEN3 = Family("qwen3", ("qwen3",), (*SIZES, *HEADS, FFN, DENSE, ROPE), dict(qk_norm="head"), QKV_BIAS)
QWEN3MOE = Family(
    "qwen3moe",
    ("qwen3_moe",),
    (*SIZES, *HEADS, FFN, *EXPERTS, EXPERT_FFN, ROPE),
    SOFTMAX | dict(qk_norm="head"),
    QKV_BIAS,
)
QWEN2MOE = Family(
    "qwen2moe",
    ("qwen2_moe",),
    (*SIZES, *HEADS, FFN, *EXPERTS, EXPERT_FFN, SHARED_FFN, ROPE),
    {"moe.renormalize": False, "moe.shared_gate": True},
    QKV_BIAS,
    head=True,
    square=True,
)


def _needs_all_heads(cfg: ModelConfig) -> list[str]:
    said = f"model.kv_heads={cfg.kv_heads}"
    return [] if cfg.kv_heads == cfg.heads else [f"{said}: must be {cfg.heads}, model.heads"]


OLMOE = Family(
    "olmoe",
    ("olmoe",),
    (*SIZES, *HEADS, ONE_WIDTH, ROPE),
    {"moe.renormalize": False, "qk_norm": "full"},
    QKV_BIAS,
    head=True,
    square=True,
    limits=_needs_all_heads,
)
SCALES = (
    Key("attention.scale", "attention_multiplier", "float32", None, 0.0),
    Key("embedding_scale", "embedding_multiplier", "float32", 1.0),
    Key("residual_scale", "residual_multiplier", "float32", 1.0),
    Key("logit_scale", "logits_scaling", "float32"),
)
GRANITEMOE = Family(
    "granitemoe",
    ("granitemoe", "granitemoeshared"),
    (*SIZES, *HEADS, ONE_WIDTH, SHARED_FFN, ROPE, *SCALES),
    SOFTMAX,
    QKV_BIAS | O_BIAS,
    pairs=True,
    factors=True,
)


def _read_window(values: Values, found: Settings) -> None:
    found["window"] = number(values, "attention.sliding_window")


WINDOW = Part(
    lambda cfg: {"attention.sliding_window": ("uint32", cfg.window)},
    _read_window,
    ("attention.sliding_window",),
)
GPT_OSS = Family(
    "gpt-oss",
    ("gpt_oss",),
    (*SIZES, *HEADS, FFN, *EXPERTS, EXPERT_FFN, WINDOW, ROPE),
    {
        "windowed": (1, 0),
        "sinks": True,
        "qkv_bias": True,
        "o_bias": True,
        "moe.softmax": "after",
        "moe.router_bias": True,
        "moe.bias": True,
        "moe.activation": "clamped",
    },
    {},
    head=True,
)


# ---- DeepSeek's routers ----

SIGMOID, SCALE, NORM = "expert_gating_func", "expert_weights_scale", "expert_weights_norm"
GATES = dict(softmax=1, sigmoid=2)
GROUPS = "expert_group_count", "expert_group_used_count"


def _write_router(cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    return _write_gate(cfg) | _write_weights(cfg)


def _write_weights(cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    moe = cfg.moe
    found: dict[str, tuple[str, Any]] = {}
    if moe.top_groups < moe.groups:
        found |= dict(zip(GROUPS, (("uint32", moe.groups), ("uint32", moe.top_groups)), strict=True))
    return found | {SCALE: ("float32", moe.scaling), NORM: ("bool", moe.renormalize)}


def _write_gate(cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    return {SIGMOID: ("uint32", GATES.get(cfg.moe.score, 0))}


def _read_gate(values: Values, found: Settings) -> None:
    score = {number: name for name, number in GATES.items()}.get(values.get(SIGMOID, 1))
    if score is None:
        raise ConfigError(f"{SIGMOID}={values[SIGMOID]!r}: only 1 (softmax) and 2 (sigmoid) are computed")
    found["moe.score"] = score


def _read_router(values: Values, found: Settings) -> None:
    _read_gate(values, found)
    _read_weights(values, found)


def _read_weights(values: Values, found: Settings) -> None:
    found |= {
        "moe.renormalize": bool(values.get(NORM, False)),
        "moe.scaling": number(values, SCALE, "float32") if values.get(SCALE) else 1.0,
    }
    if values.get(GROUPS[0], 0) > 1:
        found |= {"moe.groups": number(values, GROUPS[0]), "moe.top_groups": number(values, GROUPS[1])}
        found["moe.group_score"] = "top2"


def _read_shared(values: Values, found: Settings) -> None:
    found["moe.shared_dim"] = number(values, SHARED) * found.get("moe.ffn_dim", 0)


SHARED = "expert_shared_count"
ROUTER = (
    Part(_write_router, _read_router, (SIGMOID, SCALE, NORM, *GROUPS)),
    Part(lambda cfg: {SHARED: ("uint32", cfg.moe.shared_dim // cfg.moe.ffn_dim)}, _read_shared, (SHARED,)),
    Key("leading_dense_block_count", "dense_layers", default=0),
)


def _needs_shared(cfg: ModelConfig) -> list[str]:
    return [] if cfg.moe.shared_dim else ["model.moe.shared_dim=0: must be above 0"]


def _dots_limits(cfg: ModelConfig) -> list[str]:
    return _needs_all_heads(cfg) + _needs_shared(cfg)


DOTS1 = Family(
    "dots1",
    ("dots1",),
    (*SIZES, *HEADS, FFN, *EXPERTS, EXPERT_FFN, *ROUTER, ROPE),
    dict(qk_norm="head"),
    QKV_BIAS | CHOICE_BIAS,
    head=True,
    limits=_dots_limits,
)
GLM4MOE = Family(
    "glm4moe",
    ("glm4_moe", "solar_open"),
    (*SIZES, *PARTIAL_HEADS, FFN, *EXPERTS, EXPERT_FFN, *ROUTER, ROPE),
    {"moe.choice_bias": True},
    QKV_BIAS | HEAD_NORMS,
    limits=_needs_shared,
)
MINIMAX_M2 = Family(
    "minimax-m2",
    ("minimax_m2",),
    (*SIZES, *PARTIAL_HEADS, ONE_WIDTH, EXPERT_FFN, Part(_write_gate, _read_gate, (SIGMOID,)), ROPE),
    {"qk_norm": "full", "moe.choice_bias": True, "moe.renormalize": True},
    QKV_BIAS,
    head=True,
)


HUNYUAN_MOE = Family(
    "hunyuan-moe",
    ("hunyuan_v1_moe",),
    (*SIZES, *HEADS, ONE_WIDTH, EXPERT_FFN, SHARED_FFN, ROPE),
    SOFTMAX | dict(qk_norm="rotated"),
    QKV_BIAS,
    limits=_needs_shared,
)


def _read_step(values: Values, found: Settings) -> None:
    if number(values, STEP) != 1:
        raise ConfigError(f"{STEP}={values[STEP]!r}: only 1 is computed")


STEP = "interleave_moe_layer_step"
EVERY_LAYER = Part(lambda cfg: {STEP: ("uint32", 1)}, _read_step, (STEP,))
ERNIE4_5_MOE = Family(
    "ernie4_5-moe",
    ("ernie4_5_moe",),
    (*SIZES, *HEADS, FFN, *EXPERTS, EXPERT_FFN, SHARED_FFN, EVERY_LAYER, ROUTER[-1], ROPE),
    SOFTMAX | {"rope.interleave": True},
    QKV_BIAS | O_BIAS | CHOICE_BIAS,
    pairs=True,
)
EXAONE_MOE = Family(
    "exaone-moe",
    ("exaone_moe",),
    (*SIZES, *HEADS, FFN, *EXPERTS, EXPERT_FFN, *ROUTER, SHARED_FFN, WINDOW, ROPE),
    dict(qk_norm="head", windowed=(1, 1, 1, 0), rotary=(1, 1, 1, 0)),
    QKV_BIAS | CHOICE_BIAS,
    factors=True,
    head=True,
    limits=_needs_shared,
)


# ---- latent attention ----

LATENT = "attention.{}_lora_rank"


def _write_latent(cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    """llama.cpp's form of latent attention: one key head, of the latent and the rotated channels."""
    mla = cfg.mla
    whole = {
        "attention.head_count_kv": 1,
        "attention.key_length": mla.kv_rank + mla.rope_dim,
        "attention.value_length": mla.kv_rank,
        "attention.key_length_mla": mla.nope_dim + mla.rope_dim,
        "attention.value_length_mla": mla.v_dim,
        "attention.kv_lora_rank": mla.kv_rank,
        "rope.dimension_count": mla.rope_dim,
    }
    whole |= {"attention.q_lora_rank": mla.q_rank} if mla.q_rank else {}
    return {name: ("uint32", value) for name, value in whole.items()}


def _read_latent(values: Values, found: Settings) -> None:
    rotated = number(values, "rope.dimension_count")
    found |= {
        "mla.rope_dim": rotated,
        "mla.kv_rank": number(values, "attention.kv_lora_rank"),
        "mla.q_rank": values.get("attention.q_lora_rank", 0),
        "mla.nope_dim": number(values, "attention.key_length_mla") - rotated,
        "mla.v_dim": number(values, "attention.value_length_mla"),
        "kv_heads": found.get("heads"),
    }
    if found.get("rope.scaling") != "yarn":
        return
    factor = found.get("rope.attention_factor", usual_factor(found["rope.factor"]))
    if round(factor, 5) != 1:  # llama.cpp puts another one on all channels
        raise ConfigError("rope.scaling: YaRN's factor on cos and sin must be 1 with latent attention")
    if whole := round(float(values.get(LOG_MULTIPLIER, 0.0)) * 10, 5):
        found |= {"rope.mscale": whole, "rope.mscale_all_dim": whole}


LATENT_KEYS = (
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count"),
    *("attention.key_length_mla", "attention.value_length_mla", LATENT.format("q"), LATENT.format("kv")),
    LOG_MULTIPLIER,
)


def _latent_limits(cfg: ModelConfig) -> list[str]:
    found = []
    lite = cfg.layers in (26, 27) or (cfg.layers == 48 and cfg.vocab == 128256)
    if not cfg.mla.q_rank and not lite:
        valid = "without a latent for queries only 26 or 27 layers are loaded"
        found.append(f"model.mla.q_rank=0: {valid}")
    return found + _needs_shared(cfg)


DEEPSEEK2 = Family(
    "deepseek2",
    ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite"),
    (
        *SIZES,
        FFN,
        *EXPERTS,
        EXPERT_FFN,
        *ROUTER,
        ROPE,
        Part(_write_latent, _read_latent, LATENT_KEYS),
    ),
    {"attention": "mla"},
    CHOICE_BIAS,
    pairs=True,
    limits=_latent_limits,
)


# ---- linear layers ----


def _linear_limits(cfg: ModelConfig) -> list[str]:
    n = cfg.linear
    found = [] if n.value_dim == n.key_dim else [f"model.linear.value_dim={n.value_dim}: must be key_dim"]
    return found + _needs_shared(cfg)


QWEN3NEXT = Family(
    "qwen3next",
    ("qwen3_next",),
    (
        *SIZES,
        *PARTIAL_HEADS,
        FFN,
        *EXPERTS,
        EXPERT_FFN,
        SHARED_FFN,
        ROPE,
        STATES,
    ),
    SOFTMAX
    | {
        "qk_norm": "head",
        "attention_gate": True,
        "norm_offset": True,
        "linear.kind": "deltanet",
        "moe.shared_gate": True,
    },
    {},
    limits=_linear_limits,
)
QWEN35MOE = QWEN3NEXT._replace(
    name="qwen35moe",
    types=("qwen3_5_moe_text", "qwen3_5_moe"),
    keys=(*QWEN3NEXT.keys, SECTIONS),
    tiled=True,
    compared=False,
)

# ---- Mamba-2 ----

GRANITEHYBRID = Family(
    "granitehybrid",
    ("granitemoehybrid",),
    (
        *SIZES,
        mamba.TWO_KINDS,
        *HEADS[1:],
        ONE_WIDTH,
        SHARED_FFN,
        mamba.RULE,
        mamba.POSITIONS,
        ROPE,
        *SCALES,
    ),
    SOFTMAX | {"linear.kind": "mamba2", "linear.conv_bias": True},
    QKV_BIAS | O_BIAS,
    pairs=True,
    factors=True,
    limits=mamba.limits,
)
NEMOTRON_H_MOE = Family(
    "nemotron_h_moe",
    ("nemotron_h",),
    (
        *SIZES,
        mamba.THREE_KINDS,
        HEADS[1],
        mamba.VALUE_HEADS,
        mamba.OTHER_EPS,
        *EXPERTS,
        EXPERT_FFN,
        SHARED_FFN,
        Part(lambda cfg: {SHARED: ("uint32", 1)}, lambda values, found: None, (SHARED,)),
        Part(_write_weights, _read_weights, (SCALE, NORM, *GROUPS)),
        mamba.LATENT_EXPERTS,
        mamba.RULE,
    ),
    {
        "linear.kind": "mamba2",
        "linear.conv_bias": True,
        "rotary": (0,),
        "moe.score": "sigmoid",
        "moe.choice_bias": True,
        "moe.activation": "relu2",
        "moe.shared_activation": "relu2",
    },
    {},
    pairs=True,
    limits=mamba.one_branch_limits,
)

HARMLESS = {"vocab_size", "rope.scaling.finetuned"}  # keys that decide nothing that is computed
NUMERIC = ("rope.truncate", "windows", "linear.least_step")
"""differences that a file may have all the same: no tensor depends on them"""

FAMILIES = (LLAMA, QWEN2, QWEN3, QWEN3MOE, QWEN2MOE, OLMOE, GRANITEMOE, GPT_OSS, DOTS1, GLM4MOE, MINIMAX_M2)
FAMILIES += (HUNYUAN_MOE, ERNIE4_5_MOE, EXAONE_MOE, DEEPSEEK2, QWEN3NEXT, QWEN35MOE)
FAMILIES += (GRANITEHYBRID, NEMOTRON_H_MOE)


# ---- both directions ----


def family_of(model_type: str) -> Family:
    """The architecture that a model_type is written as. ConfigError names those that have one."""
    found = [family for family in FAMILIES if model_type in family.types]
    if not found:
        known = ", ".join(name for family in FAMILIES for name in family.types)
        raise ConfigError(
            f"model_type {model_type!r}: no GGUF is written of it: llama.cpp lacks its architecture, or its "
            f"function was not compared with tmoe's; there are: {known}"
        )
    return found[0]


def group_of(family: Family, cfg: ModelConfig) -> int:
    """Query heads for each key head of the first block, as a file's keys say; 0 for a block without keys."""
    heads = write_keys(family.keys, cfg)["attention.head_count_kv"][1]
    first = heads[0] if isinstance(heads, list) else heads
    return cfg.heads // first if first else 0


def require_same_function(family: Family, cfg: ModelConfig, allowed: Collection[str] = ()) -> list[str]:
    """ConfigError lists every setting that llama.cpp computes otherwise, by its architecture and the keys.

    allowed: names of such settings that are written all the same, of `NUMERIC`; their lines are returned.
    """
    found, problems = _read_back(family, cfg)
    lines = {} if problems else _differences(family, cfg, found)
    refused = [name for name in lines if name not in {*allowed} & {*NUMERIC}]
    if problems or refused:
        shown = [*problems, *(lines[name] for name in refused)]
        if not problems and {*refused} <= {*NUMERIC}:
            shown.append(f"--allow {' '.join(refused)} writes the file all the same")
        words = f"llama.cpp computes another function than this model, in its architecture {family.name}"
        raise ConfigError(listed(words, shown))
    return list(lines.values())


def _read_back(family: Family, cfg: ModelConfig) -> tuple[Settings, list[str]]:
    """The settings that the keys and tensors of a model's file stand for, and what no file of it says."""
    keys = {name: value for name, (_, value) in write_keys(family.keys, cfg).items()}
    found: Settings = dict(family.ours) | dict(vocab=cfg.vocab, tied=cfg.tied)
    problems = read_keys(family.keys, keys, found)
    for name, seen in family.tensors.items():
        found[name] = seen.absent if _setting(cfg, name) == seen.absent else seen.there
    if cfg.rope.scaling == "llama3":
        if not family.factors:
            problems.append(f"model.rope.scaling=llama3: llama.cpp's {family.name} reads no factors")
        found |= {f"rope.{name}": value for name, value in vars(cfg.rope).items()}
    if family.square and cfg.heads * cfg.head_dim != cfg.dim:
        problems.append(f"model.head_dim={cfg.head_dim}: must be {cfg.dim} / {cfg.heads}, the width by heads")
    return found, problems + family.limits(cfg)


def _differences(family: Family, cfg: ModelConfig, found: Settings) -> dict[str, str]:
    """A line for each setting that decides what is computed and is another one in `found`."""
    here, there = (facts(canonical(one)) for one in (cfg, build_config(nested(found))))
    names = [name for name in dict.fromkeys([*here, *there]) if here.get(name) != there.get(name)]
    words = f"llama.cpp's {family.name} computes"
    return {name: f"model.{name}={here.get(name)!r}: {words} {there.get(name)!r}" for name in names}


def _setting(cfg: ModelConfig, name: str) -> Any:
    part, _, leaf = name.rpartition(".")
    return getattr(getattr(cfg, part) if part else cfg, leaf)


def read_model(
    arch: str, values: Values, tensors: Mapping[str, tuple[int, ...]]
) -> tuple[Family, ModelConfig]:
    """The architecture and the settings of a file. ConfigError lists what tmoe does not compute.

    values: the file's keys of its architecture, without the name in front. tensors: names and shapes.
    """
    found = [family for family in FAMILIES if family.name == arch]
    if not found:
        known = ", ".join(family.name for family in FAMILIES)
        raise ConfigError(f"general.architecture={arch!r}: there are {known}")
    family = found[0]
    settings: Settings = dict(family.ours) | dict(tied="output.weight" not in tensors)
    settings["vocab"] = tensors.get("token_embd.weight", (0, 0))[0]
    unread = set(values) - read_names(family.keys) - HARMLESS
    problems = [f"{name}={values[name]!r}: not read" for name in sorted(unread)]
    problems += read_keys(family.keys, values, settings)
    if problems:
        raise ConfigError(listed(f"keys of a {arch}", problems))
    leaves = {re.sub(r"^blk\.\d+\.", "", tensor) for tensor in tensors}
    for name, seen in family.tensors.items():
        settings[name] = seen.there if seen.leaf in leaves else seen.absent
    return family, build_config(nested(settings))
