"""DPO's own loss: a logistic regression on how much more the policy prefers the chosen completion."""

from torch import Tensor

from tmoe.post.losses.pairs import Pairs, minus_log_sigmoid


def sigmoid(pairs: Pairs, beta: float = 0.1, smoothing: float = 0.0) -> Tensor:
    """-(1 - e) ln s(beta D) - e ln s(-beta D), nats, of each pair [P]; s the logistic function.

    D is `Pairs.delta`, in nats; beta (1/nat) is how much a nat of it counts: smaller lets the policy move
    further from the reference. e, `smoothing`: the share of pairs that are taken to be labelled the wrong
    way round ("conservative DPO"). ln 2 while policy and reference are equal. Rafailov et al. 2023, arXiv
    2305.18290, equation 7.
    """
    x = beta * pairs.delta
    return (1 - smoothing) * minus_log_sigmoid(x) + smoothing * minus_log_sigmoid(-x)
