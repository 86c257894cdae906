"""The experts' activations, in one table: formula, gradient, constants and what transformers calls them.

Settings, ops and Hugging Face's families read ACTIVATIONS. A new activation is one entry, and its formula and
gradient for kernels, by its name, in `activate` and `activate_backward` (ops/experts/kernels.py).

next: ops/reference.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    """What an expert does with gate and up, the two halves of its first product, of any shape."""

    formula: Callable[[Tensor, Tensor], Tensor]
    """(gate, up) -> act, in plain differentiable PyTorch"""
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    """(gate, up, d_act, d_gate, d_up): writes the last two; d_act is used up"""
    hidden_act: str
    """its name in the config.json of Hugging Face's models"""
    of_gate: Callable[[Tensor], Tensor] | None = None
    """where act is of_gate(gate) * up, as transformers computes it by default; None: a gate of its own"""
    constants: dict[str, float] = {}  # noqa: RUF012
    """the only values computed, by their names in transformers' experts modules"""

    @property
    def keys(self) -> dict[str, float]:
        """The constants by their names in config.json."""
        return {f"swiglu_{name}": value for name, value in self.constants.items()}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv 2002.05202)."""
    return F.silu(gate) * up


def swiglu_gradient(gate: Tensor, up: Tensor, d_act: Tensor, d_gate: Tensor, d_up: Tensor) -> None:
    torch.mul(d_act, F.silu(gate), out=d_up)
    d_gate.copy_(torch.ops.aten.silu_backward(d_act.mul_(up), gate))


# of the clamped SwiGLU
ALPHA = 1.702
LIMIT = 7.0


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """(u + 1) * g * sigmoid(ALPHA * g), with g = min(gate, LIMIT) and u = up within +-LIMIT.

    The activation of gpt-oss (OpenAI 2025).
    """
    gate = gate.clamp(max=LIMIT)
    up = up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


def clamped_gradient(gate: Tensor, up: Tensor, d_act: Tensor, d_gate: Tensor, d_up: Tensor) -> None:
    g = gate.clamp(max=LIMIT)
    u = up.clamp(-LIMIT, LIMIT)
    sig = torch.sigmoid(ALPHA * g)
    glu = g * sig
    torch.mul(d_act, glu, out=d_up).masked_fill_(up.abs() > LIMIT, 0)
    d_gate.copy_(d_act.mul_((u + 1) * (sig + ALPHA * glu * (1 - sig)))).masked_fill_(gate > LIMIT, 0)


ACTIVATIONS = {
    "swiglu": Activation(swiglu, swiglu_gradient, "silu", of_gate=F.silu),
    "clamped": Activation(clamped, clamped_gradient, "silu", constants=dict(alpha=ALPHA, limit=LIMIT)),
}

if TYPE_CHECKING:
    ActivationName = str
else:
    ActivationName = Literal[tuple(ACTIVATIONS)]
