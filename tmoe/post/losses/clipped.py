"""The clipped ratio of PPO, which GRPO, DAPO, Dr.GRPO, GSPO and RLOO share, with its two further bounds."""

import math

import torch
from torch import Tensor

MOST = 20.0  # nats: a ratio beyond e^20 is infinity to a loss, but 0 times it is 0


def ratio(logp: Tensor, old: Tensor) -> Tensor:
    """rho = e^(lp - old), with lp - old between -20 and 20."""
    return (logp - old).clamp(-MOST, MOST).exp()


def clipped(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A), of each token, in units of the advantage.

    rho = e^(lp - old): what the policy has moved since it drew the token. No gradient where rho has already
    moved beyond the clip in the direction of A. Schulman et al. 2017, arXiv 1707.06347, equation 7.

    GRPO (Shao et al. 2024, arXiv 2402.03300) takes the mean over a sequence's tokens, then over sequences;
    DAPO (Yu et al. 2025, arXiv 2503.14476) the mean over tokens, and high .28; Dr.GRPO (Liu et al. 2025,
    arXiv 2503.20783) the sum over tokens, divided by a constant.

    Args:
        old: log-probs of the policy that drew the tokens.
        dual: c > 1; where A < 0 the loss is at most -c A (Ye et al. 2020, arXiv 1912.09729): a bad token that
            has become far more likely does not outweigh a step.
        cap: delta > 1 + high; rho is at most this before all else (INTELLECT-2, 2025, arXiv 2505.07291):
            the same bound by another way, after which such a token has no gradient either.
    """
    rho = ratio(logp, old)
    free = rho if cap is None else rho.clamp(max=cap)
    loss = -torch.minimum(free * advantage, rho.clamp(1 - low, 1 + high) * advantage)
    return loss if dual is None else loss.where(advantage >= 0, torch.minimum(loss, -dual * advantage))


def is_clipped(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """Whether `clipped` takes a token's gradient away: for the log."""
    rho = ratio(logp, old)
    most = min(math.inf if bound is None else bound for bound in (dual, cap))
    bad = (rho < 1 - low) | (rho > most)
    return ((rho > 1 + high) & (advantage > 0)) | (bad & (advantage < 0))
