"""Sends tokens to the ranks that hold their experts and returns the sums, by one of several backends.

`dispatch` sends a token at most once to each rank, with its K pairs (local expert id or -1, weight).
Therefore a rank receives at most T rows from each peer, however skewed the routing is, and no token is
dropped. `combine` needs only the plan: the two calls share no other state.

    LocalDispatcher         ep=1
    AllToAllDispatcher      torch.distributed, any backend; the host waits once a layer for the counts
    SymmDispatcher          one NVLink node; dispatch, experts and combine are one op; the host never waits

next: moe/experts.py
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.moe.exchange import symm
from tmoe.moe.router import Routing
from tmoe.parallel import collectives
from tmoe.parallel.agree import gathered


class Rows(NamedTuple):
    """The R tokens that this rank's experts process."""

    x_RD: Tensor
    weights_RK: Tensor  # fp32
    ids_RK: Tensor  # int32, local to this rank; -1: an expert of another rank
    pairs: int | None = None  # number of routed pairs to allocate for at once, see moe_mlp


class DispatchPlan(NamedTuple):
    """How the rows were sent: the only input of combine besides y. Frozen."""

    ids_RK: Tensor
    order_S: Tensor
    splits_2P: Tensor
    tokens: int


def pairs_bound(tokens: int, top_k: int, ep: int, local_experts: int) -> int | None:
    """The number of routed pairs to allocate for at once; None for ep=1.

    It is 1.5 times the number of pairs that arrive when experts are evenly used, at most all pairs that can
    arrive, in whole tiles of 128. The memory depends on this number, not on the worst case. Pairs beyond it
    cost time (further rounds), never correctness. They cost much time on a rank that has few tokens while its
    peers have many.
    """
    if ep == 1:
        return None
    most = tokens * ep * min(top_k, local_experts)
    wanted = min(tokens * top_k * 3 // 2, most)
    tiles = -(-wanted // 128)  # rounded up
    return 128 * max(1, tiles)


class Shared(Protocol):
    """A shared expert, such as SwiGLU of moe/layer.py.

    If it is `plain` and `matrices` is not None, an op may multiply by its matrices instead of calling it. All
    ranks must agree on `plain` beforehand: ranks that decide differently would wait for each other forever.
    """

    def __call__(self, x_TD: Tensor, /) -> Tensor: ...

    @property
    def plain(self) -> bool: ...

    def matrices(self, x_TD: Tensor, /) -> tuple[Tensor, Tensor] | None: ...


class Dispatcher:
    """Applies the experts of all ranks to this rank's tokens: y_TD = dispatcher(x_TD, routing, experts)."""

    # Mean number of experts per token, where ids have more columns than that (expert choice); memory is
    # allocated for this number. 0: the number of columns
    mean_K = 0
    ranks = 1  # of the expert group; 1: every expert is on this rank

    def __call__(self, x_TD: Tensor, routing: Routing, experts: Callable[[Rows], Tensor]) -> Tensor:
        rows, plan = self.dispatch(x_TD, routing)
        return self.combine(experts(rows), plan)

    def run_with_shared(
        self, x_TD: Tensor, routing: Routing, experts: Callable[[Rows], Tensor], shared: Shared
    ) -> tuple[Tensor, Tensor]:
        """y_TD and shared(x_TD). shared(x_TD) may run while tokens are sent."""
        return self(x_TD, routing, experts), shared(x_TD)

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[Rows, DispatchPlan | None]:
        raise NotImplementedError

    def combine(self, y_RD: Tensor, plan: DispatchPlan | None) -> Tensor:
        raise NotImplementedError


class LocalDispatcher(Dispatcher):
    """ep=1: every expert is on this rank."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[Rows, None]:
        # an eighth more, so that counts that are rounded up do not need a second round
        pairs = self.mean_K * max(len(x_TD), 1) * 9 // 8 if self.mean_K else None
        return Rows(x_TD, routing.weights_TK, routing.ids_TK, pairs), None

    def combine(self, y_RD: Tensor, plan: DispatchPlan | None) -> Tensor:
        return y_RD


class AllToAllDispatcher(Dispatcher):
    """The portable reference: `torch.distributed` all-to-all with split sizes, on gloo, NCCL or RCCL.

    The host waits for the device once per layer.
    """

    def __init__(self, group: dist.ProcessGroup, local_experts: int):
        self.group = collectives.name_of(group)
        self.ranks = group.size()
        self.local_experts = local_experts

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[Rows, DispatchPlan]:
        ids_RK, order_S, splits_2P = collectives.plan(routing.ids_TK, self.local_experts, self.group)
        x_RD = collectives.push(x_TD, ids_RK, order_S, splits_2P, self.group)
        weights_RK = collectives.push(routing.weights_TK, ids_RK, order_S, splits_2P, self.group)
        T, K = routing.ids_TK.shape
        pairs = pairs_bound(T, self.mean_K or K, self.ranks, self.local_experts)
        return Rows(x_RD, weights_RK, ids_RK, pairs), DispatchPlan(ids_RK, order_S, splits_2P, T)

    def combine(self, y_RD: Tensor, plan: DispatchPlan | None) -> Tensor:
        assert plan is not None
        return collectives.pull(y_RD, *plan, self.group)


class SymmDispatcher(Dispatcher):
    """Exchanges tokens by kernels that store into the peers' memory; see symm.py.

    `experts` are LocalExperts; the op uses their weights. The op also uses the weights of `shared`, if tokens
    can be sent while the shared expert runs and the shared expert consists of its two matrices only.

    tokens: the most tokens of any rank in a call, 0 if not known. The first call allocates room for `tokens`,
        and for the most that any rank has. Later the room grows only if all ranks have more in the same call;
        if only some ranks do, those raise ValueError. More room makes each later call of the group slower:
        kernels, and copies of dX, process all slots, used or not.
    fp8: rows are sent as float8 e4m3: half the bytes, 2.6% of rounding each way.
    width: the `work` of a shared expert that is plain on every rank of the group, 0 without one.
    """

    def __init__(
        self, group: dist.ProcessGroup, local_experts: int, tokens: int = 0, fp8: bool = False, width: int = 0
    ):
        self.group = collectives.name_of(group)
        self.ranks = group.size()
        self.local_experts = local_experts
        self.tokens = tokens
        self.fp8 = fp8
        self.width = 0 if fp8 else width

    def __call__(self, x_TD: Tensor, routing: Routing, experts: Any) -> Tensor:
        return self.layer(x_TD, routing, experts)[0]

    def run_with_shared(
        self, x_TD: Tensor, routing: Routing, experts: Any, shared: Shared
    ) -> tuple[Tensor, Tensor]:
        """y_TD and shared(x_TD), in one op if tokens can be sent while the shared expert runs.

        Raises ValueError if the shared expert no longer consists of its matrices only: if that happened on
        one rank alone, the ranks would wait for each other forever.
        """
        if not (self.width and symm.hides(self.ranks, x_TD.element_size(), self.width)):
            return super().run_with_shared(x_TD, routing, experts, shared)
        if not getattr(shared, "plain", False):
            raise ValueError(
                "moe.shared: has got hooks, adapters or other layers since parallelize, "
                "which an exchange that multiplies by its matrices would skip; "
                "change it before parallelize, on all ranks, or use --parallel.dispatch nccl"
            )
        matrices = shared.matrices(x_TD)
        if matrices is None:
            return super().run_with_shared(x_TD, routing, experts, shared)
        return self.layer(x_TD, routing, experts, matrices)

    def layer(
        self, x_TD: Tensor, routing: Routing, experts: Any, shared: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Any]:
        """y_TD of symm.moe, and y of a shared expert with the two matrices `shared` (None without them)."""
        tokens = max(self.tokens, x_TD.shape[0], 1)
        K = self.mean_K or routing.ids_TK.shape[1]
        pairs = pairs_bound(tokens, K, self.ranks, self.local_experts)
        summed = experts.sums_for(x_TD)
        matrices = experts.gate_up, experts.down, experts.gate_up_bias
        local = symm.Local(*matrices, experts.activation, summed, experts.codes)
        options = symm.SymmOptions(tokens, pairs, self.fp8, self.group)
        return symm.moe(x_TD, routing.weights_TK, routing.ids_TK, local, options, shared)


def dispatcher_for(
    group: dist.ProcessGroup,
    local_experts: int,
    dispatch: str,
    tokens: int,
    fp8: bool,
    lacks: str,
    width: int = 0,
    nodes: Sequence[str] = (),
) -> AllToAllDispatcher | SymmDispatcher:
    """The dispatcher of an expert group, by `--parallel.dispatch`: auto, nccl or symm.

    A collective, with the same answer on all ranks.
    auto: symm if the peers' memory can be accessed, else nccl. tokens, fp8: see SymmDispatcher.
    lacks: the feature of the experts that symm does not support (`Experts.symm_lacks`), "" if it supports
    all.
    width: the width of the shared expert if it is plain on this rank, else 0.
    nodes: the node of each rank of the default group (`Mesh.nodes`), which a dry run reads.
    Raises ValueError if symm, or fp8 on the wire (which needs symm), was requested and symm cannot work.
    """
    planned = dist.get_backend(group) == "fake"  # a dry run: no ranks, GPUs or links to look at
    if dispatch == "nccl":
        obstacle = "--parallel.dispatch=nccl"
    elif planned:
        hosts = [nodes[rank] if nodes else "" for rank in dist.get_process_group_ranks(group)]
        obstacle = lacks or symm.too_far(hosts)
    else:
        obstacle = lacks or symm.obstacle(group)
        if fp8 and not obstacle and torch.cuda.get_device_capability() < (8, 9):
            obstacle = "its GPUs have no float8"
    if not obstacle and planned:
        return AllToAllDispatcher(group, local_experts)
    if not obstacle:
        widths = gathered(width, group)
        return SymmDispatcher(group, local_experts, tokens, fp8, min(widths))
    if fp8:
        raise ValueError(
            f"--parallel.dispatch-dtype=fp8: only symm packs rows, and here: {obstacle}; "
            "use --parallel.dispatch-dtype same"
        )
    if dispatch == "symm":
        raise ValueError(f"--parallel.dispatch=symm: {obstacle}; use auto or nccl")
    return AllToAllDispatcher(group, local_experts)
