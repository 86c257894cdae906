"""Expert tensor parallelism: the ranks of a group divide the width of each expert that they share.

The group's ranks gather each other's routed rows, multiply by their slice of F, and add the results up. Gate
and up use the same slice of F, and down uses the columns of that slice. The storage of the weights does not
change: a slice's gradient is zero elsewhere, and the sum over the ranks that share experts completes it. It
saves activations of [R, F], and sends n times the rows; more ep is nearly always faster.

next: parallel/collectives.py
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.moe.exchange.dispatch import Dispatcher, DispatchPlan, Rows
from tmoe.moe.router import Routing
from tmoe.parallel import collectives


class Gathered(NamedTuple):
    """How rows were sent to this rank and from it to its group: the only input of combine besides y."""

    inner: DispatchPlan | None
    ids_RK: Tensor
    counts_P: Tensor


class ExpertTensorDispatcher(Dispatcher):
    """A dispatcher that gathers the rows of another dispatcher over a group of ranks that divide experts."""

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
    """The part of each expert's width that belongs to this rank."""

    index: int
    count: int

    def of_rows(self, gate_up: Tensor, halves: int) -> Tensor:
        """[L, 2F, ...], gate rows first, to [L, 2F/n, ...]; without a gate (halves: 1) F instead of 2F."""
        parts = [half.chunk(self.count, 1)[self.index] for half in gate_up.chunk(halves, 1)]
        return torch.cat(parts, 1)

    def of_columns(self, down: Tensor) -> Tensor:
        """[L, D, F] to [L, D, F/n]."""
        return down.chunk(self.count, 2)[self.index].contiguous()

    def once(self, bias: Tensor) -> Tensor:
        """The bias on the one rank that adds it. On other ranks zeros with a gradient: FSDP2 waits for one.

        All ranks multiply, so that all have the same graph: hooks of parameters send gradients, and must fire
        in the same order.
        """
        return bias * (1.0 if self.index == 0 else 0.0)
