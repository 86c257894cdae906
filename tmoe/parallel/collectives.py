"""Moves rows between the ranks of an expert group, forward and backward, as custom ops without graph breaks.

    plan   forward: all-to-all of counts and ids            backward: none (ids have no gradient)
    push   forward: copy rows to their ranks, all-to-all    backward: pull
    pull   forward: all-to-all back, add up a token's rows  backward: push

They are `torch.library.custom_op` and not an autograd.Function: on torch 2.11 a Function with collectives
inside trained silently wrong under one compile backend. The number of rows that arrive is one unbacked size,
made by `plan` alone, so nothing recompiles when the routing changes.

next: moe/exchange/dispatch.py
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.base.private_torch import find

# how functional collectives find a group by name
_resolve_process_group = find("torch.distributed.distributed_c10d._resolve_process_group")
_named: dict[str, dist.ProcessGroup] = {}  # by `name_of`, for a torch that does not find groups by name


def name_of(group: dist.ProcessGroup) -> str:
    """The name by which ops find the group."""
    _named[group.group_name] = group
    return group.group_name


def group_of(name: str) -> dist.ProcessGroup:
    """The group of this name, as `name_of` gave it."""
    return _resolve_process_group(name) if _resolve_process_group else _named[name]


def all_to_all(rows: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    """Forward: block p of the rows goes to rank p. Its transpose swaps send and receive."""
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group_of(group))
    return out


def add_up(rows_SD: Tensor, order_S: Tensor, parts: list[int], tokens: int) -> Tensor:
    """Rows added to tokens order_S of [T, D], part after part.

    The sum is made in fp32 (fp64 for fp64 rows); the result has the rows' type.
    """
    dtype = torch.promote_types(rows_SD.dtype, torch.float32)
    out_TD = rows_SD.new_zeros((tokens, *rows_SD.shape[1:]), dtype=dtype)
    for to_p, rows_p in zip(order_S.split(parts), rows_SD.split(parts), strict=True):
        out_TD.index_add_(0, to_p, rows_p.to(dtype))  # a token occurs once in a part: no two adds race
    return out_TD.to(rows_SD.dtype)


def sum_over_all(t: Tensor) -> Tensor:
    """Sum over all ranks of the default group; no gradient flows through it."""
    t = t.detach().clone()
    dist.all_reduce(t)
    return t


@torch.library.custom_op("tmoe::plan", mutates_args=())
def plan(ids_TK: Tensor, local_experts: int, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """Which rank sends which token where: a token goes once to each rank that holds one of its experts.

    ids_TK: int32 global expert ids, -1 for none; rank p holds experts p*local_experts and on.
    Returns:
        ids_RK: int32, the arrived rows' ids local to this rank, -1 where another rank holds the expert.
        order_S: int64, token of each sent row, by rank, then token.
        splits_2P: int64 on the CPU, rows sent to and received from each rank.
    """
    ranks = dist.get_world_size(group_of(group))
    ranks_P = torch.arange(ranks, device=ids_TK.device)
    owner_TK = torch.where(ids_TK >= 0, ids_TK // local_experts, -1)
    goes_PT = (owner_TK[None] == ranks_P[:, None, None]).any(-1)
    send_P = goes_PT.sum(1)
    receive_P = torch.empty_like(send_P)
    dist.all_to_all_single(receive_P, send_P, group=group_of(group))
    rank_S, order_S = goes_PT.nonzero(as_tuple=True)
    ids_SK = torch.where(
        owner_TK[order_S] == rank_S[:, None], ids_TK[order_S] - rank_S[:, None].int() * local_experts, -1
    )
    splits_2P = torch.stack([send_P, receive_P]).cpu()
    send, receive = splits_2P.tolist()
    # clone: nonzero returns views into one buffer, and compiled callers assert 16-byte alignment
    return all_to_all(ids_SK.to(torch.int32), send, receive, group), order_S.clone(), splits_2P


@plan.register_fake
def _(ids_TK: Tensor, local_experts: int, group: str) -> tuple[Tensor, Tensor, Tensor]:
    ctx = torch.library.get_ctx()
    ranks = dist.get_world_size(group_of(group))
    return (
        ids_TK.new_empty((ctx.new_dynamic_size(), ids_TK.shape[1]), dtype=torch.int32),
        ids_TK.new_empty((ctx.new_dynamic_size(),), dtype=torch.int64),
        torch.empty((2, ranks), dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op("tmoe::push", mutates_args=())
def push(x_TD: Tensor, ids_RK: Tensor, order_S: Tensor, splits_2P: Tensor, group: str) -> Tensor:
    """Sends rows x_TD[order_S] to their ranks; returns the R rows that arrive here.

    ids_RK only tells how many arrive.
    """
    send, receive = splits_2P.tolist()
    return all_to_all(x_TD[order_S], send, receive, group)


@push.register_fake
def _(x_TD: Tensor, ids_RK: Tensor, order_S: Tensor, splits_2P: Tensor, group: str) -> Tensor:
    return x_TD.new_empty(ids_RK.shape[0], *x_TD.shape[1:])


@torch.library.custom_op("tmoe::pull", mutates_args=())
def pull(
    rows_RD: Tensor, ids_RK: Tensor, order_S: Tensor, splits_2P: Tensor, tokens: int, group: str
) -> Tensor:
    """Sends rows back to where `push` took them from, and adds up those of a token: x_TD, T = tokens.

    The sum goes over ranks in rank order, in fp32 (fp64 for fp64 rows); the result has the rows' type.
    """
    send, receive = splits_2P.tolist()
    return add_up(all_to_all(rows_RD, receive, send, group), order_S, send, tokens)


@pull.register_fake
def _(rows_RD: Tensor, ids_RK: Tensor, order_S: Tensor, splits_2P: Tensor, tokens: int, group: str) -> Tensor:
    return rows_RD.new_empty(tokens, *rows_RD.shape[1:])


def _push_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_TD, ids_RK, order_S, splits_2P, ctx.group = inputs
    ctx.tokens = x_TD.shape[0]
    ctx.save_for_backward(ids_RK, order_S, splits_2P)


def _push_backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
    return pull(grad_RD, *ctx.saved_tensors, ctx.tokens, ctx.group), None, None, None, None


def _pull_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ids_RK, order_S, splits_2P, _, ctx.group = inputs
    ctx.save_for_backward(ids_RK, order_S, splits_2P)


def _pull_backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    return push(grad_TD, *ctx.saved_tensors, ctx.group), None, None, None, None, None


push.register_autograd(_push_backward, setup_context=_push_setup)
pull.register_autograd(_pull_backward, setup_context=_pull_setup)
