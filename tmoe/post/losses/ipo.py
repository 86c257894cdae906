"""A square in place of DPO's logistic function: a preference that is certain has a finite margin."""

from torch import Tensor

from tmoe.post.losses.pairs import Pairs


def ipo(pairs: Pairs, beta: float = 0.1) -> Tensor:
    """(D_a - 1 / (2 beta))^2 of each pair [P], in nats a token squared.

    D_a: D of means over a completion's tokens in place of sums, as all implementations have it: with sums
    long completions would be held to the same distance as short ones. beta: 1 / (2 beta) is the margin that
    it draws D_a to. Azar et al. 2023, arXiv 2310.12036, equation 17.
    """
    gained, lost = pairs.gains
    return (gained / pairs.chosen_tokens - lost / pairs.rejected_tokens - 1 / (2 * beta)).square()
