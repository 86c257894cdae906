"""DPO's loss that stays unbiased where a known share of the pairs is labelled the wrong way round."""

from torch import Tensor

from tmoe.post.losses.pairs import Pairs, minus_log_sigmoid


def robust(pairs: Pairs, beta: float = 0.1, noise: float = 0.1) -> Tensor:
    """(-(1 - e) ln s(beta D) + e ln s(-beta D)) / (1 - 2e), nats, of each pair [P]; s the logistic function.

    Its mean over labels that are swapped with probability e, `noise` (below 1/2), is the loss of clean
    labels. It may be negative. D, beta: as in `sigmoid`. Chowdhury et al. 2024, arXiv 2403.00409.
    """
    if not 0 <= noise < 0.5:
        raise ValueError(f"noise={noise}: must be at least 0 and below 0.5")
    x = beta * pairs.delta
    return ((1 - noise) * minus_log_sigmoid(x) - noise * minus_log_sigmoid(-x)) / (1 - 2 * noise)
