"""rms_norm: rows divided by their root mean square, summed in an order that does not depend on their number.

Compiled norms choose their reduction kernel by the whole shape, so a single row may differ in its last bit
from the same row among thousands. In this kernel the number of rows of a program depends on their width
alone. So decoding one token and training on thousands of tokens give the same bits. The op serves RMSNorm of
[T, D] and of heads [T, H, C].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.argument_checks import FLOATS, check_device, check_tensors, require
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, empty, launch
from tmoe.ops.register import Backward, register_differentiable


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32, rounded once to x's type.

    Args:
        x: [..., D], fp32, bf16 or fp16 (fp64 on a CPU); any strides. The number of rows may be 0.
        weight_D: [D], of any of these types.
        eps: added to the mean square.

    Differentiable in x and weight. Raises ValueError for arguments that do not fit.
    """
    check_tensors(x=x, weight=weight_D)
    types = FLOATS if x.is_cuda else (*FLOATS, torch.float64)
    require(x.dim() > 0 and x.shape[-1] > 0, "x", f"shape {tuple(x.shape)}", "[..., D > 0]")
    require(x.dtype in types, "x", x.dtype, f"one of {types}")
    D = x.shape[-1]
    require(tuple(weight_D.shape) == (D,), "weight", f"shape {tuple(weight_D.shape)}", f"[D={D}]")
    require(weight_D.dtype in types, "weight", weight_D.dtype, f"one of {types}")
    check_device(x, weight=weight_D)
    return torch.ops.tmoe.rms_norm(x, weight_D, eps)


def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op in plain PyTorch, by its definition."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * _inverse(wide, eps) * weight.to(wide.dtype)).to(x.dtype).contiguous()


def _inverse(wide: Tensor, eps: float) -> Tensor:
    return (wide.square().mean(-1, keepdim=True) + eps).rsqrt()


def _backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """With r the inverse root, n = x r and g = dy weight: dx = r (g - n mean(g n)), dweight = sum of dy n."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    r = _inverse(wide, eps)
    n, dy = wide * r, dy.to(wide.dtype)
    g = dy * weight.to(wide.dtype)
    dx = r * (g - n * (g * n).mean(-1, keepdim=True))
    return dx.to(x.dtype).contiguous(), (dy * n).flatten(0, -2).sum(0).to(weight.dtype)


@triton.jit(do_not_specialize=["T", "eps"])
def rms_norm_kernel(x, weight, y, T, eps, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr):
    """Normalizes ROWS rows of D numbers, padded to DP."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, DP)
    at = t.to(tl.int64)[:, None] * D + c[None, :]
    mask = (t < T)[:, None] & (c < D)[None, :]
    row = tl.load(x + at, mask, 0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(row * row, 1) / D + eps)
    scale = tl.load(weight + c, c < D, 0.0).to(tl.float32)
    tl.store(y + at, (row * inverse[:, None] * scale[None, :]).to(y.dtype.element_ty), mask)


def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op on a GPU."""
    x, weight = x.contiguous(), weight.contiguous()
    y = empty(x.shape, x.dtype, x.device)
    D = x.shape[-1]
    T = x.numel() // D
    DP = power_of_2(D)
    rows = max(1, 2048 // DP)  # depends on the width alone
    if T:
        launch(rms_norm_kernel, (cdiv(T, rows),), x, weight, y, T, eps, D, DP, rows, num_warps=4)
    return y


def trace(D: int, dtype: torch.dtype) -> None:
    """Launch the kernel on meta tensors, inside compile_only."""
    x = torch.empty(1, D, dtype=dtype, device="meta")
    forward(x, x[0], 1e-6)


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


register_differentiable(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps) -> Tensor",
    returns="y",
    cpu=plain,
    cuda=forward,
    fake=_fake,
    backward=Backward(
        "(Tensor dy, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
        gradients="x weight",
        cpu=_backward,
        cuda=_backward,
    ),
)
