"""Sends rows to other nodes in two hops: over the network once per node, then over the links inside the node.

In the flat all-to-all of dispatch.py, a token with experts on three ranks of another node crosses the network
three times; here it crosses the network once. A group of two nodes with three ranks each:

              node 0   node 1
    place 0     0 ------ 3       hop 1, along a line: a row for each (token, node) is sent to the rank
    place 1     1 ------ 4         of that node that has the sender's place
    place 2     2 ------ 5       hop 2, along a column: that rank sends a row for each (token, rank)

    plan   forward: all-to-all of counts, ids by both hops           backward: none (ids have no gradient)
    push   forward: rows by hop 1, then by hop 2                     backward: pull
    pull   forward: rows back by hop 2 and added up for each token   backward: push
                    on its node, the sums back by hop 1, and added

Rows arrive in the same order as with the flat all-to-all, so experts compute the same bits. Both hops are
all-to-alls of the whole group in which most parts are empty. Therefore they need no additional process groups
or communicators.

Shapes: P ranks on J nodes with M places each; S rows that this rank sends by hop 1, U rows that it receives
by hop 1, W rows that it sends by hop 2, R rows that it receives by hop 2.

next: moe/experts.py
"""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.moe.exchange.dispatch import AllToAllDispatcher, Dispatcher, Rows, pairs_bound
from tmoe.moe.router import Routing
from tmoe.ops.register import on_any_device
from tmoe.parallel.collectives import add_up, all_to_all, group_of

log = logging.getLogger(__name__)


class TwoLevelPlan(NamedTuple):
    """How the rows were sent: the only input of combine besides y. Frozen.

    ids_RK: int32, the received rows' ids local to this rank, -1 where another rank holds the expert.
    order_S: int64, token of each row sent by hop 1; by node, then token.
    order_W: int64, the index among the U rows of each row sent by hop 2; by rank, then row.
    parts_6P: int64 on the CPU: rows sent to and received from each rank by hop 1, the same by hop 2, the
        ranks in the order in which rows of their tokens arrive, and the number of rows of each rank's tokens.
    """

    ids_RK: Tensor
    order_S: Tensor
    order_W: Tensor
    parts_6P: Tensor
    tokens: int


class Places(NamedTuple):
    """The positions of a group's ranks, from the view of one rank."""

    table_JM: Tensor  # the ranks of each node, by place; one row for each rank reached by hop 1
    row_P: Tensor  # the row of `table_JM` for each rank
    mine_M: Tensor  # the ranks of this rank's node
    mates: list[int]  # the same as a list
    place_P: list[int]  # the place of each rank on its node


@cache
def places(nodes: tuple[int, ...], rank: int, device: torch.device) -> Places:
    """Cached, since sending a list to a GPU makes the host wait. nodes: each rank's node, any numbers."""
    members: dict[int, list[int]] = {}
    for p, node in enumerate(nodes):
        members.setdefault(node, []).append(p)
    place_P = [members[node].index(p) for p, node in enumerate(nodes)]
    table = sorted(members.values(), key=lambda ranks: ranks[place_P[rank]])
    row_P = [table.index(members[node]) for node in nodes]
    table_JM = torch.tensor(table, device=device)
    on_device = (table_JM, torch.tensor(row_P, device=device), table_JM[row_P[rank]])
    return Places(*on_device, members[nodes[rank]], place_P)


def owners(ids_TK: Tensor, local_experts: int) -> Tensor:
    """The rank that holds each expert, -1 for none."""
    return torch.where(ids_TK >= 0, ids_TK // local_experts, -1)


def goes_to(ids_TK: Tensor, local_experts: int, ranks_P: Tensor) -> Tensor:
    """bool [P, T]: whether this rank holds one of the token's experts."""
    return (owners(ids_TK, local_experts)[None] == ranks_P[:, None, None]).any(-1)


def reorder(rows_RD: Tensor, sizes: Sequence[int], now: Sequence[int], then: Sequence[int]) -> Tensor:
    """A copy of rows with its parts, of sizes[p] rows each, reordered from the order `now` to `then`."""
    parts = dict(zip(now, rows_RD.split([sizes[p] for p in now]), strict=True))
    return torch.cat([parts[p] for p in then])


def _fake_plan(ids_TK, local_experts, nodes, group):
    ctx = torch.library.get_ctx()
    return (
        ids_TK.new_empty((ctx.new_dynamic_size(), ids_TK.shape[1]), dtype=torch.int32),
        ids_TK.new_empty((ctx.new_dynamic_size(),), dtype=torch.int64),
        ids_TK.new_empty((ctx.new_dynamic_size(),), dtype=torch.int64),
        torch.empty((6, len(nodes)), dtype=torch.int64, device="cpu"),
    )


@on_any_device("two_level_plan", fake=_fake_plan)
def plan(
    ids_TK: Tensor, local_experts: int, nodes: list[int], group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors of a TwoLevelPlan.

    Args:
        ids_TK: int32 global expert ids, -1 for none; rank p holds local_experts experts from p*local_experts
            on.
        nodes: the node of each rank; each node has the same number of ranks.
    """
    rank, everyone = dist.get_rank(group_of(group)), range(len(nodes))
    table_JM, row_P, mine_M, mates, place_P = places(tuple(nodes), rank, ids_TK.device)
    place = place_P[rank]

    # The counts for each rank: how many of this rank's tokens are sent to each place of its node, and to the
    # node.
    goes_PT = goes_to(ids_TK, local_experts, torch.arange(len(nodes), device=ids_TK.device))
    goes_JMT = goes_PT[table_JM]
    goes_JT = goes_JMT.any(1)
    send_counts = torch.cat([goes_JMT.sum(-1), goes_JT.sum(-1, keepdim=True)], 1)[row_P]
    receive_counts = torch.empty_like(send_counts)
    dist.all_to_all_single(receive_counts, send_counts, group=group_of(group))
    _, order_S = goes_JT.nonzero(as_tuple=True)
    sends, receives = torch.stack([send_counts, receive_counts]).tolist()  # the host waits for the device

    line = [p for p in everyone if place_P[p] == place]
    out_1 = [sends[p][-1] if p in line else 0 for p in everyone]
    in_1 = [receives[p][-1] if p in line else 0 for p in everyone]
    out_2, in_2 = [0] * len(nodes), [0] * len(nodes)
    for j, p in enumerate(mates):
        out_2[p] = sum(receives[q][j] for q in line)
        in_2[p] = sum(receives[q][place] for q in everyone if place_P[q] == j)
    arrival = sorted(everyone, key=lambda p: (place_P[p], p))
    sizes = [receives[p][place] for p in everyone]

    ids_UK = all_to_all(ids_TK[order_S], out_1, in_1, group)
    goes_MU, W = goes_to(ids_UK, local_experts, mine_M), sum(out_2)
    # The size is given, so that the host need not wait for the network.
    found_W2 = torch.nonzero_static(goes_MU, size=W) if W else goes_MU.new_empty((0, 2), dtype=torch.int64)
    # clone: both are views into one buffer, and compiled callers assert 16-byte alignment
    to_W, order_W = mine_M[found_W2[:, 0]], found_W2[:, 1].clone()
    ids_WK = ids_UK[order_W]
    there_WK = owners(ids_WK, local_experts) == to_W[:, None]
    ids_WK = torch.where(there_WK, ids_WK - to_W[:, None].int() * local_experts, -1)
    ids_RK = reorder(all_to_all(ids_WK, out_2, in_2, group), sizes, arrival, everyone)
    return ids_RK, order_S.clone(), order_W, torch.tensor([out_1, in_1, out_2, in_2, arrival, sizes])


def _push_setup(ctx, inputs, output):
    x_TD, *plan, ctx.group = inputs
    ctx.tokens = x_TD.shape[0]
    ctx.save_for_backward(*plan)


def _push_backward(ctx, grad_RD):
    return pull(grad_RD, *ctx.saved_tensors, ctx.tokens, ctx.group), None, None, None, None, None


def _fake_push(x_TD, ids_RK, order_S, order_W, parts_6P, group):
    return x_TD.new_empty(ids_RK.shape[0], *x_TD.shape[1:])


@on_any_device("two_level_push", fake=_fake_push, save=_push_setup, differentiate=_push_backward)
def push(
    x_TD: Tensor, ids_RK: Tensor, order_S: Tensor, order_W: Tensor, parts_6P: Tensor, group: str
) -> Tensor:
    """Sends rows of x_TD to their ranks; returns the R rows that arrive here (only R is read from ids_RK)."""
    out_1, in_1, out_2, in_2, arrival, sizes = parts_6P.tolist()
    x_UD = all_to_all(x_TD[order_S], out_1, in_1, group)
    x_RD = all_to_all(x_UD[order_W], out_2, in_2, group)
    return reorder(x_RD, sizes, arrival, range(len(sizes)))


def _pull_setup(ctx, inputs, output):
    _, *plan, _, ctx.group = inputs
    ctx.save_for_backward(*plan)


def _pull_backward(ctx, grad_TD):
    return push(grad_TD, *ctx.saved_tensors, ctx.group), None, None, None, None, None, None


def _fake_pull(rows_RD, ids_RK, order_S, order_W, parts_6P, tokens, group):
    return rows_RD.new_empty(tokens, *rows_RD.shape[1:])


@on_any_device("two_level_pull", fake=_fake_pull, save=_pull_setup, differentiate=_pull_backward)
def pull(
    rows_RD: Tensor,
    ids_RK: Tensor,
    order_S: Tensor,
    order_W: Tensor,
    parts_6P: Tensor,
    tokens: int,
    group: str,
) -> Tensor:
    """Sends rows back to the tokens from which push took them, and adds them up to x_TD, T = tokens.

    A token's rows are added in fp32 (fp64 in fp64), first those of one node, in rank order. The sum is sent
    in the rows' dtype.
    """
    out_1, in_1, out_2, in_2, arrival, sizes = parts_6P.tolist()
    rows_RD = reorder(rows_RD, sizes, range(len(sizes)), arrival)
    sums_UD = add_up(all_to_all(rows_RD, in_2, out_2, group), order_W, out_2, sum(in_1))
    return add_up(all_to_all(sums_UD, in_1, out_1, group), order_S, out_1, tokens)


class TwoLevelDispatcher(Dispatcher):
    """An expert group over several nodes with equally many ranks on each, on gloo, NCCL or RCCL.

    The host waits for the device once per layer, as with the flat dispatcher.
    nodes: the node of each rank of the group, any numbers. local_experts: the number of experts on each rank.
    """

    def __init__(self, group: str, local_experts: int, nodes: Sequence[int]):
        self.group = group
        self.local_experts = local_experts
        self.nodes = list(nodes)
        self.ranks = len(self.nodes)

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[Rows, Any]:
        ways = plan(routing.ids_TK, self.local_experts, self.nodes, self.group)
        x_RD = push(x_TD, *ways, self.group)
        weights_RK = push(routing.weights_TK, *ways, self.group)
        T, K = routing.ids_TK.shape
        pairs = pairs_bound(T, self.mean_K or K, len(self.nodes), self.local_experts)
        return Rows(x_RD, weights_RK, ways[0], pairs), TwoLevelPlan(*ways, tokens=T)

    def combine(self, y_RD: Tensor, plan: Any) -> Tensor:
        return pull(y_RD, *plan, self.group)


def over_nodes(dispatcher: Dispatcher, nodes: Sequence[str], top_k: int | None = None) -> Dispatcher:
    """The two-level dispatcher instead of a flat one whose group spans nodes; any other dispatcher unchanged.

    nodes: the node of each rank of the default group, by `Mesh.nodes`; empty if unknown. top_k: experts per
    token, None if unknown. The two-level dispatcher is not used for tokens with one expert, or for a group
    with one rank on each node: it would save nothing. A group with unequal numbers of ranks on its nodes
    keeps the flat dispatcher, and a note is logged.
    """
    if not (nodes and top_k != 1 and isinstance(dispatcher, AllToAllDispatcher)):
        return dispatcher
    group_nodes = [nodes[rank] for rank in dist.get_process_group_ranks(group_of(dispatcher.group))]
    sizes = sorted(Counter(group_nodes).values())
    if len(sizes) == 1 or sizes[-1] == 1:
        return dispatcher
    if sizes[0] != sizes[-1]:
        note_uneven(tuple(sizes))
        return dispatcher
    return TwoLevelDispatcher(
        dispatcher.group, dispatcher.local_experts, [group_nodes.index(node) for node in group_nodes]
    )


@cache
def note_uneven(sizes: tuple[int, ...]) -> None:
    if dist.get_rank() == 0:
        log.warning(
            "note: an expert group has %s ranks on its nodes: with unequal numbers a token crosses the "
            "network once for each rank that holds one of its experts, not once for each node",
            ", ".join(map(str, sizes)),
        )


# Bytes over the network -------------------------------------------------------------------------------------


class Across(NamedTuple):
    """The amount that is sent between nodes: with the flat all-to-all, and in two hops."""

    flat: float
    two_level: float


def rows_across(ids_TK: Tensor, local_experts: int, nodes: Sequence[int], rank: int) -> Across:
    """Rows that leave the node of `rank` in one movement of its tokens, given their ids (-1: no expert)."""
    away = [p for p, node in enumerate(nodes) if node != nodes[rank]]
    goes_PT = goes_to(ids_TK, local_experts, torch.arange(len(nodes), device=ids_TK.device))
    by_node = [
        goes_PT[[p for p in away if nodes[p] == node]].any(0).sum() for node in {nodes[p] for p in away}
    ]
    return Across(int(goes_PT[away].sum()), int(sum(by_node)))


def bytes_across(
    ids_TK: Tensor, local_experts: int, nodes: Sequence[int], rank: int, row: int, backward: bool = True
) -> Across:
    """Bytes that cross nodes for the tokens of `rank` in one layer, there and back, counts included.

    row: bytes of a token, x_TD[0]. Forward sends ids and weights of 4 bytes each and x, and returns y.
    Backward sends dy, and returns dx and the gradients of the weights.
    """
    K = ids_TK.shape[1]
    away = sum(node != nodes[rank] for node in nodes)
    counts = Across(1, 1 + nodes.count(nodes[rank]))
    rows = rows_across(ids_TK, local_experts, nodes, rank)
    each = 4 * row + 12 * K if backward else 2 * row + 8 * K
    return Across(*(n * each + 8 * t * away for n, t in zip(rows, counts, strict=True)))


def expected_rows_across(tokens: int, top_k: int, ranks: int, nodes: int) -> Across:
    """`rows_across` if experts are evenly used and there are many more experts than K."""

    def hit(parts: int) -> float:
        return 1.0 - (1.0 - 1.0 / parts) ** top_k

    away = (nodes - 1) / nodes
    return Across(tokens * away * ranks * hit(ranks), tokens * away * nodes * hit(nodes))
