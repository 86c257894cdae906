"""The device meshes of a run, and which part of a tensor a rank holds.

An example: sixteen ranks with pp 2, dp 2, ep 4, cp 2, tp 2. The experts' axes and attention's axes divide the
same ranks in two ways (folding). ep and tp vary fastest, so that their groups are neighbours on one node:

    rank            0    1    2    3    4    5    6    7       8..15: stage 1, the same
    experts     dp  0    0    0    0    1    1    1    1       same experts, each rank trains its part of them
                ep  0    1    2    3    0    1    2    3       all-to-all inside {0..3} and {4..7}
    attention reader 0   0    0    0    1    1    1    1       each reader reads other sequences
                cp  0    0    1    1    0    0    1    1       a part of each sequence
                tp  0    1    0    1    0    1    0    1       a part of cp's part; in attention, heads

Stored tensors are sharded over dp and ep only. Experts are sharded over ep and then over the ranks that share
them; all other tensors over the ranks of a stage. So a step folder does not depend on tp, cp and etp.

torchrun numbers the ranks of a node consecutively. So if ep divides the number of processes of every node,
tokens are exchanged inside nodes. A layout with an expert group across nodes is refused unless the caller
allows it; a tp group never spans nodes.

next: parallel/agree.py
"""

import atexit
import functools
import itertools
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tmoe.base.private_torch import find, find_or_note, lacks, note
from tmoe.config.axes import Axes, RankPlace
from tmoe.config.check import ConfigError, Setting, divisors
from tmoe.parallel.launcher import join, launcher_world

_get_default_store = find_or_note(
    "torch.distributed.distributed_c10d._get_default_store",
    "ranks open a store of tmoe's in addition to the group's",
)
# Size of a unit: the blocks that FSDP2 gathers at once. FSDP2's hooks are Python and took 3.6 ms a unit and
# step on a slow host, a quarter of moe-pilot-14b's step when each of its 45 blocks was a unit. On a fast host
# nothing waits for Python, and units of two blocks took as long (docs/decisions/005-units-of-blocks.md).
UNIT = 2**26  # bytes at which a unit is complete
UNIT_BLOCKS = 4  # most blocks in a unit


@dataclass(frozen=True)
class Mesh:
    """The meshes over which a model is sharded, each made of ranks of this rank's pipeline stage."""

    axes: Axes
    grid: DeviceMesh
    """the 2D (dp, ep) mesh of the experts in this replica; its axis dp includes etp"""
    world: DeviceMesh
    """the stage's ranks in one row"""
    shard: DeviceMesh
    """the mesh over which FSDP2 shards dense parameters: `world`, or (replicate, shard)"""
    sharers: DeviceMesh
    """the mesh over which FSDP2 shards experts: `dp`, or (replicate, dp)"""
    groups: dict[str, dist.ProcessGroup]
    """groups of the axes that are larger than 1: tp, cp, etp, pp, and parts (the cp x tp ranks of one
    sequence); "etp 2" and so on: groups of 2 neighbouring ranks of etp, one for each other divisor of etp"""
    nodes: tuple[str, ...] = ()
    """the node of each rank of the default group; empty where no group could span nodes"""

    @property
    def dp(self) -> DeviceMesh:
        """The ranks that share this rank's experts."""
        return self.grid["dp"]

    @property
    def ep(self) -> DeviceMesh:
        """This rank's expert group, which exchanges tokens."""
        return self.grid["ep"]

    @property
    def place(self) -> RankPlace:
        """This rank's coordinate on every axis."""
        return self.axes.place(dist.get_rank())


# A key in the store for each mesh of this process group. All ranks build meshes in the same order.
_meetings = itertools.count()


def build_mesh(
    dp: int | None = None,
    ep: int = 1,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    *,
    replicate: int = 1,
    etp: int = 1,
    ep_across_nodes: bool = False,
) -> Mesh:
    """The mesh of the default process group; the axes are those of `tmoe.config.axes.Axes`.

    If there is no process group, it first joins the world that torchrun, mpiexec or srun announces, and
    selects this rank's GPU. Without a launcher the world is this process alone. With dp=None, dp is the size
    of the world divided by the other axes.

    Raises ValueError, on every rank and before any collective, if the product of the axes is not the size of
    the world, if tp and cp do not fit into a stage, or if a tp or etp group would span nodes; also if an
    expert group would span nodes without ep_across_nodes. (Nodes are the launcher's, else they follow from
    host and local rank.) The message names the flag to change. ValueError is also raised if launcher.py
    cannot join the world; that message says what to type.
    """
    if missing := lacks():
        raise RuntimeError(missing)
    if not dist.is_initialized():
        join()
    atexit.unregister(let_threads_finish)  # registered by an earlier mesh in this process
    atexit.register(let_threads_finish)
    others = dict(tp=tp, cp=cp, pp=pp, replicate=replicate, etp=etp)
    axes = Axes.over(dist.get_world_size(), dp=dp, ep=ep, **others)
    nodes: list[str] = []
    if axes.ep * axes.etp * axes.tp > 1 and dist.get_backend() != "fake":
        nodes = nodes_of_ranks()
        require_inside_nodes(axes, nodes, ep_across_nodes)
    return _meshes(axes, tuple(nodes))


def _meshes(axes: Axes, nodes: tuple[str, ...]) -> Mesh:
    """Makes the meshes; every rank makes all of them, in the same order."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"

    def view(**sizes: int) -> DeviceMesh:
        """A mesh of all ranks with these axes, in this order."""
        mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for group in mesh.get_all_groups():
            set_timeout(patience(), group)
        return mesh

    # Axes that only some layouts have are the first ones. The gradient norm looks up "pp" in the root mesh.
    stages = dict(pp=axes.pp) if axes.pp > 1 else {}
    copies = dict(replicate=axes.replicate) if axes.replicate > 1 else {}
    grid = view(**stages, **copies, dp=axes.sharers, ep=axes.ep)
    world = view(**stages, world=axes.stage)
    shard = view(**stages, **copies, shard=axes.shard) if copies else world
    groups = {}
    if axes.parts > 1:
        parts = view(row=axes.world // axes.parts, parts=axes.parts)
        groups["parts"] = parts["parts"].get_group()
        attention = view(row=axes.world // axes.parts, cp=axes.cp, tp=axes.tp)
        groups |= {name: attention[name].get_group() for name in ("cp", "tp")}
    if axes.etp > 1:
        groups["etp"] = view(row=axes.world // (axes.etp * axes.ep), etp=axes.etp, ep=axes.ep)[
            "etp"
        ].get_group()
        # smaller groups of neighbours, for layers whose calls choose how many ranks divide an expert
        for d in divisors(axes.etp)[1:-1]:
            parted = view(row=axes.world // (d * axes.ep), etp=d, ep=axes.ep)
            groups[f"etp {d}"] = parted["etp"].get_group()
    if stages:
        groups["pp"] = grid["pp"].get_group()
    return Mesh(
        axes,
        grid=grid["dp", "ep"] if stages or copies else grid,
        world=world["world"] if stages else world,
        shard=(shard["replicate", "shard"] if stages else shard) if copies else world["world"],
        sharers=grid["replicate", "dp"] if copies else grid["dp"],
        groups=groups,
        nodes=nodes,
    )


def let_threads_finish() -> None:
    """Lets gloo's threads free the tensors of the last collectives before Python ends, for a second at most.

    The threads need the interpreter to free tensors. Python ends a thread that requests the interpreter too
    late, and C++ then ends the process by SIGABRT: it happened in 15 of 46 runs of README's loop on two
    ranks. A thread that frees tensors is running or waiting for a processor; all other threads sleep. The
    threads still exist after the group was destroyed.
    """
    end = time.monotonic() + 1
    while time.monotonic() < end:
        time.sleep(0.02)
        tasks = [
            path for path in Path("/proc/self/task").glob("*/stat") if path.parent.name != str(os.getpid())
        ]
        if not any(_state(path) == "R" for path in tasks):
            return


def _state(stat: Path) -> str:
    """The kernel's state of a thread: "R" if it runs or waits for a processor, "" if it has ended."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def patience() -> timedelta:
    """How long a collective of the default group waits for its peers.

    Every other group gets the same limit. torch's default on gloo is half an hour; if a rank stopped, the
    ranks of its subgroup would wait that long after all other ranks had ended.
    """
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    devices = getattr(world, "_device_types", None)
    backend = world._get_backend(devices[0]) if devices and hasattr(world, "_get_backend") else None
    usual = find("torch.distributed.constants.default_pg_timeout") or timedelta(minutes=30)
    return getattr(getattr(backend, "options", None), "_timeout", usual)


def set_timeout(limit: timedelta, group: dist.ProcessGroup) -> None:
    """Sets how long a group's collectives wait, by torch 2.14's public function or the earlier private one.

    The groups of a dry run have no limit.
    """
    if dist.get_backend(group) == "fake":
        return
    change = getattr(dist, "set_timeout", None) or find("torch.distributed.distributed_c10d._set_pg_timeout")
    if change is None:
        note(f"torch {torch.__version__} cannot change a group's timeout: subgroups keep torch's default")
    else:
        change(limit, group)


def default_store() -> dist.Store:
    """The store through which the default group was formed.

    If torch does not expose that store, the result is a new store of all ranks, and the first call is a
    collective of all ranks.
    """
    return _get_default_store() if _get_default_store else _own_store(dist.group.WORLD)


@functools.cache
def _own_store(group: dist.ProcessGroup) -> dist.Store:
    if group.size() == 1:
        return dist.HashStore()
    store: dist.Store | None = None
    address: list[Any] = [None]
    if group.rank() == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        own_store = dist.TCPStore(
            host, 0, group.size(), is_master=True, timeout=patience(), wait_for_workers=False
        )
        store = own_store
        address = [(host, own_store.port)]
    dist.broadcast_object_list(address, group=group)
    host, port = address[0]
    return store or dist.TCPStore(host, port, group.size(), is_master=False, timeout=patience())


def nodes_of_ranks() -> list[str]:
    """The name of each rank's node, from the launcher's numbers of nodes.

    If the launcher does not number nodes, a node is a host together with the rank of local rank 0, so that
    consecutive ranks of one host share a node. Nodes may have different numbers of ranks, and a rank knows
    only its own node, so the ranks exchange the names through the process group's store.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"tmoe nodes {next(_meetings)}", default_store())
    own_world = launcher_world()
    first = 0 if own_world.local_rank is None else rank - own_world.local_rank
    store.set(str(rank), own_world.node or f"{socket.gethostname()} from rank {first}")
    if rank == 0:
        store.set(
            "all", json.dumps([node.decode() for node in store.multi_get([str(r) for r in range(world)])])
        )
    return json.loads(store.get("all"))


def planned_nodes(world: int, node: int) -> list[str]:
    """The node of each rank of a plan: `node` consecutive ranks share a node; the last may have fewer."""
    return [str(rank // node) for rank in range(world)]


ACROSS = f"{Setting('parallel.ep_across_nodes')} to exchange tokens over the slower network"


def require_inside_nodes(axes: Axes, nodes: Sequence[str], ep_across_nodes: bool) -> None:
    """Raises ValueError unless all ranks of each tp, etp and ep group share a node.

    nodes: the node of each rank.
    ep_across_nodes: expert groups may span nodes.
    """
    sizes = sorted(set(Counter(nodes).values()))

    def spanning(size: int) -> list[Sequence[str]]:
        groups = [nodes[i : i + size] for i in range(0, len(nodes), size)]
        return [group for group in groups if len(set(group)) > 1]

    def fitting() -> list[int]:
        return [n for n in range(1, len(nodes) + 1) if len(nodes) % n == 0 and not spanning(n)]

    for name, size in (("tp", axes.tp), ("etp", axes.etp * axes.ep if axes.etp > 1 else 1)):
        if groups := spanning(size):
            product = "" if name == "tp" else f" x {Setting('parallel.ep', axes.ep)} = {size}"
            wrong = f"{len(groups)} of {len(nodes) // size} groups would span nodes (of {sizes} processes)"
            raise ConfigError.of(f"parallel.{name}", f"{getattr(axes, name)}{product}", wrong, fitting())
    ep = axes.ep
    if not ep_across_nodes and (groups := spanning(ep)):
        wrong = f"{len(groups)} of {len(nodes) // ep} expert groups would span nodes (of {sizes} processes)"
        raise ConfigError.of("parallel.ep", ep, wrong, f"{fitting()}, or {ACROSS}")


def require_a_group_per_node(axes: Axes) -> None:
    """Raises ValueError if there are more nodes than expert groups, so that a group must span two nodes.

    Before a process group exists, no other case is known on every rank. `build_mesh` checks the other cases.
    """
    nodes = launcher_world().nodes or 1
    world, ep = axes.world, axes.ep
    if world // ep < nodes:
        wrong = f"{world // ep} expert groups on {nodes} nodes would span nodes"
        valid = f"what divides the processes of every node ({world // nodes} on average), or {ACROSS}"
        raise ConfigError.of("parallel.ep", ep, wrong, valid)


def shard_dim(shapes: Sequence[Sequence[int]], dp: int, whole: bool = False) -> int:
    """Dimension along which the dp ranks shard a rank's expert parameters of these shapes.

    It is dimension 0, the experts, or dimension 1 (2F and D) if dp divides only that. FSDP2 can shard
    dimension 0 unevenly, so that some ranks hold less or nothing, but no other dimension.

    whole: each expert's matrices must be whole on a rank, because Muon trains them: dimension 0.
    """
    if whole:
        return 0
    even = [all(len(shape) > dim and shape[dim] % dp == 0 for shape in shapes) for dim in (0, 1)]
    return 1 if even == [False, True] else 0


def keeps_whole(dp: int, experts: Sequence[int], size: float, most: float) -> bool:
    """Whether dp ranks that share experts keep whole copies of them.

    experts: a rank's number of experts in each layer.
    size: bytes of all these experts.
    most: limit in GiB up to which experts are kept whole.
    """
    return dp > 1 and 0 < size <= most * 2**30 and all(n % dp == 0 for n in experts)


def units(sizes: Sequence[int]) -> list[list[int]]:
    """Groups neighbouring blocks into the units that FSDP2 gathers at once. sizes: bytes of each block.

    A unit has the fewest blocks that reach UNIT bytes, at most UNIT_BLOCKS. Returns the blocks of each unit.
    """
    groups: list[list[int]] = []
    for i in range(len(sizes)):
        last = groups[-1] if groups else []
        if not last or len(last) == UNIT_BLOCKS or sum(sizes[j] for j in last) >= UNIT:
            groups.append([i])
        else:
            last.append(i)
    return groups


def local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The slices of the full tensor that this rank holds.

    tensor.full_tensor()[local_slices(tensor)] is its local shard.
    """
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # the function by which DCP plans its shards
    return tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds: a DTensor's local shard, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
