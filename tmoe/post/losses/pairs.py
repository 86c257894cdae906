"""Losses of preferences, from the log-probs of each pair's chosen and rejected completion.

next: tmoe/post/preference.py
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Pairs(NamedTuple):
    """Sums of log-probs over a completion's trained tokens, [P] each, by the policy and by a reference.

    In the formulas, lp(y) is such a sum, and a(y) is the mean over the completion's tokens.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_ref: Tensor | None = None
    rejected_ref: Tensor | None = None

    @property
    def delta(self) -> Tensor:
        """(lp_c - ref_c) - (lp_r - ref_r): the policy's preference for the chosen minus the reference's."""
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
        """a_c and a_r: the means over tokens of the chosen and of the rejected."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def pairs_of(sums_N: Tensor, tokens_N: Tensor, refs_N: Tensor | None = None) -> Pairs:
    """Pairs of a micro-batch's sequences: sequence 2p is pair p's chosen one, 2p + 1 the rejected one.

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


def sigmoid(pairs: Pairs, beta: float = 0.1, smoothing: float = 0.0) -> Tensor:
    """-(1 - e) ln s(beta D) - e ln s(-beta D), nats, of each pair [P]; s the logistic function.

    D is `Pairs.delta`, in nats. beta (1/nat) is the weight of D: a smaller beta lets the policy move further
    from the reference. e, `smoothing`: the share of pairs whose labels are assumed to be swapped
    ("conservative DPO"). The loss is ln 2 while policy and reference are equal. Rafailov et al. 2023, arXiv
    2305.18290, equation 7.
    """
    x = beta * pairs.delta
    return (1 - smoothing) * minus_log_sigmoid(x) + smoothing * minus_log_sigmoid(-x)


def robust(pairs: Pairs, beta: float = 0.1, noise: float = 0.1) -> Tensor:
    """(-(1 - e) ln s(beta D) + e ln s(-beta D)) / (1 - 2e), nats, of each pair [P]; s the logistic function.

    Its mean over labels that are swapped with probability e, `noise` (below 1/2), is the loss of clean
    labels. It may be negative. D, beta: as in `sigmoid`. Chowdhury et al. 2024, arXiv 2403.00409.
    """
    if not 0 <= noise < 0.5:
        raise ValueError(f"noise={noise}: must be at least 0 and below 0.5")
    x = beta * pairs.delta
    return ((1 - noise) * minus_log_sigmoid(x) - noise * minus_log_sigmoid(-x)) / (1 - 2 * noise)


def hinge(pairs: Pairs, beta: float = 0.1) -> Tensor:
    """max(0, 1 - beta D) of each pair [P], without unit.

    D: `Pairs.delta`, nats. Pairs whose D is above 1 / beta give no gradient. Zhao et al. 2023 (SLiC), arXiv
    2305.10425, with DPO's D; Liu et al. 2023, arXiv 2309.06657.
    """
    return (1 - beta * pairs.delta).clamp(min=0)


def ipo(pairs: Pairs, beta: float = 0.1) -> Tensor:
    """(D_a - 1 / (2 beta))^2 of each pair [P], in (nats a token)^2.

    D_a: D with means over a completion's tokens in place of sums, as in all implementations: with sums, long
    completions would have the same target as short ones. beta: 1 / (2 beta) is the target of D_a. Azar et al.
    2023, arXiv 2310.12036, equation 17.
    """
    gained, lost = pairs.gains
    return (gained / pairs.chosen_tokens - lost / pairs.rejected_tokens - 1 / (2 * beta)).square()


def simpo(pairs: Pairs, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """-ln s(beta (a_c - a_r) - gamma), nats, of each pair [P]; s the logistic function.

    a: means over a completion's tokens, nats a token. gamma: the margin, in units of beta a. TRL's
    defaults, .1 and .5, are far below the paper's values. Meng et al. 2024, arXiv
    2405.14734, equation 6.
    """
    chosen, rejected = pairs.means
    return minus_log_sigmoid(beta * (chosen - rejected) - gamma)


def orpo(pairs: Pairs, weight: float = 0.1) -> Tensor:
    """-a_c - weight ln s(o), nats a token, of each pair [P]; s the logistic function.

    o = (a_c - a_r) - (ln(1 - e^a_c) - ln(1 - e^a_r)), the log of the ratio of odds; a: means over a
    completion's tokens. Hong et al. 2024, arXiv 2403.07691, equations 6 and 7.
    """
    chosen, rejected = pairs.means
    odds = (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))
    return -chosen + weight * minus_log_sigmoid(odds)


def log1mexp(x: Tensor) -> Tensor:
    """ln(1 - e^x) for x < 0, without cancellation near 0 and far from it (Maechler 2012).

    x above -1e-7 is replaced by -1e-7, because the odds of a certain completion are infinite.
    """
    x = x.clamp(max=-1e-7)
    near = x > -math.log(2)
    # each branch gets arguments with a finite gradient, also where `where` chooses the other branch
    return torch.where(near, (-x.where(near, -0.1).expm1()).log(), (-x.where(~near, -1.0).exp()).log1p())
