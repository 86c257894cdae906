"""grouped_mm: multiplies each of several groups of consecutive rows by its matrix; differentiable."""

from typing import Any

import torch
from torch import Tensor

from tmoe.ops.argument_checks import check_device, check_grouped_mm, check_tensors, require
from tmoe.ops.experts import cpu, gpu
from tmoe.ops.launch.eager import mapped
from tmoe.ops.register import Backward, register_differentiable


def grouped_mm(a_ND: Tensor, b_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """c[ends[e-1]:ends[e]] = a[ends[e-1]:ends[e]] @ b[e].T; rows past the last end are zeros in c.

    Args:
        a_ND: rows [N, D]; float32, bfloat16 or float16 (float64 on the CPU).
        b_EFD: one matrix for each group [E, F, D]; dtype of a.
        ends_E: int32 [E], the cumulative ends of the groups' rows, non-decreasing, at most N. The host does
            not read them from a GPU, so only the CPU refuses invalid ends.

    Returns c_NF [N, F] in the dtype of a, accumulated in float32, differentiable in a and b; if b needs
    no gradient, backward does not compute it. Raises
    ValueError for shapes, dtypes or devices that do not fit together. Definition:
    `tmoe.ops.reference.grouped_mm`.
    """
    check_tensors(a=a_ND, b=b_EFD, ends=ends_E)
    trained = b_EFD.requires_grad or mapped(b_EFD) or not torch.is_grad_enabled()
    return (torch.ops.tmoe.grouped_mm if trained else torch.ops.tmoe.grouped_mm_frozen)(a_ND, b_EFD, ends_E)


def _forward_cpu(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    check_grouped_mm(a, b, ends)
    bounds = [0, *ends.tolist(), a.shape[0]]
    require(bounds == sorted(bounds), "ends", bounds[1:-1], f"non-decreasing, 0 to N={a.shape[0]}")
    return cpu.grouped_mm(a, b, bounds[1:-1])


def _forward_gpu(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    check_grouped_mm(a, b, ends)
    return gpu.grouped_mm(a, b, ends)


def _forward_fake(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    check_device(a, b=b, ends=ends)
    return a.new_empty(a.shape[0], b.shape[1])


def _backward_cpu(dc: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return cpu.grouped_mm_backward(dc, a, b, ends.tolist())


def _backward_frozen_cpu(dc: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return cpu.grouped_mm_backward_of_a(dc, a, b, ends.tolist())


_FORWARD: dict[str, Any] = dict(
    schema="(Tensor a, Tensor b, Tensor ends) -> Tensor",
    returns="c",
    cpu=_forward_cpu,
    cuda=_forward_gpu,
    fake=_forward_fake,
)
register_differentiable(
    "grouped_mm",
    **_FORWARD,
    backward=Backward(
        "(Tensor dc, Tensor a, Tensor b, Tensor ends) -> (Tensor, Tensor)",
        gradients="a b",
        cpu=_backward_cpu,
        cuda=gpu.grouped_mm_backward,
    ),
)
# b needs no gradient
register_differentiable(
    "grouped_mm_frozen",
    **_FORWARD,
    backward=Backward(
        "(Tensor dc, Tensor a, Tensor b, Tensor ends) -> Tensor",
        gradients="a",
        cpu=_backward_frozen_cpu,
        cuda=gpu.grouped_mm_backward_of_a,
    ),
)
