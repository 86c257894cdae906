"""Experts whose matrices are quantised, for inference: the scope and the local experts of moe/experts.py.

next: model/quantised.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tmoe.base.quantised import stored
from tmoe.moe.exchange.dispatch import Rows
from tmoe.moe.exchange.sorted_rows import Sorted, over_sorted_rows
from tmoe.moe.experts import Experts
from tmoe.ops import gather_rows
from tmoe.ops.quantised.gpu import Matrix
from tmoe.ops.quantised.op import quantised_moe_mlp


def hold(module: nn.Module, name: str, kind: str, weight: Tensor) -> None:
    """Registers empty buffers for a quantised weight of this shape and device: NAME_codes and so on."""
    for part, size, dtype in stored(kind, tuple(weight.shape)):
        module.register_buffer(f"{name}_{part}", torch.empty(size, dtype=dtype, device=weight.device))


def held(module: nn.Module, name: str, kind: str, shape: tuple[int, ...]) -> Matrix:
    """The weight in the buffers of `hold`."""
    parts = (getattr(module, f"{name}_{part}") for part, _, _ in stored(kind, shape))
    return Matrix(kind, shape, tuple(parts))


class Local(Protocol):
    """Local experts whose op leaves out the bias of down."""

    @property
    def held(self) -> int: ...
    @property
    def weigh(self) -> str: ...
    @property
    def down_bias(self) -> Tensor | None: ...
    def mlp(self, x: Tensor, weights: Tensor, ids: Tensor, pairs: int | None = None) -> Tensor: ...


def results(experts: Local, rows: Rows) -> Tensor:
    """y [R, D] of the op for these rows, with the bias of down."""
    if experts.weigh != "activation":
        run = lambda x_ND, pairs: _unweighted(experts, x_ND, pairs, rows.ids_RK)  # noqa: E731
        return over_sorted_rows(rows, experts.held, run, experts.weigh)
    y_RD = experts.mlp(rows.x_RD, rows.weights_RK, rows.ids_RK, rows.pairs)
    if experts.down_bias is None:
        return y_RD
    # each row's weight for each expert; column 0 collects the weights with id -1
    weights_RE = rows.weights_RK.new_zeros(y_RD.shape[0], experts.held + 1)
    weights_RE = weights_RE.scatter_add(1, rows.ids_RK.long() + 1, rows.weights_RK)[:, 1:]
    return y_RD + weights_RE.to(y_RD.dtype) @ experts.down_bias


def _unweighted(experts: Local, x_ND: Tensor, pairs: Sorted, ids_RK: Tensor) -> Tensor:
    """The results for sorted rows, each with weight 1."""
    slots_N = pairs.slots_N.clamp(min=0).long()
    ids_N = torch.where(pairs.slots_N < 0, -1, ids_RK.flatten()[slots_N])
    ones_N1 = torch.ones_like(ids_N, dtype=torch.promote_types(x_ND.dtype, torch.float32))[:, None]
    y_ND = experts.mlp(x_ND, ones_N1, ids_N[:, None])
    return y_ND if experts.down_bias is None else y_ND + gather_rows(experts.down_bias, ids_N)


class QuantisedLocal(NamedTuple):
    """All experts with quantised matrices. Called on Rows, they return y [R, D] as LocalExperts do."""

    gate_up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    weigh: str

    @property
    def held(self) -> int:
        """L, the number of experts of this rank."""
        return self.gate_up.shape[0]

    def to(self, dtype: torch.dtype) -> QuantisedLocal:
        """The same experts for rows of another dtype."""
        up, down = (t if t is None else t.to(dtype) for t in (self.gate_up_bias, self.down_bias))
        return self._replace(gate_up_bias=up, down_bias=down)

    def mlp(self, x: Tensor, weights: Tensor, ids: Tensor, pairs: int | None = None) -> Tensor:
        """The op for these experts, without the bias of down."""
        how = self.gate_up_bias, self.activation, pairs
        return quantised_moe_mlp(x, self.gate_up, self.down, weights, ids, *how)

    def __call__(self, rows: Rows) -> Tensor:
        return results(self, rows)


class QuantisedExperts(Experts):
    """The scope of quantised experts, in place of an Experts, on one device.

    Its buffers are gate_up_codes, gate_up_scales, down_codes and so on. Biases stay parameters.
    """

    def __init__(self, experts: Experts, kind: str):
        """experts: whose shapes, biases and activation these have; their matrices may be on meta."""
        nn.Module.__init__(self)  # not the constructor of Experts, which creates weights
        self.kind = kind
        self.dtype = experts.gate_up.dtype
        self.shapes = tuple(experts.gate_up.shape), tuple(experts.down.shape)
        hold(self, "gate_up", kind, experts.gate_up)
        hold(self, "down", kind, experts.down)
        self.gate_up_bias = experts.gate_up_bias
        self.down_bias = experts.down_bias
        self.activation = experts.activation
        self.weigh = experts.weigh
        self.deferred = False

    @property
    def symm_lacks(self) -> str:
        return "quantised experts"

    def forward(self, fn: Callable, *args: Any) -> Any:
        gate_up = held(self, "gate_up", self.kind, self.shapes[0])
        down = held(self, "down", self.kind, self.shapes[1])
        how = self.gate_up_bias, self.down_bias, self.activation, self.weigh
        return fn(*args, QuantisedLocal(gate_up, down, *how))
