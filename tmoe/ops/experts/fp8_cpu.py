"""A layer of experts with fp8 products on the CPU: the twin of the kernels, with the same rounding points.

x and dy, act and dH, H for the backward, and the matrices are rounded to codes times scales; all products
are computed in fp32. Gradients of matrices are those of ops/experts/cpu.py; fp8_table.py decides whether they
are of operands in fp8.

next: ops/experts/op.py
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tmoe.base.activations import activation as named
from tmoe.ops.experts.cpu import ExpertWeights, combine, spans
from tmoe.ops.experts.fp8_codes import TILE, Codes, KeptH, rounded_blocks, rounded_rows, rounded_tiles
from tmoe.ops.launch.kernel_launch import cdiv


class Matrices:
    """The values of the experts' matrices in fp8."""

    def __init__(self, experts: ExpertWeights, packed: tuple[Tensor, Tensor]):
        """packed: the codes of gate_up and of down."""
        self.halves = named(experts.activation).halves
        self.up = Codes.of(packed[0], tuple(experts.gate_up_E2FD.shape), self.halves)
        self.down = Codes.of(packed[1], tuple(experts.down_EDF.shape), 1)

    def gate_up_2FD(self, e: int) -> Tensor:
        """Gate and up of expert e, float32."""
        return torch.cat([self.up.value(self.halves * e + half) for half in range(self.halves)])

    def down_DF(self, e: int) -> Tensor:
        """Down of expert e, float32."""
        return self.down.value(e)


def kept_h(packed: Tensor, N: int, experts: ExpertWeights) -> KeptH:
    """The codes of H in a packed tensor for N rows."""
    return KeptH.of(packed, N, tuple(experts.down_EDF.shape), experts.activation)


def tiled(ends: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """`spans`, each with the number of its first tile, as the kernels count them."""
    tile = 0
    for e, lo, hi in spans(ends):
        yield e, lo, hi, tile
        tile += 2 * cdiv(hi - lo, 2 * TILE)


def forward(
    x_TD: Tensor,
    experts: ExpertWeights,
    packed: tuple[Tensor, Tensor],
    weights_TK: Tensor,
    order: Tensor,
    ends: list[int],
    h: Tensor,
) -> Tensor:
    """y_TD, as `cpu.moe_mlp_forward`; packed: the codes of gate_up and down. h gets the codes of H."""
    T, D = x_TD.shape
    K = weights_TK.shape[1]
    tokens = order // max(K, 1)
    matrices, x8_TD = Matrices(experts, packed), rounded_rows(x_TD)
    out_ND = x_TD.new_empty(order.numel() + 1, D)
    out_ND[-1] = 0
    kept = kept_h(h, weights_TK.numel(), experts)
    kept.scales.zero_()  # no tile has most of them
    for e, lo, hi, tile in tiled(ends):
        h_n2F = x8_TD[tokens[lo:hi]] @ matrices.gate_up_2FD(e).T
        if experts.bias_E2F is not None:
            h_n2F += experts.bias_E2F[e]
        kept.keep(h_n2F, lo, tile, experts.activation)
        act_nF = rounded_tiles(named(experts.activation).of(h_n2F))
        out_ND[lo:hi] = act_nF @ matrices.down_DF(e).T
    return combine(out_ND, order, weights_TK, T, K)


def gradient_of_x(
    dy_TD: Tensor,
    x_TD: Tensor,
    experts: ExpertWeights,
    packed: tuple[Tensor, Tensor],
    weights_TK: Tensor,
    h: Tensor,
    order: Tensor,
    ends: list[int],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """The results of `cpu.gradient_of_x`; packed: the codes of gate_up and down; h: those of H."""
    T, D = x_TD.shape
    K, N = weights_TK.shape[1], order.numel()
    tokens = order // max(K, 1)
    matrices, dy8_TD, act_of = Matrices(experts, packed), rounded_rows(dy_TD), named(experts.activation)
    s_N = weights_TK.reshape(-1)[order].float()
    d_bias = None if experts.bias_E2F is None else torch.zeros_like(experts.bias_E2F)
    ds_N = torch.empty(N, dtype=weights_TK.dtype)
    dh_N2F = x_TD.new_empty(N, experts.gate_up_E2FD.shape[1])
    act_NF = x_TD.new_empty(N, experts.down_EDF.shape[2])
    kept = kept_h(h, weights_TK.numel(), experts)
    dx_ND = x_TD.new_empty(N + 1, D)
    dx_ND[-1] = 0
    for e, lo, hi, tile in tiled(ends):
        s, h_n2F = s_N[lo:hi, None], kept.rows(lo, hi, tile)
        act_nF = act_of.of(h_n2F)
        d_act = dy8_TD[tokens[lo:hi]] @ matrices.down_DF(e)
        ds_N[lo:hi] = torch.linalg.vecdot(d_act, act_nF)
        act_NF[lo:hi] = act_nF * s
        dh = torch.empty_like(h_n2F)
        act_of.gradient_of(h_n2F, d_act * s, dh)
        dh_N2F[lo:hi] = dh
        halves = dh_N2F[lo:hi].float().chunk(matrices.halves, 1)
        dh8 = torch.cat([rounded_tiles(half) for half in halves], 1)
        dx_ND[lo:hi] = dh8 @ matrices.gate_up_2FD(e)
        if d_bias is not None:
            d_bias[e] = dh_N2F[lo:hi].sum(0, dtype=torch.float32)
    ds = weights_TK.new_zeros(T * K).index_copy_(0, order, ds_N).view(T, K)
    return combine(dx_ND, order, None, T, K), ds, d_bias, dh_N2F, act_NF


def operands_of_matrices(
    dy_TD: Tensor, x_TD: Tensor, tokens: Tensor, dh_N2F: Tensor, act_NF: Tensor, ends: list[int]
) -> tuple[Tensor, ...]:
    """These arguments of `cpu.gradients_of_matrices`, rounded as products in fp8 read them.

    dy and x become rows [N, D] in expert order, and tokens their numbers.
    """

    def rounded(rows: Tensor) -> Tensor:
        for _, lo, hi in spans(ends):
            rows[lo:hi] = rounded_blocks(rows[lo:hi].float())  # exact in bf16
        return rows

    rows = [rounded(t) for t in (dy_TD[tokens], x_TD[tokens], dh_N2F.clone(), act_NF.clone())]
    return rows[0], rows[1], torch.arange(len(tokens), device=tokens.device), rows[2], rows[3]
