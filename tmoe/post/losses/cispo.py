"""A policy gradient whose weights, and not whose gradients, are clipped: every token keeps one."""

from torch import Tensor

from tmoe.post.losses.clipped import ratio


def cispo(logp: Tensor, old: Tensor, advantage: Tensor, cap: float = 5.0) -> Tensor:
    """-sg(min(rho, cap)) A lp, of each token, in units of the advantage times nats; sg without gradient.

    rho = e^(lp - old). Rare tokens that turn an argument, whose rho is large, still count: PPO's clip drops
    them. Mean over the step's tokens. MiniMax-M1, 2025, arXiv 2506.13585, bounded above alone.
    """
    return -ratio(logp.detach(), old).clamp(max=cap) * advantage * logp
