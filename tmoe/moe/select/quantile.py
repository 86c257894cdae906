"""Quantile balancing: a bias on each logit that would give its expert an even load.

The choice is top-k of logits plus the choice bias. After each step that bias becomes minus the mean, over the
step's sequences, of each expert's quantile. The quantile is the value of logit minus the token's cutoff that
an even share of the sequence's tokens exceeds. (Megatron-Core's quantile_balancing. There the tokens are a
micro-batch of one rank. Here they are a sequence, so that neither the layout nor the micro-batches change the
bias. Exceptions are tp and cp, which divide sequences.)

next: moe/balance.py
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tmoe.moe.select.selection import Choice, RouterInput, best_experts


def choose(asked: RouterInput) -> Choice:
    """Top-k of logits plus bias. Notes each token's cutoff, which is the largest sum that was not chosen."""
    assert asked.bias_E is not None
    K, E = asked.K, asked.logits_TE.shape[-1]
    wanted_TE = asked.logits_TE + asked.bias_E
    ids_TK = best_experts(wanted_TE, min(K + 1, E))
    return Choice(ids_TK[:, :K], wanted_TE.gather(-1, ids_TK[:, -1:].long()))


@torch.no_grad()
def quantiles(
    logits_TE: Tensor, cutoff_T1: Tensor, K: int, sequences: int, padding_T: Tensor | None
) -> Tensor:
    """The (n K / E + 1)-th largest logit - cutoff over the n tokens of each sequence, per expert: [B, E].

    It is 0 for a sequence without tokens.
    """
    above_BSE = (logits_TE - cutoff_T1).unflatten(0, (sequences, len(logits_TE) // max(sequences, 1)))
    B, S, E = above_BSE.shape
    if S == 0:
        return above_BSE.new_zeros(B, E)
    if padding_T is None:
        return above_BSE.topk(min(S * K // E + 1, S), 1).values[:, -1]
    padding_BS = padding_T.view(B, S)
    tokens_B = S - padding_BS.sum(1)
    place_B = (tokens_B * K // E).minimum(tokens_B - 1).clamp(min=0)
    sorted_BSE = above_BSE.masked_fill(padding_BS[..., None], float("-inf")).sort(1, descending=True).values
    found_BE = sorted_BSE.gather(1, place_B[:, None, None].expand(B, 1, E))[:, 0]
    return found_BE.where((tokens_B > 0)[:, None], 0)


class Quantiles:
    """Sums over micro-batches of a step's quantiles in Y layers, and the bias that follows from them."""

    def __init__(self) -> None:
        self.sums_YX: Tensor | None = None  # fp64: a sum for each expert, then the number of sequences

    def record(self, noted_YBE: Tensor, tokens_YB: Tensor) -> None:
        """Adds a micro-batch."""
        counts_Y1 = (tokens_YB > 0).sum(1, keepdim=True)
        new_YX = torch.cat([noted_YBE.sum(1).double(), counts_Y1.double()], 1)
        self.sums_YX = new_YX if self.sums_YX is None else self.sums_YX + new_YX

    @torch.no_grad()
    def update(
        self,
        biases: Iterable[Tensor],
        ema: float,
        all_reduce: Callable[[Tensor], Tensor],
        taken: Tensor | None,
    ) -> None:
        """Sets each layer's choice bias: -(ema * old quantile + (1 - ema) * the step's), minus its mean.

        A collective, if anything was recorded. Nothing changes if no sequence had a token, or if `taken` is
        0.
        """
        if self.sums_YX is None:
            return
        for bias_E, sums_X in zip(biases, all_reduce(self.sums_YX), strict=True):
            count = sums_X[-1]
            new_E = ema * -bias_E.double() + (1 - ema) * sums_X[:-1] / count.clamp(min=1)
            new_E = new_E - new_E.mean()
            moves = count > 0 if taken is None else (count > 0) & (taken > 0)
            bias_E.copy_(bias_E.where(~moves, -new_E.to(bias_E.dtype)))
        self.sums_YX = None
