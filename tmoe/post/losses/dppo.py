"""A policy gradient that drops tokens whose probability, not whose ratio, has moved too far."""

from torch import Tensor

from tmoe.post.losses.clipped import MOST, ratio


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
