"""Moves rows between the ranks of an expert group, forward and backward, as custom ops that compile without a break.

    plan   forward: all-to-all of counts and ids            backward: none (ids have no gradient)
    push   forward: copy rows to their ranks, all-to-all    backward: pull
    pull   forward: all-to-all back, add up a token's rows  backward: push

`torch.library.custom_op` and not an autograd.Function: on torch 2.11 a Function with collectives inside trained silently
wrong under one compile backend. The number of rows that arrive is one unbacked size, made by `plan` alone, so that
nothing recompiles when the routing changes.

next: moe/dispatch.py
"""

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.parallel.mesh import default_store
from tmoe.stack import find

# how functional collectives find a group by name, and where a group met
_resolve_process_group = find("torch.distributed.distributed_c10d._resolve_process_group")
_get_process_group_store = find("torch.distributed.distributed_c10d._get_process_group_store")
_named: dict[str, dist.ProcessGroup] = {}  # by `name_of`, for a torch that does not find groups by name


def name_of(group: dist.ProcessGroup) -> str:
    """The name by which ops find the group."""
    _named[group.group_name] = group
    return group.group_name


def group_of(name: str) -> dist.ProcessGroup:
    return _resolve_process_group(name) if _resolve_process_group else _named[name]


def store_of(group: dist.ProcessGroup) -> dist.Store:
    if _get_process_group_store:
        return _get_process_group_store(group)
    return dist.PrefixStore(f"tmoe {group.group_name}", default_store())


def all_to_all(rows: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    """Forward: block p of the rows goes to rank p. Its transpose swaps send and receive."""
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group_of(group))
    return out


def add_up(rows_SD: Tensor, order_S: Tensor, parts: list[int], tokens: int) -> Tensor:
    """Rows added to tokens order_S of [T, D], part after part, in fp32 (fp64 as it is); of the rows' dtype."""
    dtype = torch.promote_types(rows_SD.dtype, torch.float32)
    out_TD = rows_SD.new_zeros((tokens, *rows_SD.shape[1:]), dtype=dtype)
    for to_p, rows_p in zip(order_S.split(parts), rows_SD.split(parts), strict=True):
        out_TD.index_add_(0, to_p, rows_p.to(dtype))  # a token occurs once in a part: no two adds race
    return out_TD.to(rows_SD.dtype)


@torch.library.custom_op("tmoe::plan", mutates_args=())
def plan(ids_TK: Tensor, local_experts: int, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """Who sends which token where: a token goes once to each rank that holds one of its experts.

    Args: ids_TK int32 global expert ids, -1 for none; rank p holds experts p*local_experts and on.
    Returns: ids_RK int32, the arrived rows' ids local to this rank, -1 where another rank holds the expert; order_S int64,
    token of each sent row, by rank, then token; splits_2P int64 on the CPU, rows sent to and received from each rank.
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
def _(ids_TK, local_experts, group):
    ctx = torch.library.get_ctx()
    ranks = dist.get_world_size(group_of(group))
    return (
        ids_TK.new_empty((ctx.new_dynamic_size(), ids_TK.shape[1]), dtype=torch.int32),
        ids_TK.new_empty((ctx.new_dynamic_size(),), dtype=torch.int64),
        torch.empty((2, ranks), dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op("tmoe::push", mutates_args=())
def push(x_TD: Tensor, ids_RK: Tensor, order_S: Tensor, splits_2P: Tensor, group: str) -> Tensor:
    """Rows x_TD[order_S] to their ranks; returns the R rows that arrive here (ids_RK only tells how many)."""
    send, receive = splits_2P.tolist()
    return all_to_all(x_TD[order_S], send, receive, group)


@push.register_fake
def _(x_TD, ids_RK, order_S, splits_2P, group):
    return x_TD.new_empty(ids_RK.shape[0], *x_TD.shape[1:])


@torch.library.custom_op("tmoe::pull", mutates_args=())
def pull(
    rows_RD: Tensor, ids_RK: Tensor, order_S: Tensor, splits_2P: Tensor, tokens: int, group: str
) -> Tensor:
    """Rows back to where push took them from, added up over ranks in rank order in fp32 (fp64 as it is): x_TD, T = tokens."""
    send, receive = splits_2P.tolist()
    return add_up(all_to_all(rows_RD, receive, send, group), order_S, send, tokens)


@pull.register_fake
def _(rows_RD, ids_RK, order_S, splits_2P, tokens, group):
    return rows_RD.new_empty(tokens, *rows_RD.shape[1:])


def _push_setup(ctx, inputs, output):
    x_TD, ids_RK, order_S, splits_2P, ctx.group = inputs
    ctx.tokens = x_TD.shape[0]
    ctx.save_for_backward(ids_RK, order_S, splits_2P)


def _push_backward(ctx, grad_RD):
    return pull(grad_RD, *ctx.saved_tensors, ctx.tokens, ctx.group), None, None, None, None


def _pull_setup(ctx, inputs, output):
    _, ids_RK, order_S, splits_2P, _, ctx.group = inputs
    ctx.save_for_backward(ids_RK, order_S, splits_2P)


def _pull_backward(ctx, grad_TD):
    return push(grad_TD, *ctx.saved_tensors, ctx.group), None, None, None, None, None


push.register_autograd(_push_backward, setup_context=_push_setup)
pull.register_autograd(_pull_backward, setup_context=_pull_setup)


def together(group: dist.ProcessGroup, key: str, word: Any, ahead: Callable[[], Any]) -> list[Any] | None:
    """The words (JSON) of all ranks of a group that call this with one key, through its store; None once ahead() says that one never will.

    For what should be a collective, but other ranks may not see the reason for: all_gather_object would wait for them until the
    watchdog ends the process. Raises TimeoutError after the store's timeout.
    """
    ranks = dist.get_process_group_ranks(group)
    store, rank = store_of(group), group.rank()
    calls = f"tmoe {key} of {ranks}"  # groups that were split from one share its store
    call = store.add(calls, 0)
    prefix = f"{calls} {call}"
    keys = [f"{prefix} {q}" for q in ranks]

    def wait(done: Callable[[], bool], left: str) -> None:
        end = time.monotonic() + store.timeout.total_seconds()
        while not done():
            if time.monotonic() > end:
                missing = [q for q, k in zip(ranks, keys, strict=True) if not store.check([k])]
                store.delete_key(left)
                raise TimeoutError(f"{key}: ranks {missing} did not come within {store.timeout}")
            time.sleep(0.01)

    if ahead():  # which waits for this rank's own work: whose word is out has none behind it that others still wait for
        return None
    store.set(keys[rank], json.dumps(word))
    passed = False

    def all_here() -> bool:
        nonlocal passed
        passed = bool(ahead())  # before the words: a peer's may be of a later call
        return passed or store.check(keys)

    wait(all_here, keys[rank])
    if passed:
        store.delete_key(keys[rank])  # or who comes later would read it in another call
        return None
    words = [json.loads(store.get(k)) for k in keys]
    if store.add(prefix, 1) == len(keys):  # all have read: the next call may begin
        for k in (*keys, prefix):
            store.delete_key(k)
        store.add(calls, 1)
    wait(lambda: store.add(calls, 0) > call, prefix)  # or this rank's next word would be read as this one
    return words
