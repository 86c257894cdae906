"""Keeps experts evenly used: what each router measures per sequence, and the losses made of it.

Every MoE layer returns sums per sequence only; the loss is taken once, for all layers together, outside the compiled
blocks. So the global-batch loss costs one all-reduce a micro-batch however deep the model, and activation
checkpointing cannot count a token twice.

next: moe/dispatch.py
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tmoe.config.model import MoEConfig
from tmoe.moe.router import Router, Routing


class Load(NamedTuple):
    """Sums over the tokens (padding left out) of each of B sequences; stacked over Y MoE layers in front by `stack`."""

    probs_BE: Tensor  # sum_t of the scores, divided by their sum over experts, differentiable
    counts_BE: Tensor  # (token, expert) pairs routed, fp32
    tokens_B: Tensor  # fp32
    z_B: Tensor  # sum_t logsumexp(logits_t)^2, differentiable
    entropy_B: Tensor  # sum_t entropy of those shares, nats, no gradient


class Totals(NamedTuple):
    """What a whole step holds, over all ranks and micro-batches: losses are sums divided by these (0-dim fp32)."""

    targets: Tensor
    tokens: Tensor
    sequences: Tensor


def measure(routing: Routing, sequences: int, padding_T: Tensor | None, score: str = "softmax") -> Load:
    """Sums for the losses. T tokens are `sequences` rows of equal length. score: MoEConfig's; sigmoids are divided by their sum
    (DeepSeek-V3, 2024, eq. 19) as a softmax of their logarithms, which stays one where they all are nearly 0."""
    logits_TE = routing.logits_TE
    z_T = lse_T = logits_TE.logsumexp(-1)
    if score == "sigmoid":
        logits_TE = F.logsigmoid(logits_TE)
        lse_T = logits_TE.logsumexp(-1)
    probs_TE = (logits_TE - lse_T[:, None]).exp()
    # a comparison for each of the K choices: one_hot and scatter_add allocate [T, K, E] or add in random order
    experts_E = torch.arange(logits_TE.shape[-1], device=logits_TE.device)
    chosen_TE = (routing.ids_TK[:, :, None] == experts_E).sum(1).to(probs_TE.dtype)
    logs_TE, shares_TE = logits_TE.detach(), probs_TE.detach()
    entropy_T = lse_T.detach() - (shares_TE * logs_TE.where(shares_TE > 0, 0)).sum(
        -1
    )  # -inf: an expert switched off
    keep_T = torch.ones_like(lse_T) if padding_T is None else (~padding_T).to(lse_T.dtype)

    def per_sequence(v_T: Tensor) -> Tensor:
        return v_T.unflatten(0, (sequences, v_T.shape[0] // max(sequences, 1))).sum(1)  # -1 fails for B = 0

    return Load(
        per_sequence(probs_TE * keep_T[:, None]),
        per_sequence(chosen_TE * keep_T[:, None]),
        per_sequence(keep_T),
        per_sequence(z_T.square() * keep_T),
        per_sequence(entropy_T * keep_T),
    )


def stack(loads: list[Load]) -> Load:
    return Load(*(torch.stack(field) for field in zip(*loads, strict=True)))


def alone(t: Tensor) -> Tensor:
    """The sum over one rank. RuntimeError where there are more: each would steer by its own counts, and their models drift apart."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"balancer.all_reduce: not set in a world of {dist.get_world_size()} ranks; parallelize sets it, and under another wrapper "
            "a function that returns the sum of a tensor over the ranks that train together does"
        )
    return t


class Balancer:
    """Turns the layers' loads into the balancing loss or into steps of the routers' choice bias, and remembers counts: of the step,
    and for the log."""

    def __init__(self, cfg: MoEConfig):
        self.cfg = cfg
        self.all_reduce: Callable[[Tensor], Tensor] = alone  # sum over the ranks; set by parallelize
        self.log: RouterLog | None = None
        self.start_step()

    def start_step(self) -> None:
        """Forget the counts of the step before (the global-batch loss averages over a step's micro-batches)."""
        self.seen_YE: Tensor | None = None
        self.routed_YE: Tensor | None = None  # int64, this rank's, where a choice bias is to be updated

    def loss(self, load: Load, totals: Totals | None) -> Tensor:
        """This rank's share of the balancing and z-loss of one micro-batch, summed over layers: shares add up over
        ranks and micro-batches to the loss of the step. load: stacked over layers; totals None: this call is all.
        A load made where gradients were off, as in a checkpoint with use_reentrant=True, gives a loss without any, and no error: its
        tensors look like those of a frozen router, whose loss rightly has none."""
        cfg = self.cfg
        # an evaluation between two micro-batches is none
        part = totals is not None and torch.is_grad_enabled()
        if totals is None:
            totals = Totals(
                load.tokens_B[0].sum(),
                load.tokens_B[0].sum(),
                load.tokens_B.new_full((), load.tokens_B.shape[1]),
            )
        loss = cfg.z_coeff * load.z_B.sum() / totals.tokens.clamp(min=1)
        if cfg.balance != "none":
            loss = loss + cfg.balance_coeff * cfg.experts * self._overlap(load, totals, part)
        return loss

    def _overlap(self, load: Load, totals: Totals, part: bool) -> Tensor:
        """sum_e f_e P_e, f_e the share of routed pairs in the scope, P_e the mean probability. part: of a step, whose counts add up."""
        if self.cfg.balance == "sequence":
            share_YBE = load.counts_BE / (self.cfg.top_k * load.tokens_B.clamp(min=1)[..., None])
            mean_YBE = load.probs_BE / load.tokens_B.clamp(min=1)[..., None]
            return (share_YBE * mean_YBE).sum() / totals.sequences.clamp(min=1)
        counts_YE = load.counts_BE.sum(1)
        if self.cfg.balance == "global":
            counts_YE = self.all_reduce(counts_YE)
            if part:
                counts_YE = counts_YE if self.seen_YE is None else counts_YE + self.seen_YE
                self.seen_YE = counts_YE
        share_YE = counts_YE / counts_YE.sum(-1, keepdim=True).clamp(min=1)
        return (share_YE * load.probs_BE.sum(1)).sum() / totals.tokens.clamp(min=1)

    @torch.no_grad()
    def record(self, load: Load) -> None:
        """Adds a micro-batch to what the next log line shows, and to what update_bias sums."""
        tokens_Y = load.tokens_B.sum(1)
        counts_LE = load.counts_BE.sum(1)
        if self.cfg.choice_bias:
            self.routed_YE = counts_LE.long() + (0 if self.routed_YE is None else self.routed_YE)
        new = RouterLog(
            counts_LE, load.entropy_B.sum(1), tokens_Y * self.cfg.top_k - counts_LE.sum(-1), tokens_Y
        )
        new = RouterLog(
            *(v.double() for v in new)
        )  # a step's counts may pass 2^24, where fp32 no longer counts
        self.log = (
            new if self.log is None else RouterLog(*(a + b for a, b in zip(self.log, new, strict=True)))
        )

    def update_bias(self, routers: Iterable[Router], taken: Tensor | None = None) -> None:
        """After an optimizer step (a collective, one for all layers): each router's choice bias follows the loads recorded since
        the step began. Nothing recorded, no choice bias, or a step that was not taken (0): nothing happens."""
        if self.routed_YE is None:
            return
        if taken is not None:
            self.routed_YE = self.routed_YE * taken.long()
        for router, counts_E in zip(routers, self.all_reduce(self.routed_YE), strict=True):
            router.update_bias(counts_E)
        self.routed_YE = None

    def read_log(self) -> "RouterStats | None":
        """What was recorded since the last call, over all ranks (a collective: every rank calls it, or none)."""
        if self.log is None:
            return None
        flat = self.all_reduce(torch.cat([v.reshape(v.shape[0], -1) for v in self.log], 1))
        self.log = None
        counts_LE, entropy_L, dropped_L, tokens_L = flat.split([self.cfg.experts, 1, 1, 1], 1)
        return RouterStats(counts_LE, (entropy_L / tokens_L.clamp(min=1))[:, 0], dropped_L[:, 0])


class RouterLog(NamedTuple):
    """Sums since the last log line, a row for each MoE layer."""

    counts_LE: Tensor
    entropy_L: Tensor
    dropped_L: Tensor
    tokens_L: Tensor


class RouterStats(NamedTuple):
    """A log line's view of the routers, L MoE layers."""

    counts_LE: Tensor  # routed pairs per expert
    entropy_L: Tensor  # mean entropy of the router's distribution, nats
    dropped_L: Tensor  # K choices a token less the counts: those that a router left open (-1), which tmoe's never does; dispatch drops none
