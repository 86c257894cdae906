"""The ops on the CPU: sorted rows, one matrix product for each expert that has rows, explicit gradients.

Contract and saved tensors are those of the Triton kernels: only the pre-activations H and the row order are
kept between forward and backward.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.base.activations import activation as named
from tmoe.ops.gradient_sums import NEW, Target

FEW = 16  # least rows of a product, so that the bits of a row do not depend on the number of rows


def route(ids_TK: Tensor, E: int) -> tuple[Tensor, list[int]]:
    """A stable sort of rows by expert: the order (row -> flat slot t*K+k), and the ends of the experts' rows.

    Raises ValueError for an id that is neither -1 nor in [0, E).
    """
    flat = ids_TK.reshape(-1)
    if flat.numel() and (int(flat.min()) < -1 or int(flat.max()) >= E):
        raise ValueError(
            f"ids: got {int(flat.min())}..{int(flat.max())}, valid are 0..{E - 1} and -1 for 'not here'"
        )
    ends = torch.bincount(flat.to(torch.int64) + 1, minlength=E + 1).cumsum(0).tolist()
    not_here = ends[0]  # number of slots with id -1, which are first
    order = torch.argsort(flat, stable=True)[not_here:]
    return order, [end - not_here for end in ends[1:]]


class ExpertWeights(NamedTuple):
    """The experts' parameters and their activation."""

    gate_up_E2FD: Tensor
    down_EDF: Tensor
    bias_E2F: Tensor | None
    activation: str


def spans(ends: list[int]) -> list[tuple[int, int, int]]:
    """(expert, lo, hi) of every expert that has rows."""
    return [(e, lo, hi) for e, (lo, hi) in enumerate(zip([0, *ends], ends, strict=False)) if hi > lo]


def combine(rows_ND: Tensor, order: Tensor, weights_TK: Tensor | None, T: int, K: int) -> Tensor:
    """The weighted sum of each token's rows, in fp32 in slot order. Without weights all factors are 1.

    y[t] = sum_k w[t, k] * rows[row of (t, k)]
    """
    acc_dtype = torch.promote_types(rows_ND.dtype, torch.float32)
    n = order.numel()
    D = rows_ND.shape[1]

    # rows_ND[n] is the row of zeros for slots with id -1
    row_TK = torch.full((T * K,), n, dtype=torch.int64)
    row_TK[order] = torch.arange(n)
    row_TK = row_TK.view(T, K)

    y_TD = torch.zeros(T, D, dtype=acc_dtype)
    for k in range(K):
        rows_TD = rows_ND.index_select(0, row_TK[:, k]).to(acc_dtype)
        if weights_TK is None:
            y_TD += rows_TD
        else:
            y_TD.addcmul_(
                rows_TD,
                weights_TK[:, k, None].to(acc_dtype).masked_fill(row_TK[:, k, None] == n, 0),
            )
    return y_TD.to(rows_ND.dtype)


def mm(a_RD: Tensor, b_DF: Tensor, out_RF: Tensor) -> None:
    """Writes the product a b into out.

    Few rows are padded, because for them MKL uses another kernel, which gives a row other bits.
    """
    R = a_RD.shape[0]
    if R >= FEW:
        torch.mm(a_RD, b_DF, out=out_RF)
    else:
        whole_WD = torch.cat([a_RD, a_RD.new_zeros(FEW - R, a_RD.shape[1])])
        out_WF = out_RF.new_empty(FEW, out_RF.shape[1])  # passed as out, so that autocast has no effect
        out_RF.copy_(torch.mm(whole_WD, b_DF, out=out_WF)[:R])


def pre_activations(
    x_TD: Tensor, tokens: Tensor, gate_up_FD: Tensor, bias_F: Tensor | None, out: Tensor
) -> None:
    """Write one expert's rows of H into out."""
    mm(x_TD.index_select(0, tokens), gate_up_FD.T, out)
    if bias_F is not None:
        out.add_(bias_F)


def moe_mlp_forward(
    x_TD: Tensor,
    experts: ExpertWeights,
    weights_TK: Tensor,
    order: Tensor,
    ends: list[int],
    h: Tensor,
) -> Tensor:
    """y_TD. It writes the pre-activations into h [>= rows, 2F], or [>= rows, F] without a gate."""
    gate_up_E2FD, down_EDF, bias_E2F, activation = experts
    T, D = x_TD.shape
    K = weights_TK.shape[1]
    tokens = order // max(K, 1)
    out_ND = x_TD.new_empty(order.numel() + 1, D)
    out_ND[-1] = 0
    for e, lo, hi in spans(ends):
        bias_F = None if bias_E2F is None else bias_E2F[e]
        pre_activations(x_TD, tokens[lo:hi], gate_up_E2FD[e], bias_F, h[lo:hi])
        mm(named(activation).of(h[lo:hi]), down_EDF[e].T, out_ND[lo:hi])
    return combine(out_ND, order, weights_TK, T, K)


def gradient_of_x(
    dy_TD: Tensor,
    x_TD: Tensor,
    experts: ExpertWeights,
    weights_TK: Tensor,
    h: Tensor,
    order: Tensor,
    ends: list[int],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """The gradients of x, weights and bias (None without one); dH [N, 2F], the weighted activation [N, F].

    The last two are inputs of `gradients_of_matrices`.
    """
    gate_up_E2FD, down_EDF, bias_E2F, activation = experts
    T, D = x_TD.shape
    K = weights_TK.shape[1]
    N = order.numel()
    tokens = order // max(K, 1)
    s_N = weights_TK.reshape(-1)[order].to(_acc(x_TD))  # in the same type as in forward
    d_bias = None if bias_E2F is None else bias_E2F.new_zeros(bias_E2F.shape)
    ds_N = torch.empty(N, dtype=weights_TK.dtype)
    dh_N2F = h.new_empty(N, h.shape[1])
    act_NF = h.new_empty(N, down_EDF.shape[2])
    dx_ND = x_TD.new_empty(N + 1, D)
    dx_ND[-1] = 0
    for e, lo, hi in spans(ends):
        s = s_N[lo:hi, None]
        dy = dy_TD.index_select(0, tokens[lo:hi])
        act = named(activation).of(h[lo:hi])
        # computed before the routing weight is applied, since its product with act is the weight's gradient
        d_act = dy @ down_EDF[e]
        ds_N[lo:hi] = torch.linalg.vecdot(d_act.to(_acc(d_act)), act.to(_acc(act)))
        act_NF[lo:hi] = act.mul_(s)
        dh = dh_N2F[lo:hi]
        named(activation).gradient_of(h[lo:hi], d_act.mul_(s), dh)
        torch.mm(dh, gate_up_E2FD[e], out=dx_ND[lo:hi])
        if d_bias is not None:
            d_bias[e] = dh.sum(0, dtype=_acc(dh))
    ds = weights_TK.new_zeros(T * K).index_copy_(0, order, ds_N).view(T, K)
    return combine(dx_ND, order, None, T, K), ds, d_bias, dh_N2F, act_NF


def gradients_of_matrices(
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    dy_TD: Tensor,
    x_TD: Tensor,
    tokens: Tensor,
    dh_N2F: Tensor,
    act_NF: Tensor,
    ends: list[int],
    into: tuple[Target, Target] = (NEW, NEW),
) -> tuple[Tensor, Tensor]:
    """The gradients of gate_up and down; tokens [N]: the token of each row. into: their targets."""
    of_up, of_down = into
    d_gate_up = begun(gate_up_E2FD, of_up)
    d_down = begun(down_EDF, of_down)
    for e, lo, hi in spans(ends):
        product_into(dy_TD.index_select(0, tokens[lo:hi]).T, act_NF[lo:hi], d_down[e], of_down.add)
        product_into(dh_N2F[lo:hi].T, x_TD.index_select(0, tokens[lo:hi]), d_gate_up[e], of_up.add)
    return d_gate_up, d_down


def begun(matrix: Tensor, into: Target) -> Tensor:
    """The tensor of a target: with its values where they are added to, else zeros."""
    if into.tensor is None:
        return matrix.new_zeros(matrix.shape)
    return into.tensor if into.add else into.tensor.zero_()


def product_into(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """Writes the product a b into out, or adds it. If out has a wider type, the product is not rounded."""
    wide = torch.promote_types(a.dtype, out.dtype)
    product = torch.mm(a.to(wide), b.to(wide))
    if add:
        out.add_(product)
    else:
        out.copy_(product)


def _acc(t: Tensor) -> torch.dtype:
    """The type of sums: fp32, or t's type if that is wider."""
    return torch.promote_types(t.dtype, torch.float32)


def grouped_mm(a_ND: Tensor, b_EFD: Tensor, ends: list[int]) -> Tensor:
    """c_NF as defined in reference.py. ends: the groups' ends."""
    c_NF = a_ND.new_empty(a_ND.shape[0], b_EFD.shape[1])
    for e, lo, hi in spans(ends):
        torch.mm(a_ND[lo:hi], b_EFD[e].T, out=c_NF[lo:hi])
    c_NF[ends[-1] if ends else 0 :] = 0
    return c_NF


def grouped_mm_backward(dc_NF: Tensor, a_ND: Tensor, b_EFD: Tensor, ends: list[int]) -> tuple[Tensor, Tensor]:
    """The gradients of a and b."""
    db_EFD = b_EFD.new_zeros(b_EFD.shape)
    for e, lo, hi in spans(ends):
        torch.mm(dc_NF[lo:hi].T, a_ND[lo:hi], out=db_EFD[e])
    return grouped_mm_backward_of_a(dc_NF, a_ND, b_EFD, ends), db_EFD


def grouped_mm_backward_of_a(dc_NF: Tensor, a_ND: Tensor, b_EFD: Tensor, ends: list[int]) -> Tensor:
    """The gradient of a."""
    da_ND = a_ND.new_empty(a_ND.shape)
    for e, lo, hi in spans(ends):
        torch.mm(dc_NF[lo:hi], b_EFD[e], out=da_ND[lo:hi])
    da_ND[ends[-1] if ends else 0 :] = 0
    return da_ND
