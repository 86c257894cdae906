"""Chooses experts for every token and weighs them: logits, scores, a selection, weights.

The scores are a table (moe/select/scores.py). Each selection is a file (moe/select/selection.py describes the
interface). config/routing_choices.py has the names, and which of them can be combined.

next: moe/select/scores.py, then moe/balance.py
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tmoe.config.model import MoEConfig
from tmoe.config.routing_choices import SELECTIONS
from tmoe.moe.select.forced_routing import forced
from tmoe.moe.select.scores import SCORES, normalised
from tmoe.moe.select.selection import Choice, RouterInput, selection
from tmoe.ops import softmax_topk
from tmoe.ops.argument_checks import require
from tmoe.ops.router.product import router_product

HOTTEST = math.log(100.0)  # upper bound of a cosine router's log scale (Tutel)


class Routing(NamedTuple):
    """The router's decision for T tokens."""

    weights_TK: Tensor  # fp32, differentiable
    # int32 expert ids, -1 for no expert (padding, an unused column). Ids from E on are identity experts
    ids_TK: Tensor
    logits_TE: Tensor  # fp32, differentiable, with noise; identity experts included
    clean_TE: Tensor | None = None  # the logits without noise
    noted_TX: Tensor | None = None  # Sinkhorn's residual, quantile's cutoffs, or [T, 0]


def without_identity(routing: Routing, cfg: MoEConfig) -> tuple[Routing, Tensor | None]:
    """The routing to experts that have weights, and each token's total weight on identity experts.

    Identity experts need no product and no exchange: y += weight * x. The second value is None if the layer
    has no identity experts.
    """
    if not cfg.identity_experts:
        return routing, None
    identity_TK = routing.ids_TK >= cfg.experts
    kept_T = routing.weights_TK.where(identity_TK, 0).sum(-1)
    return routing._replace(ids_TK=routing.ids_TK.masked_fill(identity_TK, -1)), kept_T


def on_matrix_units(x_TD: Tensor) -> bool:
    """Whether `router_product` is faster than an fp32 product of an fp32 copy of x.

    The product needs matrix units that multiply bf16 and accumulate in fp32.
    """
    return x_TD.is_cuda and torch.version.hip is None and x_TD.dtype == torch.bfloat16


class Router(nn.Module):
    """Chooses some of E experts for each token by logits, usually the K largest of x W^T.

    Logits: the method `logits`. Choice: the file of `cfg.selection`. Weights:
    `softmax="before"`: the chosen experts' scores, divided by their sum if `renormalize`.
    `softmax="after"`: the softmax over the chosen logits (Mixtral; equal to "before" with `renormalize`).

    Both are multiplied by `scaling`. `router_bias`: logits = x W^T + b (gpt-oss).
    Scores and weights are fp32, and the product has fp32 accuracy, whatever the dtypes of x and W. With
    `router_dtype="fp64"` scores, weights and product are fp64, and weights and logits are rounded to fp32 at
    the end, unless x is fp64. `on_matrix_units` decides whether bf16 is multiplied without conversion.
    """

    def __init__(self, dim: int, cfg: MoEConfig):
        super().__init__()
        self.cfg = cfg
        self.wide = cfg.router_dtype == "fp64"
        self.dtype = torch.float64 if self.wide else torch.float32
        self.devices = 1  # ranks of the expert group, for top_devices; set by parallelize
        cosine = cfg.score == "cosine"
        self.projection = nn.Linear(dim, cfg.cosine_dim) if cosine else None
        # cosines are multiplied by exp(log_scale) / cosine_temperature
        self.log_scale = nn.Parameter(torch.zeros(1)) if cosine else None
        self.weight = nn.Parameter(torch.empty(cfg.outputs, cfg.cosine_dim if cosine else dim))
        self.bias = nn.Parameter(torch.empty(cfg.outputs)) if cfg.router_bias else None
        self.choice_bias: Tensor | None
        biased = cfg.choice_bias or cfg.selection == "quantile"
        choice_bias = torch.zeros(cfg.outputs, dtype=torch.float32) if biased else None
        self.register_buffer("choice_bias", choice_bias)
        self.choose = selection(cfg.selection)

    def forward(
        self,
        x_TD: Tensor,
        padding_T: Tensor | None = None,
        top_k: int | None = None,
        ids: Tensor | None = None,
    ) -> Routing:
        """The routing of T tokens.

        Args:
            x_TD: any float dtype.
            padding_T: bool, True at tokens that are not routed.
            top_k: experts per token in this call, 1 to E; None: as configured.
            ids: [T, any number of columns], int: the experts to use instead of a choice, -1 for none. Their
                weights are computed from this call's scores. Used to replay a recorded routing.
        """
        K = self.experts_a_token(top_k)
        # autocast does not exist on the meta device
        with nullcontext() if x_TD.is_meta else torch.autocast(x_TD.device.type, enabled=False):
            clean_TE = self.logits(x_TD)
            logits_TE = self.disturbed(clean_TE, padding_T, K)
            if ids is not None:
                # quantiles are computed from this call's logits, even where the ids are given
                noting = self.cfg.selection == "quantile"
                noted_TX = self.chosen(logits_TE, padding_T, K).noted_TX if noting else None
                choice = Choice(self.checked(ids, x_TD), noted_TX)
                weights_TK = self.weigh(logits_TE, choice.ids_TK, K, given=True)
            elif self.cfg.by_softmax_topk(self.devices) and not (logits_TE.is_cuda and self.wide):
                over_chosen = self.cfg.renormalize or self.cfg.softmax == "after"
                weights_TK, ids_TK = softmax_topk(logits_TE, K, over_chosen)
                choice = Choice(ids_TK)
            else:
                choice = self.chosen(logits_TE, padding_T, K)
                weights_TK = self.weigh(logits_TE, choice.ids_TK, K)
        ids_TK = choice.ids_TK.to(torch.int32)
        if padding_T is not None:
            ids_TK = ids_TK.masked_fill(padding_T[:, None], -1)
        if self.cfg.scaling != 1.0:
            weights_TK = weights_TK * self.cfg.scaling
        wide = x_TD.dtype == torch.float64
        weights_TK, logits_TE, clean_TE = (
            t if wide else t.float() for t in (weights_TK, logits_TE, clean_TE)
        )
        noted_TX = (
            logits_TE.detach()[:, :0] if choice.noted_TX is None else choice.noted_TX.to(logits_TE.dtype)
        )
        return Routing(weights_TK, ids_TK, logits_TE, clean_TE, noted_TX)

    def experts_a_token(self, top_k: int | None) -> int:
        """K of a call; raises ValueError where a token cannot have that many experts."""
        if top_k is None:
            return self.cfg.top_k
        most = self.cfg.reach(self.devices)
        ok = type(top_k) is int and 1 <= top_k <= most
        require(ok, "top_k", repr(top_k), f"a whole number from 1 to {most}")
        return top_k

    def checked(self, ids: Tensor, x_TD: Tensor) -> Tensor:
        """The given ids; raises ValueError for a wrong shape, dtype or device."""
        ok = isinstance(ids, Tensor) and ids.dim() == 2 and len(ids) == len(x_TD)
        ok = ok and not (ids.is_floating_point() or ids.dtype == torch.bool) and ids.device == x_TD.device
        got = f"{ids.dtype} {tuple(ids.shape)} on {ids.device}" if isinstance(ids, Tensor) else repr(ids)[:80]
        require(ok, "ids", got, f"whole numbers [T={len(x_TD)}, K] on {x_TD.device}, -1 for no expert")
        return ids

    def logits(self, x_TD: Tensor) -> Tensor:
        """x W^T + b; for score=cosine: the cosines with the rows of W, times a scale, plus b."""
        jitter = self.cfg.jitter if self.training else 0.0
        bias = None if self.bias is None else self.bias.to(self.dtype)
        narrow = self.projection is None and not self.wide
        if narrow and on_matrix_units(x_TD) and not jitter:
            logits_TE = router_product(x_TD, self.weight)
            return logits_TE if bias is None else logits_TE + bias
        x_TD = x_TD.to(self.dtype)
        if jitter:
            x_TD = x_TD * (1 + jitter * (2 * torch.rand_like(x_TD) - 1))
        weight_ED = self.weight.to(self.dtype)
        if self.projection is None:
            return F.linear(x_TD, weight_ED, bias)
        assert self.log_scale is not None
        inner = self.projection
        x_TP = F.linear(x_TD, inner.weight.to(self.dtype), inner.bias.to(self.dtype))
        scale = self.log_scale.to(self.dtype) - math.log(self.cfg.cosine_temperature)
        cosines_TE = F.linear(F.normalize(x_TP, dim=-1), F.normalize(weight_ED, dim=-1))
        logits_TE = cosines_TE * scale.clamp(max=HOTTEST).exp()
        return logits_TE if bias is None else logits_TE + bias

    def disturbed(self, logits_TE: Tensor, padding_T: Tensor | None, K: int) -> Tensor:
        """Logits plus noise in training (Tutel), or artificial logits instead, for benchmarks."""
        if self.cfg.noise and self.training:
            logits_TE = logits_TE + torch.randn_like(logits_TE) * (self.cfg.noise / self.cfg.outputs)
        return logits_TE if self.cfg.force == "none" else forced(self.cfg, logits_TE, padding_T, K)

    @torch.no_grad()
    def chosen(self, logits_TE: Tensor, padding_T: Tensor | None, K: int) -> Choice:
        """The choice that the selection makes."""
        live_T = None if padding_T is None else ~padding_T
        logits_TE = logits_TE.detach()
        scores_TE = SCORES[self.cfg.score].of(logits_TE)
        numbers = (logits_TE, scores_TE, self.choice_bias, live_T)
        return self.choose(RouterInput(self.cfg, K, *numbers, self.devices, self.training))

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor, K: int, given: bool = False) -> Tensor:
        """The weights of these experts, before scaling; 0 where an id is -1.

        given: whether the ids were given. Given ids may hold -1, as the ids of some selections do.
        """
        cfg, entry = self.cfg, SELECTIONS[self.cfg.selection]
        at_TK, here_TK = ids_TK.long(), None
        if given or entry.columns:
            here_TK = at_TK >= 0
            at_TK = at_TK.clamp(min=0)
        if entry.weighs:
            scores_TE = logits_TE.sigmoid() if K == 1 else logits_TE.softmax(-1)
        else:
            scores_TE = SCORES[cfg.score].of(logits_TE)
        scores_TK = scores_TE.gather(-1, at_TK)
        if not entry.weighs and (cfg.renormalize or cfg.softmax == "after"):
            return normalised(scores_TK, SCORES[cfg.score].log(logits_TE.gather(-1, at_TK)), here_TK)
        return scores_TK if here_TK is None else scores_TK.where(here_TK, 0)

    @torch.no_grad()
    def update_bias(self, counts_E: Tensor) -> None:
        """Moves the bias towards an even load: choice_bias += bias_speed * sign(mean load - load).

        (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing", algorithm 1.) The bias of identity experts
        does not change (LongCat-Flash, 2025, section 2.1.1): when each other expert has its share, the
        identity experts together have theirs.

        counts_E: the step's routed pairs over all ranks, whole numbers in any dtype. They are exact, so that
        the bias is the same on every rank and in every layout.
        """
        if not self.cfg.choice_bias or self.choice_bias is None:
            raise ValueError(
                "choice_bias: got False, valid is True in MoEConfig where the bias is to be updated"
            )
        if not isinstance(counts_E, Tensor):  # checked first: repr of a tensor would wait for the GPU
            require(False, "counts", repr(counts_E)[:80], "a tensor")
        same_shape = counts_E.shape == self.choice_bias.shape
        require(same_shape, "counts", tuple(counts_E.shape), f"[E={self.cfg.outputs}]")
        counts_E = counts_E.double()  # E times a load may overflow int32, and float32 may round it
        error_E = counts_E.sum() - counts_E * self.cfg.outputs
        error_E[self.cfg.experts :] = 0
        self.choice_bias += self.cfg.bias_speed * error_E.sign()

    def _apply(self, fn: Callable, recurse: bool = True) -> "Router":
        """Keeps the choice bias fp32 under `.bfloat16()`, where a step of 0.001 would be rounded away.

        `.to(device)` moves it as usual.
        """
        before = self.choice_bias
        super()._apply(fn, recurse)
        if before is not None and self.choice_bias is not None and self.choice_bias.dtype != before.dtype:
            self.choice_bias = before.to(self.choice_bias.device)
        return self
