"""Keys and tensors of a GGUF file for Gated DeltaNet, gated attention and norms of 1 + weight.

llama.cpp holds 1 + weight of these norms and -exp(A_log), as its convert_hf_to_gguf.py writes them. A query
head is followed by its gate. In qwen35moe, value heads that share a key are not neighbours: their first heads
come first, then their second heads.

next: extras/gguf/names.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.config.model import ModelConfig
from tmoe.extras.gguf.keys import Part, Settings, Values, number

INTERVAL = "full_attention_interval"


class Tensors(NamedTuple):
    """A tensor of the file, and the part of ours that it holds."""

    name: str
    first: int
    rows: int
    order: Tensor | None = None
    """our rows in the order of the file; None: the same"""
    axis: int = 0
    """the axis that rows are counted on"""
    view: tuple[int, ...] = ()
    """the file's shape, if it is another one of the same values"""


# ---- keys ----


def _write_states(cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    n = cfg.linear
    full = [i + 1 for i in range(cfg.layers) if not cfg.is_linear(i)]
    whole = {
        "ssm.conv_kernel": n.conv,
        "ssm.state_size": n.key_dim,
        "ssm.group_count": n.key_heads,
        "ssm.time_step_rank": n.value_heads,
        "ssm.inner_size": n.value_width,
        INTERVAL: full[0] if full else cfg.layers + 1,
    }
    return {name: ("uint32", value) for name, value in whole.items()}


def _read_states(values: Values, found: Settings) -> None:
    heads = number(values, "ssm.time_step_rank")
    found |= {
        "linear.conv": number(values, "ssm.conv_kernel"),
        "linear.key_dim": number(values, "ssm.state_size"),
        "linear.key_heads": number(values, "ssm.group_count"),
        "linear.value_heads": heads,
        "linear.value_dim": number(values, "ssm.inner_size") // max(1, heads),
        "linear.every": number(values, INTERVAL) if INTERVAL in values else 4,
    }


def _write_sections(cfg: ModelConfig) -> dict[str, tuple[str, Any]]:
    pairs = cfg.rotary_dim // 2  # divided among time, height and width, which are equal for text
    return {"rope.dimension_sections": ("array", [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])}


STATES = Part(
    _write_states,
    _read_states,
    (
        *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
        INTERVAL,
    ),
)
SECTIONS = Part(_write_sections, lambda values, found: None, ("rope.dimension_sections",))

# ---- tensors ----


def parts_of(cfg: ModelConfig, layer: int, leaf: str, tiled: bool) -> list[Tensors]:
    """The file's tensors that make up one of ours. leaf: its name in the block's attention.

    tiled: value heads are in qwen35moe's order.
    """
    n = cfg.linear
    H, keys = n.value_heads, 2 * n.key_width
    values, one = _values(cfg, n.value_dim, tiled), _values(cfg, 1, tiled)
    mixed = torch.cat([torch.arange(keys), keys + values])
    block = f"blk.{layer}"
    if leaf == "ba.weight" and not tiled:
        beta = torch.arange(H).view(n.key_heads, -1)
        return [Tensors(f"{block}.ssm_ba.weight", 0, 2 * H, torch.cat([beta, H + beta], 1).flatten())]
    table = {
        "qkvz.weight": [
            Tensors(f"{block}.attn_qkv.weight", 0, n.mixed, mixed),
            Tensors(f"{block}.attn_gate.weight", n.mixed, n.value_width, values),
        ],
        "ba.weight": [
            Tensors(f"{block}.ssm_beta.weight", 0, H, one),
            Tensors(f"{block}.ssm_alpha.weight", H, H, one),
        ],
        "rates.conv": [Tensors(f"{block}.ssm_conv1d.weight", 0, n.mixed, mixed)],
        "rates.A_log": [Tensors(f"{block}.ssm_a", 0, H, one)],
        "rates.dt_bias": [Tensors(f"{block}.ssm_dt.bias", 0, H, one)],
        "norm.weight": [Tensors(f"{block}.ssm_norm.weight", 0, n.value_dim)],
        "out.weight": [Tensors(f"{block}.ssm_out.weight", 0, n.value_width, values, axis=1)],
    }
    return table[leaf]


def _values(cfg: ModelConfig, width: int, tiled: bool) -> Tensor:
    """The order of the rows of all value heads, `width` of each."""
    n = cfg.linear
    rows = torch.arange(n.value_heads * width)
    return rows.view(n.key_heads, -1, width).transpose(0, 1).flatten() if tiled else rows


def gated(cfg: ModelConfig, layer: int) -> Iterator[Tensors]:
    """The file's queries with their gates, keys and values."""
    C, keys = cfg.head_dim, cfg.kv_heads * cfg.head_dim
    queries = cfg.heads * C
    query = torch.arange(queries).view(cfg.heads, C)
    order = torch.cat([query, queries + 2 * keys + query], 1).flatten()
    yield Tensors(f"blk.{layer}.attn_q.weight", 0, 2 * (queries + keys), order)
    yield Tensors(f"blk.{layer}.attn_k.weight", queries, keys)
    yield Tensors(f"blk.{layer}.attn_v.weight", queries + keys, keys)


def value_of(cfg: ModelConfig, ours: str) -> str:
    """The function of our values that the file has: "offset", "decay", or "" for the values themselves."""
    if ours.endswith(".rates.A_log"):
        return "decay"
    return "offset" if cfg.norm_offset and _is_offset(cfg, ours) else ""


def _is_offset(cfg: ModelConfig, ours: str) -> bool:
    """Whether a tensor is the weight of a norm whose factor is 1 + weight."""
    return ours.endswith("norm.weight") and not ours.endswith(".attention.norm.weight")


def to_file(ours: Tensor, value: str) -> Tensor:
    """The file's values, in fp32."""
    if not value:
        return ours
    return ours.float() + 1 if value == "offset" else -ours.float().exp()


def to_ours(theirs: Tensor, value: str) -> Tensor:
    """`to_file` backwards. A decay that is 0 gives an A_log of -inf."""
    if not value:
        return theirs
    return theirs - 1 if value == "offset" else _log(-theirs)


def _log(rate: Tensor) -> Tensor:
    """A number in fp32 whose exp is exactly `rate`, if the logarithm or a neighbour of it is one."""
    log = rate.double().log().float()
    for near in (log.nextafter(log + 1), log.nextafter(log - 1)):
        log = torch.where((log.exp() != rate) & (near.exp() == rate), near, log)
    return log
