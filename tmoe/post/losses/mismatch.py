"""Corrects tokens that one program drew and another trains: weights of importance, bounded token by token."""

from typing import Literal

import torch
from torch import Tensor

from tmoe.post.losses.clipped import ratio


def correction(
    train: Tensor, rollout: Tensor, cap: float = 2.0, how: Literal["truncate", "mask"] = "truncate"
) -> Tensor:
    """min(w, cap), or with "mask" w where 1 / cap <= w <= cap and 0 elsewhere; w = e^(train - rollout).

    train, rollout: log-probs of the same weights, as training computes them and as the sampler did, both over
    the whole tempered softmax: under top-p the sampler's renormalised ones are others. Of tokens, not of
    sequences: those products shrink with length. Without gradient. A factor on the loss of each token
    (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
    """
    if not cap > 1:
        raise ValueError(f"cap={cap}: must be above 1")
    weight = ratio(train, rollout).detach()
    if how == "truncate":
        return weight.clamp(max=cap)
    if how == "mask":
        return torch.where((weight >= 1 / cap) & (weight <= cap), weight, 0.0)
    raise ValueError(f"how={how!r}: must be truncate or mask")
