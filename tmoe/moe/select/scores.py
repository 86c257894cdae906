"""Scores of experts: a table of functions of the logits, which the router and the losses use.

The names are in config/routing_choices.py. A score is defined by its logarithm, up to a constant for all
experts of a token. A token's shares are its scores divided by their sum. They are computed as the softmax of
these logarithms, so that they add up to one even if every score is nearly 0 or has underflowed to 0.

next: moe/select/selection.py
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Score(NamedTuple):
    """One kind of score, computed from logits whose last dimension holds all experts."""

    of: Callable[[Tensor], Tensor]
    """the scores, differentiable"""
    log: Callable[[Tensor], Tensor]
    """their logarithms up to a constant for each token, differentiable, and finite where logits are"""


def same(logits: Tensor) -> Tensor:
    """The softmax's logarithms: the logits themselves."""
    return logits


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def log_sqrt_softplus(logits: Tensor) -> Tensor:
    """log(sqrt(log(1 + exp(x)))).

    Far below 0, softplus is exp(x), which underflows. The logarithm of exp(x) is x.
    """
    low = logits < -15  # exp(-15) / 2, the next term of the series, is less than fp32's rounding of x
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

# If the sum of a token's scores is smaller than this, their logarithms are used. The limit is far above the
# smallest fp32 number, and far below any usual sum. DeepSeek adds 1e-20 to the sum. This code does not,
# because no bit of a sum above the limit would change.
LEAST = 1e-12


def normalised(scores_TK: Tensor, logs_TK: Tensor, here_TK: Tensor | None = None) -> Tensor:
    """Scores divided by their sum; the results add up to one even for tiny scores.

    logs: the logarithms of the scores, up to a constant for each token. here: bool, False where there is no
    expert; the result is 0 at such a place, and at all places of a token without experts.
    """
    if here_TK is not None:
        scores_TK = scores_TK.where(here_TK, 0)
        logs_TK = logs_TK.masked_fill(~here_TK, torch.finfo(logs_TK.dtype).min)
    total_T1 = scores_TK.sum(-1, keepdim=True)
    enough_T1 = total_T1 > LEAST
    plain_TK = scores_TK / total_T1.where(enough_T1, 1)
    weights_TK = plain_TK.where(enough_T1, logs_TK.softmax(-1))
    return weights_TK if here_TK is None else weights_TK.where(here_TK, 0)
