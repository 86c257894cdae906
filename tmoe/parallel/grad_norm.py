"""Clips gradients to a global norm that does not depend on the layout, over any mixture of meshes.

Every element of the model has one owner rank in the default process group. The owner adds the element to its
sum of p-th powers, and one all-reduce of that scalar follows. Placements alone determine the owners:

    axis of the mesh that shards a gradient         each rank owns its shard
    axis that replicates it                         coordinate 0 owns it
    axis of the root mesh that the mesh lacks       a replica as well, coordinate 0;
                                                    but "pp" separates different tensors
    plain tensor                                    replicated on all ranks, rank 0 owns it

The collective depends on no gradient and no parameter, so ranks without gradients, or without tensors, take
part as well. The alternative, a reduction of each mesh's sum over that mesh alone, would need more
collectives. Ranks outside the mesh would have another norm, and clip parameters that they share with its
ranks by another factor.

`torch.nn.utils.clip_grad_norm_` raises an error if DTensors are on two meshes (seen on 2.13: "All operands
in aten.stack.default must have the same mesh").

next: optim/adamw.py
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from tmoe.base.private_torch import need


@torch.no_grad()
def clip_grad_norm_(
    params: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales all gradients in place by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils does.

    A collective: every rank of the default process group (if there is one) must call it, whichever parameters
    it holds. A gradient may be None on any rank. A gradient with a Partial placement is summed first, by a
    collective over its mesh. The host does not wait for the device, unless error_if_nonfinite is set. With
    max_norm=inf gradients are not changed.

    params: parameters, plain or DTensor with any placements, on any meshes.
    max_norm: largest norm that is not scaled down.
    norm_type: p > 0 or inf; the string "inf" is accepted as well. (torch also accepts p <= 0; its p = 0
        counts tensors, not elements.)
    error_if_nonfinite: raise RuntimeError on every rank, before scaling, if the norm is NaN or inf.
    foreach: False launches one kernel a tensor; None and True launch one kernel for many tensors.
    Returns the norm before clipping, as a single process that holds all gradients would compute it: a plain
    0-dim tensor, equal on all ranks, fp32 (fp64 if a gradient on this rank is fp64). NaN or inf on any rank,
    even in a diverged copy of a replicated gradient, makes the norm non-finite on all ranks. (torch's own
    function adds up the norms of bf16 gradients in bf16.)
    Raises ValueError if an argument is not a number or not a tensor, if norm_type is not positive, and if
    max_norm is below 0 or NaN: a negative max_norm would reverse the sign of all gradients.
    """
    try:
        max_norm = float(max_norm)
        norm_type = float(norm_type)
    except (TypeError, ValueError):
        raise ValueError(f"max_norm={max_norm!r}, norm_type={norm_type!r}: must be numbers") from None
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: must be above 0, or inf")
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}: must be 0 or above, or inf")
    params = [params] if isinstance(params, Tensor) else list(params)
    if others := [p for p in params if not isinstance(p, Tensor)]:
        raise ValueError(
            f"params: got {type(others[0]).__name__}, valid are tensors, as model.parameters() gives them"
        )
    grads = [p.grad for p in params if p.grad is not None]
    total = _total_norm(grads, norm_type, foreach, _device(params))
    total = total.to(params[0].device) if params else total
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the gradients' total norm of order {norm_type} is {total.item()}, so it cannot be clipped"
        )
    if max_norm != math.inf:
        _scale([_local(g) for g in grads], torch.clamp(max_norm / (total + 1e-6), max=1.0), foreach)
    return total


def _device(params: list[Tensor]) -> torch.device:
    """The device on which the scalars are reduced.

    The process group determines it, not this rank's tensors; otherwise ranks could use different backends.
    """
    if dist.is_initialized():
        nccl = "nccl" in dist.get_backend_config()
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    return params[0].device if params else torch.device("cpu")


def _total_norm(grads: list[Tensor], p: float, foreach: bool | None, device: torch.device) -> Tensor:
    """The norm of order p over the gradients of all ranks, a 0-dim tensor on `device`. A collective."""
    owned: list[Tensor] = []
    copies: list[Tensor] = []
    owners: dict[Any, bool] = {}
    for grad in grads:
        key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        if key not in owners:
            owners[key] = _owns(*key) if key else not dist.is_initialized() or dist.get_rank() == 0
        (owned if owners[key] else copies).append(_summed(grad))
    out = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    return _reduce(_norms(owned, p, foreach, device), _norms(copies, p, foreach, device), p).to(out)


def _owns(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> bool:
    """Whether this rank adds its part to the sum; on sharded axes every rank does."""
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return False
    # Not `not is_shard()`: on 2.13 it is False for FSDP2's _StridedShard, the stored placement of experts.
    copied = [placement.is_replicate() or placement.is_partial() for placement in placements]
    first = not any(coordinate and copy for coordinate, copy in zip(coordinates, copied, strict=True))
    # The root is the mesh itself, unless the mesh is a slice; a mesh of the whole world never is a slice.
    # torch has no public name for the root.
    whole = not hasattr(mesh, "_get_root_mesh") and mesh.size() == dist.get_world_size()
    root = (
        mesh if whole else need(mesh, "_get_root_mesh", "clip_grad_norm_ of parameters on a part of a mesh")()
    )
    grid = root.mesh
    if "pp" in (root.mesh_dim_names or ()):
        axis = root.mesh_dim_names.index("pp")
        grid = grid.select(axis, root.get_coordinate()[axis])  # type: ignore[index]
    return first and bool((mesh.mesh == grid.flatten()[0]).any())


def _summed(grad: Tensor) -> Tensor:
    """This rank's part of a gradient, with Partial placements summed."""
    if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
        whole = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
        grad = grad.redistribute(placements=whole)
    return _local(grad)


def _local(grad: Tensor) -> Tensor:
    """The part of a gradient that is stored on this rank."""
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _norms(tensors: list[Tensor], p: float, foreach: bool | None, device: torch.device) -> Tensor:
    """The norm of each tensor that is not empty: fp64 [n] on `device`.

    A GPU adds in fp32, because its reductions are trees. A CPU adds sequentially, and therefore in fp64: the
    fp32 norm of 4M normal numbers was off by 7.5e-5 for p=2 and 1.1e-3 for p=1, which is more than layouts
    may differ by. The fp64 sum costs 1 ns an element instead of 0.15 ns.
    """
    norms = []
    for (kind, dtype), group in _by_device_and_dtype(tensors).items():
        wide = torch.float64 if kind.type == "cpu" or dtype == torch.float64 else torch.float32
        if foreach is False:
            each = [torch.linalg.vector_norm(t, p, dtype=wide) for t in group]
        else:
            each = torch._foreach_norm(group, p, dtype=wide)
        norms.append(torch.stack(each).to(device, torch.float64, non_blocking=True))
    return torch.cat(norms) if norms else torch.zeros(0, dtype=torch.float64, device=device)


def _by_device_and_dtype(tensors: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """The non-empty tensors, grouped so that one foreach kernel handles each group."""
    groups = defaultdict(list)
    for t in tensors:
        if t.numel():
            groups[t.device, t.dtype].append(t)
    return groups


def _reduce(owned: Tensor, copies: Tensor, p: float) -> Tensor:
    """The norm over all ranks' norms, computed by the only collective.

    Copies do not contribute to the sum, but a NaN or inf in a copy reaches every rank.
    """
    if p == math.inf:
        norms = torch.cat([owned, copies, owned.new_zeros(1)])
        # backends lose NaN in a maximum, so a separate flag carries it
        pair = torch.stack(
            [norms.nan_to_num(nan=0.0, posinf=math.inf).max(), norms.isnan().any().to(norms.dtype)]
        )
        _all_reduce(pair, dist.ReduceOp.MAX)
        return torch.where(pair[1] > 0, math.nan, pair[0])
    copied = copies.pow(p).sum()
    power = owned.pow(p).sum() + torch.where(copied.isfinite(), 0.0, copied)
    _all_reduce(power, dist.ReduceOp.SUM)
    return power.pow(1.0 / p)


def _all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
    """Reduces in place over the default process group, if there is one."""
    if dist.is_initialized():
        dist.all_reduce(x, op)


def _scale(tensors: list[Tensor], factor: Tensor, foreach: bool | None) -> None:
    """Multiplies all tensors by the 0-dim `factor`, in place."""
    for (device, _), group in _by_device_and_dtype(tensors).items():
        on_device = factor.to(device, non_blocking=True)
        if foreach is False:
            for t in group:
                t.mul_(on_device)
        else:
            torch._foreach_mul_(group, on_device)
