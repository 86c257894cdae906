"""The op moe_mlp_adapted on the CPU: sorted rows, one expert after the other, gradients by formula.

next: ops/experts/cpu.py
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.base.activations import activation as named
from tmoe.ops.experts import cpu
from tmoe.ops.experts.cpu import ExpertWeights, combine, mm, pre_activations, spans


class Adapters(NamedTuple):
    """Low-rank changes of the experts' matrices: gate_up + gate_up_b gate_up_a, down + down_b down_a.

    A matrix without an adapter has None twice. The two ranks r may differ.
    """

    gate_up_a: Tensor | None  # [E, r, D]
    gate_up_b: Tensor | None  # [E, 2F, r]
    down_a: Tensor | None  # [E, r, F]
    down_b: Tensor | None  # [E, D, r]

    @property
    def ranks(self) -> tuple[int, int]:
        """The ranks of gate_up's and of down's adapter; 0 for none."""
        up, down = (0 if a is None else a.shape[1] for a in (self.gate_up_a, self.down_a))
        return up, down


class Kept(NamedTuple):
    """Tensors that `forward` keeps for `backward`, in the order of sorted rows."""

    h: Tensor  # [N, 2F]
    u_up: Tensor  # scale x gate_up_a^T [N, r]
    u_down: Tensor  # scale act down_a^T [N, r]


class AdaptedRows(NamedTuple):
    """Rows sorted by expert, the results of `cpu.route`."""

    order: Tensor  # row -> flat slot t*K+k
    ends: list[int]  # the end of each expert's rows


def add_change(x_RD: Tensor, a_rD: Tensor, b_Fr: Tensor, out_RF: Tensor, u_Rr: Tensor, scale: float) -> None:
    """Writes u = scale x a^T, and adds u b^T to out."""
    mm(x_RD, a_rD.T, u_Rr)
    u_Rr.mul_(scale)
    change_RF = torch.empty_like(out_RF)
    mm(u_Rr, b_Fr.T, change_RF)
    out_RF.add_(change_RF)


def forward(
    x_TD: Tensor,
    experts: ExpertWeights,
    adapters: Adapters,
    weights_TK: Tensor,
    rows: AdaptedRows,
    kept: Kept,
    scales: tuple[float, float],
) -> Tensor:
    """Returns y_TD; writes the tensors of `kept`, each with at least as many rows as there are."""
    h_N2F, u_up_Nr, u_down_Nr = kept
    gate_up_E2FD, down_EDF, bias_E2F, activation = experts
    gate_up_a, gate_up_b, down_a, down_b = adapters
    order, ends = rows
    T, D = x_TD.shape
    K = weights_TK.shape[1]
    tokens = order // max(K, 1)
    out_ND = x_TD.new_empty(order.numel() + 1, D)
    out_ND[-1] = 0
    for e, lo, hi in spans(ends):
        h, out = h_N2F[lo:hi], out_ND[lo:hi]
        pre_activations(x_TD, tokens[lo:hi], gate_up_E2FD[e], None if bias_E2F is None else bias_E2F[e], h)
        if gate_up_a is not None and gate_up_b is not None:
            x = x_TD.index_select(0, tokens[lo:hi])
            add_change(x, gate_up_a[e], gate_up_b[e], h, u_up_Nr[lo:hi], scales[0])
        act = named(activation).of(h)
        mm(act, down_EDF[e].T, out)
        if down_a is not None and down_b is not None:
            add_change(act, down_a[e], down_b[e], out, u_down_Nr[lo:hi], scales[1])
    return combine(out_ND, order, weights_TK, T, K)


class Gradients(NamedTuple):
    """The gradients of `backward`; None for an argument that is None."""

    x: Tensor
    weights: Tensor
    bias: Tensor | None
    gate_up_a: Tensor | None
    gate_up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None


def backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    experts: ExpertWeights,
    adapters: Adapters,
    weights_TK: Tensor,
    rows: AdaptedRows,
    kept: Kept,
    scales: tuple[float, float],
) -> Gradients:
    """The gradients; kept: written by `forward`.

    With w the weight of a row, g its dy and s the scale: v2 = s g B2, d_act = g W2 + v2 A2,
    dA2 = v2^T (w act), dB2 = g^T (w u2); dH follows from w d_act; v1 = s dH B1, dx = dH W1 + v1 A1,
    dA1 = v1^T x, dB1 = dH^T u1.
    """
    h_N2F, u_up_Nr, u_down_Nr = kept
    gate_up_E2FD, down_EDF, bias_E2F, activation = experts
    gate_up_a, gate_up_b, down_a, down_b = adapters
    order, ends = rows
    T, D = x_TD.shape
    K, N = weights_TK.shape[1], order.numel()
    tokens = order // max(K, 1)
    w_N = weights_TK.reshape(-1)[order].to(cpu._acc(x_TD))
    d_bias = None if bias_E2F is None else torch.zeros_like(bias_E2F)
    d_up_a, d_up_b, d_down_a, d_down_b = (None if t is None else torch.zeros_like(t) for t in adapters)
    dw_N = torch.empty(N, dtype=weights_TK.dtype)
    dx_ND = x_TD.new_empty(N + 1, D)
    dx_ND[-1] = 0
    for e, lo, hi in spans(ends):
        w, h, dx = w_N[lo:hi, None], h_N2F[lo:hi], dx_ND[lo:hi]
        dy = dy_TD.index_select(0, tokens[lo:hi])
        act = named(activation).of(h)
        d_act = dy @ down_EDF[e]
        if down_a is not None and down_b is not None and d_down_a is not None and d_down_b is not None:
            v = dy @ down_b[e] * scales[1]
            d_act += v @ down_a[e]
            torch.mm(v.T, (act * w).to(act.dtype), out=d_down_a[e])
            torch.mm(dy.T, (u_down_Nr[lo:hi] * w).to(dy.dtype), out=d_down_b[e])
        dw_N[lo:hi] = torch.linalg.vecdot(d_act.to(cpu._acc(d_act)), act.to(cpu._acc(act)))
        dh = torch.empty_like(h)
        named(activation).gradient_of(h, d_act.mul_(w), dh)
        torch.mm(dh, gate_up_E2FD[e], out=dx)
        if gate_up_a is not None and gate_up_b is not None and d_up_a is not None and d_up_b is not None:
            v = dh @ gate_up_b[e] * scales[0]
            dx += v @ gate_up_a[e]
            torch.mm(v.T, x_TD.index_select(0, tokens[lo:hi]), out=d_up_a[e])
            torch.mm(dh.T, u_up_Nr[lo:hi], out=d_up_b[e])
        if d_bias is not None:
            d_bias[e] = dh.sum(0, dtype=cpu._acc(dh))
    dw = weights_TK.new_zeros(T * K).index_copy_(0, order, dw_N).view(T, K)
    return Gradients(combine(dx_ND, order, None, T, K), dw, d_bias, d_up_a, d_up_b, d_down_a, d_down_b)
