"""Runs experts on rows sorted by expert: one row for each pair of token and expert, weighted before or after.

This works for any experts, because each expert has separate copies of its rows. tmoe's own experts need it
only if weights are not applied to the activation. Otherwise `moe_mlp` reads rows in place and writes one sum
for each token.

next: moe/own_experts.py
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.moe.exchange.dispatch import Rows
from tmoe.ops.argument_checks import require
from tmoe.ops.experts.gather_scatter import gather_rows, scatter_rows
from tmoe.ops.register import on_any_device


class Sorted(NamedTuple):
    """The N pairs of a rank's R rows and its experts, by expert, then by row; -1 where there is no pair."""

    rows_N: Tensor  # int32: row of each pair, 0 to R - 1
    slots_N: Tensor  # int32: slot of each pair among the R * K ids
    ends_L: Tensor  # int32: expert e has the pairs from ends[e - 1] to ends[e]


def _fake_first_rows(order_N: Tensor, ends_L: Tensor) -> Tensor:
    return order_N.new_empty(torch.library.get_ctx().new_dynamic_size())


@on_any_device("first_rows", fake=_fake_first_rows)
def first_rows(order_N: Tensor, ends_L: Tensor) -> Tensor:
    """The first ends[-1] numbers of order. The host waits for the device."""
    return order_N[: int(ends_L[-1])].clone()


def sort_pairs(ids_RK: Tensor, experts: int, exact: bool) -> Sorted:
    """The pairs whose ids are from 0 to experts - 1.

    exact: N is the number of pairs, which costs a wait for the device. Otherwise N is R * K, and the entries
    after the last end are -1.
    """
    flat = ids_RK.flatten()
    is_local = (flat >= 0) & (flat < experts)
    keys, order = torch.where(is_local, flat, experts).sort(stable=True)
    bounds = torch.arange(1, experts + 1, dtype=keys.dtype, device=keys.device)
    ends_L = torch.searchsorted(keys, bounds, out_int32=True)
    if exact:
        slots_N = first_rows(order, ends_L).to(torch.int32)
        return Sorted(slots_N // ids_RK.shape[1], slots_N, ends_L)
    present = keys < experts
    slots_N = torch.where(present, order, -1).to(torch.int32)
    return Sorted(torch.where(present, slots_N // ids_RK.shape[1], -1), slots_N, ends_L)


def over_sorted_rows(rows: Rows, experts: int, run: Callable[[Tensor, Sorted], Tensor], weigh: str) -> Tensor:
    """y [R, D]: for each row the sum over its pairs of weight * run(x), or of run(weight * x) ("before").

    run: receives x [N, D] sorted by expert, and returns rows of the same shape. After the last end x is zero,
    and the results of run are ignored there. If the rows were received from other ranks, there are no rows
    after the last end.
    """
    pairs = sort_pairs(rows.ids_RK, experts, exact=rows.pairs is not None)
    weights_N1 = gather_rows(rows.weights_RK.reshape(-1, 1), pairs.slots_N)
    x_ND = gather_rows(rows.x_RD, pairs.rows_N)
    if weigh == "before":
        x_ND = (x_ND * weights_N1).to(x_ND.dtype)
    y_ND = run(x_ND, pairs)
    if not isinstance(y_ND, Tensor) or y_ND.shape != x_ND.shape:
        got = f"shape {tuple(y_ND.shape)}" if isinstance(y_ND, Tensor) else repr(y_ND)[:80]
        require(False, "experts: result", got, f"a tensor of the shape of its rows {tuple(x_ND.shape)}")
    if weigh != "before":
        y_ND = y_ND * weights_N1
    return scatter_rows(y_ND.to(x_ND.dtype), pairs.rows_N, rows.x_RD.shape[0])
