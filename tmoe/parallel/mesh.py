"""The (dp, ep) device mesh, and which part of a tensor a rank holds.

Ranks of a 2 x 4 world, ep fastest, so that an expert group is neighbours on one node:

            ep=0  ep=1  ep=2  ep=3
    dp=0      0     1     2     3      each row exchanges tokens (all-to-all)
    dp=1      4     5     6     7      each column shares the same experts, of which each rank trains its part

Dense parameters are sharded over all eight; every rank reads its own batch. torchrun numbers a node's ranks in a row, so
with ep dividing every node's processes the exchange of tokens stays inside nodes and dp alone crosses them; a layout that
would take an expert group across nodes is refused unless it is asked for.

next: parallel/collectives.py
"""

import functools
import itertools
import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tmoe.parallel.launcher import join, launcher_world
from tmoe.stack import find, lacks, note, take

_get_default_store = take(
    "torch.distributed.distributed_c10d._get_default_store",
    "ranks meet in a store of their own beside the group's",
)
# FSDP2's hooks are Python: 3.6 ms a unit and step on a slow host, a quarter of moe-pilot-14b's step when each of its 45 blocks was a
# unit. Two blocks a unit took as long on a fast host, where nobody waits for Python
# (docs/decisions/005-units-of-blocks.md).
UNIT, UNIT_BLOCKS = 2**26, 4


@dataclass(frozen=True)
class Mesh:
    """`grid`: the 2D (dp, ep) mesh of the experts; `world`: the same ranks in one row, for everything dense."""

    grid: DeviceMesh
    world: DeviceMesh
    nodes: tuple[str, ...] = ()  # of each rank; empty where no expert group could span them

    @property
    def dp(self) -> DeviceMesh:
        return self.grid["dp"]

    @property
    def ep(self) -> DeviceMesh:
        return self.grid["ep"]


_meetings = (
    itertools.count()
)  # a key in the store for each mesh of this process group: ranks build them in one order


def build_mesh(
    dp: int | None = None,
    ep: int = 1,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    *,
    ep_across_nodes: bool = False,
) -> Mesh:
    """Mesh over the default process group. Where there is none, it joins the world that torchrun, mpiexec or srun announces, and takes
    this rank's GPU; without a launcher the world is this process.

    dp None takes what the other axes leave of the world. Raises ValueError, on every rank and before any collective, when
    the axes do not multiply to the world, or when an expert group would span nodes (the launcher's, else by host and local rank) without
    ep_across_nodes, naming the flag to change; and where launcher.py cannot join, with what to type. tp, cp and pp are axes to come: only 1 is valid today.
    """
    if missing := lacks():
        raise RuntimeError(missing)
    if not dist.is_initialized():
        join()
    dp = mesh_shape(dist.get_world_size(), dp, ep, tp, cp, pp)[0]
    nodes = nodes_of_ranks() if ep > 1 and dist.get_backend() != "fake" else []
    if nodes and not ep_across_nodes:
        require_ep_inside_nodes(ep, nodes)
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    grid = init_device_mesh(device, (dp, ep), mesh_dim_names=("dp", "ep"))
    if dist.get_backend() != "fake":
        for group in grid.get_all_groups():
            set_timeout(patience(), group)
    return Mesh(grid, init_device_mesh(device, (dp * ep,), mesh_dim_names=("world",)), tuple(nodes))


def patience() -> timedelta:
    """How long a collective of the default group waits for its peers. Every other group is to wait as long: torch would give it
    half an hour on gloo, and a rank that stopped would hold its subgroup for that time after the others had ended."""
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    devices = getattr(world, "_device_types", None)
    backend = world._get_backend(devices[0]) if devices and hasattr(world, "_get_backend") else None
    usual = find("torch.distributed.constants.default_pg_timeout") or timedelta(minutes=30)
    return getattr(getattr(backend, "options", None), "_timeout", usual)


def set_timeout(limit: timedelta, group: dist.ProcessGroup) -> None:
    """How long the group's collectives wait, by torch 2.14's public name or the private one before it."""
    change = getattr(dist, "set_timeout", None) or find("torch.distributed.distributed_c10d._set_pg_timeout")
    if change is None:
        note(
            f"torch {torch.__version__} cannot change a group's timeout: subgroups wait as long as torch lets them"
        )
    else:
        change(limit, group)


def default_store() -> dist.Store:
    """The store where the default group met. Where torch does not give it away, one for all ranks: the first call
    is then a collective of them."""
    return _get_default_store() if _get_default_store else _own_store(dist.group.WORLD)


@functools.cache
def _own_store(group: dist.ProcessGroup) -> dist.Store:
    if group.size() == 1:
        return dist.HashStore()
    store: dist.Store | None = None
    address: list[Any] = [None]
    if group.rank() == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        mine = dist.TCPStore(
            host, 0, group.size(), is_master=True, timeout=patience(), wait_for_workers=False
        )
        store = mine
        address = [(host, mine.port)]
    dist.broadcast_object_list(address, group=group)
    host, port = address[0]
    return store or dist.TCPStore(host, port, group.size(), is_master=False, timeout=patience())


def mesh_shape(world: int, dp: int | None, ep: int, tp: int = 1, cp: int = 1, pp: int = 1) -> tuple[int, int]:
    """(dp, ep) for a world, or ValueError."""
    for name, size in dict(tp=tp, cp=cp, pp=pp).items():
        if size != 1:
            raise ValueError(f"{name}={size}: this axis is not built yet; valid: 1")
    for name, size in dict(dp=1 if dp is None else dp, ep=ep).items():
        if type(size) is not int or size < 1:
            raise ValueError(f"--parallel.{name}={size!r}: must be a whole number from 1 on")
    if dp is None:
        if world % ep:
            valid = [d for d in range(1, world + 1) if world % d == 0]
            raise ValueError(
                f"--parallel.ep={ep}: must divide the world of {world} processes; valid: {valid}"
            )
        dp = world // ep
    if dp * ep != world:
        hint = f"--parallel.dp {world // ep}" if world % ep == 0 else f"torchrun with {dp * ep} processes"
        raise ValueError(
            f"--parallel.dp={dp} x --parallel.ep={ep} = {dp * ep} is not the world of {world} processes; use {hint}"
        )
    return dp, ep


def nodes_of_ranks() -> list[str]:
    """The node of each rank, as the launcher numbers them. Where it sets local ranks at most, ranks of one host whose local ranks go on
    where they began are a node.

    No rank knows what the others' nodes hold, which may differ; they tell each other through the process group's store.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"tmoe nodes {next(_meetings)}", default_store())
    here = launcher_world()
    first = 0 if here.local_rank is None else rank - here.local_rank
    store.set(str(rank), here.node or f"{socket.gethostname()} from rank {first}")
    if rank == 0:
        store.set(
            "all", json.dumps([node.decode() for node in store.multi_get([str(r) for r in range(world)])])
        )
    return json.loads(store.get("all"))


def require_ep_inside_nodes(ep: int, nodes: Sequence[str]) -> None:
    """ValueError unless each ep neighbouring ranks share a node; nodes: the node of each rank."""

    def spanning(ep: int) -> list[Sequence[str]]:
        groups = [nodes[i : i + ep] for i in range(0, len(nodes), ep)]
        return [group for group in groups if len(set(group)) > 1]

    if groups := spanning(ep):
        sizes = sorted(set(Counter(nodes).values()))
        valid = [e for e in range(1, len(nodes) + 1) if len(nodes) % e == 0 and not spanning(e)]
        raise ValueError(
            f"--parallel.ep={ep}: {len(groups)} of {len(nodes) // ep} expert groups would span nodes (of {sizes} processes); "
            f"valid: {valid}, or --parallel.ep-across-nodes to exchange tokens over the slower network"
        )


def require_a_group_per_node(world: int, ep: int) -> None:
    """ValueError if there are more nodes than expert groups, so that one must span two: all that is certain, on every rank
    alike, before a process group exists. `build_mesh` finds the other cases."""
    nodes = launcher_world().nodes or 1
    if world // ep < nodes:
        raise ValueError(
            f"--parallel.ep={ep}: {world // ep} expert groups on {nodes} nodes would span nodes; valid: what divides "
            f"the processes of every node ({world // nodes} on average), or --parallel.ep-across-nodes to exchange tokens "
            "over the slower network"
        )


def shard_dim(shapes: Sequence[Sequence[int]], dp: int) -> int:
    """Dimension along which the dp ranks cut a rank's expert parameters of these shapes: the experts, or 2F and D where dp divides
    those only. FSDP2 cuts dimension 0 unevenly, some ranks then hold less or nothing, and no other dimension."""
    even = [all(len(shape) > dim and shape[dim] % dp == 0 for shape in shapes) for dim in (0, 1)]
    return 1 if even == [False, True] else 0


def keeps_whole(dp: int, experts: Sequence[int], size: float, most: float) -> bool:
    """Whether dp ranks that share experts, so many of each layer and `size` bytes in all, keep them whole: up to `most` GiB."""
    return dp > 1 and 0 < size <= most * 2**30 and all(n % dp == 0 for n in experts)


def units(sizes: Sequence[int]) -> list[list[int]]:
    """Which neighbouring blocks FSDP2 gathers together, given the bytes of each: the fewest that reach UNIT, at most UNIT_BLOCKS."""
    found: list[list[int]] = []
    for i in range(len(sizes)):
        last = found[-1] if found else []
        if not last or len(last) == UNIT_BLOCKS or sum(sizes[j] for j in last) >= UNIT:
            found.append([i])
        else:
            last.append(i)
    return found


def local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The slices of the full tensor that this rank holds: tensor.full_tensor()[local_slices(tensor)] is its local shard."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    (held,) = tensor.__create_chunk_list__()  # what DCP plans its shards with
    return tuple(slice(o, o + n) for o, n in zip(held.offsets, held.sizes, strict=True))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
