"""Single completions marked as good or bad, weighed as gains and losses against a point of reference."""

from typing import NamedTuple

import torch
from torch import Tensor


class Completions(NamedTuple):
    """Sums of log-probs over a completion's trained tokens, [N] each, of policy and reference."""

    logp: Tensor
    ref: Tensor
    desirable: Tensor  # bool


def kto(
    completions: Completions,
    baseline: Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """w_D (1 - s(beta (lp - ref - z))) or w_U (1 - s(beta (z - lp + ref))), of each completion [N], no unit.

    The first for desirable completions, the second for others; s the logistic function. z, `baseline`: nats,
    the same for the whole step, of `baseline_of`. Where one kind is rare, its
    weight is to bring w_D n_D / (w_U n_U) between 1 and 4/3. Ethayarajh et al. 2024, arXiv 2402.01306.
    """
    gain = completions.logp - completions.ref - baseline.detach()
    signed = gain.where(completions.desirable, -gain)
    # 1 - s(x) = s(-x), exact where s(x) is near 1
    weight = torch.where(completions.desirable, desirable_weight, undesirable_weight)
    return weight * (-beta * signed).sigmoid()


def baseline_of(gains_sum: Tensor, count: Tensor) -> Tensor:
    """z: the mean over a step of lp - ref of completions under other prompts, at least 0, without gradient.

    Completion i stands behind prompt i + 1 (the last behind the first): an estimate of the policy's KL from
    the reference. gains_sum, count: over all ranks and micro-batches, before the step's first loss.
    """
    return (gains_sum / count.clamp(min=1)).clamp(min=0).detach()
