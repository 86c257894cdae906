"""Limits how many of a micro-batch's tokens an expert accepts: which pairs it drops, and in which order.

A pair is a token and one of its K experts. An expert accepts its first C pairs of a rank's micro-batch of T
tokens, in one of four orders:

    probs      the largest weights first (Megatron-Core's default)
    position   the first tokens first (Megatron-Core)
    choice     all tokens' first choices, then all second ones; the first tokens first (GShard, Tutel)
    priority   the same, but the tokens with the best scores first (Tutel's batch-prioritised routing)

Among equal weights or scores the lower token is first, on every machine, because the sorts are stable. The
weights of pairs that are kept do not change. A dropped pair has the id -1, so it is neither sent nor
multiplied. No size depends on the routing, and the host waits for nothing.

next: moe/exchange/padded.py
"""

import math

import torch
from torch import Tensor

from tmoe.config.model import MoEConfig
from tmoe.moe.router import Routing


def capacity(tokens: int, top_k: int, cfg: MoEConfig, factor: float | None = None) -> int:
    """C: how many pairs of `tokens` tokens an expert accepts, padding counted; at most all tokens.

    factor: None: the factor of `cfg`. 0: all tokens. Below 0: its absolute value is used, because capacities
    never depend on the load here.
    """
    factor = cfg.capacity_factor if factor is None else factor
    if not factor:
        return tokens
    factor, E = abs(factor), cfg.experts
    if cfg.rounding == "tutel":
        most = top_k * int(factor * ((tokens + E - 1) // E))
    else:
        most = math.ceil(tokens * top_k / E * factor)
    return min(most, tokens)


def order(routing: Routing, drop: str, score: str) -> Tensor:
    """int64 [N]: pairs, by their number t K + k, in the order in which experts accept them."""
    T, K = routing.ids_TK.shape
    pairs_TK = torch.arange(T * K, device=routing.ids_TK.device).view(T, K)
    if drop == "position":
        return pairs_TK.flatten()
    if drop == "probs":
        return routing.weights_TK.detach().flatten().argsort(descending=True, stable=True)
    if drop == "priority":
        best_T = best_score(routing.logits_TE.detach(), score)
        pairs_TK = pairs_TK[best_T.argsort(descending=True, stable=True)]
    return pairs_TK.T.flatten()


def best_score(logits_TE: Tensor, score: str) -> Tensor:
    """A number for each token that increases with the score of its best expert.

    Softmax: the logarithm of that score. Any other score depends on its own logit alone: the largest logit.
    """
    best_T = logits_TE.amax(-1)
    return best_T - logits_TE.logsumexp(-1) if score == "softmax" else best_T


def places(ids_TK: Tensor, order_N: Tensor, experts: int) -> Tensor:
    """int64 [T, K]: how many pairs of the same expert precede each pair in this order."""
    ids_N = ids_TK.flatten()[order_N].long()
    ids_N = torch.where(ids_N < 0, experts, ids_N)  # no expert: a separate group after all experts
    sorted_N, from_N = ids_N.sort(stable=True)
    starts = torch.searchsorted(sorted_N, torch.arange(experts + 1, device=ids_N.device))
    places_N = torch.arange(ids_N.numel(), device=ids_N.device) - starts[sorted_N]
    return torch.empty_like(places_N).scatter(0, order_N[from_N], places_N).view(ids_TK.shape)


def limited(routing: Routing, most: int | Tensor, cfg: MoEConfig) -> Routing:
    """The routing in which each expert accepts its first `most` pairs; the ids of dropped pairs are -1.

    most: a 0-dim int64 tensor on the device if it changes between calls of one compiled graph.
    """
    T, E = routing.logits_TE.shape
    if isinstance(most, int) and most >= T:
        return routing
    places_TK = places(routing.ids_TK, order(routing, cfg.drop, cfg.score), E)
    return routing._replace(ids_TK=torch.where(places_TK < most, routing.ids_TK, -1))
