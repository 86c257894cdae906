"""Frozen experts in NF4 with low-rank adapters, for training: the scope and the local experts.

next: model/nf4.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.moe.exchange.dispatch import Rows
from tmoe.moe.experts import Experts
from tmoe.moe.quantised_experts import QuantisedExperts, held, results
from tmoe.ops.experts.adapted import Adapters
from tmoe.ops.quantised.adapted import Nf4Weights, moe_mlp_nf4
from tmoe.ops.quantised.gpu import Matrix
from tmoe.parallel.mesh import local_part


class Nf4Local(NamedTuple):
    """All experts, with matrices in NF4. Called on Rows, they return y [R, D] as LocalExperts do."""

    gate_up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    weigh: str
    adapters: Adapters | None
    scales: tuple[float, float]

    @property
    def held(self) -> int:
        """L, the number of experts of this rank."""
        return self.gate_up.shape[0]

    def to(self, dtype: torch.dtype) -> Nf4Local:
        """The same experts for rows of another dtype."""
        up, down = (t if t is None else t.to(dtype) for t in (self.gate_up_bias, self.down_bias))
        adapters = self.adapters
        if adapters is not None:
            adapters = Adapters(*(t if t is None else t.to(dtype) for t in adapters))
        return self._replace(gate_up_bias=up, down_bias=down, adapters=adapters)

    def mlp(self, x: Tensor, weights: Tensor, ids: Tensor, pairs: int | None = None) -> Tensor:
        """The op for these experts, without the bias of down."""
        experts = Nf4Weights(self.gate_up, self.down, self.gate_up_bias, self.activation)
        return moe_mlp_nf4(x, experts, self.adapters, weights, ids, pairs, self.scales)

    def __call__(self, rows: Rows) -> Tensor:
        return results(self, rows)


class Nf4Experts(QuantisedExperts):
    """The scope of frozen experts in NF4, in place of an Experts, whose adapters and biases it takes over."""

    def __init__(self, experts: Experts):
        super().__init__(experts, "nf4")
        for matrix in experts.scales:
            for part in "ab":
                name = f"{matrix}_{part}"
                setattr(self, name, getattr(experts, name))
        self.scales = experts.scales
        self.adapters_on = experts.adapters_on

    def forward(self, fn: Callable, *args: Any) -> Any:
        gate_up, down = (
            held(self, n, "nf4", s) for n, s in zip(("gate_up", "down"), self.shapes, strict=True)
        )
        up_bias, down_bias = (t if t is None else local_part(t) for t in (self.gate_up_bias, self.down_bias))
        how = self.activation, self.weigh, *self.local_adapters()
        return fn(*args, Nf4Local(gate_up, down, up_bias, down_bias, *how))
