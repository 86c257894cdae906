"""A Mixture-of-Experts layer: route, dispatch, experts, combine."""

from tmoe.moe.layer import MoE, balancing_loss

__all__ = ["MoE", "balancing_loss"]
