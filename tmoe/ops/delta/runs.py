"""Runs of tokens in rows: the documents of a linear layer, and each token's neighbours in its run.

A linear layer reads a row from left to right and keeps one state. So a document is a run of tokens with the
same id. Padding is no part of any run: a run continues after padding as if the padding were not there.

next: tmoe/ops/delta/short_conv.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Runs(NamedTuple):
    """The runs of some rows."""

    number_BS: Tensor
    """int64: number of a token's run in its row, never decreasing; padding has that of the token before it"""
    back_BSJ: Tensor
    """int64: positions of the tokens 1, 2, ... J places before a token in its run; -1: there is none"""
    ahead_BSJ: Tensor
    """int64: positions of the tokens 1, 2, ... J places after a token in its run; -1: there is none"""
    padding_BS: Tensor | None
    """bool: True at padding, which has no neighbours and is no neighbour"""


def runs_of(documents_BS: Tensor | None, padding_BS: Tensor | None, reach: int) -> Runs | None:
    """The runs of rows; None if each row is one run without padding.

    documents_BS: int, the document of each token. None: a row is one document.
    padding_BS: bool, True at padding; None: no padding.
    reach: J, the number of neighbours on each side.
    """
    given = padding_BS if documents_BS is None else documents_BS
    if given is None:
        return None
    B, S = given.shape
    device = given.device
    at_BS = torch.arange(S, device=device).expand(B, S)
    documents_BS = torch.zeros_like(at_BS) if documents_BS is None else documents_BS
    if padding_BS is None:
        live_BS, order_BS = None, at_BS
    else:  # the k-th token of a row that is no padding is at order[k]
        live_BS = ~padding_BS
        order_BS = padding_BS.to(torch.uint8).argsort(dim=1, stable=True)
    sorted_BS = documents_BS.gather(1, order_BS)
    first_BS = torch.ones(B, S, dtype=torch.bool, device=device)  # of a run, among tokens in this order
    first_BS[:, 1:] = sorted_BS[:, 1:] != sorted_BS[:, :-1]
    number_BS = first_BS.cumsum(1) - 1
    rank_BS, count_B1 = at_BS, torch.full((B, 1), S, device=device)
    if live_BS is not None:
        rank_BS, count_B1 = live_BS.cumsum(1) - 1, live_BS.sum(1, keepdim=True)
    own_BS = number_BS.gather(1, rank_BS.clamp(min=0))  # padding: that of the last token before it

    def neighbour(places: int) -> Tensor:
        rank = rank_BS + places
        inside = (rank >= 0) & (rank < count_B1)
        inside = inside if live_BS is None else inside & live_BS
        rank = rank.clamp(0, S - 1)
        same = number_BS.gather(1, rank) == own_BS
        return order_BS.gather(1, rank).masked_fill(~(inside & same), -1)

    back, ahead = ([neighbour(sign * j) for j in range(1, reach + 1)] for sign in (-1, 1))
    none_BS0 = at_BS.new_empty(B, S, 0)
    back_BSJ, ahead_BSJ = (torch.stack(some, -1) if some else none_BS0 for some in (back, ahead))
    return Runs(own_BS.contiguous(), back_BSJ, ahead_BSJ, padding_BS)
