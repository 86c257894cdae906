"""The model's forward over a cache: prompts whole, then one token a slot.

It calls the model's own modules, so weights, norms, rotations and experts are those of training. Prompts pass
attention as sequences in training do. One token reads the cache, in which latent attention's matrices of keys
and values are absorbed into its queries and its output (DeepSeek-V2, 2024, section 2.1.2).

next: generate/sampler.py
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe.generate.cache import Cache, Layer
from tmoe.generate.whole import Ranks
from tmoe.model.attention import Attention
from tmoe.model.attention_backend import attend
from tmoe.model.latent import LatentAttention
from tmoe.model.rope import rope_table
from tmoe.model.transformer import Block, Transformer
from tmoe.moe.expert_tensor import ExpertTensorDispatcher
from tmoe.moe.layer import Call
from tmoe.moe.router import Routing


class Turns(NamedTuple):
    """Rotations of some tokens: rope_table's rows."""

    cos: Tensor
    sin: Tensor


def prefill(
    model: Transformer, cache: Cache, tokens_BS: Tensor, padding_BS: Tensor, slots_B: Tensor, ranks: Ranks
) -> None:
    """Fills these slots with prompts, from position 0 on.

    padding_BS: True behind a prompt's end. Causal attention keeps prompts from seeing it; what it leaves in
    the cache is overwritten before any query sees it.
    """
    rows = ranks.rows(tokens_BS.numel())
    turns = Turns(*rope_table(model.cfg.rope, model.cfg.rotary_dim, tokens_BS.shape[1], tokens_BS.device))
    x = model.embed(tokens_BS)
    for block, layer in zip(model.blocks, cache.layers, strict=True):
        assert isinstance(block, Block)
        normed = block.attention_norm(x)
        attention = block.attention
        if isinstance(attention, LatentAttention):
            y = prompt_latent(attention, normed, turns, layer, slots_B)
        else:
            y = prompt_grouped(attention, normed, turns, layer, slots_B)
        x = x + block.branch(y)
        # nothing reads what comes behind the last block's keys, but other ranks pass its experts
        if layer is not cache.layers[-1] or ranks.group is not None:
            x = feed_forward(block, x, padding_BS, rows)[0]


def decode(
    model: Transformer,
    cache: Cache,
    tokens_B: Tensor,
    at_B: Tensor,
    longest: int,
    turns: Turns,
    ranks: Ranks,
) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, V] behind one token of each of the first B slots, which also goes into the cache.

    Also the experts that the tokens go to, ids [B, K] of each MoE layer.

    at_B: its position. longest: above all of them, known to the host. turns: of all positions.
    """
    B = tokens_B.shape[0]
    rows = ranks.rows(B)
    now = Turns(turns.cos[at_B][:, None], turns.sin[at_B][:, None])
    behind_BT = at_B[:, None] - torch.arange(longest, device=at_B.device)
    seen = {w: behind_BT >= 0 if w == 0 else (behind_BT >= 0) & (behind_BT < w) for w in windows(model)}
    x = model.embed(tokens_B[:, None])
    rows_B = torch.arange(B, device=at_B.device)
    routes = []
    for block, layer in zip(model.blocks, cache.layers, strict=True):
        assert isinstance(block, Block)
        normed = block.attention_norm(x)
        attention = block.attention
        if isinstance(attention, LatentAttention):
            q, k, v = absorbed(attention, normed, now)
        else:
            q, k, v = attention.project(normed, *now)
        layer.k_BTGC[rows_B, at_B] = k[:, 0]
        if v is not None:
            layer.v_BTGC[rows_B, at_B] = v[:, 0]
        k_BTGC, v_BTGC = (t[:B, :longest] for t in layer)
        scale, sinks_H = softmax_of(attention)
        y_BHC = attend_one(q[:, 0], k_BTGC, v_BTGC, seen[block.window], scale, sinks_H)
        x = x + block.branch(output(attention, y_BHC)[:, None])
        x, routing = feed_forward(block, x, None, rows)
        if routing is not None:
            routes.append(routing.ids_TK)
    return F.linear(model.scaled(model.norm(x[:, 0])), model.head_weight), routes


def idle(model: Transformer, rows: int) -> None:
    """A pass without tokens, for the ranks whose tokens' experts are here. rows: see feed_forward."""
    x = model.head_weight.new_empty(0, 1, model.cfg.dim)
    for block in model.blocks:
        assert isinstance(block, Block)
        if block.moe is not None:
            feed_forward(block, x, None, rows)


def windows(model: Transformer) -> set[int]:
    """The windows of all blocks; 0: none."""
    return {model.cfg.window_of(i) for i in range(model.cfg.layers)}


def feed_forward(
    block: Block, x: Tensor, padding_BS: Tensor | None, rows: int
) -> tuple[Tensor, Routing | None]:
    """The block's second half, as in training but without full experts, and where an MoE sent the tokens.

    rows: how many the experts are given, of which the last are padding; 0: as many as there are tokens.
    """
    moe = block.moe
    normed = block.ffn_norm(x)
    if moe is None:
        assert block.ffn is not None
        return x + block.branch(block.ffn(normed)), None
    x_TD, padding_T = normed.flatten(0, 1), None if padding_BS is None else padding_BS.flatten()
    T = x_TD.shape[0]
    if more := max(rows - T, 0):
        padding_T = x_TD.new_zeros(T, dtype=torch.bool) if padding_T is None else padding_T
        x_TD, padding_T = F.pad(x_TD, (0, 0, 0, more)), F.pad(padding_T, (0, more), value=True)
    call = None if moe.router.cfg.capacity_factor is None else moe.call(x_TD, capacity_factor=0.0)
    if isinstance(moe.dispatcher, ExpertTensorDispatcher):  # undivided: ranks of its group have other tokens
        call = (call or Call())._replace(way="1")
    # past the hooks of the scope: weights are gathered already
    y_TD, routing, _ = moe.experts.forward(partial(moe.mix, call=call), x_TD, padding_T)
    y_TD, ids_TK = y_TD[:T], routing.ids_TK[:T]
    return x + block.branch(y_TD.view_as(x)), routing._replace(ids_TK=ids_TK)


# ---- prompts ----


def prompt_grouped(
    attention: Attention, x_BSD: Tensor, turns: Turns, layer: Layer, slots_B: Tensor
) -> Tensor:
    """y [B, S, D] of prompts; their keys and values go into the cache."""
    q, k, v = attention.project(x_BSD, *turns)
    S = x_BSD.shape[1]
    layer.k_BTGC[slots_B, :S] = k
    layer.v_BTGC[slots_B, :S] = v
    scale, sinks_H = softmax_of(attention)
    return attention.o(attend(q, k, v, None, scale, attention.window, sinks_H).flatten(-2))


def prompt_latent(
    attention: LatentAttention, x_BSD: Tensor, turns: Turns, layer: Layer, slots_B: Tensor
) -> Tensor:
    """y [B, S, D] of prompts, nothing absorbed; their latents go into the cache."""
    q_nope, q_rot, latent, k_rot = attention.narrow(x_BSD, *turns)
    layer.k_BTGC[slots_B, : x_BSD.shape[1], 0] = torch.cat([latent, k_rot.squeeze(2)], -1)
    k, v = attention.widen(latent, k_rot)
    y = attend(torch.cat([q_nope, q_rot], -1), k, v, None, attention.scale)
    return attention.o(y.flatten(-2))


# ---- one token ----


def absorbed(attention: LatentAttention, x_B1D: Tensor, turns: Turns) -> tuple[Tensor, Tensor, None]:
    """Queries that multiply latents themselves, and what is cached of this token; values are in it.

    (W q_nope) . latent = q_nope . (W^T latent), where W^T latent would be the key.
    """
    q_nope, q_rot, latent, k_rot = attention.narrow(x_B1D, *turns)
    w_k_HNR, _ = matrices(attention)
    q_latent = torch.einsum("bshn,hnr->bshr", q_nope, w_k_HNR)
    return torch.cat([q_latent, q_rot], -1), torch.cat([latent.unsqueeze(2), k_rot], -1), None


def matrices(attention: LatentAttention) -> tuple[Tensor, Tensor]:
    """Of each head, what makes its key [H, nope_dim, R] and its value [H, v_dim, R] of a latent."""
    mla = attention.mla
    w_HXR = attention.kv_b.weight.unflatten(0, (attention.heads, mla.nope_dim + mla.v_dim))
    w_k, w_v = w_HXR.split([mla.nope_dim, mla.v_dim], 1)
    return w_k, w_v


def output(attention: Attention | LatentAttention, y_BHC: Tensor) -> Tensor:
    """[B, D] of all heads' sums over values, or over latents."""
    if isinstance(attention, LatentAttention):
        y_BHC = torch.einsum("bhr,hvr->bhv", y_BHC, matrices(attention)[1])
    return attention.o(y_BHC.flatten(-2))


def softmax_of(attention: Attention | LatentAttention) -> tuple[float, Tensor | None]:
    """The factor on queries times keys, and the sinks."""
    if isinstance(attention, LatentAttention):
        return attention.scale, None
    cfg = attention.cfg
    scale = cfg.head_dim**-0.5 if cfg.attention_multiplier is None else cfg.attention_multiplier
    return scale, attention.sinks


def attend_one(
    q_BHC: Tensor, k_BTGC: Tensor, v_BTGC: Tensor, seen_BT: Tensor, scale: float, sinks_H: Tensor | None
) -> Tensor:
    """`attend` for one query a sequence, [B, H, C of v].

    The heads that share a key are rows of one product, so keys are read once.
    """
    B, H, _ = q_BHC.shape
    G = k_BTGC.shape[2]
    q_BGPC = q_BHC.unflatten(1, (G, H // G))
    k_BGTC, v_BGTC = k_BTGC.transpose(1, 2), v_BTGC.transpose(1, 2)
    seen = seen_BT[:, None, None]
    if sinks_H is None:
        y = F.scaled_dot_product_attention(q_BGPC, k_BGTC, v_BGTC, attn_mask=seen, scale=scale)
        return y.flatten(1, 2)
    scores = (q_BGPC @ k_BGTC.mT).float() * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    sinks = sinks_H.float().view(1, G, H // G, 1).expand(B, -1, -1, -1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights.to(v_BGTC.dtype) @ v_BGTC).flatten(1, 2)
