"""The experts' weights, and the one fused op that applies them to routed rows.

next: ops/__init__.py
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tmoe.config import MoEConfig
from tmoe.ops import moe_mlp
from tmoe.parallel.dispatch import Rows
from tmoe.parallel.mesh import local_part


class LocalExperts(NamedTuple):
    """This rank's gathered weights: y = down(silu(gate x) * up x), a row's experts added up by weight."""

    gate_up: Tensor  # [L, 2F, D], gate rows first
    down: Tensor  # [L, D, F]

    def __call__(self, rows: Rows) -> Tensor:
        return moe_mlp(rows.x_RD, self.gate_up, self.down, rows.weights_RK, rows.ids_RK)


class Experts(nn.Module):
    """gate_up [E, 2F, D] and down [E, D, F]; DTensors sharded on ep, then on dp, once parallelized.

    Calling it opens a scope: `experts(fn, *args)` runs fn(*args, local) with this rank's experts gathered. FSDP2 hangs
    its all-gather and reduce-scatter on that call, which stands outside the compiled graph that fn is: inside a graph
    those hooks fail on torch 2.11 and 2.13 alike.
    """

    def __init__(self, dim: int, cfg: MoEConfig):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(cfg.experts, 2 * cfg.ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(cfg.experts, dim, cfg.ffn_dim))

    def forward(self, fn: Callable, *args):
        return fn(*args, LocalExperts(local_part(self.gate_up), local_part(self.down)))
