"""What makes shares of a loss add up: counts of the whole step, weights of tokens, sums over sequences.

A loss is a sum over this rank's tokens, sequences or pairs divided by one number of the whole step. So what
ranks and micro-batches return adds up to the loss, whatever the layout; a mean of means would not.

Tokens lie flat, [T], however they are packed or padded. `segments_T` says which of the micro-batch's N
sequences a token belongs to; what belongs to none has mask 0 and any segment from 0 to N - 1.

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
    """Trained tokens of each of a micro-batch's sequences, [N] fp32. mask_T: bool, or weights."""
    return sequence_sums((mask_T != 0).float(), segments_T, sequences).float()


def count(mask_T: Tensor, lengths_N: Tensor, pairs: int = 0) -> StepCounts:
    """A micro-batch's own counts. mask_T: bool, or weights; lengths_N: its `trained_tokens`."""
    sequences = (lengths_N > 0).sum().float()
    return StepCounts(mask_T.float().sum(), sequences, torch.full_like(sequences, pairs))


def add_up(micros: Iterable[StepCounts], group: dist.ProcessGroup | None) -> StepCounts:
    """The step's counts, of this rank's micro-batches. A collective; group None: this process alone.

    Where tp or cp divide sequences, all ranks of such a group count the same whole rows: then `group` has
    one rank of each.
    """
    total = torch.stack([torch.stack(tuple(micro)) for micro in micros]).sum(0)
    if group is not None:
        dist.all_reduce(total, group=group)
    return StepCounts(*total)


def over(values: Tensor, total: Tensor) -> Tensor:
    """The sum of values divided by the step's number; 0 in a step of nothing."""
    return values.sum() / total.where(total > 0, 1.0)


def token_weights(
    mask_T: Tensor,
    segments_T: Tensor,
    lengths_N: Tensor,
    counts: StepCounts,
    per: Per = "token",
    max_tokens: int | None = None,
) -> Tensor:
    """How much each token's loss counts, fp32 [T]: the sum of weight x loss is this rank's share.

    Args:
        mask_T: bool, or weights of tokens.
        lengths_N: trained tokens of each sequence. Whole sequences', also where cp divides them.
        per: "token": the mean over the step's trained tokens. "sequence": the mean over a sequence's tokens,
            then over sequences. "constant": the sum over tokens, divided by sequences x max_tokens.
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
    """The sum of values over each sequence, fp64 [N], differentiable, equal in every call.

    In fp64: a sum of -1000 in fp32 is off by 6e-5, as much as a first step moves it. Where cp divides
    sequences, add these up over its ranks.
    """
    wide = values_T.double()
    sums = wide.new_zeros(sequences)
    if wide.is_cuda:  # it sorts; index_add would add in random order
        return sums.index_put((segments_T,), wide, accumulate=True)
    return sums.index_add(0, segments_T, wide)
