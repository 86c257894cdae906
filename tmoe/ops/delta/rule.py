"""delta_rule: the gated delta rule over rows of runs (Yang et al. 2024), the core of a linear layer.

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q          for each head, token after token

Without the correction S^T k, the rule is Mamba-2's (Dao & Gu 2024): q is C, k is B, and beta the step dt.

next: tmoe/model/linear.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.ops.argument_checks import FLOATS, check_device, check_tensors, require
from tmoe.ops.delta import chunks, gpu
from tmoe.ops.delta.chunks import FORGOTTEN
from tmoe.ops.delta.gpu import Inputs
from tmoe.ops.launch.shapes import LinearShapes
from tmoe.ops.register import Backward, register_differentiable


def delta_rule(
    q_BSGK: Tensor,
    k_BSGK: Tensor,
    v_BSHV: Tensor,
    g_BSH: Tensor,
    beta_BSH: Tensor,
    run_BS: Tensor | None = None,
    correct: bool = True,
) -> Tensor:
    """o [B, S, H, V] in v's type; computed in fp32, or in fp64 for fp64 inputs.

    Args:
        q_BSGK, k_BSGK: queries and keys of G heads, each for H/G neighbouring heads of values; q with its
            factor. With the correction k has length 1, or less: the rule may diverge for longer keys.
        v_BSHV: values.
        g_BSH: logarithms of the decays, at most 0; 0 at padding. fp32 or fp64.
        beta_BSH: how much of the difference is written, 0 to 1; 0 at padding. g's type.
        run_BS: int64, the run of each token, never decreasing in a row (`Runs.number_BS`). The state is 0 at
            a run's beginning. None: each row is one run.
        correct: False: without the correction, S <- exp(g) S + k (beta v)^T, for any beta and length of k.

    A token with a value that is not finite makes itself and all later tokens of its run NaN in the head
    concerned, and changes no other run: neither its outputs nor its gradients.

    Differentiable in all tensors but run. Raises ValueError for arguments that do not fit.
    """
    _check(q_BSGK, k_BSGK, v_BSHV, g_BSH, beta_BSH, run_BS)
    o_BSHV, _, _ = torch.ops.tmoe.delta_rule(q_BSGK, k_BSGK, v_BSHV, g_BSH, beta_BSH, run_BS, correct)
    return o_BSHV


def delta_rule_from(inputs: Inputs, state_BHKV: Tensor, correct: bool = True) -> tuple[Tensor, Tensor]:
    """o as in `delta_rule`, for rows that continue from a state, and the state after their last tokens.

    inputs: q, k, v, g and beta. state_BHKV: fp32 or fp64. correct: as in `delta_rule`. Not differentiable.
    """
    _check(*inputs, None)
    v = inputs[2]
    with torch.no_grad():
        if v.shape[1] == 1:
            return _one_token(inputs, state_BHKV, correct)
        made = chunks.cut(*_wide(*inputs), None, correct)
        o, state, _, _ = chunks.scan(made, state_BHKV)
        return chunks.unfold(o, v.shape[1]).to(v.dtype), state


@torch.no_grad()
def delta_rule_step(inputs: Inputs, state_BHKV: Tensor, correct: bool = True) -> Tensor:
    """o [B, 1, H, V] for one more token of each sequence; the states are overwritten. Not differentiable.

    inputs: q, k, v, g and beta. state_BHKV: fp32 or fp64, contiguous. correct: as in `delta_rule`.
    """
    _check(*inputs, None)
    if state_BHKV.dtype == torch.float32 and inputs[2].numel() and gpu.measured(state_BHKV.device):
        return gpu.step(_contiguous(inputs), state_BHKV, correct)
    o, after = _one_token(inputs, state_BHKV, correct)
    state_BHKV.copy_(after)
    return o


def _one_token(inputs: Inputs, state: Tensor, correct: bool) -> tuple[Tensor, Tensor]:
    """The rule for one token of each row, by its definition."""
    o_type, H = inputs[2].dtype, inputs[2].shape[2]
    q, k, v, g, beta = (t[:, 0] for t in _wide(*inputs))
    q, k = (t.repeat_interleave(H // t.shape[1], 1) for t in (q, k))
    state = state * g.exp()[..., None, None]
    v = v - (state * k[..., None]).sum(-2) if correct else v
    fresh = beta[..., None] * v
    state = state + k[..., None] * fresh[..., None, :]
    return (state * q[..., None]).sum(-2)[:, None].to(o_type), state


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, run: Tensor | None) -> None:
    check_tensors(q=q, k=k, v=v, g=g, beta=beta)
    types = (*FLOATS, torch.float64)
    require(v.dim() == 4, "v", f"shape {tuple(v.shape)}", "[B, S, H, V]")
    B, S, H, _ = v.shape
    fit = q.dim() == 4 and q.shape[:2] == v.shape[:2] and q.shape[2] > 0 and H % q.shape[2] == 0
    require(fit, "q", f"shape {tuple(q.shape)}", f"[B={B}, S={S}, a divisor of H={H}, K]")
    require(k.shape == q.shape, "k", f"shape {tuple(k.shape)}", f"q's {tuple(q.shape)}")
    for name, t in dict(q=q, k=k, v=v).items():
        require(t.dtype in types and t.dtype == v.dtype, name, t.dtype, f"v's type, one of {types}")
    for name, t in dict(g=g, beta=beta).items():
        require(t.shape == v.shape[:3], name, f"shape {tuple(t.shape)}", f"[B={B}, S={S}, H={H}]")
        wide = torch.promote_types(v.dtype, torch.float32)
        require(t.dtype == wide, name, t.dtype, f"{wide}")
    if run is not None:
        require(run.shape == v.shape[:2], "run", f"shape {tuple(run.shape)}", f"[B={B}, S={S}]")
        require(run.dtype == torch.int64, "run", run.dtype, "int64")
        check_device(v, run=run)
    check_device(v, q=q, k=k, g=g, beta=beta)


def _wide(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Inputs:
    return q.to(g.dtype), k.to(g.dtype), v.to(g.dtype), g, beta


def _cleaned(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, run: Tensor | None
) -> tuple[Inputs, Tensor]:
    """Inputs with 0 in place of tokens that are not finite, and the outputs that are NaN, [B, S, H]."""
    some = v.shape[2] // q.shape[2]
    ok = (q.isfinite() & k.isfinite()).all(-1).repeat_interleave(some, 2)
    ok = ok & v.isfinite().all(-1) & beta.isfinite() & (g < float("inf"))  # -inf forgets the state
    bad = ~ok
    of_keys = ~ok.unflatten(2, (-1, some)).all(-1)
    v, g, beta = v.masked_fill(bad[..., None], 0.0), g.masked_fill(bad, 0.0), beta.masked_fill(bad, 0.0)
    q, k = (torch.where((of_keys & ~t.isfinite().all(-1))[..., None], 0.0, t) for t in (q, k))
    seen = bad.long().cumsum(1)
    if run is not None:  # count from the beginning of the run
        at = torch.arange(run.shape[1], device=run.device).expand_as(run)
        begins = torch.ones_like(run, dtype=torch.bool)
        begins[:, 1:] = run[:, 1:] != run[:, :-1]
        first = torch.where(begins, at, 0).cummax(1).values
        seen = seen - (seen - bad.long()).gather(1, first[..., None].expand_as(seen))
    return (q, k, v, g.clamp(min=FORGOTTEN), beta), seen > 0


def _contiguous(inputs: Inputs) -> Inputs:
    q, k, v, g, beta = inputs
    return q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), beta.contiguous()


def on_gpu(q: Tensor, v: Tensor, correct: bool) -> bool:
    """Whether kernels compute the rule."""
    fits = gpu.fits(q.shape[-1], v.shape[-1], v.dtype == torch.bfloat16, correct)
    return fits and v.numel() > 0 and gpu.measured(v.device)


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, run: Tensor | None, correct: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """o, and what kernels keep for backward: T, and which outputs are NaN. Without kernels both are empty."""
    if on_gpu(q, v, correct):
        return with_kernels(q, k, v, g, beta, run, correct)
    return plain(q, k, v, g, beta, run, correct), g.new_empty(0), g.new_empty(0)


def with_kernels(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, run: Tensor | None, correct: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """`forward` by kernels."""
    return gpu.forward(_contiguous((q, k, v, g, beta)), run, correct)


def plain(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, run: Tensor | None, correct: bool = True
) -> Tensor:
    """o in plain PyTorch."""
    if not v.numel() or not q.numel():
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    inputs, lost = _cleaned(*_wide(q, k, v, g, beta), run)
    o, *_ = chunks.scan(chunks.cut(*inputs, run, correct), None)
    o = chunks.unfold(o, v.shape[1]).masked_fill(lost[..., None], float("nan"))
    return o.to(v.dtype).contiguous()


class Kept(NamedTuple):
    """The arguments of the op that computes the gradients: that of o, the rule's, and what `forward` kept."""

    dy: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    t: Tensor
    lost: Tensor
    run: Tensor | None
    correct: bool


def backward(kept: Kept) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, g and beta; 0 where an output is NaN."""
    given = kept.q, kept.k, kept.v, kept.g, kept.beta
    if on_gpu(kept.q, kept.v, kept.correct):
        return back_with_kernels(kept.dy, given, (kept.t, kept.lost), kept.run, kept.correct)
    return plain_back(kept.dy, given, kept.run, kept.correct)


def back_with_kernels(
    dy: Tensor, given: Inputs, known: tuple[Tensor, Tensor], run: Tensor | None, correct: bool = True
) -> tuple[Tensor, ...]:
    """`backward` by kernels. known: what the forward kept."""
    return gpu.backward(dy.contiguous(), _contiguous(given), run, *known, correct)


def plain_back(dy: Tensor, given: Inputs, run: Tensor | None, correct: bool = True) -> tuple[Tensor, ...]:
    """`backward` in plain PyTorch."""
    q, _, v, g, _ = given
    if not v.numel() or not q.numel():
        return tuple(map(torch.zeros_like, given))
    inputs, lost = _cleaned(*_wide(*given), run)
    made = chunks.cut(*inputs, run, correct)
    dy = dy.to(g.dtype).masked_fill(lost[..., None], 0.0)
    parts = chunks.scan_back(made, chunks.fold(dy, made.q.shape[3]))
    dq, dk, dv, dg, db = (chunks.unfold(t, v.shape[1]) for t in parts)
    G = q.shape[2]
    dq, dk = (t.unflatten(2, (G, -1)).sum(3) for t in (dq, dk))
    return tuple(t.to(like.dtype).contiguous() for t, like in zip((dq, dk, dv, dg, db), given, strict=True))


def _fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, run: Tensor | None, correct: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not on_gpu(q, v, correct):
        return v.new_empty(v.shape), g.new_empty(0), g.new_empty(0)
    t, lost = (v.new_empty(shape, dtype=dtype) for shape, dtype in gpu.kept(q, v, correct))
    return v.new_empty(v.shape), t, lost


register_differentiable(
    "delta_rule",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? run, bool correct)"
    " -> (Tensor, Tensor, Tensor)",
    returns="o",
    keeps="t lost",
    cpu=forward,
    cuda=forward,
    fake=_fake,
    backward=Backward(
        Kept,
        gradients="q k v g beta",
        cpu=backward,
        cuda=backward,
    ),
    traces={LinearShapes: gpu.of_linear},
)
