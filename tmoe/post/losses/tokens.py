"""Losses of single tokens: cross-entropy, DFT, PPO's clip, CISPO, DPPO; a token's KL and importance weight.

Each is a pure function of log-probs of any shape. In formulas, lp is the log-prob of a token.

next: sequences.py
"""

import math
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
# Bound of differences of log-probs, nats. e^20 is as good as infinity in a loss, but 0 times it is not NaN;
# in an estimate of KL a single token's e^x beyond it would outweigh all other tokens of a step.
MOST = 20.0


def sft(logp: Tensor, dft: bool = False) -> Tensor:
    """-lp, nats, of each token: cross-entropy. With `dft` -sg(e^lp) lp, where sg stops the gradient.

    DFT (Wu et al. 2025, arXiv 2508.05629) weighs a token by its own probability: tokens that the model finds
    very improbable change it little, as in a policy gradient with reward 1.

    The step's loss is sum(w m loss) / sum(w m) over its trained tokens, with m the mask and w weights of rows
    or tokens: `sums.token_weights` with mask_T = w m. Layouts change it by rounding only.
    """
    return -logp.detach().exp() * logp if dft else -logp


def neftune(x_TD: Tensor, lengths_T: Tensor, noise_TD: Tensor, alpha: float = 5.0) -> Tensor:
    """Embeddings with noise: x + noise alpha / sqrt(n D), where n is the length of a token's own document.

    For training only. Jain et al. 2023, arXiv 2310.05914, algorithm 1.

    Args:
        x_TD: embeddings.
        lengths_T: n of each token (`document_lengths`): the length of its document, not of its row, so that
            packing changes nothing.
        noise_TD: uniform on (-1, 1); the caller draws it by (seed, step, sample), so that it is the same in
            every layout.
        alpha: strength of the noise.
    """
    scale = alpha / (lengths_T.float() * x_TD.shape[-1]).sqrt()
    return x_TD + (noise_TD * scale[:, None]).to(x_TD.dtype)


def document_lengths(documents_BS: Tensor) -> Tensor:
    """The number of tokens of each token's document, int64 [B, S].

    documents_BS: number of the document within the row, as in batches; equal numbers are neighbours.
    """
    B, S = documents_BS.shape
    index = documents_BS - documents_BS.amin(1, keepdim=True)
    index = index.clamp(max=S - 1) + S * torch.arange(B, device=documents_BS.device)[:, None]
    return torch.bincount(index.flatten(), minlength=B * S)[index]


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

    rho = e^(lp - old): how much more probable the token is than when it was drawn. There is no gradient where
    rho is already beyond the clip in the direction of A. Schulman et al. 2017, arXiv 1707.06347, equation 7.

    GRPO (Shao et al. 2024, arXiv 2402.03300) takes the mean over a sequence's tokens, then over sequences;
    DAPO (Yu et al. 2025, arXiv 2503.14476) the mean over tokens, and high .28; Dr.GRPO (Liu et al. 2025,
    arXiv 2503.20783) the sum over tokens, divided by a constant.

    Args:
        logp: log-probs by the policy.
        old: log-probs by the policy that drew the tokens.
        advantage: A of each token.
        low, high: the bounds of rho are 1 - low and 1 + high.
        dual: c > 1; where A < 0 the loss is at most -c A (Ye et al. 2020, arXiv 1912.09729), so that a bad
            token that has become far more probable does not outweigh the rest of a step.
        cap: delta > 1 + high; rho is bounded by it before it is clipped (INTELLECT-2, 2025, arXiv
            2505.07291): another way to the same bound, which takes away such a token's gradient as well.
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
    """Whether `clipped` takes away a token's gradient, bool, for the log."""
    rho = ratio(logp, old)
    most = min(math.inf if bound is None else bound for bound in (dual, cap))
    bad = (rho < 1 - low) | (rho > most)
    return ((rho > 1 + high) & (advantage > 0)) | (bad & (advantage < 0))


def cispo(logp: Tensor, old: Tensor, advantage: Tensor, cap: float = 5.0) -> Tensor:
    """-sg(min(rho, cap)) A lp, of each token, in units of the advantage times nats; sg stops the gradient.

    rho = e^(lp - old). Rare tokens at turning points of an argument have a large rho: PPO's clip drops them,
    and this loss keeps them. The step's loss is the mean over its tokens. MiniMax-M1, 2025, arXiv 2506.13585,
    with the upper bound only.
    """
    return -ratio(logp.detach(), old).clamp(max=cap) * advantage * logp


def dppo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    low: float = 0.2,
    high: float = 0.2,
    pull: float = 1e-3,
) -> Tensor:
    """-keep rho A + pull (ln rho)^2, of each token, in units of the advantage.

    rho = e^(lp - old), p = e^lp. `keep` is 0 (the token is dropped) where A > 0 and p - p_old > high, and
    where A < 0 and p_old - p > low, else 1: bounds of the total variation between the two policies. Rare
    tokens, whose rho is far from 1 although p hardly changes, are kept. The second term pulls the rho of all
    trained tokens back to 1. The step's loss is the mean over its tokens. arXiv 2602.04879, with the second
    term of 2602.02276, as in prime-rl.
    """
    moved = (logp.exp() - old.exp()).detach()
    dropped = ((advantage > 0) & (moved > high)) | ((advantage < 0) & (moved < -low))
    term = -(ratio(logp, old) * advantage).masked_fill(dropped, 0.0)
    return term + pull * (logp - old).clamp(-MOST, MOST).square()


def kl(logp: Tensor, ref: Tensor, estimator: Estimator) -> Tensor:
    """With x = ref - lp, between -20 and 20: k1 -x, k2 x^2 / 2, k3 e^x - x - 1; nats, of each token.

    k1 as an estimate is unbiased and may be negative; k3 is unbiased and never negative; k2 has a small bias.
    In a loss, differentiated at tokens that the policy drew, the mean of k2's gradient is the gradient of the
    KL, the mean of k3's is not, and the mean of k1's is 0. So use k2 in a loss, and k1 in a reward. Schulman
    2020, "Approximating KL divergence"; Liu et al. 2025, arXiv 2510.01555.
    """
    x = (ref - logp).clamp(-MOST, MOST)
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x.square() / 2
    if estimator == "k3":
        return x.expm1() - x
    raise ValueError(f"estimator={estimator!r}: must be k1, k2 or k3")


def correction(
    train: Tensor, rollout: Tensor, cap: float = 2.0, how: Literal["truncate", "mask"] = "truncate"
) -> Tensor:
    """min(w, cap), or with "mask" w where 1 / cap <= w <= cap and 0 elsewhere; w = e^(train - rollout).

    The result is a factor on the loss of each token, without gradient (Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"). It is not for sequences, because products over a
    sequence shrink with its length.

    train, rollout: log-probs by the same weights, as training and as the sampler computed them. Both are over
    the whole softmax at the sampling temperature; with top-p, do not use the sampler's renormalised ones.
    """
    if not cap > 1:
        raise ValueError(f"cap={cap}: must be above 1")
    weight = ratio(train, rollout).detach()
    if how == "truncate":
        return weight.clamp(max=cap)
    if how == "mask":
        return torch.where((weight >= 1 / cap) & (weight <= cap), weight, 0.0)
    raise ValueError(f"how={how!r}: must be truncate or mask")
