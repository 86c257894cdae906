"""Estimates of KL(policy | reference) from one sampled token each."""

from typing import Literal

from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
MOST = 20.0  # nats: beyond, a single token's e^x would be all of a step


def kl(logp: Tensor, ref: Tensor, estimator: Estimator) -> Tensor:
    """With x = ref - lp, between -20 and 20: k1 -x, k2 x^2 / 2, k3 e^x - x - 1; nats, of each token.

    As numbers: k1 is unbiased and may be negative, k3 unbiased and never negative, k2 biased by little. As
    terms of a loss, differentiated at tokens that the policy drew: the mean of k2's gradient is the gradient
    of this KL, k3's is not, and k1's is 0. So a loss takes k2, and k1 goes into the reward. Schulman 2020,
    "Approximating KL divergence"; Liu et al. 2025, arXiv 2510.01555.
    """
    x = (ref - logp).clamp(-MOST, MOST)
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    if estimator == "k3":
        return x.expm1() - x
    raise ValueError(f"estimator={estimator!r}: must be k1, k2 or k3")
