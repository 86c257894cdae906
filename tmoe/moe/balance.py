"""Keeps experts evenly used: what each router measures per sequence, and the losses made of it.

Every MoE layer returns only sums per sequence. The loss is computed once, for all layers together, outside
the compiled blocks. So the global-batch loss costs one all-reduce per micro-batch, however deep the model is,
and activation checkpointing cannot count a token twice.

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
    """One layer's sums over the tokens of each of B sequences, without padding.

    `stack` puts the loads of Y MoE layers together, with Y as the first dimension.
    """

    probs_BE: Tensor  # sum over tokens of each expert's share of a token's scores, differentiable
    counts_BE: Tensor  # (token, expert) pairs routed, fp32
    tokens_B: Tensor  # fp32
    z_B: Tensor  # sum over tokens of logsumexp(logits)^2, differentiable
    entropy_B: Tensor  # sum over tokens of the entropy of those shares, nats, no gradient
    dropped_BE: Tensor  # of the pairs routed, those that a full expert did not take, fp32


class Totals(NamedTuple):
    """Counts of a whole step, over all ranks and micro-batches (0-dim fp32): the divisors of the losses."""

    targets: Tensor
    tokens: Tensor
    sequences: Tensor


def measure(
    routing: Routing,
    sequences: int,
    padding_T: Tensor | None,
    score: str = "softmax",
    taken: Routing | None = None,
) -> Load:
    """A layer's sums for the losses, from its routing of T tokens: `sequences` rows of equal length.

    taken: the same routing without the pairs that full experts dropped; None: none were. Losses and the
    choice bias count before that: behind it the counts of full experts are all the same.
    padding_T: bool, True at tokens to leave out. score: that of MoEConfig. Sigmoid scores are divided by
    their sum (DeepSeek-V3, 2024, eq. 19). That is computed as a softmax of their logarithms, whose shares
    still add up to one where all scores are nearly 0.
    """
    logits_TE = routing.logits_TE
    z_T = lse_T = logits_TE.logsumexp(-1)
    if score == "sigmoid":
        logits_TE = F.logsigmoid(logits_TE)
        lse_T = logits_TE.logsumexp(-1)
    probs_TE = (logits_TE - lse_T[:, None]).exp()

    # one comparison for each of the K choices: one_hot allocates [T, K, E], scatter_add adds in random order
    experts_E = torch.arange(logits_TE.shape[-1], device=logits_TE.device)
    chosen_TE = (routing.ids_TK[:, :, None] == experts_E).sum(1).to(probs_TE.dtype)
    if taken is None or taken.ids_TK is routing.ids_TK:
        dropped_TE = torch.zeros_like(chosen_TE)
    else:
        dropped_TE = chosen_TE - (taken.ids_TK[:, :, None] == experts_E).sum(1).to(probs_TE.dtype)

    # entropy = lse - sum of share * logit; the logit of an expert that is switched off is -inf, its term 0
    logs_TE = logits_TE.detach()
    shares_TE = probs_TE.detach()
    mean_log_T = (shares_TE * logs_TE.where(shares_TE > 0, 0)).sum(-1)
    entropy_T = lse_T.detach() - mean_log_T

    keep_T = torch.ones_like(lse_T) if padding_T is None else (~padding_T).to(lse_T.dtype)

    def per_sequence(v_T: Tensor) -> Tensor:
        length = v_T.shape[0] // max(sequences, 1)  # computed, since unflatten's -1 fails for 0 sequences
        return v_T.unflatten(0, (sequences, length)).sum(1)

    return Load(
        per_sequence(probs_TE * keep_T[:, None]),
        per_sequence(chosen_TE * keep_T[:, None]),
        per_sequence(keep_T),
        per_sequence(z_T.square() * keep_T),
        per_sequence(entropy_T * keep_T),
        per_sequence(dropped_TE),
    )


def stack(loads: list[Load]) -> Load:
    """The loads of all MoE layers as one, with the layers as the first dimension."""
    return Load(*(torch.stack(field) for field in zip(*loads, strict=True)))


def alone(t: Tensor) -> Tensor:
    """The sum over one rank: the tensor itself.

    RuntimeError where there are more ranks: each would steer by its own counts, and their models drift apart.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"balancer.all_reduce: not set in a world of {dist.get_world_size()} ranks; parallelize sets it, "
            "and under another wrapper "
            "a function that returns the sum of a tensor over the ranks that train together does"
        )
    return t


class Balancer:
    """Turns the layers' loads into the balancing loss, or into steps of the routers' choice bias.

    It keeps two kinds of counts: those of the step, and those for the log.
    """

    def __init__(self, cfg: MoEConfig):
        self.cfg = cfg
        self.all_reduce: Callable[[Tensor], Tensor] = alone  # sum over the ranks; set by parallelize
        # sum over the ranks that divide sequences, if any do; set by parallelize
        self.over_parts: Callable[[Tensor], Tensor] | None = None
        self.log: RouterLog | None = None
        self.start_step()

    def start_step(self) -> None:
        """Forgets the last step's counts (the global-batch loss averages over one step's micro-batches)."""
        self.seen_YE: Tensor | None = None
        self.routed_YE: Tensor | None = None  # int64, this rank's, where a choice bias is to be updated

    def loss(self, load: Load, totals: Totals | None) -> Tensor:
        """This rank's share of the balancing loss and z-loss of one micro-batch, summed over layers.

        The shares of all ranks and micro-batches add up to the loss of the step.
        load: stacked over layers. totals: those of the step; None: this call is the whole step.
        A load made with gradients off, as in a checkpoint with use_reentrant=True, gives a loss without
        gradients, and no error: its tensors look like those of a frozen router, whose loss rightly has none.
        """
        cfg = self.cfg
        # an evaluation between two micro-batches is not part of the step
        part = totals is not None and torch.is_grad_enabled()
        if cfg.balance != "global" or totals is None:
            load = self._of_whole_sequences(load)
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

    def _of_whole_sequences(self, load: Load) -> Load:
        """The load with counts and tokens of whole sequences; all else stays this rank's share.

        A product of two sums over a sequence is no sum of its parts' products. A collective where tp or cp
        divide sequences, one for all layers.
        """
        if self.over_parts is None:
            return load
        both_YBX = torch.cat([load.counts_BE, load.tokens_B[..., None]], -1)
        both_YBX = self.over_parts(both_YBX.detach())
        return load._replace(counts_BE=both_YBX[..., :-1], tokens_B=both_YBX[..., -1])

    def _overlap(self, load: Load, totals: Totals, part: bool) -> Tensor:
        """The sum over experts of f_e P_e, which is least where the experts are evenly used.

        f_e: the expert's share of the routed pairs in the scope; P_e: its mean probability.
        part: this micro-batch is part of a step, whose counts add up.
        """
        if self.cfg.balance == "sequence":
            share_YBE = load.counts_BE / load.counts_BE.sum(-1, keepdim=True).clamp(min=1)
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
        """Adds a micro-batch to what the next log line shows, and to the counts that update_bias uses."""
        tokens_Y = load.tokens_B.sum(1)
        counts_LE = load.counts_BE.sum(1)
        if self.cfg.choice_bias:
            self.routed_YE = counts_LE.long() + (0 if self.routed_YE is None else self.routed_YE)
        dropped_Y = tokens_Y * self.cfg.top_k - counts_LE.sum(-1) + load.dropped_BE.sum((1, 2))
        sums = (counts_LE, load.entropy_B.sum(1), dropped_Y, tokens_Y)
        # fp64: a step's counts may pass 2^24, above which fp32 cannot add 1
        new = RouterLog(*(v.double() for v in sums))
        if self.log is None:
            self.log = new
        else:
            self.log = RouterLog(*(a + b for a, b in zip(self.log, new, strict=True)))

    def update_bias(self, routers: Iterable[Router], taken: Tensor | None = None) -> None:
        """Moves each router's choice bias, after an optimizer step, by the loads recorded since it began.

        A collective, one for all layers. taken: 0 if the step was skipped. Nothing changes if it was skipped,
        if nothing was recorded, or without a choice bias.
        """
        if self.routed_YE is None:
            return
        if taken is not None:
            self.routed_YE = self.routed_YE * taken.long()
        for router, counts_E in zip(routers, self.all_reduce(self.routed_YE), strict=True):
            router.update_bias(counts_E)
        self.routed_YE = None

    def take_log(self) -> Tensor | None:
        """This rank's sums since the last call, [Y, E + 3] in fp64; None if nothing was recorded."""
        if self.log is None:
            return None
        flat = torch.cat([v.reshape(v.shape[0], -1) for v in self.log], 1)
        self.log = None
        return flat

    def read_log(self) -> "RouterStats | None":
        """What was recorded since the last call, over all ranks; None if nothing was.

        A collective: every rank calls it, or none.
        """
        own = self.take_log()
        return None if own is None else stats_of(self.all_reduce(own), self.cfg.experts)


def stats_of(sums: Tensor, experts: int) -> "RouterStats":
    """What a log line says of them; sums: those of `Balancer.take_log`, over all ranks."""
    counts_LE, entropy_L, dropped_L, tokens_L = sums.split([experts, 1, 1, 1], 1)
    mean_entropy_L = entropy_L / tokens_L.clamp(min=1)
    return RouterStats(counts_LE, mean_entropy_L[:, 0], dropped_L[:, 0])


class RouterLog(NamedTuple):
    """Sums since the last log line, one row for each MoE layer."""

    counts_LE: Tensor
    entropy_L: Tensor
    dropped_L: Tensor
    tokens_L: Tensor


class RouterStats(NamedTuple):
    """What a log line says of the routers of L MoE layers."""

    counts_LE: Tensor  # routed pairs per expert
    entropy_L: Tensor  # mean entropy of the router's distribution, nats
    # pairs that full experts dropped, and choices that a router left open (-1); tmoe's leaves none open
    dropped_L: Tensor
