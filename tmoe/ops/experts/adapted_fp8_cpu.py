"""The op moe_mlp_adapted with fp8 products of the base on the CPU, with the rounding points of fp8_cpu.py.

Products with the adapters' factors read the operands that are not in fp8. Their results are added to H, to
the activation's gradient, and to results before any of these is cast.

next: ops/experts/fp8_cpu.py
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.base.activations import activation as named
from tmoe.ops.experts.adapted_cpu import AdaptedRows, Adapters, Gradients, Kept
from tmoe.ops.experts.cpu import ExpertWeights, combine
from tmoe.ops.experts.fp8_codes import rounded_rows, rounded_tiles
from tmoe.ops.experts.fp8_cpu import Matrices, kept_h, tiled


class Base(NamedTuple):
    """The frozen experts, of whose matrices only the shapes are read."""

    experts: ExpertWeights
    packed: tuple[Tensor, Tensor]  # the codes of gate_up and down


def forward(
    x_TD: Tensor,
    base: Base,
    adapters: Adapters,
    weights_TK: Tensor,
    rows: AdaptedRows,
    kept: Kept,
    scales: tuple[float, float],
) -> Tensor:
    """y_TD, as `adapted_cpu.forward`; kept.h gets the codes of H."""
    experts, packed = base
    up_a, up_b, down_a, down_b = adapters
    order, ends = rows
    T, D = x_TD.shape
    K = weights_TK.shape[1]
    tokens = order // max(K, 1)
    matrices, x8_TD = Matrices(experts, packed), rounded_rows(x_TD)
    out_ND = x_TD.new_empty(order.numel() + 1, D)
    out_ND[-1] = 0
    coded_h = kept_h(kept.h, weights_TK.numel(), experts)
    coded_h.scales.zero_()  # no tile has most of them
    for e, lo, hi, tile in tiled(ends):
        h = x8_TD[tokens[lo:hi]] @ matrices.gate_up_2FD(e).T
        if experts.bias_E2F is not None:
            h += experts.bias_E2F[e]
        if up_a is not None and up_b is not None:
            kept.u_up[lo:hi] = x_TD[tokens[lo:hi]] @ up_a[e].T * scales[0]
            h += kept.u_up[lo:hi].float() @ up_b[e].float().T
        coded_h.keep(h, lo, tile, experts.activation)
        act = named(experts.activation).of(h)
        out = rounded_tiles(act) @ matrices.down_DF(e).T
        if down_a is not None and down_b is not None:
            kept.u_down[lo:hi] = act.to(x_TD.dtype) @ down_a[e].T * scales[1]
            out += kept.u_down[lo:hi].float() @ down_b[e].float().T
        out_ND[lo:hi] = out
    return combine(out_ND, order, weights_TK, T, K)


def backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    base: Base,
    adapters: Adapters,
    weights_TK: Tensor,
    rows: AdaptedRows,
    kept: Kept,
    scales: tuple[float, float],
) -> Gradients:
    """The gradients of `adapted_cpu.backward`, by its formulas."""
    experts, packed = base
    up_a, up_b, down_a, down_b = adapters
    order, ends = rows
    T, D = x_TD.shape
    K, N, dtype = weights_TK.shape[1], order.numel(), x_TD.dtype
    tokens = order // max(K, 1)
    matrices, dy8_TD, act_of = Matrices(experts, packed), rounded_rows(dy_TD), named(experts.activation)
    w_N = weights_TK.reshape(-1)[order].float()
    bias = experts.bias_E2F
    d_bias = None if bias is None else torch.zeros_like(bias)
    d_up_a, d_up_b, d_down_a, d_down_b = (None if t is None else torch.zeros_like(t) for t in adapters)
    dw_N = torch.empty(N, dtype=weights_TK.dtype)
    dx_ND = x_TD.new_empty(N + 1, D)
    dx_ND[-1] = 0
    coded_h = kept_h(kept.h, weights_TK.numel(), experts)
    for e, lo, hi, tile in tiled(ends):
        w, h = w_N[lo:hi, None], coded_h.rows(lo, hi, tile)
        dy, act = dy_TD[tokens[lo:hi]], act_of.of(h)
        d_act = dy8_TD[tokens[lo:hi]] @ matrices.down_DF(e)
        if down_a is not None and down_b is not None and d_down_a is not None and d_down_b is not None:
            v = dy @ down_b[e] * scales[1]
            d_act += v.float() @ down_a[e].float()
            d_down_a[e] = v.T @ (act * w).to(dtype)
            d_down_b[e] = dy.T @ (kept.u_down[lo:hi] * w).to(dtype)
        dw_N[lo:hi] = torch.linalg.vecdot(d_act, act)
        dh = torch.empty_like(h)
        act_of.gradient_of(h, d_act * w, dh)
        dh = dh.to(dtype)
        dh8 = torch.cat([rounded_tiles(half) for half in dh.chunk(matrices.halves, 1)], 1)
        dx = dh8 @ matrices.gate_up_2FD(e)
        if up_a is not None and up_b is not None and d_up_a is not None and d_up_b is not None:
            v = dh @ up_b[e] * scales[0]
            dx += v.float() @ up_a[e].float()
            d_up_a[e] = v.T @ x_TD[tokens[lo:hi]]
            d_up_b[e] = dh.T @ kept.u_up[lo:hi]
        dx_ND[lo:hi] = dx
        if d_bias is not None:
            d_bias[e] = dh.sum(0, dtype=torch.float32)
    dw = weights_TK.new_zeros(T * K).index_copy_(0, order, dw_N).view(T, K)
    return Gradients(combine(dx_ND, order, None, T, K), dw, d_bias, d_up_a, d_up_b, d_down_a, d_down_b)
