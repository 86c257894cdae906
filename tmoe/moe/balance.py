"""Keeps experts evenly used: sums that each router measures per sequence, and losses of these sums.

Every MoE layer returns only sums per sequence. The loss is computed once, for all layers together, outside
the compiled blocks. Therefore the global-batch loss costs one all-reduce per micro-batch, however deep the
model is, and activation checkpointing cannot count a token twice.

In tmoe a padding mask is always True at the tokens to leave out.

next: moe/losses.py
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.config.balance_settings import OF_NOISE
from tmoe.config.model import MoEConfig
from tmoe.moe.losses import LOSSES, Load, Scope, Totals, smooth_load, with_fields
from tmoe.moe.router import Router, Routing
from tmoe.moe.select.quantile import Quantiles
from tmoe.moe.select.scores import SCORES

FEW = 16  # up to this number of columns, ids are compared with every expert


def measure(
    routing: Routing,
    sequences: int,
    padding_T: Tensor | None,
    score: str = "softmax",
    taken: Routing | None = None,
    cfg: MoEConfig | None = None,
    members_BSN: Tensor | None = None,
) -> Load:
    """A layer's sums for the losses, from its routing of T tokens: `sequences` rows of equal length.

    padding_T: bool, True at tokens to leave out. score: as in MoEConfig. Scores other than softmax are
    divided by their sum (DeepSeek-V3, 2024, eq. 19). This is computed as a softmax of their logarithms, so
    that the shares add up to one even where all scores are nearly 0.
    taken: the same routing without the pairs that full experts dropped; None: no pairs were dropped. Losses
    and the choice bias use the counts before dropping, because the counts of full experts are equal after it.
    cfg: the config whose losses may need more sums than `sequence`, `batch` and `global` do; None: no more
    sums.
    members_BSN: fp32, 1 where a token belongs to the n-th sequence of its row; None: each row is one
    sequence.
    """
    z_T = routing.logits_TE.logsumexp(-1)
    logits_TE = SCORES[score].log(routing.logits_TE)
    lse_T = z_T if logits_TE is routing.logits_TE else logits_TE.logsumexp(-1)
    probs_TE = (logits_TE - lse_T[:, None]).exp()

    E = logits_TE.shape[-1]
    chosen_TE = chosen(routing.ids_TK, E).to(probs_TE.dtype)
    if taken is None or taken.ids_TK is routing.ids_TK:
        dropped_TE = torch.zeros_like(chosen_TE)
    else:
        dropped_TE = chosen_TE - chosen(taken.ids_TK, E).to(probs_TE.dtype)

    # entropy = lse - sum of share * logit. A disabled expert has the logit -inf; its term is 0
    logs_TE = logits_TE.detach()
    shares_TE = probs_TE.detach()
    mean_log_T = (shares_TE * logs_TE.where(shares_TE > 0, 0)).sum(-1)
    entropy_T = lse_T.detach() - mean_log_T

    keep_T = torch.ones_like(lse_T) if padding_T is None else (~padding_T).to(lse_T.dtype)
    noted_TX = logits_TE.detach()[:, :0] if routing.noted_TX is None else routing.noted_TX
    per_sequence = partial(_per_sequence, sequences=sequences)
    tokens_B = per_sequence(keep_T)
    # some selections have more than K columns, of which K are used on average
    K = routing.ids_TK.shape[-1] if cfg is None or cfg.slots == cfg.top_k else cfg.top_k
    load = Load(
        per_sequence(probs_TE * keep_T[:, None]),
        per_sequence(chosen_TE * keep_T[:, None]),
        tokens_B,
        per_sequence(z_T.square() * keep_T),
        per_sequence(entropy_T * keep_T),
        tokens_B * K,
        per_sequence(dropped_TE),
        noted_BX=per_sequence(noted_TX * keep_T[:, None]),
    )

    if members_BSN is not None:
        load = _with_members(load, members_BSN, probs_TE, chosen_TE)
    return load if cfg is None else _with_losses(load, routing, keep_T, per_sequence, cfg)


def _per_sequence(v_T: Tensor, sequences: int) -> Tensor:
    """Sums over the tokens of each sequence.

    In a compiled graph the sum over a single sequence has one dimension less, and a view adds it. Inductor of
    torch 2.11 leaves out a sum's dimensions of size 1 where it sums rows and columns of many numbers in one
    kernel (pytorch/pytorch#177782). Then the load had another shape, and the backward was refused.
    """
    if sequences == 1 and torch.compiler.is_compiling():
        return v_T.sum(0)[None].clone()  # a copy: a block returns it, and FSDP2 warns of a view
    length = v_T.shape[0] // max(sequences, 1)  # computed, because unflatten's -1 fails for 0 sequences
    return v_T.unflatten(0, (sequences, length)).sum(1)


def _with_members(load: Load, members_BSN: Tensor, probs_TE: Tensor, chosen_TE: Tensor) -> Load:
    """The load with the sums of the sequences in each row.

    The sums are computed as matrix products, which add in a fixed order and work for any number of sequences.
    """
    with torch.autocast(members_BSN.device.type, enabled=False):
        by_row = [t_TX.unflatten(0, members_BSN.shape[:2]) for t_TX in (probs_TE, chosen_TE)]
        of_BNS = members_BSN.transpose(1, 2).to(probs_TE.dtype)
        # copies: a block returns the load, and FSDP2 warns of an output that is a view
        probs_NE, counts_NE = ((of_BNS @ t_BSX).flatten(0, 1).clone() for t_BSX in by_row)
    tokens_N = members_BSN.sum(1).flatten().to(load.tokens_B.dtype)
    return with_fields(load, probs_NE=probs_NE, counts_NE=counts_NE, tokens_N=tokens_N)


def _with_losses(
    load: Load,
    routing: Routing,
    keep_T: Tensor,
    per_sequence: Callable[[Tensor], Tensor],
    cfg: MoEConfig,
) -> Load:
    """The load with the sums that only some losses need; keep_T: 1, or 0 at tokens to leave out."""
    if "gshard" in cfg.losses:
        first_TE = chosen(routing.ids_TK[:, :1], routing.logits_TE.shape[-1]).to(keep_T.dtype)
        load = with_fields(load, first_BE=per_sequence(first_TE * keep_T[:, None]))
    if any(name in cfg.losses for name in OF_NOISE):
        clean_TE = routing.logits_TE if routing.clean_TE is None else routing.clean_TE
        last_T = routing.logits_TE.gather(1, routing.ids_TK[:, -1:].clamp(min=0).long())[:, 0]
        smooth_TE = smooth_load(clean_TE, last_T, cfg)
        load = with_fields(
            load,
            clean_BE=per_sequence(clean_TE.softmax(-1) * keep_T[:, None]),
            smooth_BE=per_sequence(smooth_TE * keep_T[:, None]),
        )
    return load


def chosen(ids_TK: Tensor, E: int) -> Tensor:
    """How often each token chose each expert, [T, E]; ids of -1 are not counted."""
    # one comparison for each of the K choices: one_hot allocates [T, K, E], and scatter_add adds in random
    # order
    if ids_TK.shape[1] <= FEW:
        return (ids_TK[:, :, None] == torch.arange(E, device=ids_TK.device)).sum(1)
    # a selection with up to E columns, in which each expert occurs at most once
    places_TE = torch.zeros(len(ids_TK), E + 1, dtype=torch.bool, device=ids_TK.device)
    return places_TE.scatter(1, ids_TK.long() + 1, True)[:, 1:]


def stack(loads: list[Load]) -> Load:
    """The loads of all MoE layers as one, with the layers as the first dimension."""
    fields: Any = (None if field[0] is None else torch.stack(field) for field in zip(*loads, strict=True))
    return Load(*fields)


def alone(t: Tensor) -> Tensor:
    """The sum over one rank: the tensor itself.

    RuntimeError if there are more ranks: each rank would balance by its own counts, and the models would
    diverge.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"balancer.all_reduce: not set in a world of {dist.get_world_size()} ranks; parallelize sets it. "
            "Under another wrapper, "
            "set it to a function that returns the sum of a tensor over the ranks that train together"
        )
    return t


class Balancer:
    """Computes the balancing losses, or the steps of the routers' choice bias, from the layers' loads.

    It keeps the counts of the step, sums for the log, and a trace of the choices if one is recorded.
    """

    def __init__(self, cfg: MoEConfig):
        self.cfg = cfg
        self.all_reduce: Callable[[Tensor], Tensor] = alone  # sum over ranks; set by parallelize
        # sum over the ranks that divide sequences, if any do; set by parallelize
        self.over_parts: Callable[[Tensor], Tensor] | None = None
        self.log: RouterLog | None = None
        self.losses_YX: Tensor | None = None  # for the log too: the losses of cfg.logged, without factors
        self.steps = 0  # number of steps in losses_YX
        self.trace: list[Tensor] | None = None  # ids [Y, T, K] of each call, while a trace is recorded
        self.start_step()

    def start_step(self) -> None:
        """Resets the step's counts (the global-batch loss averages over one step's micro-batches)."""
        self.seen_YE: Tensor | None = None
        self.routed_YE: Tensor | None = None  # int64, this rank's counts, for the update of a choice bias
        self.quantiles = Quantiles()
        self.begun = False

    def loss(self, load: Load, totals: Totals | None) -> Tensor:
        """This rank's share of the balancing losses and z-loss of one micro-batch, summed over layers.

        The shares of all ranks and micro-batches add up to the loss of the step.
        load: stacked over layers. totals: the counts of the step; None: this call is the whole step.
        If the load was made with gradients off, as in a checkpoint with use_reentrant=True, the loss has no
        gradient, and no error is raised: such a load looks like the load of a frozen router, whose loss
        rightly has no gradient.
        """
        terms = self.cfg.losses
        # an evaluation between two micro-batches does not belong to the step
        trains = torch.is_grad_enabled()
        part = totals is not None and trains
        step_YE = self._counts_of_step(load, part) if "global" in terms else None
        parts: Tensor | float = 1.0
        if terms.keys() - {"global"} or totals is None:
            load, parts = self._of_whole_sequences(load)
        if totals is None:
            tokens, sequences = load.tokens_B[0].sum(), load.tokens_B.new_full((), load.tokens_B.shape[1])
            if load.tokens_N is not None:
                sequences = (load.tokens_N[0] > 0).sum()
            totals = Totals(tokens, tokens, sequences)
        scope = Scope(totals, step_YE, parts)
        z_Y = load.z_B.sum(1) / totals.tokens.clamp(min=1)
        shares_XY = [*(LOSSES[name](load, scope) for name in terms), z_Y]
        if trains:
            noted_XY = list(shares_XY)
            if "residual" in self.cfg.logged:
                assert load.noted_BX is not None
                noted_XY.append(load.noted_BX[..., 0].sum(1) / totals.tokens.clamp(min=1))
            self._note(torch.stack(noted_XY, 1), part)
        factors = [*terms.values(), self.cfg.z_coeff]
        return torch.stack(
            [factor * share_Y.sum() for factor, share_Y in zip(factors, shares_XY, strict=True)]
        ).sum()

    def _counts_of_step(self, load: Load, part: bool) -> Tensor:
        """Routed pairs of the step so far over all ranks, [Y, E]. A collective.

        part: whether this micro-batch is part of a step, over which the counts are added up.
        """
        counts_YE = self.all_reduce(load.counts_BE.sum(1))
        if part:
            counts_YE = counts_YE if self.seen_YE is None else counts_YE + self.seen_YE
            self.seen_YE = counts_YE
        return counts_YE

    def _of_whole_sequences(self, load: Load) -> tuple[Load, Tensor | float]:
        """The load with the sums of whole sequences, and the number of ranks that divide them.

        A product of two sums over a sequence is not the sum of the products over its parts. Therefore the
        counts, which the losses multiply by other sums, are replaced by the counts of whole sequences. So are
        the sums of the importance loss, but their gradient stays that of this rank's part. All other sums
        stay this rank's share. Where tp or cp divide sequences, this is one collective for all layers.
        """
        if self.over_parts is None:
            return load, 1.0
        names = ["counts_BE", "first_BE", "clean_BE", "smooth_BE", "tokens_B", "counts_NE", "tokens_N"]
        local = {name: t for name in names if (t := getattr(load, name)) is not None}
        one = torch.ones_like(load.tokens_B[:1, :1])
        sums = torch.cat([t.detach().flatten() for t in (*local.values(), one)])
        *whole, parts = self.over_parts(sums).split([*(t.numel() for t in local.values()), one.numel()])
        summed = {
            name: b.view_as(a) + (a - a.detach()) for (name, a), b in zip(local.items(), whole, strict=True)
        }
        return load._replace(**summed), parts[0] if parts.numel() else 1.0

    @torch.no_grad()
    def _note(self, losses_YX: Tensor, part: bool) -> None:
        """Adds a micro-batch's losses to the sums for the next log line.

        part: whether the micro-batch belongs to a step that began with `start_step`.
        """
        self.steps += not (part and self.begun)
        self.begun = part
        losses_YX = losses_YX.double()
        self.losses_YX = losses_YX if self.losses_YX is None else self.losses_YX + losses_YX

    @torch.no_grad()
    def record(self, load: Load) -> None:
        """Adds a micro-batch to the sums for the next log line, and to the counts that update_bias uses.

        The counts are those before dropping. Under pad-to-capacity the counts after dropping would be equal
        for all experts, and the bias would never move.
        """
        counts_LE = load.counts_BE.sum(1)
        if self.cfg.choice_bias:
            self.routed_YE = counts_LE.long() + (0 if self.routed_YE is None else self.routed_YE)
        if self.cfg.selection == "quantile":
            assert load.noted_BX is not None
            self.quantiles.record(load.noted_BX, load.tokens_B)
        if self.trace is not None and load.ids_TK is not None:
            self.trace.append(load.ids_TK)
        sums = (
            counts_LE,
            load.dropped_BE.sum(1),
            load.entropy_B.sum(1),
            load.choices_B.sum(1) - counts_LE.sum(-1),
            load.tokens_B.sum(1),
        )
        # fp64: a step's counts may exceed 2^24, above which fp32 cannot add 1
        new = RouterLog(*(v.double() for v in sums))
        if self.log is None:
            self.log = new
        else:
            self.log = RouterLog(*(a + b for a, b in zip(self.log, new, strict=True)))

    def update_bias(self, routers: Iterable[Router], taken: Tensor | None = None) -> None:
        """Moves each router's choice bias after an optimizer step, by the loads recorded during the step.

        One collective for all layers. taken: 0 if the step was skipped. Nothing changes if the step was
        skipped, if nothing was recorded, or without a choice bias.
        """
        routers = list(routers)
        biases = [router.choice_bias for router in routers if router.choice_bias is not None]
        self.quantiles.update(biases, self.cfg.quantile_ema, self.all_reduce, taken)
        if self.routed_YE is None:
            return
        if taken is not None:
            self.routed_YE = self.routed_YE * taken.long()
        for router, counts_E in zip(routers, self.all_reduce(self.routed_YE), strict=True):
            if router.weight.requires_grad:  # the choice of a frozen router does not change
                router.update_bias(counts_E)
        self.routed_YE = None

    @torch.no_grad()
    def take_log(self, routers: Iterable[Router] = ()) -> Tensor | None:
        """This rank's sums since the last call, [Y, log_width] in fp64; None if nothing was recorded.

        routers: the layers' routers, if their choice bias is wanted.
        """
        if self.log is None:
            return None
        counts_LE, dropped_LE, *single = self.log
        one_L1 = torch.ones_like(counts_LE[:, :1])  # to average values that all ranks share
        biases = [router.choice_bias for router in routers if router.choice_bias is not None]
        bias_LE = torch.stack(biases).double() if biases else torch.zeros_like(counts_LE)
        losses_LX = self.losses_YX
        if losses_LX is None:  # called without targets
            losses_LX = one_L1.expand(-1, len(self.cfg.logged)) * 0
        parts = [counts_LE, dropped_LE, bias_LE, losses_LX, *(v[:, None] for v in single)]
        parts += [one_L1 * self.steps, one_L1]
        self.log = self.losses_YX = None
        self.steps = 0
        return torch.cat(parts, 1)

    def read_log(self, routers: Iterable[Router] = ()) -> "RouterStats | None":
        """The statistics recorded since the last call, over all ranks; None if nothing was recorded.

        A collective: either all ranks call it, or none.
        """
        local = self.take_log(routers)
        return None if local is None else stats_of(self.all_reduce(local), self.cfg)


def log_width(cfg: MoEConfig) -> int:
    """Number of columns of `Balancer.take_log`."""
    return 3 * cfg.outputs + len(cfg.logged) + 5


def stats_of(sums: Tensor, cfg: MoEConfig) -> "RouterStats":
    """The statistics for a log line; sums: the result of `Balancer.take_log`, summed over all ranks."""
    columns = [*[cfg.outputs] * 3, len(cfg.logged), *[1] * 5]
    counts_LE, dropped_LE, bias_LE, losses_LX, *single = sums.split(columns, 1)
    entropy_L, open_L, tokens_L, steps_L, ranks_L = (v[:, 0] for v in single)
    ranks_L1 = ranks_L[:, None].clamp(min=1)
    return RouterStats(
        counts_LE,
        entropy_L / tokens_L.clamp(min=1),
        open_L + dropped_LE.sum(1),
        dropped_LE,
        bias_LE / ranks_L1,
        losses_LX / (steps_L[:, None] / ranks_L1).clamp(min=1),
    )


class RouterLog(NamedTuple):
    """Sums since the last log line, with one row for each MoE layer."""

    counts_LE: Tensor
    dropped_LE: Tensor
    entropy_L: Tensor
    open_L: Tensor
    tokens_L: Tensor


class RouterStats(NamedTuple):
    """The statistics of the routers of L MoE layers in a log line."""

    counts_LE: Tensor  # routed pairs per expert, before dropping
    entropy_L: Tensor  # mean entropy of the router's distribution, nats
    # choices that reached no expert: choices that a router left open (-1), of K per token, and dropped pairs
    dropped_L: Tensor
    dropped_LE: Tensor  # dropped pairs per expert
    bias_LE: Tensor  # the choice bias at the time of the line; 0 without one
    # means over the line's steps of the losses that MoEConfig.logged names, without their coefficients (with
    # an even load, sequence, batch, global and gshard are 1)
    losses_LX: Tensor
