"""PPO's clip with the ratio of whole sequences, a token's share of it: what sequence rewards are about."""

from torch import Tensor

from tmoe.post.losses.clipped import clipped


def gspo(
    logp_N: Tensor,
    old_N: Tensor,
    tokens_N: Tensor,
    advantage_N: Tensor,
    low: float = 3e-4,
    high: float = 4e-4,
    dual: float | None = None,
) -> Tensor:
    """-min(s A, clip(s, 1 - low, 1 + high) A) of each sequence [N], in units of the advantage.

    s = e^mean(lp - old) over a sequence's trained tokens, not the product of their ratios. Mean over
    sequences. It is GRPO with rho = sg(s) e^(lp - sg(lp)) at each token: the same value, the same gradient.
    Routers of experts that change between two policies move single tokens' ratios much more than s. Zheng et
    al. 2025, arXiv 2507.18071.

    Args:
        logp_N, old_N: sums over a sequence's trained tokens, tokens_N their number.
    """
    tokens = tokens_N.clamp(min=1)
    return clipped(logp_N / tokens, old_N / tokens, advantage_N, low, high, dual)
