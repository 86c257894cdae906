"""The interface of a selection of experts; plain top-k, and functions that several selections share.

A selection is a function `choose(asked) -> Choice` in a separate file, and a line in the table SELECTIONS of
config/routing_choices.py. It runs without gradient, inside the compiled block. It must not wait for the host,
and no size may depend on values of tensors.

next: moe/select/sinkhorn_selection.py
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from tmoe.config.model import MoEConfig
from tmoe.config.routing_choices import SELECTIONS
from tmoe.moe.select.scores import SCORES
from tmoe.ops import softmax_topk


class RouterInput(NamedTuple):
    """The input of a selection: the router's numbers of T tokens for all experts, without gradients."""

    cfg: MoEConfig
    K: int  # experts per token; an average where a selection has more columns than K
    logits_TE: Tensor
    scores_TE: Tensor
    bias_E: Tensor | None  # the choice bias
    live_T: Tensor | None  # bool, False at padding; None: no padding
    devices: int  # ranks of the expert group; each has equally many neighbouring experts
    training: bool


class Choice(NamedTuple):
    """Which experts each token is sent to."""

    ids_TK: Tensor  # any integer type; in the token's order of preference; -1: no expert
    noted_TX: Tensor | None = None  # numbers for the log, or for the balancing of the selection


def choose(asked: RouterInput) -> Choice:
    """Plain top-k: the K experts that a token prefers."""
    return Choice(best_experts(preference(asked), asked.K))


def best_experts(wanted_TE: Tensor, K: int) -> Tensor:
    """Ids of each token's K largest numbers, in decreasing order."""
    if wanted_TE.dtype != torch.float32:
        return wanted_TE.topk(K, -1).indices
    return softmax_topk(wanted_TE, K, False)[1]  # one short launch on a GPU, where topk sorts


def preference(asked: RouterInput) -> Tensor:
    """The numbers [T, E] whose K largest are chosen; -inf outside a token's best groups or ranks.

    With a choice bias: scores plus the bias. Without: logits, which have the same order as scores. Logits
    still differ between experts whose scores have underflowed to 0 or rounded to 1.
    """
    cfg = asked.cfg
    scores_TE = asked.scores_TE if asked.bias_E is None else asked.scores_TE + asked.bias_E
    wanted_TE = asked.logits_TE if asked.bias_E is None else scores_TE
    if cfg.softmax == "after":
        scores_TE = wanted_TE  # scores are computed after the choice, so logits compare groups (Megatron)
    groups, best = cfg.groups, cfg.top_groups
    if cfg.top_devices:
        groups, best = asked.devices, min(cfg.top_devices, asked.devices)
    return wanted_TE if best == groups else within_best(asked, wanted_TE, scores_TE, groups, best)


def within_best(asked: RouterInput, wanted_TE: Tensor, scores_TE: Tensor, groups: int, best: int) -> Tensor:
    """`wanted`, with -inf at the experts outside a token's `best` groups.

    A group is a run of neighbouring experts. Its value is that of its best expert (DeepSeek-V2, 2024, section
    2.2.2), or the sum of its two best scores (DeepSeek-V3, 2024, released code), or the sum of its best K /
    `best` scores (Megatron). Identity experts are in no group and can always be chosen.
    """
    E = asked.cfg.experts
    inside = rearrange(wanted_TE[:, :E], "t (group e) -> t group e", group=groups)
    if asked.cfg.group_score == "max":
        worth = inside.amax(-1)
    else:
        count = 2 if asked.cfg.group_score == "top2" else max(1, asked.K // best)
        by_group = rearrange(scores_TE[:, :E], "t (group e) -> t group e", group=groups)
        worth = by_group.topk(count, -1).values.sum(-1)
    chosen = worth.topk(best, -1).indices
    closed = torch.ones_like(worth, dtype=torch.bool).scatter(-1, chosen, False)
    inside = inside.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
    return torch.cat([inside, wanted_TE[:, E:]], -1) if asked.cfg.identity_experts else inside


def best_tokens(worth_TE: Tensor, counts_E: Tensor, live_T: Tensor | None) -> Tensor:
    """The chosen (token, expert) pairs, bool [T, E]: expert e chooses its counts_E[e] best tokens.

    Among equal tokens the earlier one is chosen first, on every machine.
    """
    if live_T is not None:
        worth_TE = worth_TE.masked_fill(~live_T[:, None], float("-inf"))
    order_TE = worth_TE.argsort(dim=0, descending=True, stable=True)
    places_TE = torch.arange(len(worth_TE), device=worth_TE.device)[:, None].expand_as(order_TE)
    rank_TE = torch.empty_like(order_TE).scatter(0, order_TE, places_TE)
    taken_TE = rank_TE < counts_E
    return taken_TE if live_T is None else taken_TE & live_T[:, None]


def in_columns(taken_TE: Tensor, worth_TE: Tensor, columns: int) -> Tensor:
    """The experts of each token as ids [T, columns], -1 in unused columns.

    With fewer columns than experts, a token keeps the experts of highest worth.
    """
    E = taken_TE.shape[1]
    if columns == E:
        return torch.arange(E, device=taken_TE.device).where(taken_TE, -1)
    best_TK = worth_TE.masked_fill(~taken_TE, float("-inf")).topk(columns, -1).indices
    return best_TK.where(taken_TE.gather(-1, best_TK), -1)


def shares(cfg: MoEConfig, logits_TE: Tensor) -> Tensor:
    """Each token's scores divided by their sum over all experts."""
    return SCORES[cfg.score].log(logits_TE).softmax(-1)


def selection(name: str) -> Callable[[RouterInput], Choice]:
    """The function `choose` that a line of SELECTIONS names."""
    module = SELECTIONS[name].module
    return importlib.import_module(module if "." in module else f"tmoe.moe.select.{module}").choose
