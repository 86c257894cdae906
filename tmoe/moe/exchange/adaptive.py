"""Chooses in each call between sending tokens and sending weights (Tutel's adaptive parallelism).

The sharding of the weights never changes. A way, by its number r, defines what a call sends:

    0          the expert group's weights, to every rank: no token leaves its rank
    1          tokens, to the ranks that hold their experts
    d          if n ranks share each expert (--parallel.etp n), for the divisors d of n: tokens as well,
               and groups of d ranks gather their rows and divide the experts' width

Results and gradients are equal up to rounding. `LayerCost` estimates which way is cheapest.

next: moe/exchange/gathered_weights.py, moe/exchange/expert_tensor.py
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from tmoe.config.check import divisors
from tmoe.config.model import MoEConfig
from tmoe.moe.exchange.dispatch import Dispatcher, LocalDispatcher, SymmDispatcher
from tmoe.moe.exchange.expert_tensor import ExpertTensorDispatcher
from tmoe.moe.exchange.padded import PaddedDispatcher
from tmoe.moe.router import Routing
from tmoe.parallel import collectives
from tmoe.parallel.mesh import Mesh


class WeightsDispatcher(Dispatcher):
    """r = 0: the group's experts are gathered for the op, so that `inner` has all of them on this rank."""

    def __init__(self, inner: Dispatcher, group: dist.ProcessGroup):
        self.inner = inner
        self.ranks = group.size()
        self.group = collectives.name_of(group)

    def __call__(self, x_TD: Tensor, routing: Routing, experts: Any) -> Tensor:
        return self.inner(x_TD, routing, experts.gathered(self.group))


def ways(by_tokens: Dispatcher, cfg: MoEConfig, mesh: Mesh, gathers: bool) -> dict[str, Dispatcher]:
    """The dispatcher of each distinct way, by str(r). by_tokens: the dispatcher of r = 1.

    gathers: whether the weights of these experts can be gathered, which r = 0 needs.
    """
    dispatchers = {"1": by_tokens}
    if mesh.axes.ep > 1 and gathers:
        local = PaddedDispatcher(cfg.experts) if cfg.pad else LocalDispatcher()
        dispatchers["0"] = WeightsDispatcher(local, mesh.ep.get_group())
    for d in divisors(mesh.axes.etp)[1:]:
        group = mesh.groups["etp" if d == mesh.axes.etp else f"etp {d}"]
        dispatchers[str(d)] = ExpertTensorDispatcher(by_tokens, group)
    return dispatchers


# Cost of a way ----------------------------------------------------------------------------------------------


class Machine(NamedTuple):
    """Seconds for one unit of each of `Terms`, in the same order."""

    byte: float  # per byte that a rank sends to its group
    start: float
    wait: float
    memory: float
    product: float


# All assumptions of `LayerCost` about a machine. They are guesses from exchanges that were measured on H200
# (NCCL's all-to-all, 160 to 285 GB/s a rank) and from data sheets. `python -m benchmarks.adaptive` measures a
# machine and prints a line for this table.
MACHINES = dict(
    nvlink=Machine(1 / 250e9, 25e-6, 60e-6, 1 / 2.5e12, 1 / 500e12),
    network=Machine(1 / 40e9, 40e-6, 90e-6, 1 / 2.5e12, 1 / 500e12),
    gloo=Machine(1 / 1e9, 200e-6, 50e-6, 1 / 10e9, 1 / 50e9),
)


class Terms(NamedTuple):
    """The work of a rank in one call of a layer, by kind of cost."""

    sent: float  # bytes to the group
    starts: float  # collectives
    waits: float  # times that the host waits for counts
    memory: float  # bytes of experts and their gradients that are read or written
    products: float  # multiplications and additions


@dataclass(frozen=True)
class LayerCost:
    """Estimated seconds of a layer's experts and of the exchange for them, by r, if experts are evenly used.

    With n = ep, T tokens on each rank, b bytes an element, and experts of W = 3 D F b bytes (2 D F b
    and 4 T K D F without a gate):

        rows sent      T (n-1) h,  h = 1 - (1 - 1/n)^K: the chance that a rank has one of a token's experts
        rows received  T n h

        r = 0   sent     E (n-1)/n W in forward; in backward again, and once more for gradients
                memory   E W each time, written and read; and the op's own reads of E W
        r = d   sent     2 D b (rows sent + (d-1) rows received), there and back; in backward again
                memory   the op's own reads of E/n W; for d > 1 slices of 1/d of them are copied
        products         6 T K D F, and twice as many more in backward, for all r

    The op reads weights once in forward and twice in backward. In addition, each collective has a start cost,
    and where counts are exchanged the host waits for them. The estimate assumes an even routing. With a
    skewed routing r = 0 is better than this estimate, because no rank then waits for the fullest rank.
    """

    machine: Machine
    experts: int
    top_k: int
    dim: int
    ffn_dim: int
    ep: int
    element: int  # bytes
    waits: bool  # whether the exchange of tokens waits for counts
    backward: bool
    matrices: int = 3  # of an expert, D F elements each; without a gate 2

    def terms(self, r: int, tokens: int) -> Terms:
        n, row = self.ep, self.dim * self.element
        weights = self.experts * self.matrices * self.ffn_dim * row
        passes = 3 if self.backward else 1
        products = 2 * self.matrices * tokens * self.top_k * self.dim * self.ffn_dim * passes
        if r == 0:
            sent = passes * (n - 1) / n * weights
            return Terms(sent, 2 * passes, 0, (2 * passes + passes) * weights, products)

        hit = 1 - (1 - 1 / n) ** self.top_k
        rows = (n - 1) * tokens * hit + (r - 1) * tokens * n * hit
        ways = 4 if self.backward else 2
        exchanges = (n > 1) + (r > 1)  # over ep, and over the ranks that divide an expert
        # besides rows: the weights of pairs, their gradients, ids and counts
        starts = exchanges * (ways + (4 if self.backward else 3))
        slices = weights / n / r
        memory = passes * (slices + (2 * slices if r > 1 else 0))
        return Terms(ways * rows * row, starts, exchanges * self.waits, memory, products)

    def seconds(self, r: int, tokens: int) -> float:
        return sum(map(operator.mul, self.terms(r, tokens), self.machine))

    def cheapest(self, ways: Sequence[int], tokens: int) -> int:
        """The r of these `ways` with the least seconds; among equal ones, the first."""
        return min(ways, key=lambda r: self.seconds(r, tokens))


def cost_of(by_tokens: Dispatcher, cfg: MoEConfig, dim: int, mesh: Mesh) -> LayerCost:
    """The LayerCost of a layer on this mesh, in bf16 and training; by_tokens: the dispatcher of r = 1."""
    group = mesh.ep.get_group()
    link = "gloo"
    if dist.get_backend(group) != "gloo":
        members = dist.get_process_group_ranks(group)
        spans = mesh.nodes and len({mesh.nodes[rank] for rank in members}) > 1
        link = "network" if spans else "nvlink"
    waits = mesh.axes.ep > 1 and not isinstance(by_tokens, SymmDispatcher | PaddedDispatcher)
    return LayerCost(
        MACHINES[link],
        cfg.experts,
        cfg.top_k,
        dim,
        cfg.ffn_dim,
        mesh.axes.ep,
        element=2,
        waits=waits,
        backward=True,
        matrices=cfg.halves + 1,
    )
