"""The gated delta rule in chunks of tokens, forward and backward, in plain PyTorch.

Per head, with G the sum of g from a chunk's beginning, D_ij = exp(G_i - G_j) for i >= j, and S the state
before the chunk (Yang et al. 2024, "Gated Delta Networks", section 3.3):

    A = strict lower part of beta_i (k_i . k_j) D_ij;   T = (I + A)^-1
    U = T (beta v);   W = T (beta e^G k);   F = U - W S;   P = (q k^T) D
    O = (q e^G) S + P F;   S <- e^{G_L} S + (k e^{G_L - G})^T F

Without the correction (Mamba-2; Dao & Gu 2024, "Transformers are SSMs", section 6) F = beta v, and there are
no T, U and W.

A chunk may hold parts of several runs. D_ij is 0 across a boundary; e^G is 0 after the first boundary, and
e^{G_L - G} before the last one. Masks are applied before the exponential, so no exponent is above 0.

next: tmoe/ops/delta/rule.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LONGEST = 64  # tokens of a chunk
FORGOTTEN = -1e4  # least g: exp of it is 0 in every type, and differences of its sums are finite


class Chunks(NamedTuple):
    """Inputs in chunks [B, H, N, L, ...], and what is computed of them without a state."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor  # [B, H, N, L]
    reach: Tensor  # D [B, H, N, L, L]
    head: Tensor  # [B, H, N, L]: decay from the state before the chunk to a token
    tail: Tensor  # [B, H, N, L]: decay from a token to the state after the chunk
    solve: Tensor | None  # I + A; None without the correction
    u: Tensor
    w: Tensor | None  # None without the correction
    scores: Tensor  # P

    @property
    def whole(self) -> Tensor:
        """Decay of the state over a chunk, [B, H, N]."""
        return self.head[..., -1]


def temporaries(H: int, K: int, V: int, correct: bool = True) -> int:
    """Numbers in fp32 that `scan_back` holds at one time for each token, to about 5%.

    Ten tensors of a value head's width, 13 of a key head's, three states for each chunk, and 12 of pairs of a
    chunk's tokens, of which decays are in fp64. Without the correction they are 7.5, 12.5, three and 2.
    """
    if not correct:
        return H * (15 * V // 2 + 25 * K // 2 + 3 * K * V // LONGEST + 2 * LONGEST)
    return H * (10 * V + 13 * K + 3 * K * V // LONGEST + 12 * LONGEST)


def length_of(S: int) -> int:
    """Tokens of a chunk of rows of S tokens."""
    return next((n for n in (16, 32) if n >= S), LONGEST)


def fold(t_BSHX: Tensor, L: int) -> Tensor:
    """[B, H, N, L, ...] of [B, S, H, ...]; the last chunk is filled up with zeros."""
    more = -t_BSHX.shape[1] % L
    if more:
        t_BSHX = torch.cat([t_BSHX, t_BSHX.new_zeros(t_BSHX.shape[0], more, *t_BSHX.shape[2:])], 1)
    return t_BSHX.unflatten(1, (-1, L)).movedim(3, 1)


def unfold(t_BHNL: Tensor, S: int) -> Tensor:
    """[B, S, H, ...] of [B, H, N, L, ...]; inverse of `fold`."""
    return t_BHNL.movedim(1, 3).flatten(1, 2)[:, :S]


def _decays(g: Tensor, run_BS: Tensor | None, L: int) -> tuple[Tensor, Tensor, Tensor]:
    """reach, head and tail of g [B, H, N, L]. Sums are in fp64: differences of large ones are exact."""
    sums = g.double().cumsum(-1)
    apart = sums[..., :, None] - sums[..., None, :]
    lower = torch.ones(L, L, dtype=torch.bool, device=g.device).tril()
    never = float("-inf")
    if run_BS is None:
        reach = apart.masked_fill(~lower, never)
        head, tail = sums, sums[..., -1:] - sums
    else:
        more = -run_BS.shape[1] % L
        run = torch.cat([run_BS, run_BS[:, -1:].expand(-1, more)], 1)
        run = run.unflatten(1, (-1, L))[:, None]
        before = torch.cat([run[:, :, :1, :1], run[:, :, :-1, -1:]], 2)
        reach = apart.masked_fill(~((run[..., :, None] == run[..., None, :]) & lower), never)
        head = sums.masked_fill(run != before, never)
        tail = (sums[..., -1:] - sums).masked_fill(run != run[..., -1:], never)
    return tuple(t.exp().to(g.dtype) for t in (reach, head, tail))  # pyrefly: ignore[bad-return]


def cut(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, run: Tensor | None, correct: bool = True
) -> Chunks:
    """The chunks of rows; arguments as in `rule`, all of one type, fp32 or fp64."""
    H, L = v.shape[2], length_of(v.shape[1])
    q, k = (t.repeat_interleave(H // t.shape[2], 2) for t in (q, k))
    q, k, v, beta, g = (fold(t, L) for t in (q, k, v, beta, g.clamp(min=FORGOTTEN)))
    reach, head, tail = _decays(g, run, L)
    scores = (q @ k.mT) * reach
    if not correct:
        return Chunks(q, k, v, beta, reach, head, tail, None, beta[..., None] * v, None, scores)
    lower = (beta[..., None] * (k @ k.mT) * reach).tril(-1)
    solve = lower + torch.eye(L, dtype=q.dtype, device=q.device)
    right = torch.cat([beta[..., None] * v, (beta * head)[..., None] * k], -1)
    solved = torch.linalg.solve_triangular(solve, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    return Chunks(q, k, v, beta, reach, head, tail, solve, u, w, scores)


def scan(c: Chunks, state: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Outputs [B, H, N, L, V], the state after the last token, and the state before and F of each chunk.

    state: [B, H, K, V] before the first token; None: 0.
    """
    B, H, N, _, K = c.k.shape
    S = c.q.new_zeros(B, H, K, c.v.shape[-1]) if state is None else state
    reads, writes, whole = c.q * c.head[..., None], c.k * c.tail[..., None], c.whole[..., None, None]
    states, fresh, out = [], [], []
    for n in range(N):
        states.append(S)
        fresh.append(c.u[:, :, n] if c.w is None else c.u[:, :, n] - c.w[:, :, n] @ S)
        out.append(reads[:, :, n] @ S + c.scores[:, :, n] @ fresh[-1])
        S = whole[:, :, n] * S + writes[:, :, n].mT @ fresh[-1]
    return torch.stack(out, 2), S, states, fresh


class Gradients(NamedTuple):
    """Gradients of the inputs of `cut`, in chunks."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class Solved(NamedTuple):
    """Gradients that pass through the solve, in chunks: of beta v, and shares of others."""

    bv: Tensor
    beta: Tensor
    k: Tensor
    head: Tensor
    apart: Tensor


def _solve_back(c: Chunks, before: Tensor, dF: Tensor) -> Solved:
    """Gradients through U and W. before: the state before each chunk. dF: the gradient of F, so of U too."""
    assert c.solve is not None and c.w is not None
    # that of W is -dF S^T; both pass through T's transpose
    right = torch.cat([dF, -dF @ before.mT], -1)
    solved = torch.linalg.solve_triangular(c.solve.mT, right, upper=True, unitriangular=True)
    d_bv, d_bk = solved.split([c.v.shape[-1], c.k.shape[-1]], -1)
    d_lower = -(d_bv @ c.u.mT + d_bk @ c.w.mT).tril(-1)
    kk = c.k @ c.k.mT
    d_kk = d_lower * c.beta[..., None] * c.reach
    by_head = (d_bk * c.k).sum(-1)
    d_beta = (d_lower * kk * c.reach).sum(-1) + (d_bv * c.v).sum(-1) + c.head * by_head
    dk = (c.beta * c.head)[..., None] * d_bk + (d_kk + d_kk.mT) @ c.k
    return Solved(d_bv, d_beta, dk, c.beta * by_head, d_kk * kk)


def scan_back(c: Chunks, do: Tensor) -> Gradients:
    """Gradients of the inputs, in chunks, from the gradient of the outputs [B, H, N, L, V]."""
    _, _, states, fresh = scan(c, None)
    before, F = torch.stack(states, 2), torch.stack(fresh, 2)
    reads, writes, whole = c.q * c.head[..., None], c.k * c.tail[..., None], c.whole[..., None, None]
    dS = torch.zeros_like(before[:, :, 0])
    after, dF = [], []
    for n in reversed(range(before.shape[2])):
        after.insert(0, dS)
        dF.insert(0, c.scores[:, :, n].mT @ do[:, :, n] + writes[:, :, n] @ dS)
        dS = reads[:, :, n].mT @ do[:, :, n] + whole[:, :, n] * dS
        dS = dS if c.w is None else dS - c.w[:, :, n].mT @ dF[0]
    dS_after, dF = torch.stack(after, 2), torch.stack(dF, 2)

    d_reads, d_writes = do @ before.mT, F @ dS_after.mT
    d_whole = (before * dS_after).sum((-1, -2))
    d_scores = do @ F.mT
    d_qk = d_scores * c.reach
    d_head = (d_reads * c.q).sum(-1)
    d_tail = (d_writes * c.k).sum(-1)
    d_apart = d_scores * c.scores
    dq = d_reads * c.head[..., None] + d_qk @ c.k
    dk = d_writes * c.tail[..., None] + d_qk.mT @ c.q
    if c.w is None:
        d_bv, d_beta = dF, (dF * c.v).sum(-1)
    else:
        solved = _solve_back(c, before, dF)
        d_bv, d_beta = solved.bv, solved.beta
        dk, d_head, d_apart = dk + solved.k, d_head + solved.head, d_apart + solved.apart
    dv = c.beta[..., None] * d_bv
    # each decay is the exponential of a difference of sums of g
    d_sums = d_apart.sum(-1) - d_apart.sum(-2) + d_head * c.head - d_tail * c.tail
    d_last = (d_tail * c.tail).sum(-1) + d_whole * c.whole
    d_sums = torch.cat([d_sums[..., :-1], d_sums[..., -1:] + d_last[..., None]], -1)
    dg = d_sums.flip(-1).cumsum(-1).flip(-1)
    return Gradients(dq, dk, dv, dg, d_beta)
