"""The model's forward over a row of trees (eval/tree.py): final hidden states, and the log-probs of targets.

It calls the model's own modules, as generate/forward.py does, without a cache.

next: eval/score.py
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tmoe.config.model import LINEAR
from tmoe.eval.tree import Row
from tmoe.generate.forward import AllTurns, Rotations, feed_forward, softmax_of, windows
from tmoe.generate.prompt_chunks import LENGTHS
from tmoe.model.attention import Attention, gated
from tmoe.model.attention_backend import BLOCK, NARROWEST, Mask, attend, ordered
from tmoe.model.count import qk_width, v_width
from tmoe.model.latent import LatentAttention
from tmoe.model.linear import LinearLayer
from tmoe.model.transformer import Block, Transformer
from tmoe.ops.delta.runs import runs_of
from tmoe.ops.loss.head import wide_products
from tmoe.ops.loss.logprob import chunk_rows


class Batch(NamedTuple):
    """A row of trees on the device. On a GPU it has one of few lengths, filled up with padding."""

    ids_1S: Tensor
    at_S: Tensor
    ends_S: Tensor
    padding_1S: Tensor | None


def batch_of(row: Row, device: torch.device) -> Batch:
    """The tensors of a row. Flex attention is compiled for each length, so a GPU's rows have few lengths."""
    S = len(row.ids)
    rest = length_of(S, device) - S
    alone = range(S + 1, S + rest + 1)  # a token of padding attends to itself alone
    lists = row.ids + [0] * rest, row.at + [0] * rest, [*row.ends, *alone]
    ids_S, at_S, ends_S = torch.tensor(lists).to(device)
    padding_1S = torch.arange(S + rest, device=device)[None] >= S if rest else None
    return Batch(ids_S[None], at_S, ends_S, padding_1S)


def length_of(tokens: int, device: torch.device) -> int:
    """The length of a row that holds so much on this device."""
    if device.type == "cpu":
        return tokens
    step = LENGTHS[-1]
    return next((n for n in LENGTHS if n >= tokens), -(-tokens // step) * step)


def tree_mask(batch: Batch, window: int, width: int) -> Mask:
    """The mask of a row for layers of this window (0: none); it includes the window.

    width: as in attention_backend.make_mask.
    """
    S = batch.ends_S.shape[0]
    places_S = torch.arange(S, device=batch.ends_S.device)
    at_S, ends_S = batch.at_S, batch.ends_S
    reach = window if window > 0 else 2**30

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < ends_S[k]) & (at_S[q] - at_S[k] < reach)

    if not ends_S.is_cuda or width < NARROWEST:
        zero = places_S.new_zeros(())
        return visible(zero, zero, places_S[:, None], places_S[None])[None, None]
    return tree_blocks(batch, reach, visible)


def tree_blocks(batch: Batch, reach: int, visible: Callable[..., Tensor]) -> BlockMask:
    """Which blocks of 128 x 128 contain a visible pair. The bounds may mark a block without one."""
    S = batch.ends_S.shape[0]
    device = batch.ends_S.device

    def extremes(t_S: Tensor) -> tuple[Tensor, Tensor]:
        short = -S % BLOCK
        filled = torch.cat([t_S, t_S[-1:].expand(short)])
        blocks = rearrange(filled, "(block token) -> block token", token=BLOCK)
        return blocks.amin(-1), blocks.amax(-1)

    first = torch.arange(0, S, BLOCK, device=device)
    last = (first + BLOCK - 1).clamp(max=S - 1)
    (early_end, late_end), (low_at, high_at) = extremes(batch.ends_S), extremes(batch.at_S)
    first_q, last_q, low_q, high_q = (t[:, None] for t in (first, last, low_at, high_at))
    some = (first <= last_q) & (first_q < late_end) & (low_q - high_at < reach)
    whole = (last <= first_q) & (last_q < early_end) & (high_q - low_at < reach)
    whole &= (first_q + BLOCK <= S) & (first + BLOCK <= S)
    part, whole = (some & ~whole)[None, None], whole[None, None]
    blocks = (*ordered(part), *ordered(whole), *ordered(part.mT), *ordered(whole.mT))
    return BlockMask((S, S), *blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible)


def hidden(model: Transformer, batch: Batch, turns: AllTurns, rows: int) -> Tensor:
    """The inputs of the head [S, D] for a row.

    It must run inside `gathered`. turns: of all positions. rows: as in feed_forward.
    """
    width = min(qk_width(model.cfg), v_width(model.cfg))
    masks: dict[Any, Any] = {window: tree_mask(batch, window, width) for window in windows(model)}
    if model.cfg.linear_layers:
        sequences_1S = (batch.at_S == 0).cumsum(0)[None]  # no row has branches, see `rows` of eval/tree.py
        masks[LINEAR] = runs_of(sequences_1S, None, model.cfg.linear.conv - 1)
    here = {rope: Rotations(cos[batch.at_S], sin[batch.at_S]) for rope, (cos, sin) in turns.items()}
    x = model.embed(batch.ids_1S)
    for block in model.blocks:
        assert isinstance(block, Block)
        if block.attention is not None:
            y = attention(block.attention, block.attention_norm(x), here[block.rope], masks[block.mask])
            x = x + block.branch(block.attention_post_norm(y))
        if block.feeds:
            y, _ = feed_forward(block, block.ffn_norm(x), batch.padding_1S, rows)
            x = x + y
    return model.scaled(model.norm(x))[0]


def attention(
    layer: Attention | LatentAttention | LinearLayer, x_1SD: Tensor, turns: Rotations, mask: Any
) -> Tensor:
    """y [1, S, D] of a layer whose mask includes its window."""
    if isinstance(layer, LinearLayer):
        return layer(x_1SD, *turns, mask)
    if isinstance(layer, LatentAttention):
        q_nope, q_rot, latent, k_rot = layer.narrow(x_1SD, *turns)
        k, v = layer.widen(latent, k_rot)
        return layer.o(attend(torch.cat([q_nope, q_rot], -1), k, v, mask, layer.scale).flatten(-2))
    q, k, v, gate = layer.project(x_1SD, *turns)
    scale, sinks_H = softmax_of(layer)
    return layer.o(gated(attend(q, k, v, mask, scale, 0, sinks_H), gate).flatten(-2))


def target_logprobs(
    h_SD: Tensor, weight_VD: Tensor, places_P: Tensor, targets_P: Tensor
) -> tuple[Tensor, Tensor]:
    """For each target, ln softmax(h W^T) of it at its place, and whether it is the most probable token.

    The softmax is in fp32. Places may repeat: the logits of a place are computed once, a chunk of places at a
    time. Returns (fp32 [P], bool [P]).
    """
    once_U, which_P = places_P.unique(return_inverse=True)
    order_P = which_P.argsort(stable=True)
    which_P, targets_P = which_P[order_P], targets_P[order_P]
    logp_P = torch.empty(len(which_P), device=h_SD.device)
    best_P = torch.empty(len(which_P), dtype=torch.bool, device=h_SD.device)
    wide = wide_products(h_SD)
    head = weight_VD if wide else weight_VD.float()
    step = chunk_rows(weight_VD.shape[0], 4)
    edges = torch.arange(0, len(once_U) + step, step, device=h_SD.device)
    cuts = torch.searchsorted(which_P, edges).tolist()
    for i, (low, high) in enumerate(pairwise(cuts)):
        h_RD = h_SD[once_U[i * step : (i + 1) * step]]
        logits_RV = torch.mm(h_RD, head.T, out_dtype=torch.float32) if wide else h_RD.float() @ head.T
        mine, wanted = which_P[low:high] - i * step, targets_P[low:high]
        logp_P[low:high] = logits_RV[mine, wanted] - logits_RV.logsumexp(-1)[mine]
        best_P[low:high] = logits_RV.argmax(-1)[mine] == wanted
    back_P = order_P.argsort()
    return logp_P[back_P], best_P[back_P]
