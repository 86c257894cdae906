"""The model's forward over a cache: prompts packed into a row, then one token for each slot.

It calls the model's own modules, so weights, norms, rotations and experts are those of training. Prompts are
packed and attend like documents in training. A single token attends to the cache; for latent attention, the
matrices that make keys and values are then absorbed into the query and the output (DeepSeek-V2, 2024, section
2.1.2).

next: generate/sampler.py
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn

from tmoe.config.model import ModelConfig, RopeConfig
from tmoe.generate.cache import PAGE, Cache, LayerCache
from tmoe.generate.states import rows_of_states
from tmoe.model.adapted import adapted
from tmoe.model.attention import Attention, gated
from tmoe.model.attention_backend import Mask, attend, make_mask
from tmoe.model.count import qk_width, v_width
from tmoe.model.latent import LatentAttention
from tmoe.model.linear import LinearLayer, State
from tmoe.model.norm import OffsetNorm
from tmoe.model.rope import turns_of
from tmoe.model.transformer import Block, Transformer
from tmoe.moe.exchange.expert_tensor import ExpertTensorDispatcher
from tmoe.moe.layer import CallOptions
from tmoe.moe.router import Routing
from tmoe.ops.decode.add_norm import WIDEST, add_norm
from tmoe.ops.decode.attention import decode_attention
from tmoe.ops.decode.heads import Heads, decode_heads, fits
from tmoe.ops.decode.in_blocks import decode_in_blocks


class Rotations(NamedTuple):
    """Rotations of some tokens: rope_table's rows."""

    cos: Tensor
    sin: Tensor


AllTurns = dict[RopeConfig | None, Rotations]  # by kind of block


def all_turns(cfg: ModelConfig, tokens: int, device: torch.device) -> AllTurns:
    """The rotations of positions 0 to tokens - 1, by kind of block."""
    return {rope: Rotations(*tables) for rope, tables in turns_of(cfg, tokens, device).items()}


class PromptBatch(NamedTuple):
    """Prompts that the model computes together, as one row of S places: N tokens, and gaps.

    A chunk holds either beginnings of prompts, or later pieces, whose earlier tokens are in the cache.
    """

    tokens_1S: Tensor
    at_1S: Tensor  # positions in their prompts
    documents_1S: Tensor | None  # None: one prompt
    padding_1S: Tensor | None  # True in gaps
    rows_N: Tensor | None  # the places that are tokens; None: all
    places_S: Tensor  # places of their keys in the cache; of gaps: places without a token
    lengths: tuple[int, ...]  # tokens of each piece
    # of later pieces: places of all keys of their prompts up to the pieces' ends, the pieces whose keys they
    # are (None: one piece), and each token's own key among them
    seen_J: Tensor | None = None
    seen_documents_1J: Tensor | None = None
    queries_S: Tensor | None = None

    def tokens(self, t_1SX: Tensor) -> Tensor:
        """The values of tokens, without gaps [N, ...]."""
        return t_1SX[0] if self.rows_N is None else t_1SX[0, self.rows_N]


def prefill(
    model: Transformer,
    cache: Cache,
    chunk: PromptBatch,
    turns: AllTurns,
    rows: int,
    last: bool,
    states: Sequence[list[State]] = (),
) -> tuple[list[Routing], Tensor]:
    """Fills the cache with a chunk.

    Returns the routing of each MoE layer, of all S places, and the residual stream after the last block
    [1, S, D]; without `last`, both without the last feed-forward.

    turns: of all positions. rows: as in feed_forward. last: compute the feed-forward of the last block too.
    states: for each piece of the chunk, its prompt's states in the linear layers; they are replaced by those
    after the piece.
    """
    routes = []
    linear = 0
    fused = chunk.tokens_1S.is_cuda and model.rounding.fused
    here = {rope: Rotations(cos[chunk.at_1S], sin[chunk.at_1S]) for rope, (cos, sin) in turns.items()}
    masks = {window: mask_of(model, chunk, window) for window in windows(model)}
    x = model.embed(chunk.tokens_1S)
    blocks, norms = in_order(model)
    normed = blocks[0].first_norm(x)
    for block, layer, following in zip(blocks, cache.layers, norms, strict=True):
        attention, mask, now = block.attention, masks[block.window], here[block.rope]
        y = normed
        if isinstance(attention, LinearLayer):
            y = prompt_linear(attention, normed, chunk, states, linear)
            linear += 1
        elif isinstance(attention, LatentAttention):
            assert layer is not None
            y = prompt_latent(attention, normed, now, layer, chunk, mask)
        elif attention is not None:
            assert layer is not None
            y = prompt_grouped(attention, normed, now, layer, chunk, mask, fused)
        if attention is not None:
            y = block.branch(block.attention_post_norm(y))
            x, normed = add_and_norm(x, y, block.ffn_norm if block.feeds else following, fused)
        # the cache needs nothing after the last block's keys
        if block.feeds and (last or block is not blocks[-1]):
            y, routing = feed_forward(block, normed, chunk.padding_1S, rows)
            x, normed = add_and_norm(x, y, following, fused)
            if routing is not None:
                routes.append(routing)
    return routes, x


def in_order(model: Transformer) -> tuple[list[Block], list[nn.Module]]:
    """The blocks, and the norm that follows each."""
    blocks = cast(list[Block], list(model.blocks))
    return blocks, [*(block.first_norm for block in blocks[1:]), cast(nn.Module, model.norm)]


def head_input(model: Transformer, x_1SD: Tensor, chunk: PromptBatch) -> Tensor:
    """The head's input [N, D] of a chunk's tokens, from the residual stream after the last block."""
    assert model.norm is not None
    return model.scaled(model.norm(chunk.tokens(x_1SD)))


def mask_of(model: Transformer, chunk: PromptBatch, window: int) -> Mask:
    """The mask of attention between the tokens of a chunk, for a layer with this window."""
    cfg = model.cfg
    width, sinks = min(qk_width(cfg), v_width(cfg)), cfg.sinks_in(window)
    S, device = chunk.tokens_1S.shape[1], chunk.tokens_1S.device
    in_blocks = model.rounding.in_blocks
    if chunk.seen_J is None:
        return make_mask(chunk.documents_1S, window, S, device, width, sinks, in_blocks=in_blocks)
    J = chunk.seen_J.shape[0]
    seen = chunk.seen_documents_1J
    return make_mask(seen, window, J, device, width, sinks, chunk.queries_S, in_blocks)


def decode(
    model: Transformer,
    cache: Cache,
    tokens_B: Tensor,
    at_B: Tensor,
    table_BM: Tensor,
    turns: AllTurns,
    rows: int,
    padding_B: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Routing]]:
    """Logits [B, V] after one token of each of B sequences, which is also added to the cache.

    Also returns the input of the head [B, D], and the routing of the tokens in each MoE layer.

    Args:
        tokens_B: the tokens.
        at_B: their positions.
        table_BM: int32, the pages of each sequence, as many as the longest one has.
        turns: of all positions.
        rows: as in feed_forward.
        padding_B: True at rows of no sequence, which experts must not get.

    The first B states of `cache.states` are overwritten by those after the tokens.
    """
    padding_B1 = None if padding_B is None else padding_B[:, None]
    here = {rope: Rotations(cos[at_B], sin[at_B]) for rope, (cos, sin) in turns.items()}
    pages_B = table_BM.gather(1, at_B[:, None] // PAGE)[:, 0]
    places_B = pages_B.long() * PAGE + at_B % PAGE
    lengths_B = at_B + 1
    fused = tokens_B.is_cuda and model.rounding.fused
    x = model.embed(tokens_B[:, None])
    blocks, norms = in_order(model)
    normed = blocks[0].first_norm(x)
    routes = []
    states = iter(rows_of_states(cache.states, len(tokens_B)))
    for block, layer, following in zip(blocks, cache.layers, norms, strict=True):
        attention, y = block.attention, normed
        if isinstance(attention, LinearLayer):
            y = attention.step(normed, next(states))
        elif attention is not None:
            assert layer is not None
            q_BHC, gate_BHC = put_one(attention, normed, here[block.rope], layer, places_B, fused)
            scale, sinks_H = softmax_of(attention)
            pages = q_BHC, *layer, table_BM, lengths_B
            if model.rounding.in_blocks:
                y_BHC = decode_in_blocks(*pages, scale=scale)
            else:
                y_BHC = decode_attention(*pages, scale=scale, window=block.window or None, sinks_H=sinks_H)
            y = output(attention, gated(y_BHC, gate_BHC))[:, None]
        if attention is not None:
            y = block.branch(block.attention_post_norm(y))
            x, normed = add_and_norm(x, y, block.ffn_norm if block.feeds else following, fused)
        if not block.feeds:
            continue
        y, routing = feed_forward(block, normed, padding_B1, rows)
        x, normed = add_and_norm(x, y, following, fused)
        if routing is not None:
            routes.append(routing)
    h_BD = model.scaled(normed[:, 0])
    return F.linear(h_BD, model.head_weight), h_BD, routes


def idle(model: Transformer, rows: int) -> None:
    """A pass without tokens, which computes this rank's experts for other ranks. rows: as in feed_forward."""
    x = model.head_weight.new_empty(0, 1, model.cfg.dim)
    for block in model.blocks:
        assert isinstance(block, Block)
        if block.moe is not None:
            feed_forward(block, block.ffn_norm(x), None, rows)


def windows(model: Transformer) -> set[int]:
    """The windows of all blocks; 0: none, as in linear blocks."""
    return {model.cfg.window_of(i) for i in range(model.cfg.layers)}


def feed_forward(
    block: Block, normed: Tensor, padding_BS: Tensor | None, rows: int
) -> tuple[Tensor, Routing | None]:
    """The output of a block's feed-forward, and the routing of an MoE.

    It computes as in training, but without a bound on experts' tokens.
    normed: the output of ffn_norm. rows: number of rows for the experts, filled up with padding; 0: the
    number of tokens.
    """
    moe = block.moe
    if moe is None:
        assert block.ffn is not None
        return block.branch(block.ffn_post_norm(block.ffn(normed))), None
    x_TD, padding_T = normed.flatten(0, 1), None if padding_BS is None else padding_BS.flatten()
    T = x_TD.shape[0]
    if more := max(rows - T, 0):
        padding_T = x_TD.new_zeros(T, dtype=torch.bool) if padding_T is None else padding_T
        x_TD = torch.cat([x_TD, x_TD.new_zeros(more, x_TD.shape[1])])
        padding_T = torch.cat([padding_T, padding_T.new_ones(more)])
    call = None if moe.router.cfg.capacity_factor is None else moe.call(x_TD, capacity_factor=0.0)
    if isinstance(moe.dispatcher, ExpertTensorDispatcher):  # undivided: ranks of its group have other tokens
        call = (call or CallOptions())._replace(way="1")
    # `forward` bypasses the hooks of the scope, because weights are gathered already
    y_TD, routing, _ = moe.experts.forward(partial(moe.mix, call=call), x_TD, padding_T)
    y_TD = block.branch(block.ffn_post_norm(y_TD[:T].view_as(normed)))
    return y_TD, routing._replace(ids_TK=routing.ids_TK[:T], weights_TK=routing.weights_TK[:T])


# ---- prompts ----


def prompt_grouped(
    attention: Attention,
    x_1SD: Tensor,
    turns: Rotations,
    layer: LayerCache,
    chunk: PromptBatch,
    mask: Mask,
    fused: bool,
) -> Tensor:
    """y [1, S, D] of a chunk; its keys and values are written to the cache. fused: as in put_heads."""
    seen = chunk.seen_J
    if fused and has_kernel(attention, fused):
        here = Rotations(turns.cos[0], turns.sin[0])
        q, gate = put_heads(attention, x_1SD[0], here, layer, chunk.places_S, fused)
        q, gate = q[None], None if gate is None else gate[None]
        k, v = layer.get(chunk.places_S if seen is None else seen)
        k, v = k[None], v[None]
    else:
        q, k, v, gate = attention.project(x_1SD, *turns)
        layer.put(chunk.places_S, k[0], v[0])
        if seen is not None:
            k, v = (t[None] for t in layer.get(seen))
    # with earlier keys the mask has the window already, for queries of a part of the prompt
    window = attention.window if seen is None else 0
    scale, sinks_H = softmax_of(attention)
    y = attend(q, k, v, mask, scale, window, sinks_H)
    return attention.o(gated(y, gate).flatten(-2))


def prompt_linear(
    attention: LinearLayer, x_1SD: Tensor, chunk: PromptBatch, states: Sequence[list[State]], layer: int
) -> Tensor:
    """y [1, S, D] of a chunk, piece by piece; 0 in gaps. The pieces' states of this linear layer change."""
    parts = []
    for part, own in zip(chunk.tokens(x_1SD).split(chunk.lengths), states, strict=True):
        y, own[layer] = attention.go_on(part[None], own[layer])
        parts.append(y[0])
    y_ND = torch.cat(parts)
    if chunk.rows_N is None:
        return y_ND[None]
    return torch.zeros_like(x_1SD).index_copy(1, chunk.rows_N, y_ND[None])


def prompt_latent(
    attention: LatentAttention,
    x_1SD: Tensor,
    turns: Rotations,
    layer: LayerCache,
    chunk: PromptBatch,
    mask: Mask,
) -> Tensor:
    """y [1, S, D] of a chunk, without absorbed matrices; its latents are written to the cache."""
    q_nope, q_rot, latent, k_rot = attention.narrow(x_1SD, *turns)
    layer.put(chunk.places_S, torch.cat([latent.unsqueeze(2), k_rot], -1)[0], None)
    if chunk.seen_J is not None:
        both_1J1C = layer.get(chunk.seen_J)[0][None]
        latent, k_rot = both_1J1C.split(attention.widths[1:], -1)
        latent = latent.squeeze(2)
    k, v = attention.widen(latent, k_rot)
    y = attend(torch.cat([q_nope, q_rot], -1), k, v, mask, attention.scale)
    return attention.o(y.flatten(-2))


# ---- one token ----


def add_and_norm(x: Tensor, y: Tensor, norm: nn.Module, fused: bool) -> tuple[Tensor, Tensor]:
    """x + y and its norm, [B, 1, D] each; fused: in one kernel."""
    D = x.shape[-1]
    if not (fused and isinstance(norm, nn.RMSNorm) and D <= WIDEST):
        total = x + y
        return total, norm(total)
    weight, offset = cast(Tensor, norm.weight), isinstance(norm, OffsetNorm)
    total, normed = add_norm(x.view(-1, D), y.reshape(-1, D), weight, cast(float, norm.eps), offset)
    return total.view_as(x), normed.view_as(x)


def put_one(
    attention: Attention | LatentAttention,
    x_B1D: Tensor,
    turns: Rotations,
    layer: LayerCache,
    places_B: Tensor,
    fused: bool,
) -> tuple[Tensor, Tensor | None]:
    """Queries and gates [B, H, C] of one token each; its key and value are written to the cache.

    fused: norms of heads may be part of their kernel. Else, and without a kernel, they round as in training.
    """
    latent = isinstance(attention, LatentAttention)
    if x_B1D.is_cuda and not latent and has_kernel(attention, fused):
        return put_heads(attention, x_B1D[:, 0], turns, layer, places_B, fused)
    one = Rotations(turns.cos[:, None], turns.sin[:, None])
    if latent:
        q, k, v, gate = (*absorbed(attention, x_B1D, one), None)
    else:
        q, k, v, gate = attention.project(x_B1D, *one)
    layer.put(places_B, k[:, 0], None if v is None else v[:, 0])
    return q[:, 0].contiguous(), None if gate is None else gate[:, 0]


def has_kernel(attention: Attention, fused: bool) -> bool:
    """Whether ops/decode/heads.py can take the attention's heads.

    fused: norms are part of the kernel; else they are the modules', which cannot follow the rotation.
    """
    cfg = attention.cfg
    return fits(cfg.heads, cfg.head_dim, cfg.qk_norm) if fused else cfg.qk_norm != "rotated"


def put_heads(
    attention: Attention, x_BD: Tensor, turns: Rotations, layer: LayerCache, places_B: Tensor, fused: bool
) -> tuple[Tensor, Tensor | None]:
    """put_one by ops/decode/heads.py. fused: norms as well. (The norm modules add in another order.)"""
    cfg, G, norm = attention.cfg, attention.key_heads, attention.cfg.qk_norm
    qkv_BX = attention.qkv(x_BD)
    if norm != "none" and not fused:
        qkv_BX, norm = with_norms(attention, qkv_BX), "none"
    how = Heads(cfg.heads, norm, cfg.norm_eps, cfg.rope.interleave, cfg.value_multiplier, cfg.norm_offset)
    norms = None if norm == "none" else (attention.q_norm.weight, attention.k_norm.weight)
    q_BHC = decode_heads(qkv_BX, *turns, places_B, layer, how, norms)
    if not cfg.attention_gate:
        return q_BHC, None
    first = (cfg.heads + G) * cfg.head_dim + G * cfg.value_dim
    return q_BHC, rearrange(qkv_BX[:, first:], "b (head c) -> b head c", head=cfg.heads)


def with_norms(attention: Attention, qkv_BX: Tensor) -> Tensor:
    """Rows of queries, keys and other columns [B, X], with queries and keys normed."""
    cfg = attention.cfg
    C = cfg.head_dim
    q, k, others = qkv_BX.tensor_split([cfg.heads * C, (cfg.heads + attention.key_heads) * C], -1)
    if cfg.qk_norm == "head":
        q, k = (rearrange(t, "b (head c) -> b head c", c=C) for t in (q, k))
    q, k = attention.q_norm(q), attention.k_norm(k)
    return torch.cat([q.reshape(len(qkv_BX), -1), k.reshape(len(qkv_BX), -1), others], -1)


def absorbed(attention: LatentAttention, x_B1D: Tensor, turns: Rotations) -> tuple[Tensor, Tensor, None]:
    """Queries that are multiplied by latents, and the latent of this token for the cache.

    (W q_nope) . latent = q_nope . (W^T latent), where W^T latent is the key. Values are a view of the latent.
    """
    q_nope, q_rot, latent, k_rot = attention.narrow(x_B1D, *turns)
    w_k_HNR, _ = matrices(attention)
    q_latent = einsum(q_nope, w_k_HNR, "b s head nope, head nope rank -> b s head rank")
    if (own := adapted(attention.kv_b)) is not None:  # the adapter's part of W^T: a^T (b^T q)
        b_k_HNr, _ = of_keys_and_values(attention, own.b)
        low = einsum(q_nope, b_k_HNr, "b s head nope, head nope low -> b s head low")
        q_latent = q_latent + (low * own.scale) @ own.a
    return torch.cat([q_latent, q_rot], -1), torch.cat([latent.unsqueeze(2), k_rot], -1), None


def matrices(attention: LatentAttention) -> tuple[Tensor, Tensor]:
    """The matrices that make each head's key [H, nope_dim, R] and value [H, v_dim, R] from a latent."""
    return of_keys_and_values(attention, attention.kv_b.weight)


def of_keys_and_values(attention: LatentAttention, w_XR: Tensor) -> tuple[Tensor, Tensor]:
    """Rows for keys [H, nope_dim, R] and for values [H, v_dim, R] of kv_b's weight, or of its adapter's b."""
    w_HXR = rearrange(w_XR, "(head x) rank -> head x rank", head=attention.heads)
    w_k, w_v = w_HXR.split([attention.mla.nope_dim, attention.mla.v_dim], 1)
    return w_k, w_v


def output(attention: Attention | LatentAttention, y_BHC: Tensor) -> Tensor:
    """Attention's output [B, D] from all heads' sums over values, or over latents."""
    if isinstance(attention, LatentAttention):
        v_BHV = einsum(y_BHC, matrices(attention)[1], "b head rank, head v rank -> b head v")
        if (own := adapted(attention.kv_b)) is not None:
            _, b_v_HVr = of_keys_and_values(attention, own.b)
            v_BHV = v_BHV + einsum(own.inner(y_BHC), b_v_HVr, "b head low, head v low -> b head v")
        y_BHC = v_BHV
    return attention.o(y_BHC.flatten(-2))


def softmax_of(attention: Attention | LatentAttention) -> tuple[float, Tensor | None]:
    """The factor on the products of queries and keys, and the sinks."""
    if isinstance(attention, LatentAttention):
        return attention.scale, None
    cfg = attention.cfg
    scale = cfg.head_dim**-0.5 if cfg.attention_multiplier is None else cfg.attention_multiplier
    return scale, attention.sinks
