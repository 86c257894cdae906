"""How an optimizer's moments are stored: in fp32, in bf16, or in 8 bits with a scale for each block.

AdamW has two of a parameter, Muon one, its momentum.

A moment lies where its parameter lies: a DTensor on the same mesh with the same placements. A block is a part
of a row (the last axis), and no layout cuts a matrix along its last axis, so the codes of a parameter do not
depend on the layout, and a checkpoint of one layout loads into any other. torchao's AdamW8bit cuts blocks
from a rank's part instead, and keeps fp32 where 256 does not divide that part.

next: optim/adamw.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tmoe.base.private_torch import need
from tmoe.ops.dynamic_map import BLOCK, dequantise, quantise, zero_code
from tmoe.parallel.mesh import local_part, local_slices

States = Literal["fp32", "bf16", "int8"]
MOMENTS = "exp_avg", "exp_avg_sq"
MOMENTUM = "momentum"  # Muon's, with another name, so that neither optimizer reads the other's state
SCALES = {moment: f"{moment}_scale" for moment in (*MOMENTS, MOMENTUM)}
STATE = (*MOMENTS, MOMENTUM, *SCALES.values(), "step")
DTYPES = dict(fp32=torch.float32, bf16=torch.bfloat16, int8=torch.uint8)
SMALL = 4096  # parameters with fewer elements are not quantised, as in bitsandbytes and torchao
LEAST = 64  # least length of a block: its scale then takes half a bit an element and moment


def block_of(p: Tensor) -> int:
    """The length of the blocks in which moments of p are quantised; 0: they are not.

    It is the largest divisor of the last axis from LEAST to BLOCK. Vectors, small parameters and parameters
    whose last axis has no such divisor, or is cut by the layout, are not quantised.
    """
    if p.ndim < 2 or p.numel() < SMALL:
        return 0
    width = p.shape[-1]
    last = local_slices(p)[-1]
    if last.stop - last.start not in (0, width):
        return 0
    return next((n for n in range(BLOCK, LEAST - 1, -1) if width % n == 0), 0)


def new_moments(
    p: Tensor, states: States | None, offload: bool, moments: Sequence[str] = MOMENTS
) -> dict[str, Tensor]:
    """The moments of a parameter before its first step, with their scales if they are quantised.

    states: None: in the parameter's own type.
    offload: in pinned host memory, whatever the device of p's mesh.
    """
    form = form_of(p, states)
    dtype = p.dtype if form is None else DTYPES[form]
    block = block_of(p) if form == "int8" else 0
    found: dict[str, Tensor] = {}
    local = local_part(p)
    for moment in moments:
        empty = zero_code(is_signed(moment)) if block else 0
        full = torch.full(local.shape, empty, dtype=dtype, device=local.device)
        found[moment] = _placed(p, full, offload)
        if block:
            scale = torch.zeros(*local.shape[:-1], local.shape[-1] // block, device=local.device)
            found[SCALES[moment]] = _placed(p, scale, offload, p.shape[-1] // block)
    return found


def is_signed(moment: str) -> bool:
    """Whether a moment has negative numbers."""
    return moment != MOMENTS[1]


def form_of(p: Tensor, states: States | None) -> States | None:
    """How this parameter's moments are stored: as `states`, or fp32 if they cannot be quantised."""
    return "fp32" if states == "int8" and not block_of(p) else states


def _placed(p: Tensor, local: Tensor, offload: bool, width: int | None = None) -> Tensor:
    """A tensor with p's layout from this rank's part of it. width: length of the last axis, if not p's."""
    shape = p.shape if width is None else torch.Size((*p.shape[:-1], width))
    whole = local
    if isinstance(p, DTensor):
        stride = torch.empty(shape, device="meta").stride()
        mesh, placements = p.device_mesh, p.placements
        whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    if not offload:
        return whole
    pinned = torch.empty(local.shape, dtype=local.dtype, pin_memory=True).copy_(local)
    if not isinstance(whole, DTensor):
        return pinned
    # from_local would move the tensor to the mesh's device. FSDP2 stores offloaded parameters so as well.
    return DTensor(pinned, need(whole, "_spec", "--optim.offload"), requires_grad=False)


@torch.no_grad()
def converted(
    p: Tensor, state: Mapping[str, Tensor], states: States | None, offload: bool
) -> dict[str, Tensor]:
    """The state of a parameter with its moments stored otherwise, rounded to the nearest."""
    moments = [moment for moment in (*MOMENTS, MOMENTUM) if moment in state]
    new = new_moments(p, states, offload, moments) | dict(step=state["step"])
    for moment in moments:
        signed = is_signed(moment)
        value = local_part(state[moment])
        if SCALES[moment] in state:
            value = dequantise(value, local_part(state[SCALES[moment]]), signed)
        if SCALES[moment] in new:
            codes, scale = quantise(value.float(), block_of(p), signed)
            local_part(new[SCALES[moment]]).copy_(scale)
            value = codes
        local_part(new[moment]).copy_(value)
    return new
