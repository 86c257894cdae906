"""The (dp, ep) device mesh, and which part of a tensor a rank holds.

Ranks of a 2 x 4 world, ep fastest, so that an expert group is neighbours on one node:

            ep=0  ep=1  ep=2  ep=3
    dp=0      0     1     2     3      each row exchanges tokens (all-to-all)
    dp=1      4     5     6     7      each column shares the same experts, sharded by FSDP2

Dense parameters are sharded over all eight; every rank reads its own batch.

next: parallel/collectives.py
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

# what DCP itself plans its shards with; not in the public namespace of torch 2.11 or 2.13
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Mesh:
    """`grid`: the 2D (dp, ep) mesh of the experts; `world`: the same ranks in one row, for everything dense."""

    grid: DeviceMesh
    world: DeviceMesh

    @property
    def dp(self) -> DeviceMesh:
        return self.grid["dp"]

    @property
    def ep(self) -> DeviceMesh:
        return self.grid["ep"]


def build_mesh(dp: int | None = None, ep: int = 1, tp: int = 1, cp: int = 1, pp: int = 1) -> Mesh:
    """Mesh over the default process group (made for a single process when there is none).

    dp None takes what the other axes leave of the world. Raises ValueError, before any collective, when the axes do not
    multiply to the world, naming the flag to change. tp, cp and pp are axes to come: only 1 is valid today.
    """
    if not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    dp = mesh_shape(dist.get_world_size(), dp, ep, tp, cp, pp)[0]
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    grid = init_device_mesh(device, (dp, ep), mesh_dim_names=("dp", "ep"))
    return Mesh(grid, init_device_mesh(device, (dp * ep,), mesh_dim_names=("world",)))


def mesh_shape(world: int, dp: int | None, ep: int, tp: int = 1, cp: int = 1, pp: int = 1) -> tuple[int, int]:
    """(dp, ep) for a world, or ValueError."""
    for name, size in dict(tp=tp, cp=cp, pp=pp).items():
        if size != 1:
            raise ValueError(f"{name}={size}: this axis is not built yet; valid: 1")
    for name, size in dict(dp=dp, ep=ep).items():
        if size is not None and size < 1:
            raise ValueError(f"--parallel.{name}={size}: must be at least 1")
    if dp is None:
        if world % ep:
            valid = [d for d in range(1, world + 1) if world % d == 0]
            raise ValueError(f"--parallel.ep={ep}: must divide the world of {world} processes; valid: {valid}")
        dp = world // ep
    if dp * ep != world:
        hint = f"--parallel.dp {world // ep}" if world % ep == 0 else f"torchrun with {dp * ep} processes"
        raise ValueError(
            f"--parallel.dp={dp} x --parallel.ep={ep} = {dp * ep} is not the world of {world} processes; use {hint}"
        )
    return dp, ep


def local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The slices of the full tensor that this rank holds: tensor.full_tensor()[local_slices(tensor)] is its local shard."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
