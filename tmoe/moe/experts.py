"""The experts' weights, and the one fused op that applies them to routed rows.

next: ops/__init__.py
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tmoe.config.model import MoEConfig
from tmoe.moe.dispatch import Rows
from tmoe.ops import moe_mlp
from tmoe.parallel.mesh import local_part


class LocalExperts(NamedTuple):
    """This rank's experts, their weights gathered: y = down(activation(gate x, up x)).

    Called on Rows, it returns y [R, D]: for each row, the weighted sum over its experts that are on this
    rank.
    """

    gate_up: Tensor  # [L, 2F, D], gate rows first
    down: Tensor  # [L, D, F]
    gate_up_bias: Tensor | None = None  # [L, 2F]
    down_bias: Tensor | None = None  # [L, D]
    activation: str = "swiglu"

    def to(self, dtype: torch.dtype) -> "LocalExperts":
        """The same experts in another dtype; gradients reach the original weights in their own."""
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
        # each row's weight for each expert; column 0 collects what has the id -1, and is cut off
        weights_RE = rows.weights_RK.new_zeros(y_RD.shape[0], self.down_bias.shape[0] + 1)
        weights_RE = weights_RE.scatter_add(1, rows.ids_RK.long() + 1, rows.weights_RK)[:, 1:]
        return y_RD + weights_RE.to(y_RD.dtype) @ self.down_bias


class Experts(nn.Module):
    """Holds the weights of all experts: gate_up [E, 2F, D] and down [E, D, F].

    With cfg.bias also gate_up_bias [E, 2F] and down_bias [E, D]; without, both are None. Once parallelized,
    the weights are DTensors, sharded on ep, then on dp.

    Calling it opens a scope: `experts(fn, *args)` runs fn(*args, local) with this rank's experts gathered.
    FSDP2 attaches its all-gather and reduce-scatter to that call. The call stands outside the compiled graph,
    which is fn: inside a graph those hooks fail, on torch 2.11 and on 2.13.
    """

    def __init__(self, dim: int, cfg: MoEConfig):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(cfg.experts, 2 * cfg.ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(cfg.experts, dim, cfg.ffn_dim))
        self.gate_up_bias = nn.Parameter(torch.empty(cfg.experts, 2 * cfg.ffn_dim)) if cfg.bias else None
        self.down_bias = nn.Parameter(torch.empty(cfg.experts, dim)) if cfg.bias else None
        self.activation = cfg.activation

    def forward(self, fn: Callable, *args: Any) -> Any:
        gate_up_bias, down_bias = (
            None if bias is None else local_part(bias) for bias in (self.gate_up_bias, self.down_bias)
        )
        local = LocalExperts(
            local_part(self.gate_up), local_part(self.down), gate_up_bias, down_bias, self.activation
        )
        return fn(*args, local)
