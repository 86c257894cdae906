"""Bytes that one block holds on a rank, in closed form: the sum over its parts.

The formulas of the parts are in tmoe/model/block_bytes.py and tmoe/moe/moe_bytes.py.

next: tmoe/plan/memory.py
"""

from __future__ import annotations

from typing import Any

from tmoe.config import sizes
from tmoe.config.axes import Axes
from tmoe.config.float8_settings import fits
from tmoe.config.run import Config
from tmoe.config.sizes import FP32, compute_bytes, local_tokens
from tmoe.model import block_bytes as of_model
from tmoe.model.block_bytes import attention_elements, rule_bytes, statistics
from tmoe.model.count import block_shapes
from tmoe.model.freeze import frozen_pattern, matching
from tmoe.moe import moe_bytes as of_moe
from tmoe.moe.moe_bytes import (
    coded_row_bytes,
    gathered_expert_bytes,
    moe_bytes,
    slice_bytes,
    turned_bytes,
    window_bytes,
)


def layer_bytes(cfg: Config, axes: Axes, layer: int, checkpoint: str = "none") -> int:
    """Bytes that autograd keeps of one block: of its attention and of its feed-forward.

    checkpoint: the part that is recomputed in the backward; only the input of that part is kept.

    The formula is for a compiled block: inductor recomputes pointwise results in the backward, but keeps
    operands of matrix products. It is within 2% of the saved tensors of such blocks
    (tests/run/test_memory.py, test_block_memory.py); eager blocks keep 1.3 to 2 times as much.
    """
    model, width = cfg.model, compute_bytes(cfg)
    T, D = local_tokens(cfg, axes), model.dim

    # the residual stream, which is qkv's operand if no norm precedes it; a norm adds its output and root mean
    # square
    norm = T * (D * width + FP32)  # a norm after a branch keeps the branch's result
    around_attention, around_feed_forward = model.norms_of(layer)
    attention = T * D * width * model.mixes(layer) + around_attention * norm
    attention += attention_elements(cfg, axes, layer) * width
    attention += statistics(cfg, axes, layer) * FP32

    feed_forward = T * D * width * model.feeds(layer) + around_feed_forward * norm
    dense = (model.moe.shared_halves + 1) * T * model.ffn_dim * width * model.is_dense(layer)
    feed_forward += moe_bytes(cfg, axes) if model.is_moe(layer) else dense
    feed_forward += slice_bytes(cfg, axes) if model.is_moe(layer) else 0

    stream = T * D * width
    if layer >= model.layers:  # predicts a further token: [e; h] and its norms, the operand of eh_proj
        stream = 2 * T * D * width
        attention += stream + 2 * norm
        feed_forward += norm
    if checkpoint == "block":
        return stream
    if checkpoint == "attention":
        return stream + feed_forward
    if checkpoint == "moe":
        return attention + T * D * width
    return attention + feed_forward


def backward_bytes(cfg: Config, axes: Axes, layer: int) -> int:
    """Temporaries of one block's backward: gradients of saved tensors, recomputed tensors, later windows.

    Under tp they include the gathered input of the projections and its gradient, for all the group's tokens.
    """
    whole = layer_bytes(cfg, axes, layer)
    again = 2 * whole - layer_bytes(cfg, axes, layer, cfg.parallel.checkpoint)
    gathered = 2 * (axes.tp - 1) * local_tokens(cfg, axes) * cfg.model.dim * compute_bytes(cfg)
    experts = 0
    if cfg.model.is_moe(layer):
        experts = gathered_expert_bytes(cfg, axes) + coded_row_bytes(cfg, axes)
        experts += turned_bytes(cfg, axes) if trains_experts(cfg, layer) else 0
    rest = window_bytes(cfg, axes, layer) + cast_bytes(cfg, axes, layer) + rule_bytes(cfg, axes, layer)
    return again + gathered + experts + rest


def trains_experts(cfg: Config, layer: int) -> bool:
    """Whether a matrix of a block's experts has a gradient."""
    names = [f"blocks.{layer}.moe.experts.{matrix}" for matrix in ("gate_up", "down")]
    pattern = frozen_pattern(cfg)
    return not pattern or len(matching(pattern, names)) < len(names)


def cast_bytes(cfg: Config, axes: Axes, layer: int) -> int:
    """Bytes of the float8 copies that one layer's two products of the backward read (--train.float8).

    dx: the gradient of the result, and the weight; dW: that gradient again, by columns, and the input. The
    result is that of the widest layer of the block.
    """
    if cfg.train.float8 == "none":
        return 0
    T, (dense, _) = local_tokens(cfg, axes), block_shapes(cfg.model, layer)
    wide = [shape for shape in dense if len(shape) == 2 and fits(*shape)]
    return max((T * (2 * rows + columns) + rows * columns for rows, columns in wide), default=0)


def __getattr__(name: str) -> Any:
    """A formula that was in this module, from the module that has it now; until version 0.2."""
    for room in (sizes, of_moe, of_model):
        if name in vars(room):
            return vars(room)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
