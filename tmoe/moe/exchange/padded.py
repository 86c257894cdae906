"""Pads every expert's rows to its capacity, so that all sizes of a layer are known beforehand.

A rank puts its pairs into C slots for each of the E experts, and sends L C slots to each rank of the expert
group, filled or not: an all-to-all of equal parts. Therefore the host waits for nothing, and a CUDA graph can
hold the layer. In contrast, the all-to-all of dispatch.py sends only the routed rows, and waits for their
counts. Empty slots are sent as zeros. They have the id -1, so no product is spent on them.

    to_slots     [T, D] -> [E C, D]    a copy for each pair that is not dropped     backward: from_slots
    from_slots   [E C, D] -> [T, D]    each token's rows, added up in fp32          backward: to_slots
    exchange     part p of the rows is sent to rank p                               backward: exchange

next: parallel/collectives.py
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from tmoe.moe.exchange.dispatch import Dispatcher, Rows, pairs_bound
from tmoe.moe.select.capacity import places
from tmoe.ops.argument_checks import require
from tmoe.ops.register import on_any_device
from tmoe.parallel import collectives
from tmoe.parallel.collectives import group_of


class PaddedRouting(NamedTuple):
    """A Routing whose experts have `capacity` slots each, and at most that number of pairs."""

    weights_TK: Tensor
    ids_TK: Tensor
    capacity: int


class ExpertSlots(NamedTuple):
    """The slot of each pair among this rank's E C slots; E C if it was dropped. All that combine needs."""

    slots_TK: Tensor
    count: int


class PaddedDispatcher(Dispatcher):
    """Static shapes: E times C slots per rank. All ranks of the group have the same C.

    group: None: every expert is on this rank.
    """

    def __init__(self, experts: int, group: dist.ProcessGroup | None = None):
        self.experts = experts
        self.group = None if group is None else collectives.name_of(group)
        self.ranks = 1 if group is None else group.size()

    def dispatch(self, x_TD: Tensor, routing: Any) -> tuple[Rows, ExpertSlots]:
        """routing: a PaddedRouting."""
        weights_TK, ids_TK, C = routing
        (T, K), E, P, L = ids_TK.shape, self.experts, self.ranks, self.experts // self.ranks

        everything = E * C  # also the slot number of dropped pairs; that slot is cut off
        places_TK = places(ids_TK, torch.arange(T * K, device=ids_TK.device), E)
        slots_TK = torch.where(ids_TK >= 0, ids_TK * C + places_TK, everything)
        rows_SD = to_slots(x_TD, slots_TK, everything)
        weights_S = weights_TK.new_zeros(everything + 1).scatter(0, slots_TK.flatten(), weights_TK.flatten())
        filled_E = places_TK.new_zeros(E + 1).scatter_add(
            0, (ids_TK + 1).long().flatten(), torch.ones_like(places_TK).flatten()
        )[1:]

        # the number of filled slots is sent as the last column of the weights
        weights_EC = rearrange(weights_S[:-1], "(e c) -> e c", e=E)
        marks = torch.cat([weights_EC, filled_E[:, None].to(weights_TK.dtype)], 1)
        if self.group is not None:
            rows_SD = exchange(rows_SD, self.group)
            marks = exchange(marks, self.group)
        filled_PL1 = rearrange(marks[:, C:].detach(), "(p l) 1 -> p l 1", p=P)
        local_L1 = torch.arange(L, dtype=torch.int32, device=ids_TK.device)[:, None]
        ids_PLC = torch.where(torch.arange(C, device=ids_TK.device) < filled_PL1, local_L1, -1)

        pairs = T * K if P == 1 else pairs_bound(T, K, P, L)
        weights_R1 = rearrange(marks[:, :C], "e c -> (e c) 1")
        ids_R1 = rearrange(ids_PLC, "p l c -> (p l c) 1")
        return Rows(rows_SD, weights_R1, ids_R1, pairs or None), ExpertSlots(slots_TK, everything)

    def combine(self, y_RD: Tensor, plan: Any) -> Tensor:
        if self.group is not None:
            y_RD = exchange(y_RD, self.group)
        return from_slots(y_RD, plan.slots_TK)


def _to_setup(ctx, inputs, output):
    _, slots_TK, _ = inputs
    ctx.save_for_backward(slots_TK)


def _to_grads(ctx, grad):
    return from_slots(grad, *ctx.saved_tensors), None, None


def _fake_to_slots(x_TD, slots_TK, count):
    return x_TD.new_empty(count, *x_TD.shape[1:])


@on_any_device("to_slots", fake=_fake_to_slots, save=_to_setup, differentiate=_to_grads)
def to_slots(x_TD: Tensor, slots_TK: Tensor, count: int) -> Tensor:
    """Rows [count, D]: x[t] in the slots of token t, zeros elsewhere. The slot `count` is cut off."""
    rows = x_TD.new_zeros(count + 1, *x_TD.shape[1:])
    for slots_T in slots_TK.unbind(1):
        rows.index_copy_(0, slots_T, x_TD)
    return rows[:count]


def _from_setup(ctx, inputs, output):
    rows_SD, slots_TK = inputs
    ctx.count = rows_SD.shape[0]
    ctx.save_for_backward(slots_TK)


def _from_grads(ctx, grad):
    return to_slots(grad, *ctx.saved_tensors, ctx.count), None


def _fake_from_slots(rows_SD, slots_TK):
    return rows_SD.new_empty(slots_TK.shape[0], *rows_SD.shape[1:])


@on_any_device("from_slots", fake=_fake_from_slots, save=_from_setup, differentiate=_from_grads)
def from_slots(rows_SD: Tensor, slots_TK: Tensor) -> Tensor:
    """y[t], the sum of the rows in token t's slots, in fp32 (fp64 for fp64) and in the order of choices."""
    dtype = torch.promote_types(rows_SD.dtype, torch.float32)
    y_TD = rows_SD.new_zeros(slots_TK.shape[0], *rows_SD.shape[1:], dtype=dtype)
    if rows_SD.shape[0]:
        for slots_T in slots_TK.unbind(1):
            here_T1 = (slots_T < rows_SD.shape[0])[:, None]
            found_TD = rows_SD.index_select(0, slots_T.clamp(max=rows_SD.shape[0] - 1))
            y_TD += found_TD.masked_fill(~here_T1, 0)
    return y_TD.to(rows_SD.dtype)


def require_alike(rows: int, group: str) -> None:
    """Raises ValueError on every rank of the group unless all have this number of rows. A collective."""
    edges = torch.tensor([rows, -rows])
    dist.all_reduce(edges, dist.ReduceOp.MAX, group_of(group))
    most, least = edges[0].item(), -edges[1].item()
    valid = "the same number of tokens on all ranks of an expert group, with --model.moe.pad"
    require(most == least, "slots", f"{rows} on this rank, {least} to {most} in the group", valid)


def _exchange_setup(ctx, inputs, output):
    ctx.group = inputs[1]


def _exchange_grads(ctx, grad):
    return exchange(grad, ctx.group), None


def _fake_exchange(rows, group):
    return rows.new_empty(rows.shape)


@on_any_device("exchange_slots", fake=_fake_exchange, save=_exchange_setup, differentiate=_exchange_grads)
def exchange(rows: Tensor, group: str) -> Tensor:
    """Splits the rows into equal parts, one for each rank of the group, and sends part p to rank p.

    On a CPU it raises ValueError if ranks have different numbers of rows. On a GPU this is not checked,
    because the check would wait for the device.
    """
    if not rows.is_cuda:
        require_alike(rows.shape[0], group)
    out = rows.new_empty(rows.shape)
    dist.all_to_all_single(out, rows.contiguous(), group=group_of(group))
    return out
