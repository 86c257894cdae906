"""Frozen experts in NF4 with low-rank adapters, for training: the scope and the local experts.

next: model/nf4.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.moe.exchange.dispatch import Rows
from tmoe.moe.exchange.sorted_rows import Sorted, over_sorted_rows
from tmoe.moe.experts import Experts
from tmoe.moe.quantised_experts import QuantisedExperts, held
from tmoe.ops import gather_rows
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

    def each(self, x_ND: Tensor, pairs: Sorted, ids_RK: Tensor) -> Tensor:
        """The experts' results for sorted rows, without weights."""
        slots_N = pairs.slots_N.clamp(min=0).long()
        ids_N = torch.where(pairs.slots_N < 0, -1, ids_RK.flatten()[slots_N])
        ones_N1 = torch.ones_like(ids_N, dtype=torch.promote_types(x_ND.dtype, torch.float32))[:, None]
        y_ND = self.mlp(x_ND, ones_N1, ids_N[:, None])
        return y_ND if self.down_bias is None else y_ND + gather_rows(self.down_bias, ids_N)

    def mlp(self, x: Tensor, weights: Tensor, ids: Tensor, pairs: int | None = None) -> Tensor:
        """The op for these experts, without the bias of down."""
        experts = Nf4Weights(self.gate_up, self.down, self.gate_up_bias, self.activation)
        return moe_mlp_nf4(x, experts, self.adapters, weights, ids, pairs, self.scales)

    def __call__(self, rows: Rows) -> Tensor:
        if self.weigh != "activation":
            run = lambda x_ND, pairs: self.each(x_ND, pairs, rows.ids_RK)  # noqa: E731
            return over_sorted_rows(rows, self.held, run, self.weigh)
        y_RD = self.mlp(rows.x_RD, rows.weights_RK, rows.ids_RK, rows.pairs)
        if self.down_bias is None:
            return y_RD
        # each row's weight for each expert; column 0 collects the weights with id -1
        weights_RE = rows.weights_RK.new_zeros(y_RD.shape[0], self.held + 1)
        weights_RE = weights_RE.scatter_add(1, rows.ids_RK.long() + 1, rows.weights_RK)[:, 1:]
        return y_RD + weights_RE.to(y_RD.dtype) @ self.down_bias


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
