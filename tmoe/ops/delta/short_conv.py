"""short_conv: SiLU of a causal depthwise convolution over the tokens of a run.

    y[t, x] = silu(bias[x] + sum_j w[x, J - j] u[b_j(t), x])

where b_0(t) = t, and b_j(t) is the j-th token before t in its run.

next: tmoe/ops/delta/chunks.py
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe.ops.argument_checks import FLOATS, check_device, check_tensors, require
from tmoe.ops.delta import conv_kernels, gpu
from tmoe.ops.delta.runs import Runs
from tmoe.ops.launch.shapes import LinearShapes
from tmoe.ops.register import Backward, register_differentiable


def short_conv(
    u_BSX: Tensor, weight_XJ: Tensor, runs: Runs | None = None, bias_X: Tensor | None = None
) -> Tensor:
    """[B, S, X], in u's type; computed in fp32, or in fp64 for fp64 inputs.

    Args:
        u_BSX: the inputs, fp32, bf16, fp16 or fp64. At padding they must be 0.
        weight_XJ: the weights of each channel, the token's own last; of any float type.
        runs: from `runs_of`, with J - 1 neighbours or more; None: each row is one run.
        bias_X: a number for each channel, of any float type; None: 0.

    Differentiable in u, weight and bias. Raises ValueError for arguments that do not fit.
    """
    check_tensors(u=u_BSX, weight=weight_XJ)
    types = (*FLOATS, torch.float64)
    require(u_BSX.dim() == 3, "u", f"shape {tuple(u_BSX.shape)}", "[B, S, X]")
    require(u_BSX.dtype in types, "u", u_BSX.dtype, f"one of {types}")
    X = u_BSX.shape[2]
    fit = weight_XJ.dim() == 2 and weight_XJ.shape[0] == X and weight_XJ.shape[1] > 0
    require(fit, "weight", f"shape {tuple(weight_XJ.shape)}", f"[X={X}, J > 0]")
    check_device(u_BSX, weight=weight_XJ)
    if bias_X is not None:
        require(bias_X.shape == (X,), "bias", f"shape {tuple(bias_X.shape)}", f"[X={X}]")
        check_device(u_BSX, bias=bias_X)
    back = ahead = None
    if runs is not None:
        back, ahead = runs.back_BSJ, runs.ahead_BSJ
        fit = back.shape[:2] == u_BSX.shape[:2] and back.shape[2] >= weight_XJ.shape[1] - 1
        require(fit, "runs", f"tables {tuple(back.shape)}", "tables of u's rows and of the weight's length")
    return torch.ops.tmoe.short_conv(u_BSX, weight_XJ, bias_X, back, ahead)


def taken(t_BSX: Tensor, places: int, table_BSJ: Tensor | None) -> Tensor:
    """The values of the neighbours `places` before a token (or after it, by the table); 0 without one.

    table_BSJ: of `Runs`; None: rows are single runs, and places below 0 are places after the token.
    """
    if table_BSJ is None:
        n = min(abs(places), t_BSX.shape[1])
        zeros = t_BSX.new_zeros(t_BSX.shape[0], n, t_BSX.shape[2])
        parts = (zeros, t_BSX[:, : t_BSX.shape[1] - n]) if places > 0 else (t_BSX[:, n:], zeros)
        return torch.cat(parts, 1)
    at_BS1 = table_BSJ[:, :, abs(places) - 1, None]
    found = t_BSX.gather(1, at_BS1.clamp(min=0).expand_as(t_BSX))
    return found.masked_fill(at_BS1 < 0, 0.0)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _sum(u: Tensor, weight: Tensor, bias: Tensor | None, back: Tensor | None) -> Tensor:
    """The convolution without SiLU, in the wide type."""
    u, weight = _wide(u), weight.to(_wide(u).dtype)
    y = u * weight[:, -1]
    for j in range(1, weight.shape[1]):
        y = y + taken(u, j, back) * weight[:, -1 - j]
    return y if bias is None else y + bias.to(y.dtype)


def on_gpu(u: Tensor) -> bool:
    """Whether kernels compute the op: not in fp64, nor for empty inputs, nor where they are not measured."""
    return u.dtype != torch.float64 and u.numel() > 0 and gpu.measured(u.device)


def forward_on_gpu(
    u: Tensor, weight: Tensor, bias: Tensor | None, back: Tensor | None, ahead: Tensor | None
) -> Tensor:
    """`forward`, by kernels where `on_gpu`."""
    if on_gpu(u):
        return conv_kernels.forward(u, weight, bias, back)
    return forward(u, weight, bias, back, ahead)


def backward_on_gpu(
    dy: Tensor, u: Tensor, weight: Tensor, bias: Tensor | None, back: Tensor | None, ahead: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`backward`, by kernels where `on_gpu`."""
    if on_gpu(u):
        return conv_kernels.backward(dy, u, weight, bias, back, ahead)
    return backward(dy, u, weight, bias, back, ahead)


def forward(
    u: Tensor, weight: Tensor, bias: Tensor | None, back: Tensor | None, ahead: Tensor | None
) -> Tensor:
    """The op in plain PyTorch."""
    return F.silu(_sum(u, weight, bias, back)).to(u.dtype).contiguous()


def backward(
    dy: Tensor, u: Tensor, weight: Tensor, bias: Tensor | None, back: Tensor | None, ahead: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of u, weight and bias. A token's gradient is the sum over the tokens that read it."""
    pre = _sum(u, weight, bias, back)
    share = pre.sigmoid()
    d = dy.to(pre.dtype) * share * (1 + pre * (1 - share))
    u, w = _wide(u), weight.to(pre.dtype)
    du = d * w[:, -1]
    dw = [(d * u).sum((0, 1))]
    for j in range(1, weight.shape[1]):
        du = du + taken(d, -j, ahead) * w[:, -1 - j]
        dw.insert(0, (d * taken(u, j, back)).sum((0, 1)))
    of_bias = None if bias is None else d.sum((0, 1)).to(bias.dtype)
    return du.to(dy.dtype).contiguous(), torch.stack(dw, 1).to(weight.dtype), of_bias


def of_linear(n: LinearShapes) -> Iterable[tuple]:
    """The traces of a linear layer: rows of one document, and of several."""
    X = 2 * n.key_heads * n.key_dim + n.value_heads * n.value_dim
    for runs in (False, True) if n.dtype != torch.float64 else ():
        yield conv_kernels.trace, X, n.conv, n.dtype, runs, n.trained, n.conv_bias


def _fake(
    u: Tensor, weight: Tensor, bias: Tensor | None, back: Tensor | None, ahead: Tensor | None
) -> Tensor:
    return u.new_empty(u.shape)


register_differentiable(
    "short_conv",
    "(Tensor u, Tensor weight, Tensor? bias, Tensor? back, Tensor? ahead) -> Tensor",
    returns="y",
    cpu=forward,
    cuda=forward_on_gpu,
    fake=_fake,
    backward=Backward(
        "(Tensor dy, Tensor u, Tensor weight, Tensor? bias, Tensor? back, Tensor? ahead)"
        " -> (Tensor, Tensor, Tensor)",
        gradients="u weight bias",
        cpu=backward,
        cuda=backward_on_gpu,
    ),
    traces={LinearShapes: of_linear},
)
