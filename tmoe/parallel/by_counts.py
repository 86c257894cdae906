"""all_to_all_v and all_gather_v: rows between the ranks of any group, each rank with a number of its own.

    all_to_all_v   forward: block p of the rows goes to rank p   backward: the blocks go back
    all_gather_v   forward: rows of all ranks, in rank order     backward: each rank's rows, summed over ranks

They are for loops and layers of your own; tmoe's dispatcher has an exchange that sends a token at most once
to a rank (collectives.py). Both differentiate to any order, compile without graph breaks, and wait for the
device once, for the counts.

next: parallel/uneven.py
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.ops.check import require
from tmoe.parallel import uneven
from tmoe.parallel.collectives import all_to_all, group_of, name_of

WRONG = -1  # a rank sends it in place of a count where its own counts do not fit its rows


def all_to_all_v(
    x: Tensor,
    send_counts: Tensor | Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Sends the first send_counts[0] rows of x to rank 0, the next send_counts[1] to rank 1, and so on.

    Args:
        x: [R, ...] of any type; R may differ between ranks, and be 0. What follows R must be equal.
        send_counts: one whole number for each rank of the group, together R.
        group: any group that this rank is in; None: all ranks.

    Returns the rows that arrive, those of rank 0 first, and how many come from each rank: int64 on the CPU.
    The first is differentiable in x. All ranks of the group must call it.

    Raises ValueError, on every rank of the group, where the counts of one do not add up to its rows.
    """
    ranks = _group("all_to_all_v", x, group)
    counts_P = send_counts if isinstance(send_counts, Tensor) else torch.tensor(send_counts)
    if counts_P.dtype not in (torch.int64, torch.int32) or counts_P.shape != (ranks.size(),):
        got = f"{counts_P.dtype} {tuple(counts_P.shape)}"
        require(False, "all_to_all_v: send_counts", got, f"a whole number for each of {ranks.size()} ranks")
    name = name_of(ranks)
    come_R0, splits_2P = count_arrivals(x.detach(), counts_P.to(torch.int64), name)
    return exchange(x, come_R0, splits_2P, name), splits_2P[1].clone()


def all_gather_v(x: Tensor, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """The rows of all ranks of a group, in rank order.

    Args:
        x: [R, ...] of any type; R may differ between ranks, and be 0. What follows R must be equal.
        group: any group that this rank is in; None: all ranks.

    Returns the rows, and how many are from each rank: int64 on the CPU. The first is differentiable in x:
    gradients of all ranks add up, in fp32 and in rank order. All ranks of the group must call it.
    """
    name = name_of(_group("all_gather_v", x, group))
    # ids of no columns: what is wanted of them is their number
    come_M0, counts_P = uneven.gather_ids(x.new_empty((x.shape[0], 0), dtype=torch.int32), name)
    return uneven.gather(x, come_M0, counts_P, name), counts_P


def _group(what: str, x: object, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, once x is found to have rows and the group this rank."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        require(False, f"{what}: x", "a number" if isinstance(x, Tensor) else repr(x)[:80], "rows [R, ...]")
    if torch.compiler.is_compiling() and x.shape[0] == 0 and x.requires_grad:
        # inductor leaves out what makes an empty gradient, the exchange as well: peers would wait for it
        valid = "rows on every rank that wants gradients, or a call outside of the graph"
        require(False, f"{what}: x", "no rows in a compiled graph", valid)
    if not dist.is_initialized():
        valid = "one, made by tmoe.parallel.build_mesh or torch.distributed.init_process_group before"
        require(False, f"{what}: group", "no process group", valid)
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):  # also what new_group gives to a rank outside of it
        require(False, f"{what}: group", repr(group)[:80], "a process group that this rank is in")
    assert group is not None
    return group


@torch.library.custom_op("tmoe::count_arrivals", mutates_args=())
def count_arrivals(x: Tensor, counts_P: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """[R, 0] for the R rows that will arrive here; int64 [2, P] on the CPU: rows sent and received."""
    ranks = group_of(group)
    told = counts_P.cpu()
    fits = bool((told >= 0).all()) and int(told.sum()) == x.shape[0]
    send_P = (told if fits else told.new_full(told.shape, WRONG)).to(x.device)
    receive_P = torch.empty_like(send_P)
    dist.all_to_all_single(receive_P, send_P, group=ranks)
    come = receive_P.cpu()
    wrong = [rank for rank, count in enumerate(come.tolist()) if count == WRONG]
    if wrong:
        got = told.tolist() if not fits else f"counts that do not fit, on ranks {wrong} of the group"
        valid = "counts from 0 on that add up to that rank's rows"
        if not fits:
            valid = f"counts from 0 on that add up to {x.shape[0]}, this rank's rows"
        require(False, "all_to_all_v: send_counts", got, valid)
    return x.new_empty(int(come.sum()), 0), torch.stack([told, come])


@count_arrivals.register_fake
def _(x: Tensor, counts_P: Tensor, group: str) -> tuple[Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    splits = torch.empty((2, counts_P.shape[0]), dtype=torch.int64, device="cpu")
    return x.new_empty(rows, 0), splits


@torch.library.custom_op("tmoe::exchange_by_counts", mutates_args=())
def exchange(x: Tensor, come_R0: Tensor, splits_2P: Tensor, group: str) -> Tensor:
    """The rows that arrive; come_R0 only tells how many. Its transpose swaps the two rows of splits."""
    send, receive = splits_2P.tolist()
    return all_to_all(x, send, receive, group)


@exchange.register_fake
def _(x: Tensor, come_R0: Tensor, splits_2P: Tensor, group: str) -> Tensor:
    return x.new_empty(come_R0.shape[0], *x.shape[1:])


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, _, splits_2P, ctx.group = inputs
    ctx.save_for_backward(x.new_empty(x.shape[0], 0), splits_2P.flip(0))


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return exchange(gradient, *ctx.saved_tensors, ctx.group), None, None, None


exchange.register_autograd(_backward, setup_context=_setup)
