"""A Mixture-of-Experts layer: route, dispatch, experts, combine."""

from typing import TYPE_CHECKING

from tmoe.base.lazy import lazy

if TYPE_CHECKING:
    from tmoe.moe.layer import MoE, balancing_loss

__all__ = [
    "MoE",
    "balancing_loss",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "MoE": "tmoe.moe.layer",
        "balancing_loss": "tmoe.moe.layer",
    },
)
