"""A dense SwiGLU or squared ReLU with explicit gradients, for an op that exchanges rows at the same time.

    forward     h = x gate_up^T   act = silu(gate) up   y = act down^T
    backward    d_act = dy down   act again, dh         the gradients of down, x and gate_up

Without a gate h has F columns instead of 2F, and act = relu(h)^2.

The gradients do not use autograd. Products are torch.mm. Between two products there is one pass over memory,
which in backward computes act and dh together.
"""

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.experts import kernels
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, launch
from tmoe.ops.launch.shapes import DecodeShapes, LayerShapes
from tmoe.ops.register import collect

TILE = 4096  # elements of a program


@triton.jit(do_not_specialize=["T"])
def dense_act_kernel(h, act, d_act, dh, T, F, ACT: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr):
    """act [T, F] from h [T, 2F], gate columns first, or without a gate from h [T, F].

    Also dh, unless d_act is None.
    """
    HALVES: tl.constexpr = kernels.halves_of(ACT)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    mask = (t < T)[:, None] & (f < F)[None, :]
    at = t.to(tl.int64)[:, None] * F + f[None, :]
    at_gate = t.to(tl.int64)[:, None] * (HALVES * F) + f[None, :]
    gate = tl.load(h + at_gate, mask=mask, other=0.0).to(tl.float32)
    up = gate
    if HALVES == 2:
        up = tl.load(h + at_gate + F, mask=mask, other=0.0).to(tl.float32)
    if d_act is None:
        a = kernels.activate(gate, up, False, ACT)
    else:
        d = tl.load(d_act + at, mask=mask, other=0.0).to(tl.float32)
        a, d_gate, d_up, _ = kernels.activate_backward(gate, up, d, 1.0, False, ACT)
        tl.store(dh + at_gate, d_gate.to(dh.dtype.element_ty), mask=mask)
        if HALVES == 2:
            tl.store(dh + at_gate + F, d_up.to(dh.dtype.element_ty), mask=mask)
    tl.store(act + at, a.to(act.dtype.element_ty), mask=mask)


def activate(h_T2F: Tensor, F: int, d_act_TF: Tensor | None = None) -> tuple[Tensor, Any]:
    """act [T, F] from h [T, 2F]; also the gradient of h, None unless that of act is given. All contiguous.

    With h [T, F] the activation is relu squared, which has no gate; else it is SwiGLU.
    """
    T = h_T2F.shape[0]
    name = "relu2" if h_T2F.shape[1] == F else "swiglu"
    act = torch.empty(T, F, dtype=h_T2F.dtype, device=h_T2F.device)
    dh = None if d_act_TF is None else torch.empty_like(h_T2F)
    columns = min(1024, power_of_2(F))
    rows = TILE // columns
    grid = max(1, cdiv(T, rows)), cdiv(F, columns)
    launch(dense_act_kernel, grid, h_T2F, act, d_act_TF, dh, T, F, name, rows, columns, num_warps=8)
    return act, dh


def forward(x_TD: Tensor, gate_up_2FD: Tensor, down_DF: Tensor) -> tuple[Tensor, Tensor]:
    """y [T, D] and h [T, 2F], all in the type of x."""
    with torch.autocast(x_TD.device.type, enabled=False):
        h = x_TD @ gate_up_2FD.t()
        return activate(h, down_DF.shape[1])[0] @ down_DF.t(), h


def backward(
    dy_TD: Tensor, x_TD: Tensor, gate_up_2FD: Tensor, down_DF: Tensor, h_T2F: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, gate_up and down."""
    with torch.autocast(x_TD.device.type, enabled=False):
        act, dh = activate(h_T2F, down_DF.shape[1], dy_TD @ down_DF)
        d_down = dy_TD.t() @ act
        return dh @ gate_up_2FD, dh.t() @ x_TD, d_down


def trace(T: int, F: int, dtype: torch.dtype, halves: int = 2) -> None:
    """Launch the kernel, forward and backward, on meta tensors, inside compile_only.

    halves: 2; 1 without a gate.
    """
    h, act = (torch.empty(T, width, dtype=dtype, device="meta") for width in (halves * F, F))
    activate(h, F)
    activate(h, F, act)


def _of_layer(layer: LayerShapes) -> Iterable[tuple]:
    if layer.exchange is not None and layer.exchange.shared_dim:
        exchange = layer.exchange
        yield trace, layer.tokens, exchange.shared_dim, layer.dtype, exchange.shared_halves


def _of_decoding(step: DecodeShapes) -> Iterable[tuple]:
    if step.fused:
        for width in step.ffn_dims:
            yield trace, 1, width, step.dtype, step.ffn_halves


collect("swiglu", {LayerShapes: _of_layer, DecodeShapes: _of_decoding})
