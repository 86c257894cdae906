"""What losses of preferences take: sums of log-probs over the sequences of each pair.

next: sigmoid.py
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Pairs(NamedTuple):
    """Sums over a completion's trained tokens, [P] each: of the policy's log-probs and of a reference's.

    Sums are lp(y), means over a completion's tokens are a(y) in the formulas.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_ref: Tensor | None = None
    rejected_ref: Tensor | None = None

    @property
    def delta(self) -> Tensor:
        """(lp_c - ref_c) - (lp_r - ref_r): how much more the policy prefers the chosen one than before."""
        gained, lost = self.gains
        return gained - lost

    @property
    def gains(self) -> tuple[Tensor, Tensor]:
        """lp - ref of the chosen and of the rejected; times beta they are DPO's implicit rewards."""
        if self.chosen_ref is None or self.rejected_ref is None:
            raise ValueError("pairs: this loss needs the reference's log-probs: refs_N of pairs_of")
        return self.chosen - self.chosen_ref, self.rejected - self.rejected_ref

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """a_c and a_r."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def pairs_of(sums_N: Tensor, tokens_N: Tensor, refs_N: Tensor | None = None) -> Pairs:
    """Pairs of a micro-batch's sequences: number 2p is a pair's chosen one, 2p + 1 the rejected.

    sums_N, refs_N: `sequence_sums` of log-probs; tokens_N: `trained_tokens`.
    """
    if len(sums_N) % 2:
        raise ValueError(f"sequences: got {len(sums_N)}, must be chosen and rejected in turn, so even")
    tokens = tokens_N.clamp(min=1)
    refs = (None, None) if refs_N is None else (refs_N[0::2], refs_N[1::2])
    return Pairs(sums_N[0::2], sums_N[1::2], tokens[0::2], tokens[1::2], *refs)


def minus_log_sigmoid(x: Tensor) -> Tensor:
    """-ln sigmoid(x), without overflow."""
    return F.softplus(-x)
