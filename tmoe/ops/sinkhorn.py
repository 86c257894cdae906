"""sinkhorn: the potentials that give every expert the same load, by a fixed number of iterations."""

from torch import Tensor

from tmoe.ops import reference


def sinkhorn(logits_TE: Tensor, live_T: Tensor | None, iterations: int) -> tuple[Tensor, Tensor]:
    return reference.sinkhorn(logits_TE, live_T, iterations)
