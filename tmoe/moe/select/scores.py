"""Scores of experts: what a router makes of logits, in one table, and what the losses read of them.

Their names are in config/policies.py. A score is given by its logarithm, up to a number that is the same for
all experts of a token. Shares, a token's scores divided by their sum, are the softmax of these logarithms:
they add up to one where every score is nearly 0, or has underflowed to 0.

next: moe/select/selection.py
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Score(NamedTuple):
    """One way to make scores, of logits whose last dimension is all experts."""

    of: Callable[[Tensor], Tensor]
    """the scores, differentiable"""
    log: Callable[[Tensor], Tensor]
    """their logarithms up to a number for each token, differentiable and finite where logits are"""


def same(logits: Tensor) -> Tensor:
    """The softmax's logarithms: the logits themselves."""
    return logits


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def log_sqrt_softplus(logits: Tensor) -> Tensor:
    """log(sqrt(log(1 + exp(x)))).

    Far below 0 softplus is exp(x), which underflows; its logarithm is x.
    """
    low = logits < -15  # exp(-15) / 2, the next term of the series, is below fp32's rounding of x
    near = logits.where(~low, 0)
    softplus = near.clamp(min=0) + (-near.abs()).exp().log1p()
    below = logits - logits.clamp(max=0).exp() / 2
    return 0.5 * below.where(low, softplus.log())


def sqrt_softplus(logits: Tensor) -> Tensor:
    return log_sqrt_softplus(logits).exp()


SCORES = {
    "softmax": Score(softmax, same),
    "sigmoid": Score(torch.sigmoid, F.logsigmoid),
    "sqrtsoftplus": Score(sqrt_softplus, log_sqrt_softplus),
    "cosine": Score(softmax, same),
}

# Below this sum of a token's scores their logarithms are used: far enough above fp32's least number, and so
# far below any usual sum that DeepSeek's 1e-20 in the divisor, which is left out, changed no bit.
LEAST = 1e-12


def normalised(scores_TK: Tensor, logs_TK: Tensor, here_TK: Tensor | None = None) -> Tensor:
    """Scores divided by their sum, which add up to one however small they are.

    logs: their logarithms up to a number for each token. here: bool, False where there is no expert; such a
    place gets 0, and so do all of a token that has none.
    """
    if here_TK is not None:
        scores_TK = scores_TK.where(here_TK, 0)
        logs_TK = logs_TK.masked_fill(~here_TK, torch.finfo(logs_TK.dtype).min)
    total_T1 = scores_TK.sum(-1, keepdim=True)
    enough_T1 = total_T1 > LEAST
    plain_TK = scores_TK / total_T1.where(enough_T1, 1)
    weights_TK = plain_TK.where(enough_T1, logs_TK.softmax(-1))
    return weights_TK if here_TK is None else weights_TK.where(here_TK, 0)
