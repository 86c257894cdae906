"""grouped_mm: rows in consecutive groups, each group times its own matrix; one differentiable custom op."""

import torch

from tmoe.ops import cpu
from tmoe.ops.check import check_grouped_mm


def grouped_mm(a_ND, b_EFD, ends_E):
    """c[ends[e-1]:ends[e]] = a[ends[e-1]:ends[e]] @ b[e].T, rows past the last end give zeros.

    Args:
        a_ND: rows [N, D]; float32, bfloat16 or float16 (float64 on the CPU).
        b_EFD: one matrix a group [E, F, D]; dtype of a.
        ends_E: int32 [E], the cumulative ends of the groups' rows, non-decreasing, at most N; it stays on the device.

    Returns:
        c_NF [N, F] in the dtype of a, accumulated in float32. Differentiable in a and b.
        Raises ValueError for shapes, dtypes or devices that do not fit together. Definition: `tmoe.ops.reference.grouped_mm`.
    """
    return _forward(a_ND, b_EFD, ends_E)


@torch.library.custom_op("tmoe::grouped_mm", mutates_args=(), device_types="cpu")
def _forward(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    check_grouped_mm(a, b, ends)
    return cpu.grouped_mm(a, b, ends.tolist())


@_forward.register_fake
def _(a, b, ends):
    return a.new_empty(a.shape[0], b.shape[1])


@torch.library.custom_op("tmoe::grouped_mm_backward", mutates_args=(), device_types="cpu")
def _backward(
    dc: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return cpu.grouped_mm_backward(dc, a, b, ends.tolist())


@_backward.register_fake
def _(dc, a, b, ends):
    return torch.empty_like(a), torch.empty_like(b)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, dc):
    return *_backward(dc, *ctx.saved_tensors), None


_forward.register_autograd(_differentiate, setup_context=_save)
