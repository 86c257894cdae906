"""A policy gradient that takes a whole completion for one action, clipped where the policy has moved."""

from torch import Tensor

from tmoe.post.losses.clipped import clipped


def rloo(
    logp_N: Tensor,
    old_N: Tensor,
    tokens_N: Tensor,
    advantage_N: Tensor,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> Tensor:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A) of each sequence [N], in units of the advantage.

    rho = e^(sum of lp - old) over a sequence's trained tokens. While policy and old are equal its gradient is
    -A times that of the sequence's log-prob: REINFORCE with the mean of the other samples as baseline
    (`advantages`, "leave-one-out"). Mean over sequences. Ahmadian et al. 2024, arXiv 2402.14740.
    """
    return clipped(logp_N, old_N, advantage_N, low, high, dual)
