"""Chooses K experts for every token and weighs them, by softmax or sigmoid scores in fp32.

next: moe/balance.py
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tmoe.config.model import MoEConfig
from tmoe.ops import softmax_topk
from tmoe.ops.check import require
from tmoe.ops.router_product import router_product


class Routing(NamedTuple):
    """What the router decided for T tokens."""

    weights_TK: Tensor  # fp32, differentiable
    ids_TK: Tensor  # int32 expert ids, -1 for pairs that go nowhere (padding, dropped)
    logits_TE: Tensor  # fp32, differentiable


def on_matrix_units(x_TD: Tensor) -> bool:
    """Whether `router_product` is faster than an fp32 product of an fp32 copy of x.

    It needs matrix units that multiply bf16 and keep the result in fp32.
    """
    return x_TD.is_cuda and torch.version.hip is None and x_TD.dtype == torch.bfloat16


class Router(nn.Module):
    """Chooses the top K of E experts by logits = x W^T.

    `softmax="before"`: the K largest scores (softmax over all E, or the sigmoid of each logit), divided by
        their sum if `renormalize`.
    `softmax="after"`: the softmax over the K largest logits (Mixtral; the same numbers as before +
        renormalize).

    Both are multiplied by `scaling`. `groups`, `choice_bias`: see `preference`.
    `router_bias`: logits = x W^T + b (gpt-oss).
    Scores and weights are fp32, and the product has fp32 accuracy, whatever the dtypes of x and W.
    `on_matrix_units` says where bf16 is multiplied without conversion.
    """

    def __init__(self, dim: int, cfg: MoEConfig):
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.experts, dim))
        self.bias = nn.Parameter(torch.empty(cfg.experts)) if cfg.router_bias else None
        self.choice_bias: Tensor | None
        choice_bias = torch.zeros(cfg.experts, dtype=torch.float32) if cfg.choice_bias else None
        self.register_buffer("choice_bias", choice_bias)

    def forward(self, x_TD: Tensor, padding_T: Tensor | None = None, top_k: int | None = None) -> Routing:
        """x_TD: any float dtype. padding_T: bool, True at tokens to leave out. top_k: None: that of cfg."""
        cfg = self.cfg
        top_k = cfg.top_k if top_k is None else top_k
        # autocast does not exist on the meta device
        with nullcontext() if x_TD.is_meta else torch.autocast(x_TD.device.type, enabled=False):
            jitter = cfg.jitter if self.training else 0.0
            bias = None if self.bias is None else self.bias.float()
            if on_matrix_units(x_TD) and not jitter:
                logits_TE = router_product(x_TD, self.weight)
                logits_TE = logits_TE if bias is None else logits_TE + bias
            else:
                x_TD = x_TD.float()
                if jitter:
                    x_TD = x_TD * (1 + jitter * (2 * torch.rand_like(x_TD) - 1))
                logits_TE = F.linear(x_TD, self.weight.float(), bias)

            after = cfg.softmax == "after"
            by_score_alone = self.choice_bias is None and cfg.top_groups == cfg.groups
            if after or (cfg.score == "softmax" and by_score_alone):
                weights_TK, ids_TK = softmax_topk(logits_TE, top_k, cfg.renormalize or after)
            else:
                scores_TE = logits_TE.sigmoid() if cfg.score == "sigmoid" else logits_TE.softmax(-1)
                ids_TK = self.preference(logits_TE.detach(), scores_TE.detach()).topk(top_k, -1).indices
                weights_TK = scores_TE.gather(-1, ids_TK)
                if cfg.renormalize:  # 1e-20 as in DeepSeek's code: every sigmoid may be 0
                    weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        ids_TK = ids_TK.to(torch.int32)
        if padding_T is not None:
            ids_TK = ids_TK.masked_fill(padding_T[:, None], -1)
        return Routing(weights_TK * cfg.scaling, ids_TK, logits_TE)

    def preference(self, logits_TE: Tensor, scores_TE: Tensor) -> Tensor:
        """The numbers [T, E] whose K largest are chosen; -inf outside a token's `top_groups` best groups.

        With `choice_bias`: scores plus that bias. Without: logits, which have the same order as scores, and
        which still differ between experts whose scores have underflowed to 0 or rounded to 1.
        A group is worth its best expert (DeepSeek-V2, 2024, section 2.2.2), or the sum of its two best scores
        (DeepSeek-V3, 2024, released code).
        """
        cfg = self.cfg
        if self.choice_bias is not None:
            scores_TE = scores_TE + self.choice_bias
        wanted_TE = logits_TE if self.choice_bias is None else scores_TE
        if cfg.top_groups == cfg.groups:
            return wanted_TE
        groups = wanted_TE.unflatten(-1, (cfg.groups, -1))
        if cfg.group_score == "max":
            worth = groups.amax(-1)
        else:
            worth = scores_TE.unflatten(-1, (cfg.groups, -1)).topk(2, -1).values.sum(-1)
        best = worth.topk(cfg.top_groups, -1).indices
        closed = torch.ones_like(worth, dtype=torch.bool).scatter(-1, best, False)
        return groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)

    @torch.no_grad()
    def update_bias(self, counts_E: Tensor) -> None:
        """Moves the bias towards an even load: choice_bias += bias_speed * sign(mean load - load).

        (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing", algorithm 1.)
        counts_E: the step's routed pairs over all ranks, whole numbers in any dtype. They are exact, so that
        every rank and every layout takes the same step.
        """
        if self.choice_bias is None:
            raise ValueError(
                "choice_bias: got False, valid is True in MoEConfig where the bias is to be updated"
            )
        require(isinstance(counts_E, Tensor), "counts", repr(counts_E)[:80], "a tensor")
        same_shape = counts_E.shape == self.choice_bias.shape
        require(same_shape, "counts", tuple(counts_E.shape), f"[E={self.cfg.experts}]")
        counts_E = counts_E.double()  # E times a load may be too large for int32 and for float32
        error_E = counts_E.sum() - counts_E * self.cfg.experts
        self.choice_bias += self.cfg.bias_speed * error_E.sign()

    def _apply(self, fn: Callable, recurse: bool = True) -> "Router":
        """Keeps the choice bias fp32 under `.bfloat16()`, where a step of 0.001 would round to nothing.

        `.to(device)` moves it as usual.
        """
        before = self.choice_bias
        super()._apply(fn, recurse)
        if before is not None and self.choice_bias is not None and self.choice_bias.dtype != before.dtype:
            self.choice_bias = before.to(self.choice_bias.device)
        return self
