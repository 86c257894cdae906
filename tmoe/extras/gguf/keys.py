"""The keys of a GGUF file that are settings of a model: what a key is, and those that several families share.

A family's keys are written from ModelConfig and read into settings of it by the same table.

next: extras/gguf/families.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tmoe.config.check import ConfigError
from tmoe.config.compare import flattened
from tmoe.config.model import ModelConfig

Settings = dict[str, Any]  # of ModelConfig, by dotted name
Values = Mapping[str, Any]  # of a file's keys, without the architecture in front


class Key(NamedTuple):
    """A key of a file that is one setting of ModelConfig.

    kind: its type in the file.
    default: the value where the key is missing, or a function of the settings before it. None: it must be
        there.
    unwritten: the setting's value that is written as no key at all; with it, a missing key is `default`.
    """

    name: str
    ours: str
    kind: str = "uint32"
    default: Any = None
    unwritten: Any = None


class Part(NamedTuple):
    """Keys that are more than a copy of one setting."""

    write: Callable[[ModelConfig], dict[str, tuple[str, Any]]]
    """key -> type and value"""
    read: Callable[[Values, Settings], None]
    """puts settings; ConfigError for what no setting says"""
    names: tuple[str, ...]
    """the keys that it reads"""


def as_held(value: float) -> float:
    """A number as the file holds it, in fp32, by its shortest spelling."""
    return float(str(np.float32(value)))


def write_keys(table: tuple[Key | Part, ...], cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    """Key -> type and value."""
    flat = flattened(cfg)
    found: dict[str, tuple[str, Any]] = {}
    for entry in table:
        if isinstance(entry, Part):
            found |= entry.write(cfg)
        elif (value := flat[entry.ours]) is not None and value != entry.unwritten:
            found[entry.name] = entry.kind, value
    return found


def read_keys(table: tuple[Key | Part, ...], values: Values, found: Settings) -> list[str]:
    """Put the settings that the keys say into `found`, and return what is wrong."""
    problems = []
    for entry in table:
        try:
            if isinstance(entry, Part):
                entry.read(values, found)
            else:
                found[entry.ours] = _read(entry, values, found)
        except KeyError as missing:
            problems.append(f"{missing.args[0]}: missing")
        except ConfigError as error:
            problems.append(error.wrong)
    return problems


def _read(key: Key, values: Values, found: Settings) -> Any:
    if key.name not in values:
        value = key.default(found) if callable(key.default) else key.default
        if value is None and key.unwritten is None:
            raise KeyError(key.name)
        return value
    return number(values, key.name, key.kind)


def number(values: Values, name: str, kind: str = "uint32") -> Any:
    """The value of a key. KeyError where it is missing; ConfigError for another type than `kind`.

    An array with one value for each layer is that value, if all are equal.
    """
    value = values[name]
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        value = value[0]
    valid = dict(uint32=int, float32=float, bool=bool, string=str)[kind]
    if kind == "bool" and isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (list, bool)) or not isinstance(value, (valid, int)):
        raise ConfigError(f"{name}={value!r}: must be one {kind}")
    return as_held(float(value)) if kind == "float32" else value


def read_names(table: tuple[Key | Part, ...]) -> set[str]:
    return {name for entry in table for name in (entry.names if isinstance(entry, Part) else (entry.name,))}


# ---- shared by families ----


def _width_of_head(found: Settings) -> int | None:
    return found["dim"] // found["heads"] if found.get("dim") and found.get("heads") else None


def _write_values(cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    widths = {"attention.value_length": cfg.value_dim, "rope.dimension_count": cfg.rotary_dim}
    return {name: ("uint32", value) for name, value in widths.items()}


def _read_values(values: Values, found: Settings) -> None:
    width = found.get("head_dim")
    found["v_head_dim"] = 0
    for name in ("attention.value_length", "rope.dimension_count"):
        if name in values and number(values, name) != width:
            raise ConfigError(f"{name}={values[name]!r}: only {width} is computed, attention.key_length")


def _read_partial(values: Values, found: Settings) -> None:
    width = found.get("head_dim")
    turned = number(values, "rope.dimension_count") if "rope.dimension_count" in values else width
    found["rope.dim"] = 0 if turned == width else turned
    _read_values({name: value for name, value in values.items() if name == "attention.value_length"}, found)


SIZES = (
    Key("block_count", "layers"),
    Key("context_length", "rope.max_seq"),
    Key("embedding_length", "dim"),
    Key("attention.head_count", "heads"),
    Key("attention.layer_norm_rms_epsilon", "norm_eps", "float32"),
    Key("rope.freq_base", "rope.theta", "float32", 10000.0),
)
HEADS = (
    Key("attention.head_count_kv", "kv_heads", default=lambda found: found["heads"]),
    Key("attention.key_length", "head_dim", default=_width_of_head),
    Part(_write_values, _read_values, ("attention.value_length", "rope.dimension_count")),
)
PARTIAL_HEADS = (  # of which the first channels may rotate alone
    *HEADS[:2],
    Part(_write_values, _read_partial, ("attention.value_length", "rope.dimension_count")),
)
EXPERTS = (Key("expert_count", "moe.experts"), Key("expert_used_count", "moe.top_k"))
EXPERT_FFN = Key("expert_feed_forward_length", "moe.ffn_dim")
FFN = Key("feed_forward_length", "ffn_dim")
SHARED_FFN = Key("expert_shared_feed_forward_length", "moe.shared_dim", default=0, unwritten=0)


# ---- rotary positions ----

SCALING = "rope.scaling."
LOG_MULTIPLIER = SCALING + "yarn_log_multiplier"
"""of latent attention alone: a tenth of DeepSeek's mscale_all_dim; other architectures write and read none"""
STRETCHED = ("type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow")


def usual_factor(factor: float) -> float:
    """YaRN's factor on cos and sin where nothing else is said: 0.1 ln(factor) + 1."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def factor_of(cfg: ModelConfig) -> float:
    """YaRN's factor on cos and sin of a model (RopeConfig)."""
    rope = cfg.rope
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        log = 0.1 * math.log(rope.factor) if rope.factor > 1 else 0.0
        return (log * rope.mscale + 1) / (log * rope.mscale_all_dim + 1)
    return usual_factor(rope.factor)


def _write_scaling(cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    rope = cfg.rope
    if rope.scaling in ("none", "llama3"):  # llama3's factors are a tensor
        return {}
    found: dict[str, tuple[str, Any]] = dict(type=("string", rope.scaling), factor=("float32", rope.factor))
    if rope.scaling == "yarn":
        found["original_context_length"] = "uint32", rope.original_max_seq
        found["yarn_beta_fast"] = "float32", rope.beta_fast
        found["yarn_beta_slow"] = "float32", rope.beta_slow
        whole = rope.mscale_all_dim if cfg.attention == "mla" else None
        share = factor_of(cfg) / (1.0 if whole else usual_factor(rope.factor))
        if round(share, 6) != 1:
            found["attn_factor"] = "float32", share
        if whole:
            found["yarn_log_multiplier"] = "float32", 0.1 * whole
    return {SCALING + name: value for name, value in found.items()}


def _read_scaling(values: Values, found: Settings) -> None:
    given = {name: values[SCALING + name] for name in STRETCHED if SCALING + name in values}
    kind = given.get("type", "linear" if given.get("factor", 1.0) not in (0.0, 1.0) else "none")
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"{SCALING}type={kind!r}: only none, linear and yarn are computed")
    found["rope.scaling"] = kind
    if kind == "none":
        return
    factor = found["rope.factor"] = number(values, SCALING + "factor", "float32")
    if kind == "linear":
        return
    found["rope.original_max_seq"] = given.get("original_context_length", found.get("rope.max_seq"))
    for ours, usual in dict(beta_fast=32.0, beta_slow=1.0).items():
        found[f"rope.{ours}"] = as_held(given.get(f"yarn_{ours}", usual))
    found["rope.truncate"] = True
    if "attn_factor" in given or LOG_MULTIPLIER in values:
        usual = 1.0 if LOG_MULTIPLIER in values else usual_factor(factor)  # llama-context.cpp
        found["rope.attention_factor"] = round(given.get("attn_factor", 1.0) * usual, 7)


ROPE = Part(_write_scaling, _read_scaling, tuple(SCALING + name for name in STRETCHED))


def canonical(cfg: ModelConfig) -> ModelConfig:
    """The same model in the one spelling that a file has: numbers in fp32, and one factor of YaRN."""
    rope = cfg.rope
    if rope.scaling == "yarn":
        whole = rope.mscale_all_dim if cfg.attention == "mla" else None
        rope = replace(rope, attention_factor=round(factor_of(cfg), 5), mscale=None, mscale_all_dim=whole)
    mla = replace(cfg.mla, interleave=True)  # files have one order of rows, whatever ours is
    return _in_fp32(
        replace(cfg, rope=replace(_in_fp32(rope), interleave=False), mla=mla, moe=_in_fp32(cfg.moe))
    )


def _in_fp32(part: Any) -> Any:
    held = {name: as_held(value) for name, value in vars(part).items() if type(value) is float}
    return replace(part, **held)
