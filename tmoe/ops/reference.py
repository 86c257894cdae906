"""The definitions of the ops in plain differentiable PyTorch, as references for tests and benchmarks.

These functions are not fast. On float64 copies of the (rounded) inputs they return the exact result and,
through autograd, the exact gradients.

Top-k experts are from Shazeer et al. 2017 (arXiv 1701.06538); activations are defined in
tmoe/base/activations.py.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tmoe.base.activations import activation as named


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

    The dots stand for the bias. An id of -1 adds nothing. For an activation without a gate, gate_up is
    [E, F, D] and contains only the up matrices.
    """
    y_TD = torch.zeros_like(x_TD)
    for e in range(gate_up_E2FD.shape[0]):
        t, k = torch.where(ids_TK == e)
        h = x_TD[t] @ gate_up_E2FD[e].T
        if gate_up_bias_E2F is not None:
            h = h + gate_up_bias_E2F[e]
        out = named(activation).of(h) @ down_EDF[e].T
        y_TD = y_TD.index_add(0, t, out * weights_TK[t, k, None].to(out.dtype))
    return y_TD


def softmax_topk(logits_TE: torch.Tensor, K: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest of softmax(logits), in fp32 or fp64, and their experts.

    If renormalize, they are divided by their sum.

    Experts are chosen by logits, because softmax values that have underflowed to 0 are all equal.
    """
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    ids_TK = wide_TE.detach().topk(K, -1).indices
    weights_TK = wide_TE.softmax(-1).gather(-1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK, ids_TK.int()


def delta_rule(
    q_BSGK: torch.Tensor,
    k_BSGK: torch.Tensor,
    v_BSHV: torch.Tensor,
    g_BSH: torch.Tensor,
    beta_BSH: torch.Tensor,
    correct: bool = True,
) -> torch.Tensor:
    """o [B, S, H, V], token after token: S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = S^T q.

    correct: False: without the term S^T k. S is 0 before the first token. Each of G key heads serves H/G
    neighbouring value heads.
    """
    B, _, H, V = v_BSHV.shape
    q, k = (t.repeat_interleave(H // t.shape[2], 2) for t in (q_BSGK, k_BSGK))
    state = v_BSHV.new_zeros(B, H, q.shape[-1], V)
    out = []
    for t in range(v_BSHV.shape[1]):
        state = state * g_BSH[:, t].exp()[..., None, None]
        found = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        fresh = beta_BSH[:, t, :, None] * (v_BSHV[:, t] - found * correct)
        state = state + k[:, t, :, :, None] * fresh[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


def sinkhorn(
    logits_TE: torch.Tensor, live_T: torch.Tensor | None, iterations: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Potentials: a number to add to the logits of each expert so that the softmax loads all experts equally.

    live: bool, False at tokens that do not count.
    Returns potentials_E and the residual: the largest relative error of a load, 0-dim. The plan with equal
    row sums and (up to the residual) equal column sums is softmax(logits + potentials) / T.
    """
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    E = wide_TE.shape[1]
    weight_T = torch.ones_like(wide_TE[:, 0]) if live_T is None else live_T.to(wide_TE.dtype)

    def uneven(potentials_E: torch.Tensor) -> torch.Tensor:
        """Each expert's load, as a multiple of the mean load."""
        plan_TE = (wide_TE + potentials_E).softmax(-1) * weight_T[:, None]
        return plan_TE.sum(0) * (E / weight_T.sum().clamp(min=1))

    before_E = potentials_E = wide_TE.new_zeros(E)
    for _ in range(iterations):
        ahead_E = potentials_E + (potentials_E - before_E) / 2
        before_E = potentials_E
        potentials_E = ahead_E - uneven(ahead_E).clamp(min=1e-30).log()
    return potentials_E, (uneven(potentials_E) - 1).abs().max()


def grouped_mm(a_ND: torch.Tensor, b_EFD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """c[ends[e-1]:ends[e]] = a[ends[e-1]:ends[e]] @ b[e].T; rows past the last end are zero."""
    starts = [0, *ends_E.tolist()]
    groups = [a_ND[lo:hi] @ b.T for lo, hi, b in zip(starts, starts[1:], b_EFD, strict=False)]
    rest = a_ND.new_zeros(a_ND.shape[0] - starts[-1], b_EFD.shape[1])
    return torch.cat([*groups, rest])


def logprobs(
    h_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """ln p[t, target[t]] and -sum_v p ln p of p = softmax(h W^T / temperature); 0 where a target is -100."""
    z_TV = (h_TD @ weight_VD.T / temperature).to(torch.promote_types(h_TD.dtype, torch.float32))
    logp_TV = z_TV.log_softmax(-1)
    keep = targets_T != -100
    logp_T = logp_TV.gather(-1, targets_T.where(keep, 0)[:, None])[:, 0]
    entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    return logp_T.where(keep, 0.0), entropy_T.where(keep, 0.0)


def token_loss(
    h_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_T: torch.Tensor,
    f: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor] = (),
    temperature: float = 1.0,
    entropy: bool = False,
) -> torch.Tensor:
    """The sum of f(log-prob, *inputs), or f(log-prob, entropy, *inputs), over targets that are not -100."""
    logp_T, entropy_T = logprobs(h_TD, weight_VD, targets_T, temperature)
    losses_T = f(logp_T, entropy_T, *inputs) if entropy else f(logp_T, *inputs)
    return losses_T.where(targets_T != -100, 0.0).sum()


def gather_rows(x_TD: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
    """out[n] = x[ids[n]]; zeros where ids[n] is not a row of x."""
    (n,) = torch.where((ids_N >= 0) & (ids_N < x_TD.shape[0]))
    return x_TD.new_zeros(ids_N.shape[0], x_TD.shape[1]).index_copy(0, n, x_TD[ids_N[n].long()])


def scatter_rows(y_ND: torch.Tensor, ids_N: torch.Tensor, rows: int) -> torch.Tensor:
    """out[t] = the sum of y[n] over all n with ids[n] = t, in fp32 or fp64."""
    (n,) = torch.where((ids_N >= 0) & (ids_N < rows))
    wide = torch.promote_types(y_ND.dtype, torch.float32)
    total = torch.zeros(rows, y_ND.shape[1], dtype=wide, device=y_ND.device)
    return total.index_add(0, ids_N[n].long(), y_ND[n].to(wide)).to(y_ND.dtype)


class AdamWRule(NamedTuple):
    """The numbers of AdamW's rule, in the order in which the kernels take them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float
    """weight decay, of which lr * decay is taken in a step"""


def adamw(
    weight: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    step: int,
    rule: AdamWRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step of AdamW (Loshchilov & Hutter 2017, algorithm 2): the new weight, mean and square.

    All tensors have one shape and type. step: the number of this step, from 1.
    """
    lr, (beta1, beta2), eps, decay = rule
    mean = mean + (1 - beta1) * (grad - mean)
    square = beta2 * square + (1 - beta2) * grad * grad
    root = square.sqrt() / (1 - beta2**step) ** 0.5
    weight = weight - lr * decay * weight
    return weight - lr / (1 - beta1**step) * mean / (root + eps), mean, square


class MuonRule(NamedTuple):
    """The settings of one step of Muon."""

    lr: float
    decay: float
    """weight decay, of which lr * decay is taken in a step"""
    momentum: float = 0.95
    iterations: int = 5
    """iterations of Newton-Schulz"""


# Coefficients of the iterations of Polar Express (Amsel et al. 2025, arXiv 2505.16932) for singular values
# from 1e-3, with a safety of 2e-2. Further iterations have the fixed polynomial in which the series ends.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
LAST = (1.875, -1.25, 0.375)
SLACK = 1.01  # factor on the norm, so that rounding leaves no singular value above 1
TINY = 1e-7  # added to the norm, so that a matrix of zeros stays zero


def polynomials(iterations: int) -> list[tuple[float, float, float]]:
    """The coefficients (a, b, c) of a X + b (X X^T) X + c (X X^T)^2 X, for each iteration."""
    return [*POLAR_EXPRESS[:iterations], *[LAST] * (iterations - len(POLAR_EXPRESS))]


def newton_schulz(matrix: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Nearly U V^T, for the singular value decomposition U S V^T of a matrix [out, in]."""
    x = matrix / (matrix.norm() * SLACK + TINY)
    for a, b, c in polynomials(iterations):
        gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
        mix = b * gram + c * gram @ gram
        x = a * x + (mix @ x if x.shape[0] <= x.shape[1] else x @ mix)
    return x


def newton_schulz_in_pairs(matrix: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """`newton_schulz` of a matrix [out, in] with one product X X^T, and one with X, for two iterations.

    The second iteration's X X^T is M A M, since M = a I + b A + c A^2 and A = X X^T commute.
    """
    x = matrix / (matrix.norm() * SLACK + TINY)
    x = x if x.shape[0] <= x.shape[1] else x.T
    table, one = polynomials(iterations), torch.eye(x.shape[0], dtype=x.dtype)
    for begin in range(0, iterations, 2):
        gram, mix = x @ x.T, one
        for a, b, c in table[begin : begin + 2]:
            m = a * one + b * gram + c * gram @ gram
            gram, mix = m @ gram @ m, m @ mix
        x = mix @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def muon(
    weight: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, rule: MuonRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of Muon (Jordan 2024) on one matrix [out, in]: the new weight and momentum.

    The factor 0.2 sqrt(max(out, in)) gives an update the root mean square of AdamW's, so that AdamW's
    learning rate and weight decay are valid (Liu et al. 2025, arXiv 2502.16982, section 2.2).
    """
    momentum = momentum + (1 - rule.momentum) * (grad - momentum)
    ahead = grad + rule.momentum * (momentum - grad)  # Nesterov's
    scale = 0.2 * max(weight.shape) ** 0.5
    weight = weight - rule.lr * rule.decay * weight
    return weight - rule.lr * scale * newton_schulz(ahead, rule.iterations), momentum
