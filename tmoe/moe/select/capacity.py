"""Bounds how many of a micro-batch's tokens an expert takes: which pairs it drops, and in which order.

A pair is a token and one of its K experts. An expert of a rank's micro-batch of T tokens takes its first C
pairs, by one of four orders:

    probs      the largest weights first (Megatron-Core's default)
    position   the first tokens first (Megatron-Core)
    choice     all tokens' first choices, then all second ones; the first tokens first (GShard, Tutel)
    priority   the same, but the tokens with the best scores first (Tutel's batch-prioritised routing)

Equal weights or scores: the lower token first, on every machine, as the sorts are stable. Weights of pairs
that stay are not changed. A dropped pair has the id -1, so it is neither sent nor multiplied. No size depends
on the routing, and the host waits for nothing.

next: moe/exchange/padded.py
"""

import math

import torch
from torch import Tensor

from tmoe.config.model import MoEConfig
from tmoe.moe.router import Routing


def capacity(tokens: int, top_k: int, cfg: MoEConfig, factor: float | None = None) -> int:
    """C: how many pairs an expert takes of `tokens` tokens, padding counted; at most all tokens.

    factor: None: that of `cfg`. 0: all tokens. Below 0: as above 0, for no room follows the need here.
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
    """int64 [N]: pairs, by their number t K + k, in the order in which experts take them."""
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
    """A number for each token that rises with its best expert's score.

    Softmax: the logarithm of that score. Other scores rise with their own logit alone: the largest logit.
    """
    best_T = logits_TE.amax(-1)
    return best_T - logits_TE.logsumexp(-1) if score == "softmax" else best_T


def places(ids_TK: Tensor, order_N: Tensor, experts: int) -> Tensor:
    """int64 [T, K]: how many pairs of the same expert come before each pair in this order."""
    ids_N = ids_TK.flatten()[order_N].long()
    ids_N = torch.where(ids_N < 0, experts, ids_N)  # nowhere: a group of its own, behind all experts
    sorted_N, from_N = ids_N.sort(stable=True)
    starts = torch.searchsorted(sorted_N, torch.arange(experts + 1, device=ids_N.device))
    places_N = torch.arange(ids_N.numel(), device=ids_N.device) - starts[sorted_N]
    return torch.empty_like(places_N).scatter(0, order_N[from_N], places_N).view(ids_TK.shape)


def limited(routing: Routing, most: int | Tensor, cfg: MoEConfig) -> Routing:
    """The routing in which each expert takes its first `most` pairs; the others' ids are -1.

    most: 0-dim int64 on the device where it changes from call to call of one compiled graph.
    """
    T, E = routing.logits_TE.shape
    if isinstance(most, int) and most >= T:
        return routing
    places_TK = places(routing.ids_TK, order(routing, cfg.drop, cfg.score), E)
    return routing._replace(ids_TK=torch.where(places_TK < most, routing.ids_TK, -1))
