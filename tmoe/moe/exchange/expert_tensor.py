"""Expert tensor parallelism: the ranks of a group divide the width of each expert that they share.

The group's ranks gather each other's routed rows, multiply by their slice of F, and add the results up: gate
and up give the same slice of F, of which down takes the columns. Storage does not know it: a slice's gradient
is zero elsewhere, and the sum over the ranks that share experts completes it. It saves activations of [R, F],
and costs n times the rows; more ep is nearly always faster.

next: parallel/collectives.py
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.moe.exchange.dispatch import Dispatcher, Plan, Rows
from tmoe.moe.router import Routing
from tmoe.parallel import collectives


class Gathered(NamedTuple):
    """How rows came, to this rank and from it to its group: all that combine needs."""

    inner: Plan | None
    ids_RK: Tensor
    counts_P: Tensor


class ExpertTensorDispatcher(Dispatcher):
    """Another dispatcher, whose rows are gathered over the ranks of a group, which divide experts."""

    def __init__(self, inner: Dispatcher, group: dist.ProcessGroup):
        self.inner = inner
        self.ranks = group.size()
        self.group = collectives.name_of(group)
        self.slice = Slice(group.rank(), group.size())

    def __call__(self, x_TD: Tensor, routing: Routing, experts: Any) -> Tensor:
        return super().__call__(x_TD, routing, experts.part(self.slice))

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[Rows, Gathered]:
        rows, plan = self.inner.dispatch(x_TD, routing)
        ids_MK, counts_P = collectives.gather_uneven_ids(rows.ids_RK, self.group)
        how = (ids_MK, counts_P, self.group)
        x_MD = collectives.gather_uneven(rows.x_RD, *how)
        weights_MK = collectives.gather_uneven(rows.weights_RK, *how)
        pairs = None if rows.pairs is None else rows.pairs * self.ranks
        return Rows(x_MD, weights_MK, ids_MK, pairs), Gathered(plan, rows.ids_RK, counts_P)

    def combine(self, y_MD: Tensor, plan: Gathered) -> Tensor:
        y_RD = collectives.add_up_uneven(y_MD, plan.ids_RK, plan.counts_P, self.group)
        return self.inner.combine(y_RD, plan.inner)


class Slice(NamedTuple):
    """Which part of each expert's width is this rank's."""

    index: int
    count: int

    def of_rows(self, gate_up: Tensor, halves: int) -> Tensor:
        """[L, 2F, ...], gate rows first, to [L, 2F/n, ...]; without a gate (halves: 1) F for 2F."""
        parts = [half.chunk(self.count, 1)[self.index] for half in gate_up.chunk(halves, 1)]
        return torch.cat(parts, 1)

    def of_columns(self, down: Tensor) -> Tensor:
        """[L, D, F] to [L, D, F/n]."""
        return down.chunk(self.count, 2)[self.index].contiguous()

    def once(self, bias: Tensor) -> Tensor:
        """What one rank alone adds. On the others zeros that have a gradient: FSDP2 waits for one.

        A product on all ranks: hooks of parameters send gradients, and must fire in one order.
        """
        return bias * (1.0 if self.index == 0 else 0.0)
