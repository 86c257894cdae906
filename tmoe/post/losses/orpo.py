"""Finetuning on the chosen completion and a preference by odds, in one loss without a reference."""

import math

import torch
from torch import Tensor

from tmoe.post.losses.pairs import Pairs, minus_log_sigmoid


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

    Above -1e-7 it stays what it is there: a completion that is certain has no odds.
    """
    x = x.clamp(max=-1e-7)
    near = x > -math.log(2)
    # each branch gets arguments at which its gradient is finite, also where the other one is taken
    return torch.where(near, (-x.where(near, -0.1).expm1()).log(), (-x.where(~near, -1.0).exp()).log1p())
