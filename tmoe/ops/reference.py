"""The ops as their definitions say, in plain differentiable PyTorch: the truth that tests and benchmarks compare with.

Nothing here is fast. Run on float64 copies of the (rounded) inputs, it gives the exact answer and, through autograd, the
exact gradients. Formulas: SwiGLU from Shazeer 2020 (arXiv 2002.05202), top-k experts from Shazeer et al. 2017 (1701.06538).
"""

import torch
import torch.nn.functional as F


def moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, ids_TK):
    """y[t] = sum_k weights[t, k] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t])) with e = ids[t, k]; -1 adds nothing."""
    y_TD = torch.zeros_like(x_TD)
    for e in range(gate_up_E2FD.shape[0]):
        t, k = torch.where(ids_TK == e)
        gate, up = (x_TD[t] @ gate_up_E2FD[e].T).chunk(2, dim=-1)
        out = (F.silu(gate) * up) @ down_EDF[e].T
        y_TD = y_TD.index_add(0, t, out * weights_TK[t, k, None].to(out.dtype))
    return y_TD


def grouped_mm(a_ND, b_EFD, ends_E):
    """c[ends[e-1]:ends[e]] = a[ends[e-1]:ends[e]] @ b[e].T; rows past the last end are zero."""
    starts = [0, *ends_E.tolist()]
    groups = [a_ND[lo:hi] @ b.T for lo, hi, b in zip(starts, starts[1:], b_EFD, strict=False)]
    rest = a_ND.new_zeros(a_ND.shape[0] - starts[-1], b_EFD.shape[1])
    return torch.cat([*groups, rest])
