"""The ops as their definitions say, in plain differentiable PyTorch: the truth that tests and benchmarks compare with.

Nothing here is fast. Run on float64 copies of the (rounded) inputs, it gives the exact answer and, through autograd, the
exact gradients. Formulas: SwiGLU from Shazeer 2020 (arXiv 2002.05202), top-k experts from Shazeer et al. 2017 (1701.06538).
"""

import torch
import torch.nn.functional as F


def swiglu(gate, up):
    """silu(gate) * up (Shazeer 2020)."""
    return F.silu(gate) * up


ALPHA, LIMIT = 1.702, 7.0


def clamped(gate, up):
    """(u + 1) * g sigmoid(ALPHA g) with g = min(gate, LIMIT) and u = up within +-LIMIT (gpt-oss, OpenAI 2025)."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


ACTIVATIONS = {"swiglu": swiglu, "clamped": clamped}


def moe_mlp(x_TD, gate_up_E2FD, down_EDF, weights_TK, ids_TK, gate_up_bias_E2F=None, activation="swiglu"):
    """y[t] = sum_k weights[t, k] * down[e] @ act(gate[e] @ x[t] + ..., up[e] @ x[t] + ...) with e = ids[t, k]; -1 adds nothing."""
    y_TD = torch.zeros_like(x_TD)
    for e in range(gate_up_E2FD.shape[0]):
        t, k = torch.where(ids_TK == e)
        h = x_TD[t] @ gate_up_E2FD[e].T
        gate, up = (h if gate_up_bias_E2F is None else h + gate_up_bias_E2F[e]).chunk(2, dim=-1)
        out = ACTIVATIONS[activation](gate, up) @ down_EDF[e].T
        y_TD = y_TD.index_add(0, t, out * weights_TK[t, k, None].to(out.dtype))
    return y_TD


def softmax_topk(logits_TE, K, renormalize):
    """The K largest of softmax(logits), in fp32 or more, and which they are; divided by their sum if renormalize.

    Chosen by logits: a softmax that has underflowed to 0 no longer tells experts apart.
    """
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    ids_TK = wide_TE.detach().topk(K, -1).indices
    weights_TK = wide_TE.softmax(-1).gather(-1, ids_TK)
    return (weights_TK / weights_TK.sum(-1, keepdim=True) if renormalize else weights_TK), ids_TK.int()


def grouped_mm(a_ND, b_EFD, ends_E):
    """c[ends[e-1]:ends[e]] = a[ends[e-1]:ends[e]] @ b[e].T; rows past the last end are zero."""
    starts = [0, *ends_E.tolist()]
    groups = [a_ND[lo:hi] @ b.T for lo, hi, b in zip(starts, starts[1:], b_EFD, strict=False)]
    rest = a_ND.new_zeros(a_ND.shape[0] - starts[-1], b_EFD.shape[1])
    return torch.cat([*groups, rest])
