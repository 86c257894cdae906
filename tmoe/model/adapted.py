"""A frozen dense layer with a low-rank adapter: y = W x + scale * B (A x), never merged.

next: model/lora.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tmoe.ops import grouped_mm
from tmoe.ops.decode.low_rank import add_low_rank, fits


class Adapted(nn.Linear):
    """nn.Linear whose weight is frozen, and which adds scale * b (a x); a [r, in], b [out, r].

    `SwiGLU.plain` is False with it, because its class is not nn.Linear. `inner` and `outer` are the two
    products of the adapter, for code that multiplies by parts of the weight (model/attention_parallel.py).
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float, dropout: float = 0.0):
        """Takes the weight and the bias of `linear`. Values of a and b are drawn by `init_weights`."""
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.a = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        self.b = nn.Parameter(torch.empty(linear.out_features, rank, device=device))
        self.scale = scale
        self.dropout = dropout
        self.adapters_on = True
        self.in_order = False  # see keep_order

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x, F.linear(x, self.weight, self.bias))

    def change(self, x: Tensor, y: Tensor) -> Tensor:
        """y + scale * b (a x); y is the frozen layer's result, which may be overwritten without gradients."""
        if not self.adapters_on:
            return y
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        if self.in_order:
            return y + in_order(in_order(x, self.a) * self.scale, self.b)
        flat = y.flatten(0, -2)
        if torch.is_grad_enabled():
            u = F.linear(x, self.a).flatten(0, -2)
            return torch.addmm(flat, u, self.b.T, alpha=self.scale).view(y.shape)
        if not torch.compiler.is_compiling() and fits(x, self.a):
            return add_low_rank(flat, x.flatten(0, -2), self.a, self.b, self.scale).view(y.shape)
        flat.addmm_(F.linear(x, self.a).flatten(0, -2), self.b.T, alpha=self.scale)  # y is not copied
        return flat.view(y.shape)

    def inner(self, x: Tensor, columns: slice | None = None) -> Tensor:
        """scale * a x, [..., r]; in training, a share of x is dropped first.

        columns: the columns of a that x has. The sum over all parts of the columns is the whole product.
        """
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        return F.linear(x, self.a if columns is None else self.a[:, columns]) * self.scale

    def outer(self, u: Tensor, rows: Sequence[slice] = ()) -> Tensor:
        """b u, [..., out]. rows: rows of b, in this order; none: all rows."""
        return F.linear(u, torch.cat([self.b[part] for part in rows]) if rows else self.b)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={len(self.a)}, scale={self.scale:g}"


def in_order(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T, by the experts' kernels, whose order of summation is the same for any number of rows.

    cuBLAS divides a long sum if the result is small, as that of a low-rank factor is for few rows.
    """
    rows = x.flatten(0, -2)
    ends = torch.full((1,), len(rows), dtype=torch.int32, device=x.device)
    return grouped_mm(rows, weight[None], ends).view(*x.shape[:-1], -1)


def keep_order(model: nn.Module, on: bool) -> None:
    """From now on the bits of an adapter's result for a row do not depend on the number of rows."""
    for module in model.modules():
        if isinstance(module, Adapted):
            module.in_order = on


def adapted(linear: nn.Module) -> Adapted | None:
    """The layer, if it has an adapter that is on; else None."""
    return linear if isinstance(linear, Adapted) and linear.adapters_on else None
