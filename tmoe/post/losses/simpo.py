"""Preferences without a reference: means of log-probs, which are what decoding looks for, and a margin."""

from torch import Tensor

from tmoe.post.losses.pairs import Pairs, minus_log_sigmoid


def simpo(pairs: Pairs, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """-ln s(beta (a_c - a_r) - gamma), nats, of each pair [P]; s the logistic function.

    a: means over a completion's tokens, nats a token. gamma: the margin, in units of beta a. TRL's
    defaults, .1 and .5, are far below the paper's values. Meng et al. 2024, arXiv
    2405.14734, equation 6.
    """
    chosen, rejected = pairs.means
    return minus_log_sigmoid(beta * (chosen - rejected) - gamma)
