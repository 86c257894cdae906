"""The experts' activations, in one table: formula, gradient, constants and transformers' names.

Settings, ops and Hugging Face's families read ACTIVATIONS. A new activation needs one entry, and its formula
and gradient for kernels, by its name, in `activate` and `activate_backward` (ops/experts/kernels.py).

An activation is named by text: an entry's name, or for other constants than the entry's own
`clamped:alpha=1.5,limit=5`. `activation` reads this text.

next: ops/reference.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Activation(NamedTuple):
    """An activation of the result of an expert's first product: its halves gate and up, or all of it."""

    formula: Callable[..., Tensor]
    """(gate, up, **constants) -> act, or without a gate (up) -> act, in plain differentiable PyTorch"""
    gradient: Callable[..., None]
    """(gate, up, d_act, d_gate, d_up, **constants), or without a gate (up, d_act, d_up): writes the arguments
    after d_act; d_act may be overwritten"""
    hidden_act: str
    """its name in the config.json of Hugging Face's models"""
    constants: dict[str, float] = {}  # noqa: RUF012
    """constants by their names in transformers' experts modules"""
    gated: bool = True
    """whether there is a gate: the first matrix has 2F rows, first the gate's, then up's; else it has F"""

    @property
    def keys(self) -> dict[str, float]:
        """The constants by their names in config.json."""
        return {f"swiglu_{name}": value for name, value in self.constants.items()}

    @property
    def halves(self) -> int:
        """Number of columns of the first product for each of the F columns of the activation."""
        return 2 if self.gated else 1

    def of(self, h: Tensor) -> Tensor:
        """act [..., F] of the first product h [..., 2F], or without a gate [..., F]."""
        return self.formula(*h.chunk(self.halves, dim=-1))

    def gradient_of(self, h: Tensor, d_act: Tensor, dh: Tensor) -> None:
        """Writes dh [..., 2F], without a gate [..., F]; d_act may be overwritten."""
        self.gradient(*h.chunk(self.halves, -1), d_act, *dh.chunk(self.halves, -1))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv 2002.05202)."""
    return F.silu(gate) * up


def swiglu_gradient(gate: Tensor, up: Tensor, d_act: Tensor, d_gate: Tensor, d_up: Tensor) -> None:
    torch.mul(d_act, F.silu(gate), out=d_up)
    d_gate.copy_(torch.ops.aten.silu_backward(d_act.mul_(up), gate))


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, with GELU's tanh form (Gemma's)."""
    return F.gelu(gate, approximate="tanh") * up


def geglu_gradient(gate: Tensor, up: Tensor, d_act: Tensor, d_gate: Tensor, d_up: Tensor) -> None:
    torch.mul(d_act, F.gelu(gate, approximate="tanh"), out=d_up)
    d_gate.copy_(torch.ops.aten.gelu_backward(d_act.mul_(up), gate, approximate="tanh"))


def clamped(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """(u + 1) * g * sigmoid(alpha * g), with g = min(gate, limit) and u = up within +-limit.

    The activation of gpt-oss (OpenAI 2025).
    """
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def clamped_gradient(
    gate: Tensor, up: Tensor, d_act: Tensor, d_gate: Tensor, d_up: Tensor, alpha: float, limit: float
) -> None:
    g = gate.clamp(max=limit)
    u = up.clamp(-limit, limit)
    sig = torch.sigmoid(alpha * g)
    glu = g * sig
    torch.mul(d_act, glu, out=d_up).masked_fill_(up.abs() > limit, 0)
    d_gate.copy_(d_act.mul_((u + 1) * (sig + alpha * glu * (1 - sig)))).masked_fill_(gate > limit, 0)


def clamped_silu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * u, with u = up within +-limit: DeepSeek-V4's."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def clamped_silu_gradient(
    gate: Tensor, up: Tensor, d_act: Tensor, d_gate: Tensor, d_up: Tensor, limit: float
) -> None:
    g = gate.clamp(max=limit)
    torch.mul(d_act, F.silu(g), out=d_up).masked_fill_(up.abs() > limit, 0)
    d_gate.copy_(torch.ops.aten.silu_backward(d_act.mul_(up.clamp(-limit, limit)), g))
    d_gate.masked_fill_(gate > limit, 0)


def relu2(up: Tensor) -> Tensor:
    """relu(up)^2 (So et al. 2021, arXiv 2109.08668): Nemotron's."""
    return F.relu(up).square()


def relu2_gradient(up: Tensor, d_act: Tensor, d_up: Tensor) -> None:
    torch.mul(d_act, F.relu(up).mul_(2), out=d_up)


def relu_gradient(up: Tensor, d_act: Tensor, d_up: Tensor) -> None:
    torch.mul(d_act, up > 0, out=d_up)


def gelu_gradient(up: Tensor, d_act: Tensor, d_up: Tensor) -> None:
    d_up.copy_(torch.ops.aten.gelu_backward(d_act, up))


GPT_OSS = dict(alpha=1.702, limit=7.0)

_TABLE = {
    "swiglu": Activation(swiglu, swiglu_gradient, "silu"),
    "clamped": Activation(clamped, clamped_gradient, "silu", constants=GPT_OSS),
    "clamped_silu": Activation(clamped_silu, clamped_silu_gradient, "silu", constants=dict(limit=10.0)),
    "geglu": Activation(geglu, geglu_gradient, "gelu_pytorch_tanh"),
    "relu2": Activation(relu2, relu2_gradient, "relu2", gated=False),
    "relu": Activation(F.relu, relu_gradient, "relu", gated=False),
    "gelu": Activation(F.gelu, gelu_gradient, "gelu", gated=False),
}


def _given(entry: Activation, constants: dict[str, float]) -> Activation:
    """The entry with these constants bound to its formula and gradient."""
    if not constants:
        return entry
    formula, gradient = partial(entry.formula, **constants), partial(entry.gradient, **constants)
    return entry._replace(formula=formula, gradient=gradient, constants=constants)


ACTIVATIONS = {name: _given(entry, entry.constants) for name, entry in _TABLE.items()}
UNGATED = tuple(name for name, entry in ACTIVATIONS.items() if not entry.gated)


def _constants(text: str) -> tuple[str, dict[str, float]]:
    """The entry's name and all its constants. ValueError, which says what is wrong, for an invalid text."""
    name, colon, given = text.partition(":")
    if name not in ACTIVATIONS:
        raise ValueError(f"must be one of {', '.join(ACTIVATIONS)}")
    constants = dict(ACTIVATIONS[name].constants)
    for pair in given.split(",") if colon else ():
        key, _, value = pair.partition("=")
        valid = " and ".join(constants) or "none"
        if key not in constants:
            raise ValueError(f"{key!r} is no constant of {name}; it has {valid}")
        try:
            constants[key] = float(value)
        except ValueError:
            constants[key] = math.nan
        if not 0 < constants[key] < 2.0**127:
            raise ValueError(f"{pair!r} must be {key}= and a positive, finite number")
    return name, constants


def full(text: str) -> str:
    """The activation with all its constants, as kernels need it: "clamped:alpha=1.702,limit=7.0"."""
    name, constants = _constants(text)
    return _spelled(name, constants)


def canonical(text: str) -> str:
    """The activation in one spelling: without constants that equal the entry's own."""
    name, constants = _constants(text)
    defaults = ACTIVATIONS[name].constants
    return _spelled(name, {key: value for key, value in constants.items() if value != defaults[key]})


def _spelled(name: str, constants: dict[str, float]) -> str:
    return f"{name}:" * bool(constants) + ",".join(f"{k}={v!r}" for k, v in constants.items()) or name


@cache
def activation(text: str) -> Activation:
    """The entry of this name, with the constants that the text gives. ValueError for an invalid text."""
    name, constants = _constants(text)
    return _given(_TABLE[name], constants)
