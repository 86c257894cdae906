"""The load-balancing losses: each is a function of a micro-batch's sums, named in --model.moe.balance.

A new loss is a function here, a line in LOSSES, and its name in config/balance_settings.py. Any sum that it
needs besides those of Load is added in `measure` (moe/balance.py).

Y: the number of MoE layers. Every function returns a rank's share of the step's loss, [Y], without its
coefficient. The shares of all ranks and micro-batches add up to the loss.

next: moe/exchange/dispatch.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.config.model import MoEConfig


class Load(NamedTuple):
    """One layer's sums over the tokens of each of B sequences, without padding.

    `stack` combines the loads of Y MoE layers, with Y as the first dimension. Counts refer to the router's
    choice, groups and bias included, before any pair is dropped. The losses and the choice bias are computed
    from these counts.
    """

    probs_BE: Tensor  # sum over tokens of each expert's share of a token's scores, differentiable
    counts_BE: Tensor  # (token, expert) pairs routed, fp32
    tokens_B: Tensor  # fp32
    z_B: Tensor  # sum over tokens of logsumexp(logits)^2, differentiable
    entropy_B: Tensor  # sum over tokens of the entropy of those shares, nats, no gradient
    choices_B: Tensor  # K per token: the number of pairs if no choice were left open (-1)
    dropped_BE: Tensor  # the routed pairs that a full expert did not accept, fp32
    # only where a loss needs them
    first_BE: Tensor | None = None  # tokens by their first choice
    clean_BE: Tensor | None = None  # probs_BE computed from the logits before noise, differentiable
    smooth_BE: Tensor | None = None  # tokens times the chance that noise chooses the expert, differentiable
    # sums of the selection's notes: Sinkhorn's residual over tokens [B, 1], quantiles [B, E], else [B, 0]
    noted_BX: Tensor | None = None
    ids_TK: Tensor | None = None  # the choices, if they are traced
    # if rows hold several sequences: the first three sums for each of N sequences
    probs_NE: Tensor | None = None
    counts_NE: Tensor | None = None
    tokens_N: Tensor | None = None


def with_fields(load: Load, **given: Tensor | None) -> Load:
    """The load with these fields set. (dynamo of torch 2.11 cannot return the result of `_replace`.)"""
    fields: Any = [given.get(name, value) for name, value in zip(Load._fields, load, strict=True)]
    return Load(*fields)


class Totals(NamedTuple):
    """Counts of a whole step, over all ranks and micro-batches (0-dim fp32): the divisors of the losses."""

    targets: Tensor
    tokens: Tensor
    sequences: Tensor
    further: Tensor | None = None  # places that each depth of --model.mtp counts, [depth]


class Scope(NamedTuple):
    """The inputs of a loss in addition to the micro-batch's own sums."""

    totals: Totals
    # routed pairs of the step so far, over all ranks; None if no loss needs them
    step_YE: Tensor | None
    # number of ranks that divide each sequence; each has a part of the micro-batch's loss
    parts: Tensor | float


def sequence(load: Load, scope: Scope) -> Tensor:
    """E sum_e f_e P_e of each sequence (Switch, Fedus et al. 2021, eq. 4): the mean over sequences.

    f_e: the expert's share of the sequence's routed pairs; P_e: its mean share of the scores. A sequence is a
    row, or, if rows are packed, one of the sequences packed into it.
    """
    probs_YNE, counts_YNE, tokens_YN = load.probs_NE, load.counts_NE, load.tokens_N
    if probs_YNE is None or counts_YNE is None or tokens_YN is None:
        probs_YNE, counts_YNE, tokens_YN = load.probs_BE, load.counts_BE, load.tokens_B
    share_YNE = counts_YNE / counts_YNE.sum(-1, keepdim=True).clamp(min=1)
    mean_YNE = probs_YNE / tokens_YN.clamp(min=1)[..., None]
    return _experts(load) * (share_YNE * mean_YNE).sum((-2, -1)) / scope.totals.sequences.clamp(min=1)


def batch(load: Load, scope: Scope) -> Tensor:
    """The same for a rank's micro-batch as a whole. Micro-batches are weighted by their number of tokens."""
    return _overlap(load.counts_BE.sum(1), load, scope)


def whole_step(load: Load, scope: Scope) -> Tensor:
    """The same with f_e over all ranks and over the step's micro-batches so far."""
    assert scope.step_YE is not None
    return _overlap(scope.step_YE, load, scope)


def gshard(load: Load, scope: Scope) -> Tensor:
    """`batch` with only first choices in f (GShard, Lepikhin et al. 2020; Tutel's default)."""
    assert load.first_BE is not None
    return _overlap(load.first_BE.sum(1), load, scope)


def importance(load: Load, scope: Scope) -> Tensor:
    """(cv^2 of the experts' summed scores + cv^2 of their smooth load) / 2 of a micro-batch.

    cv: standard deviation over mean. Both sums are of scores and logits before noise (Shazeer et al. 2017;
    V-MoE, Riquelme et al. 2021).
    """
    assert load.clean_BE is not None and load.smooth_BE is not None
    loss_Y = (_cv_squared(load.clean_BE.sum(1)) + _cv_squared(load.smooth_BE.sum(1))) / 2
    # Each of the ranks that divide sequences has the whole value, but only the gradient of its part. So the
    # value is divided by their number, and the gradient is not.
    share_Y = loss_Y - loss_Y.detach() + loss_Y.detach() / scope.parts
    return share_Y * load.tokens_B.sum(1) / scope.totals.tokens.clamp(min=1)


LOSSES: dict[str, Callable[[Load, Scope], Tensor]] = {
    "sequence": sequence,
    "batch": batch,
    "global": whole_step,
    "gshard": gshard,
    "importance": importance,
    "importance-tutel": importance,  # with a different smooth load: see `smooth_load`
}


def _experts(load: Load) -> int:
    return load.counts_BE.shape[-1]


def _overlap(counts_YE: Tensor, load: Load, scope: Scope) -> Tensor:
    """E sum_e f_e P_e, which is smallest if experts are evenly used; f: shares of counts_YE."""
    share_YE = counts_YE / counts_YE.sum(-1, keepdim=True).clamp(min=1)
    overlap_Y = (share_YE * load.probs_BE.sum(1)).sum(-1)
    return _experts(load) * overlap_Y / scope.totals.tokens.clamp(min=1)


def _cv_squared(sums_YE: Tensor) -> Tensor:
    """The squared coefficient of variation over experts, with Tutel's divisor E - 1 and its 1e-10."""
    many = sums_YE.shape[-1] > 1
    return sums_YE.var(-1, correction=int(many)) / (sums_YE.mean(-1).square() + 1e-10)


def smooth_load(clean_TE: Tensor, last_T: Tensor, cfg: MoEConfig) -> Tensor:
    """The probability, over the noise alone, that a token chooses each expert: [T, E], differentiable.

    It is Phi((logit - last) / sigma). last: a token's K-th chosen logit, noise included. sigma: the standard
    deviation of the noise. Tutel compares `last` not with the logits but with their softmax
    (tutel/impls/losses.py, seen at ac0e51b). "importance-tutel" does the same, so that a run that began with
    Tutel can continue with the same loss.
    """
    ours_TE = clean_TE.softmax(-1) if "importance-tutel" in cfg.losses else clean_TE
    return torch.special.ndtr((ours_TE - last_T[:, None]) * (cfg.outputs / cfg.noise))
