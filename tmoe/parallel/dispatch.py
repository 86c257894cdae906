"""Takes tokens to the ranks that hold their experts and brings the sums back; one interface for every backend.

`dispatch` sends a token at most once to each rank, with its K (local expert id or -1, weight) pairs, so a rank receives
at most T rows from each peer however skewed the routing is, and nothing is dropped. `combine` needs the plan and
nothing else: no state crosses the pair.

next: experts.py
"""

from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from tmoe.parallel import collectives
from tmoe.router import Routing


class Rows(NamedTuple):
    """The R tokens that this rank's experts work on."""

    x_RD: Tensor
    weights_RK: Tensor  # fp32
    ids_RK: Tensor  # int32, local to this rank, -1: another rank's


class Plan(NamedTuple):
    """How the rows came; frozen, and all that combine needs."""

    ids_RK: Tensor
    order_S: Tensor
    splits_2P: Tensor
    tokens: int


class Dispatcher(Protocol):
    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[Rows, Plan | None]: ...
    def combine(self, y_RD: Tensor, plan: Plan | None) -> Tensor: ...


class LocalDispatcher:
    """ep=1: every expert is here."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[Rows, None]:
        return Rows(x_TD, routing.weights_TK, routing.ids_TK), None

    def combine(self, y_RD: Tensor, plan: Plan | None) -> Tensor:
        return y_RD


class AllToAllDispatcher:
    """`torch.distributed` all-to-all with split sizes (gloo, NCCL, RCCL): the portable reference. One host sync a layer."""

    def __init__(self, group: dist.ProcessGroup, local_experts: int):
        self.group = group.group_name
        self.local_experts = local_experts

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[Rows, Plan]:
        ids_RK, order_S, splits_2P = collectives.plan(routing.ids_TK, self.local_experts, self.group)
        x_RD, weights_RK = (
            collectives.push(t, ids_RK, order_S, splits_2P, self.group) for t in (x_TD, routing.weights_TK)
        )
        return Rows(x_RD, weights_RK, ids_RK), Plan(ids_RK, order_S, splits_2P, x_TD.shape[0])

    def combine(self, y_RD: Tensor, plan: Plan | None) -> Tensor:
        assert plan is not None
        return collectives.pull(y_RD, *plan, self.group)
