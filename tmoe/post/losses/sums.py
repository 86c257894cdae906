"""Counts of a whole step, weights of tokens and sums over sequences, by which shares of a loss add up.

Each share is a sum over this rank's tokens, sequences or pairs, divided by one number of the whole step. So
the shares of ranks and micro-batches sum to the loss in every layout; a mean of means would not.

Tokens are flat, [T], for packed and padded rows. `segments_T` has the index of each token's sequence among
the micro-batch's N; tokens of no sequence have mask 0 and any segment from 0 to N - 1.

next: policy.py
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Per = Literal["token", "sequence", "constant"]


class StepCounts(NamedTuple):
    """Counts of a whole step, over all ranks and micro-batches (0-dim fp32): the divisors of the losses."""

    tokens: Tensor  # trained tokens, or the sum of their weights
    sequences: Tensor  # sequences with a trained token
    pairs: Tensor  # of a chosen and a rejected sequence


def trained_tokens(mask_T: Tensor, segments_T: Tensor, sequences: int) -> Tensor:
    """Number of trained tokens of each of a micro-batch's sequences, [N] fp32. mask_T: bool, or weights."""
    return sequence_sums((mask_T != 0).float(), segments_T, sequences).float()


def count(mask_T: Tensor, lengths_N: Tensor, pairs: int = 0) -> StepCounts:
    """A micro-batch's own counts. mask_T: bool, or weights; lengths_N: its `trained_tokens`."""
    sequences = (lengths_N > 0).sum().float()
    return StepCounts(mask_T.float().sum(), sequences, torch.full_like(sequences, pairs))


def add_up(micros: Iterable[StepCounts], group: dist.ProcessGroup | None) -> StepCounts:
    """The step's counts, from this rank's micro-batches. A collective; group None: this process alone.

    Where tp or cp divide sequences, all ranks of a row count the same whole rows: `group` must then have one
    rank of each row.
    """
    total = torch.stack([torch.stack(tuple(micro)) for micro in micros]).sum(0)
    if group is not None:
        dist.all_reduce(total, group=group)
    return StepCounts(*total)


def over(values: Tensor, total: Tensor) -> Tensor:
    """The sum of values divided by `total`, a count of the whole step; 0 if the count is 0."""
    return values.sum() / total.where(total > 0, 1.0)


def token_weights(
    mask_T: Tensor,
    segments_T: Tensor,
    lengths_N: Tensor,
    counts: StepCounts,
    per: Per = "token",
    max_tokens: int | None = None,
) -> Tensor:
    """The weight of each token's loss, fp32 [T]: the sum of weight x loss is this rank's share.

    Args:
        mask_T: bool, or weights of tokens.
        segments_T: index of each token's sequence.
        lengths_N: number of trained tokens of each whole sequence, also where cp divides sequences.
        counts: of the whole step.
        per: "token": the mean over the step's trained tokens. "sequence": the mean over a sequence's tokens,
            then over sequences. "constant": the sum over tokens, divided by sequences x max_tokens.
        max_tokens: for "constant": the most tokens of a completion.
    """
    mask = mask_T.float()
    if per == "token":
        return mask / counts.tokens.where(counts.tokens > 0, 1.0)
    each = mask / counts.sequences.clamp(min=1)
    if per == "sequence":
        return each / lengths_N.clamp(min=1)[segments_T]
    if max_tokens is None or max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: must be the most tokens of a completion, at least 1")
    return each / max_tokens


def sequence_sums(values_T: Tensor, segments_T: Tensor, sequences: int) -> Tensor:
    """The sum of values over each sequence, fp64 [N], differentiable and deterministic.

    fp64 is needed: a sum of -1000 in fp32 has an error of 6e-5, as much as a first step changes it. Where cp
    divides sequences, sum the results over its ranks.
    """
    wide = values_T.double()
    sums = wide.new_zeros(sequences)
    if wide.is_cuda:  # index_put sorts first; index_add would add in random order
        return sums.index_put((segments_T,), wide, accumulate=True)
    return sums.index_add(0, segments_T, wide)
