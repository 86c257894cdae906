"""Gathers and adds up rows where each rank of a group has another number of them, as ops that compile.

    gather_ids  ids of all ranks' rows, and how many each rank has    backward: none (ids have no gradient)
    gather      forward: rows of all ranks, in rank order             backward: add_up
    add_up      forward: of each rank's sums, this rank's rows        backward: gather

M is the number of rows of all ranks together: one unbacked size, made by `gather_ids` alone.

next: moe/exchange/expert_tensor.py
"""

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.parallel.collectives import group_of


@torch.library.custom_op("tmoe::gather_uneven_ids", mutates_args=())
def gather_ids(ids_RK: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """ids_MK of the rows of all ranks; int64 [n] on the CPU: how many rows each rank has."""
    ranks = group_of(group)
    count = torch.tensor([ids_RK.shape[0]], device=ids_RK.device)
    counts = count.new_empty(ranks.size())
    dist.all_gather_into_tensor(counts, count, group=ranks)
    counts_P = counts.cpu()
    return _gather(ids_RK, counts_P, group), counts_P


@gather_ids.register_fake
def _(ids_RK, group):
    rows = torch.library.get_ctx().new_dynamic_size()
    counts = torch.empty(group_of(group).size(), dtype=torch.int64, device="cpu")
    return ids_RK.new_empty(rows, ids_RK.shape[1]), counts


def _gather(x_RX: Tensor, counts_P: Tensor, group: str) -> Tensor:
    ranks = group_of(group)
    counts = counts_P.tolist()
    out = x_RX.new_empty(sum(counts), *x_RX.shape[1:])
    send = x_RX.repeat(ranks.size(), *(1 for _ in x_RX.shape[1:]))
    dist.all_to_all_single(out, send, counts, [x_RX.shape[0]] * ranks.size(), group=ranks)
    return out


@torch.library.custom_op("tmoe::gather_uneven", mutates_args=())
def gather(x_RX: Tensor, ids_MK: Tensor, counts_P: Tensor, group: str) -> Tensor:
    """Rows of all ranks, [M, ...] in rank order; ids_MK only tells how many."""
    return _gather(x_RX, counts_P, group)


@gather.register_fake
def _(x_RX, ids_MK, counts_P, group):
    return x_RX.new_empty(ids_MK.shape[0], *x_RX.shape[1:])


@torch.library.custom_op("tmoe::add_up_uneven", mutates_args=())
def add_up(x_MX: Tensor, ids_RK: Tensor, counts_P: Tensor, group: str) -> Tensor:
    """This rank's rows of the sum over ranks, added in rank order in fp32 (fp64 as it is).

    ids_RK only tells how many rows are this rank's.
    """
    ranks = group_of(group)
    counts = counts_P.tolist()
    own = counts[ranks.rank()]
    come = x_MX.new_empty(ranks.size() * own, *x_MX.shape[1:])
    dist.all_to_all_single(come, x_MX.contiguous(), [own] * ranks.size(), counts, group=ranks)
    parts = come.view(ranks.size(), own, *x_MX.shape[1:])
    return parts.sum(0, dtype=torch.promote_types(x_MX.dtype, torch.float32)).to(x_MX.dtype)


@add_up.register_fake
def _(x_MX, ids_RK, counts_P, group):
    return x_MX.new_empty(ids_RK.shape[0], *x_MX.shape[1:])


def _gather_setup(ctx, inputs, output):
    x_RX, _, counts_P, ctx.group = inputs
    ctx.save_for_backward(x_RX.new_empty(x_RX.shape[0], 0), counts_P)  # of x, the number of its rows


def _gather_backward(ctx, grad_MX):
    return add_up(grad_MX, *ctx.saved_tensors, ctx.group), None, None, None


def _add_up_setup(ctx, inputs, output):
    x_MX, _, counts_P, ctx.group = inputs
    ctx.save_for_backward(x_MX.new_empty(x_MX.shape[0], 0), counts_P)


def _add_up_backward(ctx, grad_RX):
    return gather(grad_RX, *ctx.saved_tensors, ctx.group), None, None, None


gather.register_autograd(_gather_backward, setup_context=_gather_setup)
add_up.register_autograd(_add_up_backward, setup_context=_add_up_setup)
