"""Exchanges rows between the ranks of a group, forward and backward, as custom ops without graph breaks.

For dispatchers, which send a token at most once to each rank:

    plan   forward: all-to-all of counts and ids            backward: none (ids have no gradient)
    push   forward: copy rows to their ranks, all-to-all    backward: pull
    pull   forward: all-to-all back, sum of a token's rows  backward: push

For a group that divides experts, where the number of rows differs between ranks:

    gather_uneven_ids   ids of all ranks' rows, and the number of each rank   backward: none
    gather_uneven       forward: rows of all ranks, in rank order             backward: add_up_uneven
    add_up_uneven       forward: this rank's rows of the sum over ranks       backward: gather_uneven

For users' loops and layers, where the caller gives the numbers of rows; differentiable to any order:

    all_to_all_v   forward: block p of the rows to rank p      backward: the blocks are sent back
    all_gather_v   forward: rows of all ranks, in rank order   backward: each rank's rows, summed over ranks

They are ops of ops/register.py and not an autograd.Function: on torch 2.11 a Function with collectives
inside trained silently wrong under one compile backend. The number of rows that arrive is one unbacked size,
made by the op that learns the counts (`plan`, `gather_uneven_ids`, `count_arrivals`) alone. So nothing
recompiles when the routing changes, and the host waits for the device once, for the counts.

next: moe/exchange/dispatch.py
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.base.private_torch import find
from tmoe.ops.argument_checks import require
from tmoe.ops.register import on_any_device

# how functional collectives find a group by name
_resolve_process_group = find("torch.distributed.distributed_c10d._resolve_process_group")
_named: dict[str, dist.ProcessGroup] = {}  # filled by `name_of`, for a torch that cannot find groups by name

WRONG = -1  # sent in place of each count by a rank whose counts do not add up to its rows


def name_of(group: dist.ProcessGroup) -> str:
    """The name by which ops find the group."""
    _named[group.group_name] = group
    return group.group_name


def group_of(name: str) -> dist.ProcessGroup:
    """The group whose name `name_of` returned."""
    return _resolve_process_group(name) if _resolve_process_group else _named[name]


def all_to_all(rows: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    """Sends block p of the rows to rank p. The backward swaps send and receive."""
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group_of(group))
    return out


def add_up(rows_SD: Tensor, order_S: Tensor, parts: list[int], tokens: int) -> Tensor:
    """[T, D] with each row added to its token, order_S, one part after the other.

    Sums are computed in fp32 (fp64 for fp64 rows); the result has the rows' type.
    """
    dtype = torch.promote_types(rows_SD.dtype, torch.float32)
    out_TD = rows_SD.new_zeros((tokens, *rows_SD.shape[1:]), dtype=dtype)
    for to_p, rows_p in zip(order_S.split(parts), rows_SD.split(parts), strict=True):
        out_TD.index_add_(0, to_p, rows_p.to(dtype))  # a token occurs once in a part: no two adds race
    return out_TD.to(rows_SD.dtype)


def sum_over_all(t: Tensor) -> Tensor:
    """The sum over all ranks of the default group; it has no gradient."""
    t = t.detach().clone()
    dist.all_reduce(t)
    return t


def _fake_plan(ids_TK: Tensor, local_experts: int, group: str) -> tuple[Tensor, Tensor, Tensor]:
    ctx = torch.library.get_ctx()
    ranks = dist.get_world_size(group_of(group))
    return (
        ids_TK.new_empty((ctx.new_dynamic_size(), ids_TK.shape[1]), dtype=torch.int32),
        ids_TK.new_empty((ctx.new_dynamic_size(),), dtype=torch.int64),
        torch.empty((2, ranks), dtype=torch.int64, device="cpu"),
    )


@on_any_device("plan", fake=_fake_plan)
def plan(ids_TK: Tensor, local_experts: int, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """Plans which tokens are sent to which ranks: a token once to each rank that holds one of its experts.

    ids_TK: int32 global expert ids, -1 for none; rank p holds the experts from p*local_experts on.
    local_experts: number of experts of a rank.
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


def _push_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_TD, ids_RK, order_S, splits_2P, ctx.group = inputs
    ctx.tokens = x_TD.shape[0]
    ctx.save_for_backward(ids_RK, order_S, splits_2P)


def _push_backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
    return pull(grad_RD, *ctx.saved_tensors, ctx.tokens, ctx.group), None, None, None, None


def _fake_push(x_TD: Tensor, ids_RK: Tensor, order_S: Tensor, splits_2P: Tensor, group: str) -> Tensor:
    return x_TD.new_empty(ids_RK.shape[0], *x_TD.shape[1:])


@on_any_device("push", fake=_fake_push, save=_push_setup, differentiate=_push_backward)
def push(x_TD: Tensor, ids_RK: Tensor, order_S: Tensor, splits_2P: Tensor, group: str) -> Tensor:
    """Sends rows x_TD[order_S] to their ranks; returns the R rows that this rank receives.

    ids_RK serves only for its length, R.
    """
    send, receive = splits_2P.tolist()
    return all_to_all(x_TD[order_S], send, receive, group)


def _pull_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ids_RK, order_S, splits_2P, _, ctx.group = inputs
    ctx.save_for_backward(ids_RK, order_S, splits_2P)


def _pull_backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
    return push(grad_TD, *ctx.saved_tensors, ctx.group), None, None, None, None, None


def _fake_pull(
    rows_RD: Tensor, ids_RK: Tensor, order_S: Tensor, splits_2P: Tensor, tokens: int, group: str
) -> Tensor:
    return rows_RD.new_empty(tokens, *rows_RD.shape[1:])


@on_any_device("pull", fake=_fake_pull, save=_pull_setup, differentiate=_pull_backward)
def pull(
    rows_RD: Tensor, ids_RK: Tensor, order_S: Tensor, splits_2P: Tensor, tokens: int, group: str
) -> Tensor:
    """Sends rows back to the ranks from which `push` sent them, and sums a token's rows: x_TD, T = tokens.

    The sum runs over ranks in rank order, in fp32 (fp64 for fp64 rows); the result has the rows' type.
    """
    send, receive = splits_2P.tolist()
    return add_up(all_to_all(rows_RD, receive, send, group), order_S, send, tokens)


# ---- a different number of rows on each rank ----


def _fake_gather_uneven_ids(ids_RK, group):
    rows = torch.library.get_ctx().new_dynamic_size()
    counts = torch.empty(group_of(group).size(), dtype=torch.int64, device="cpu")
    return ids_RK.new_empty(rows, ids_RK.shape[1]), counts


@on_any_device("gather_uneven_ids", fake=_fake_gather_uneven_ids)
def gather_uneven_ids(ids_RK: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """ids_MK of the rows of all ranks, and the number of rows of each rank: int64 [n] on the CPU."""
    ranks = group_of(group)
    count = torch.tensor([ids_RK.shape[0]], device=ids_RK.device)
    counts = count.new_empty(ranks.size())
    dist.all_gather_into_tensor(counts, count, group=ranks)
    counts_P = counts.cpu()
    return _gather(ids_RK, counts_P, group), counts_P


def _gather(x_RX: Tensor, counts_P: Tensor, group: str) -> Tensor:
    ranks = group_of(group)
    counts = counts_P.tolist()
    out = x_RX.new_empty(sum(counts), *x_RX.shape[1:])
    send = x_RX.repeat(ranks.size(), *(1 for _ in x_RX.shape[1:]))
    dist.all_to_all_single(out, send, counts, [x_RX.shape[0]] * ranks.size(), group=ranks)
    return out


def _gather_setup(ctx, inputs, output):
    x_RX, _, counts_P, ctx.group = inputs
    ctx.save_for_backward(x_RX.new_empty(x_RX.shape[0], 0), counts_P)  # only the number of rows is needed


def _gather_backward(ctx, grad_MX):
    return add_up_uneven(grad_MX, *ctx.saved_tensors, ctx.group), None, None, None


def _fake_gather_uneven(x_RX, ids_MK, counts_P, group):
    return x_RX.new_empty(ids_MK.shape[0], *x_RX.shape[1:])


@on_any_device("gather_uneven", fake=_fake_gather_uneven, save=_gather_setup, differentiate=_gather_backward)
def gather_uneven(x_RX: Tensor, ids_MK: Tensor, counts_P: Tensor, group: str) -> Tensor:
    """Rows of all ranks, [M, ...] in rank order; ids_MK serves only for its length, M."""
    return _gather(x_RX, counts_P, group)


def _add_up_setup(ctx, inputs, output):
    x_MX, _, counts_P, ctx.group = inputs
    ctx.save_for_backward(x_MX.new_empty(x_MX.shape[0], 0), counts_P)


def _add_up_backward(ctx, grad_RX):
    return gather_uneven(grad_RX, *ctx.saved_tensors, ctx.group), None, None, None


def _fake_add_up_uneven(x_MX, ids_RK, counts_P, group):
    return x_MX.new_empty(ids_RK.shape[0], *x_MX.shape[1:])


@on_any_device("add_up_uneven", fake=_fake_add_up_uneven, save=_add_up_setup, differentiate=_add_up_backward)
def add_up_uneven(x_MX: Tensor, ids_RK: Tensor, counts_P: Tensor, group: str) -> Tensor:
    """This rank's rows of the sum over ranks, added in rank order in fp32 (fp64 for fp64).

    ids_RK serves only for its length, this rank's number of rows.
    """
    ranks = group_of(group)
    counts = counts_P.tolist()
    own_count = counts[ranks.rank()]
    come = x_MX.new_empty(ranks.size() * own_count, *x_MX.shape[1:])
    dist.all_to_all_single(come, x_MX.contiguous(), [own_count] * ranks.size(), counts, group=ranks)
    parts = come.view(ranks.size(), own_count, *x_MX.shape[1:])
    return parts.sum(0, dtype=torch.promote_types(x_MX.dtype, torch.float32)).to(x_MX.dtype)


# ---- numbers of rows that the caller gives ----


def all_to_all_v(
    x: Tensor,
    send_counts: Tensor | Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Sends the first send_counts[0] rows of x to rank 0, the next send_counts[1] to rank 1, and so on.

    Args:
        x: [R, ...] of any type; R may differ between ranks, and be 0. The other dimensions must be equal.
        send_counts: one whole number for each rank of the group, whose sum is R.
        group: any group that this rank is in; None: all ranks.

    Returns the rows that this rank receives, in rank order, and the number from each rank: int64 on the CPU.
    The rows are differentiable in x. All ranks of the group must call it.

    Raises ValueError, on every rank of the group, if the counts of any rank do not add up to its rows.
    """
    ranks = _checked_group("all_to_all_v", x, group)
    counts_P = send_counts if isinstance(send_counts, Tensor) else torch.tensor(send_counts)
    if counts_P.dtype not in (torch.int64, torch.int32) or counts_P.shape != (ranks.size(),):
        got = f"{counts_P.dtype} {tuple(counts_P.shape)}"
        require(False, "all_to_all_v: send_counts", got, f"a whole number for each of {ranks.size()} ranks")
    name = name_of(ranks)
    come_R0, splits_2P = count_arrivals(x.detach(), counts_P.to(torch.int64), name)
    return exchange_by_counts(x, come_R0, splits_2P, name), splits_2P[1].clone()


def all_gather_v(x: Tensor, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """The rows of all ranks of a group, in rank order.

    Args:
        x: [R, ...] of any type; R may differ between ranks, and be 0. The other dimensions must be equal.
        group: any group that this rank is in; None: all ranks.

    Returns the rows, and the number from each rank: int64 on the CPU. The rows are differentiable in x: the
    gradients of all ranks are summed, in fp32 and in rank order. All ranks of the group must call it.
    """
    name = name_of(_checked_group("all_gather_v", x, group))
    # ids without columns, because only their number is needed
    come_M0, counts_P = gather_uneven_ids(x.new_empty((x.shape[0], 0), dtype=torch.int32), name)
    return gather_uneven(x, come_M0, counts_P, name), counts_P


def _checked_group(what: str, x: object, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group; ValueError unless x has rows and this rank is in the group."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        require(False, f"{what}: x", "a number" if isinstance(x, Tensor) else repr(x)[:80], "rows [R, ...]")
    if torch.compiler.is_compiling() and x.shape[0] == 0 and x.requires_grad:
        # inductor leaves out the computation of an empty gradient, even the exchange: peers would wait for it
        valid = "rows on every rank that wants gradients, or a call outside of the graph"
        require(False, f"{what}: x", "no rows in a compiled graph", valid)
    if not dist.is_initialized():
        valid = "one, made by tmoe.parallel.build_mesh or torch.distributed.init_process_group before"
        require(False, f"{what}: group", "no process group", valid)
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):  # new_group returns another type to a rank outside the group
        require(False, f"{what}: group", repr(group)[:80], "a process group that this rank is in")
    assert group is not None
    return group


def _fake_count_arrivals(x: Tensor, counts_P: Tensor, group: str) -> tuple[Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    splits = torch.empty((2, counts_P.shape[0]), dtype=torch.int64, device="cpu")
    return x.new_empty(rows, 0), splits


@on_any_device("count_arrivals", fake=_fake_count_arrivals)
def count_arrivals(x: Tensor, counts_P: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """[R, 0] for the R rows that this rank will receive; int64 [2, P] on the CPU: rows sent and received."""
    ranks = group_of(group)
    sent = counts_P.cpu()
    fits = bool((sent >= 0).all()) and int(sent.sum()) == x.shape[0]
    send_P = (sent if fits else sent.new_full(sent.shape, WRONG)).to(x.device)
    receive_P = torch.empty_like(send_P)
    dist.all_to_all_single(receive_P, send_P, group=ranks)
    come = receive_P.cpu()
    wrong = [rank for rank, count in enumerate(come.tolist()) if count == WRONG]
    if wrong:
        got = sent.tolist() if not fits else f"counts that do not fit, on ranks {wrong} of the group"
        valid = "counts from 0 on that add up to that rank's rows"
        if not fits:
            valid = f"counts from 0 on that add up to {x.shape[0]}, this rank's rows"
        require(False, "all_to_all_v: send_counts", got, valid)
    return x.new_empty(int(come.sum()), 0), torch.stack([sent, come])


def _exchange_setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, _, splits_2P, ctx.group = inputs
    ctx.save_for_backward(x.new_empty(x.shape[0], 0), splits_2P.flip(0))


def _exchange_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return exchange_by_counts(gradient, *ctx.saved_tensors, ctx.group), None, None, None


def _fake_exchange_by_counts(x: Tensor, come_R0: Tensor, splits_2P: Tensor, group: str) -> Tensor:
    return x.new_empty(come_R0.shape[0], *x.shape[1:])


@on_any_device(
    "exchange_by_counts",
    fake=_fake_exchange_by_counts,
    save=_exchange_setup,
    differentiate=_exchange_backward,
)
def exchange_by_counts(x: Tensor, come_R0: Tensor, splits_2P: Tensor, group: str) -> Tensor:
    """The received rows; come_R0 serves only for its length. The backward swaps the two rows of splits."""
    send, receive = splits_2P.tolist()
    return all_to_all(x, send, receive, group)
