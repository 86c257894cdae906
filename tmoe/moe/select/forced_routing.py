"""Routing that does not follow the logits, for benchmarks: evenly loaded experts, or a chosen imbalance.

Artificial logits replace the router's, for every selection. Their gradient is copied to the router's logits
unchanged (straight-through), so a step does all the work of a real step.

next: moe/select/selection.py
"""

import torch
from torch import Tensor

from tmoe.config.model import MoEConfig


def forced(cfg: MoEConfig, logits_TE: Tensor, padding_T: Tensor | None, K: int) -> Tensor:
    """The artificial logits: their values are made here, their gradient is the router's."""
    with torch.no_grad():
        made_TE = even(logits_TE, padding_T, K) if cfg.force == "even" else skewed(logits_TE, cfg.force_skew)
    return logits_TE + (made_TE - logits_TE).detach()


def even(logits_TE: Tensor, padding_T: Tensor | None, K: int) -> Tensor:
    """Logits whose K largest assign the experts in turn: counts differ by at most one, also without padding.

    The experts are assigned in a mixed order, so that a token's experts are on as many ranks as in a real
    routing.
    """
    T, E = logits_TE.shape
    place_T = torch.arange(T, device=logits_TE.device)
    if padding_T is not None:
        place_T = (~padding_T).cumsum(0) - 1
    slot_E = mixed(E, logits_TE.device)
    behind_TE = (slot_E - place_T[:, None] * K) % E  # 0 for the token's first expert
    return -behind_TE.to(logits_TE.dtype) / E


def skewed(logits_TE: Tensor, deviation: float) -> Tensor:
    """Normal logits, plus a number for each expert that is normal with this standard deviation.

    These numbers are the same for all tokens, ranks, layers and steps.
    """
    E = logits_TE.shape[1]
    middle_E = (mixed(E, logits_TE.device).double() + 0.5) / E
    bias_E = torch.special.ndtri(middle_E) * deviation
    return torch.randn_like(logits_TE) + bias_E.to(logits_TE.dtype)


def mixed(E: int, device: torch.device) -> Tensor:
    """The numbers 0 to E-1 in a fixed order without pattern."""
    # Multiplicative hashing (Knuth) in 15 bits: inductor computes in int32, and the product must fit into it.
    number_E = torch.arange(E, device=device)
    hashed_E = (number_E + 1) * 20173 % 2**15
    hashed_E = (hashed_E ^ (hashed_E >> 7)) * 26597 % 2**15
    return hashed_E.argsort(stable=True)
