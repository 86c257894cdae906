"""A margin in place of DPO's logistic function: pairs that are told apart well enough count nothing."""

from torch import Tensor

from tmoe.post.losses.pairs import Pairs


def hinge(pairs: Pairs, beta: float = 0.1) -> Tensor:
    """max(0, 1 - beta D) of each pair [P], without unit.

    D: `Pairs.delta`, nats. No gradient from pairs whose D is above 1 / beta. Zhao et al. 2023 (SLiC), arXiv
    2305.10425, with DPO's D; Liu et al. 2023, arXiv 2309.06657.
    """
    return (1 - beta * pairs.delta).clamp(min=0)
