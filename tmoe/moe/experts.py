"""The experts' weights, and the one fused op that applies them to routed rows.

next: ops/__init__.py
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tmoe.config.model import MoEConfig
from tmoe.moe.dispatch import Rows
from tmoe.ops import moe_mlp
from tmoe.parallel.mesh import local_part


class LocalExperts(NamedTuple):
    """This rank's gathered weights: y = down(activation(gate x, up x)), a row's experts added up by weight."""

    gate_up: Tensor  # [L, 2F, D], gate rows first
    down: Tensor  # [L, D, F]
    gate_up_bias: Tensor | None = None  # [L, 2F]
    down_bias: Tensor | None = None  # [L, D]
    activation: str = "swiglu"

    def to(self, dtype: torch.dtype) -> "LocalExperts":
        """The same in another type; gradients go to the weights as they were."""
        biases = [t if t is None else t.to(dtype) for t in (self.gate_up_bias, self.down_bias)]
        return LocalExperts(self.gate_up.to(dtype), self.down.to(dtype), *biases, activation=self.activation)

    def __call__(self, rows: Rows) -> Tensor:
        y_RD = moe_mlp(
            rows.x_RD,
            self.gate_up,
            self.down,
            rows.weights_RK,
            rows.ids_RK,
            self.gate_up_bias,
            self.activation,
            rows.pairs,
        )
        if self.down_bias is None:
            return y_RD
        weights_RE = rows.weights_RK.new_zeros(y_RD.shape[0], self.down_bias.shape[0] + 1)  # the first: id -1
        weights_RE = weights_RE.scatter_add(1, rows.ids_RK.long() + 1, rows.weights_RK)[:, 1:]
        return y_RD + weights_RE.to(y_RD.dtype) @ self.down_bias


class Experts(nn.Module):
    """gate_up [E, 2F, D] and down [E, D, F]; DTensors sharded on ep, then on dp, once parallelized.

    cfg.bias: gate_up_bias [E, 2F] and down_bias [E, D] as well, else both are None.

    Calling it opens a scope: `experts(fn, *args)` runs fn(*args, local) with this rank's experts gathered. FSDP2 hangs
    its all-gather and reduce-scatter on that call, which stands outside the compiled graph that fn is: inside a graph
    those hooks fail on torch 2.11 and 2.13 alike.
    """

    def __init__(self, dim: int, cfg: MoEConfig):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(cfg.experts, 2 * cfg.ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(cfg.experts, dim, cfg.ffn_dim))
        self.gate_up_bias = nn.Parameter(torch.empty(cfg.experts, 2 * cfg.ffn_dim)) if cfg.bias else None
        self.down_bias = nn.Parameter(torch.empty(cfg.experts, dim)) if cfg.bias else None
        self.activation = cfg.activation

    def forward(self, fn: Callable, *args):
        weights = local_part(self.gate_up), local_part(self.down)
        biases = [None if bias is None else local_part(bias) for bias in (self.gate_up_bias, self.down_bias)]
        return fn(*args, LocalExperts(*weights, biases[0], biases[1], self.activation))
