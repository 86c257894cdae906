"""The ops as their definitions say, in plain differentiable PyTorch: what tests and benchmarks compare with.

Nothing here is fast. Run on float64 copies of the (rounded) inputs, it gives the exact answer and, through
autograd, the exact gradients.

Top-k experts are from Shazeer et al. 2017 (arXiv 1701.06538), activations in tmoe/activations.py.
"""

import torch

from tmoe.activations import ACTIVATIONS


def moe_mlp(
    x_TD: torch.Tensor,
    gate_up_E2FD: torch.Tensor,
    down_EDF: torch.Tensor,
    weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    gate_up_bias_E2F: torch.Tensor | None = None,
    activation: str = "swiglu",
) -> torch.Tensor:
    """y[t] = sum_k weights[t, k] * down[e] @ act(gate[e] @ x[t] + ..., up[e] @ x[t] + ...), e = ids[t, k].

    The dots stand for the bias. An id of -1 adds nothing.
    """
    y_TD = torch.zeros_like(x_TD)
    for e in range(gate_up_E2FD.shape[0]):
        t, k = torch.where(ids_TK == e)
        h = x_TD[t] @ gate_up_E2FD[e].T
        if gate_up_bias_E2F is not None:
            h = h + gate_up_bias_E2F[e]
        gate, up = h.chunk(2, dim=-1)
        out = ACTIVATIONS[activation].formula(gate, up) @ down_EDF[e].T
        y_TD = y_TD.index_add(0, t, out * weights_TK[t, k, None].to(out.dtype))
    return y_TD


def softmax_topk(logits_TE: torch.Tensor, K: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest of softmax(logits), in fp32 or more, and their experts.

    Divided by their sum if renormalize.

    Chosen by logits: a softmax that has underflowed to 0 no longer tells experts apart.
    """
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    ids_TK = wide_TE.detach().topk(K, -1).indices
    weights_TK = wide_TE.softmax(-1).gather(-1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK, ids_TK.int()


def grouped_mm(a_ND: torch.Tensor, b_EFD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """c[ends[e-1]:ends[e]] = a[ends[e-1]:ends[e]] @ b[e].T; rows past the last end are zero."""
    starts = [0, *ends_E.tolist()]
    groups = [a_ND[lo:hi] @ b.T for lo, hi, b in zip(starts, starts[1:], b_EFD, strict=False)]
    rest = a_ND.new_zeros(a_ND.shape[0] - starts[-1], b_EFD.shape[1])
    return torch.cat([*groups, rest])


def gather_rows(x_TD: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
    """out[n] = x[ids[n]]; zeros where ids[n] is no row of x."""
    (n,) = torch.where((ids_N >= 0) & (ids_N < x_TD.shape[0]))
    return x_TD.new_zeros(ids_N.shape[0], x_TD.shape[1]).index_copy(0, n, x_TD[ids_N[n].long()])


def scatter_rows(y_ND: torch.Tensor, ids_N: torch.Tensor, rows: int) -> torch.Tensor:
    """out[t] = the sum over n with ids[n] = t of y[n], in fp32 or more."""
    (n,) = torch.where((ids_N >= 0) & (ids_N < rows))
    wide = torch.promote_types(y_ND.dtype, torch.float32)
    total = torch.zeros(rows, y_ND.shape[1], dtype=wide, device=y_ND.device)
    return total.index_add(0, ids_N[n].long(), y_ND[n].to(wide)).to(y_ND.dtype)
