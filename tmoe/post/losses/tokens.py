"""Losses of single tokens: cross-entropy, DFT, PPO's clip, CISPO, DPPO; a token's KL and importance weight.

Each is a pure function of log-probs of any shape. lp, in formulas, is the log-prob of a token.

next: sequences.py
"""

import math
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
# nats, the largest difference of log-probs. A ratio beyond e^20 is infinity to a loss, but 0 times it is 0;
# in an estimate of KL a single token's e^x would be all of a step.
MOST = 20.0


def sft(logp: Tensor, dft: bool = False) -> Tensor:
    """-lp, nats, of each token: cross-entropy. With `dft` -sg(e^lp) lp, sg without gradient.

    DFT (Wu et al. 2025, arXiv 2508.05629) weighs a token by its own probability: tokens that the
    model does not expect at all move it little, as in a policy gradient with reward 1.

    The step's loss is sum(w m loss) / sum(w m) over its trained tokens, w weights of rows or tokens:
    `sums.token_weights` with mask_T = w m. Its values depend on the layout by rounding alone.
    """
    return -logp.detach().exp() * logp if dft else -logp


def neftune(x_TD: Tensor, lengths_T: Tensor, noise_TD: Tensor, alpha: float = 5.0) -> Tensor:
    """Embeddings with noise: x + noise alpha / sqrt(n D), where n is the length of a token's own document.

    noise_TD: uniform on (-1, 1); drawn by the caller, by (seed, step, sample), so that no layout changes it.
    lengths_T: n of each token (`document_lengths`): of its document and not of its row, so that packing
    changes nothing. For training alone. Jain et al. 2023, arXiv 2310.05914, algorithm 1.
    """
    scale = alpha / (lengths_T.float() * x_TD.shape[-1]).sqrt()
    return x_TD + (noise_TD * scale[:, None]).to(x_TD.dtype)


def document_lengths(documents_BS: Tensor) -> Tensor:
    """How many tokens the document of each token has, int64 [B, S].

    documents_BS: number of the document within the row, as batches have it; equal numbers are neighbours.
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


def cispo(logp: Tensor, old: Tensor, advantage: Tensor, cap: float = 5.0) -> Tensor:
    """-sg(min(rho, cap)) A lp, of each token, in units of the advantage times nats; sg without gradient.

    rho = e^(lp - old). Rare tokens that turn an argument, whose rho is large, still count: PPO's clip drops
    them. Mean over the step's tokens. MiniMax-M1, 2025, arXiv 2506.13585, bounded above alone.
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

    rho = e^(lp - old), p = e^lp. A token is dropped where A > 0 and p - p_old > high, and where A < 0 and
    p_old - p > low: bounds of the total variation between the two policies. Rare tokens, whose rho is far
    from 1 while p hardly moves, are kept. The second term draws all trained tokens back. Mean over the step's
    tokens. arXiv 2602.04879, with the second term of 2602.02276, as prime-rl has them.
    """
    moved = (logp.exp() - old.exp()).detach()
    dropped = ((advantage > 0) & (moved > high)) | ((advantage < 0) & (moved < -low))
    term = -(ratio(logp, old) * advantage).masked_fill(dropped, 0.0)
    return term + pull * (logp - old).clamp(-MOST, MOST).square()


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
