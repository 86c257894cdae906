"""Keys and tensors of a GGUF file for Mamba-2, and for models whose blocks differ in kind.

llama.cpp tells a block's kind by two keys with a value for each block: a linear block has no key heads, and
in Nemotron-H a block with a feed-forward width is an MoE. Sources: src/models/granite-hybrid.cpp,
nemotron-h.cpp and mamba-base.cpp of llama.cpp 0c1e57098.

next: extras/gguf/names.py
"""

from __future__ import annotations

from typing import Any

import torch

from tmoe.config.check import ConfigError
from tmoe.config.model import ModelConfig
from tmoe.extras.gguf.keys import Key, Part, Settings, Values, number
from tmoe.extras.gguf.linear import Tensors
from tmoe.hf.config import shortest

KEY_HEADS, WIDTHS = "attention.head_count_kv", "feed_forward_length"
SSM = tuple(
    f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
)
TURNED = "rope.scaling.finetuned"  # the switch of Granite's rotary positions


# ---- keys ----


def _write_rule(cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    n = cfg.linear
    values = n.conv, n.key_dim, n.key_heads, n.value_heads, n.value_width
    return {name: ("uint32", value) for name, value in zip(SSM, values, strict=True)}


def _read_rule(values: Values, found: Settings) -> None:
    conv, state, groups, heads, width = (number(values, name) for name in SSM)
    found |= {
        "linear.conv": conv,
        "linear.key_dim": state,
        "linear.key_heads": groups,
        "linear.value_heads": heads,
        "linear.value_dim": width // max(1, heads),
    }


RULE = Part(_write_rule, _read_rule, SSM)


def _each(values: Values, name: str, found: Settings) -> list[int]:
    """The value of each block: 0 or one other number. A single number is that of all blocks."""
    value, layers = values[name], found.get("layers") or 0
    each = value if isinstance(value, list) else [value] * layers
    if len(each) != layers or not all(isinstance(one, int) for one in each) or len({*each} - {0}) > 1:
        raise ConfigError(f"{name}={value!r}: must be 0 or one number for each of {layers} blocks")
    return each


def _write_heads(cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    return {KEY_HEADS: ("array", [cfg.kv_heads * cfg.attends(i) for i in range(cfg.layers)])}


def _put(found: Settings, kinds: list[str], heads: list[int]) -> None:
    found["layer_types"] = tuple(kinds[: shortest(kinds)])
    found["kv_heads"] = max(heads, default=0) or found.get("heads")


def _read_two(values: Values, found: Settings) -> None:
    heads = _each(values, KEY_HEADS, found)
    _put(found, ["full" if one else "linear" for one in heads], heads)


def _write_widths(cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    widths = [cfg.moe.ffn_dim if cfg.is_moe(i) else cfg.ffn_dim * cfg.feeds(i) for i in range(cfg.layers)]
    return _write_heads(cfg) | {WIDTHS: ("array", widths)}


def _read_three(values: Values, found: Settings) -> None:
    heads, widths = _each(values, KEY_HEADS, found), _each(values, WIDTHS, found)
    pairs = zip(heads, widths, strict=True)
    _put(found, ["moe" if width else "full" if head else "linear" for head, width in pairs], heads)


TWO_KINDS = Part(_write_heads, _read_two, (KEY_HEADS,))
THREE_KINDS = Part(_write_widths, _read_three, (KEY_HEADS, WIDTHS))


def _write_turned(cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    return {TURNED: ("bool", any(cfg.rope_of(i) is not None for i in range(cfg.layers)))}


def _read_turned(values: Values, found: Settings) -> None:
    found["rotary"] = (int(TURNED not in values or number(values, TURNED, "bool")),)


POSITIONS = Part(_write_turned, _read_turned, (TURNED,))
# Nemotron-H has no positions, and a file's rope.dimension_count may be of another head
VALUE_HEADS = Part(
    lambda cfg: {"attention.value_length": ("uint32", cfg.value_dim)},
    lambda values, found: None,
    ("attention.value_length", "rope.dimension_count"),
)
# the value that llama.cpp 0c1e57098 requires; its norms read attention.layer_norm_rms_epsilon
OTHER_EPS = Part(
    lambda cfg: {"attention.layer_norm_epsilon": ("float32", cfg.norm_eps)},
    lambda values, found: None,
    ("attention.layer_norm_epsilon",),
)
LATENT_EXPERTS = Key("moe_latent_size", "moe.latent_dim", default=0, unwritten=0)


def limits(cfg: ModelConfig) -> list[str]:
    """Models that llama.cpp does not load, a line each."""
    return [] if cfg.linear_layers else [f"model.layer_types={cfg.layer_types}: needs linear blocks"]


def one_branch_limits(cfg: ModelConfig) -> list[str]:
    """`limits` of Nemotron-H, whose feed-forwards are all MoEs with a shared expert."""
    dense = [i for i in range(cfg.layers) if cfg.is_dense(i)]
    found = [f"model.layer_types: block {dense[0]} has a dense feed-forward, not an MoE"] if dense else []
    found += [] if cfg.moe.shared_dim else ["model.moe.shared_dim=0: must be above 0"]
    return limits(cfg) + found


# ---- tensors ----


def parts_of(cfg: ModelConfig, layer: int, leaf: str) -> list[Tensors]:
    """The file's tensors that make up one of ours. leaf: its name in the block's attention."""
    n, block = cfg.linear, f"blk.{layer}."
    C, keys, mixed = n.key_width, 2 * n.key_width, n.mixed
    ours_C, ours_B, ours_x = torch.arange(C), torch.arange(C, keys), torch.arange(keys, mixed)
    gates = torch.arange(mixed, mixed + n.value_width)
    steps = torch.arange(mixed + n.value_width, mixed + n.value_width + n.value_heads)
    channels = torch.cat([ours_x, ours_B, ours_C])
    whole = torch.cat([gates, channels, steps])
    H, X, groups = n.value_heads, n.value_width, (n.key_heads, n.value_width // n.key_heads)
    table: dict[str, Tensors] = {
        "qkvz.weight": Tensors(f"{block}ssm_in.weight", 0, len(whole), whole),
        "rates.conv": Tensors(f"{block}ssm_conv1d.weight", 0, mixed, channels),
        "rates.conv_bias": Tensors(f"{block}ssm_conv1d.bias", 0, mixed, channels),
        "rates.A_log": Tensors(f"{block}ssm_a", 0, H, view=(H, 1)),
        "rates.dt_bias": Tensors(f"{block}ssm_dt.bias", 0, H),
        "rates.D": Tensors(f"{block}ssm_d", 0, H, view=(H, 1)),
        "norm.weight": Tensors(f"{block}ssm_norm.weight", 0, X, view=groups),
        "out.weight": Tensors(f"{block}ssm_out.weight", 0, X, axis=1),
    }
    return [table[leaf]]
