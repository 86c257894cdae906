"""Keys and tensors of a GGUF file for linear layers, gated attention and norms of 1 + weight.

llama.cpp holds 1 + weight of these norms and -exp(A_log), as its convert_hf_to_gguf.py writes them. A query
head is followed by its gate. In qwen35moe, value heads that share a key are not neighbours: their first heads
come first, then their second heads.

next: extras/gguf/names.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tmoe.config.model import ModelConfig
from tmoe.extras.gguf.keys import Part, Settings, Values, number

INTERVAL = "full_attention_interval"
BLOCK = re.compile(r"blocks\.(\d+)\.attention\.(.+)")
Tensors = tuple[str, int, int, Tensor | None, int]
"""a tensor of the file; of our tensor the first row and the number of rows, the order in which the file has
these rows (None: the same), and the axis that they are counted on"""


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


def parts_of(cfg: ModelConfig, ours: str, tiled: bool) -> list[Tensors] | None:
    """The file's tensors that make up one of ours; None: it is not one of a linear layer or of gated queries.

    tiled: value heads are in qwen35moe's order.
    """
    found = BLOCK.fullmatch(ours)
    if not found or not cfg.linear_layers:
        return None
    layer, leaf = int(found[1]), found[2]
    if not cfg.is_linear(layer):
        return [*_gated(cfg, layer)] if leaf == "qkv.weight" else None
    n = cfg.linear
    H, keys = n.value_heads, 2 * n.key_width
    values, one = _values(cfg, n.value_dim, tiled), _values(cfg, 1, tiled)
    mixed = torch.cat([torch.arange(keys), keys + values])
    block = f"blk.{layer}"
    if leaf == "ba.weight" and not tiled:
        beta = torch.arange(H).view(n.key_heads, -1)
        return [(f"{block}.ssm_ba.weight", 0, 2 * H, torch.cat([beta, H + beta], 1).flatten(), 0)]
    table: dict[str, list[Tensors]] = {
        "qkvz.weight": [
            (f"{block}.attn_qkv.weight", 0, n.mixed, mixed, 0),
            (f"{block}.attn_gate.weight", n.mixed, n.value_width, values, 0),
        ],
        "ba.weight": [
            (f"{block}.ssm_beta.weight", 0, H, one, 0),
            (f"{block}.ssm_alpha.weight", H, H, one, 0),
        ],
        "rates.conv": [(f"{block}.ssm_conv1d.weight", 0, n.mixed, mixed, 0)],
        "rates.A_log": [(f"{block}.ssm_a", 0, H, one, 0)],
        "rates.dt_bias": [(f"{block}.ssm_dt.bias", 0, H, one, 0)],
        "norm.weight": [(f"{block}.ssm_norm.weight", 0, n.value_dim, None, 0)],
        "out.weight": [(f"{block}.ssm_out.weight", 0, n.value_width, values, 1)],
    }
    return table[leaf]


def _values(cfg: ModelConfig, width: int, tiled: bool) -> Tensor:
    """The order of the rows of all value heads, `width` of each."""
    n = cfg.linear
    rows = torch.arange(n.value_heads * width)
    return rows.view(n.key_heads, -1, width).transpose(0, 1).flatten() if tiled else rows


def _gated(cfg: ModelConfig, layer: int) -> Iterator[Tensors]:
    C, keys = cfg.head_dim, cfg.kv_heads * cfg.head_dim
    queries = cfg.heads * C
    query = torch.arange(queries).view(cfg.heads, C)
    order = torch.cat([query, queries + 2 * keys + query], 1).flatten()
    yield f"blk.{layer}.attn_q.weight", 0, 2 * (queries + keys), order, 0
    yield f"blk.{layer}.attn_k.weight", queries, keys, None, 0
    yield f"blk.{layer}.attn_v.weight", queries + keys, keys, None, 0


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
    return theirs - 1 if value == "offset" else (-theirs).log()
