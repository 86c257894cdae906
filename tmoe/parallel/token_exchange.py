"""Exchanges tokens between the ranks that share a sequence (tp, cp), forward and backward, as compilable ops.

    gather       [B, S/n, ...] -> [B, S, ...]          backward: scatter_sum, since every rank used all tokens
    scatter_sum  [B, S, ...] -> [B, S/n, ...]          backward: gather, since every rank's part is in the sum
    exchange     [B, S/n, H, ...] <-> [B, S, H/n, ...] backward: the exchange in the other direction

    gathered_linear   linear(gather(x))       keeps only this rank's x, and gathers again in its backward
    linear_scattered  scatter_sum(linear(y))  in pieces: one is sent while the next is computed

n is the size of the group, which is found by name (`collectives.name_of`). For a group of one rank, gather,
scatter_sum and exchange are the identity, and the two products are a plain linear. S consists of n parts, one
for each rank, in the group's order; `positions` returns the positions of a part in the sequence. Sums over
ranks are computed in the tensors' type, as by NCCL.

next: moe/exchange/dispatch.py
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from tmoe.ops.register import on_any_device
from tmoe.parallel.collectives import group_of

# torch 2.13's names, and 2.11's
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@torch.compiler.assume_constant_result
def size_of(group: str) -> int:
    """The number of ranks of a group; in a compiled graph it is a constant."""
    return group_of(group).size()


def _require_even(length: int, ranks: int, what: str) -> None:
    """ValueError unless `length` is a multiple of `ranks`."""
    if length % ranks:
        raise ValueError(f"{length} {what}: must be a multiple of the group's {ranks} ranks")


class _PendingExchange(NamedTuple):
    """A running collective with its input and output, which it keeps alive."""

    work: Any
    sent: Tensor
    out: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.out


def _start_gather(x_BsX: Tensor, group: dist.ProcessGroup) -> _PendingExchange:
    """Starts a gather to [n, B, S/n, ...]; dimension 0 is the rank."""
    x_BsX = x_BsX.contiguous()
    out = x_BsX.new_empty(group.size(), *x_BsX.shape)
    return _PendingExchange(_all_gather(out.flatten(0, 1), x_BsX, group=group, async_op=True), x_BsX, out)


def _start_scatter(x_nBsX: Tensor, group: dist.ProcessGroup) -> _PendingExchange:
    """Starts a reduce-scatter of [n, B, S/n, ...] to this rank's part of the sum, [B, S/n, ...]."""
    x_nBsX = x_nBsX.contiguous()
    out = torch.empty_like(x_nBsX[0])
    return _PendingExchange(
        _reduce_scatter(out, x_nBsX.flatten(0, 1), group=group, async_op=True), x_nBsX, out
    )


def _by_token(x_nBsX: Tensor) -> Tensor:
    """[n, B, S/n, ...] as [B, S, ...], without a copy if B is 1."""
    return rearrange(x_nBsX, "n b s ... -> b (n s) ...").contiguous()


def _by_rank(x_BSX: Tensor, ranks: int) -> Tensor:
    """[B, S, ...] as [n, B, S/n, ...]."""
    return rearrange(x_BSX, "b (n s) ... -> n b s ...", n=ranks)


def _keep_group(ctx, inputs, output):
    ctx.group, *ctx.rest = inputs[1:]


def _gather_grads(ctx, grad):
    return _scatter_sum(grad, ctx.group), None


def _fake_gather(x_BsX, group):
    B, s, *rest = x_BsX.shape
    return x_BsX.new_empty(B, s * group_of(group).size(), *rest)


@on_any_device("gather_tokens", fake=_fake_gather, save=_keep_group, differentiate=_gather_grads)
def _gather(x_BsX: Tensor, group: str) -> Tensor:
    return _by_token(_start_gather(x_BsX, group_of(group)).wait())


def _scatter_sum_grads(ctx, grad):
    return _gather(grad, ctx.group), None


def _fake_scatter_sum(x_BSX, group):
    B, S, *rest = x_BSX.shape
    return x_BSX.new_empty(B, S // group_of(group).size(), *rest)


@on_any_device(
    "scatter_sum_tokens", fake=_fake_scatter_sum, save=_keep_group, differentiate=_scatter_sum_grads
)
def _scatter_sum(x_BSX: Tensor, group: str) -> Tensor:
    ranks = group_of(group)
    return _start_scatter(_by_rank(x_BSX, ranks.size()), ranks).wait()


def _exchange_grads(ctx, grad):
    return _exchange(grad, ctx.group, not ctx.rest[0]), None, None


def _fake_exchange(x, group, to_heads):
    n = group_of(group).size()
    B, s, h, *rest = x.shape
    return x.new_empty(B, s * n, h // n, *rest) if to_heads else x.new_empty(B, s // n, h * n, *rest)


@on_any_device("exchange_tokens", fake=_fake_exchange, save=_keep_group, differentiate=_exchange_grads)
def _exchange(x: Tensor, group: str, to_heads: bool) -> Tensor:
    ranks = group_of(group)
    n = ranks.size()
    parts = rearrange(x, "b s (n h) ... -> n b s h ...", n=n) if to_heads else _by_rank(x, n)
    send = parts.contiguous()
    come = torch.empty_like(send)
    dist.all_to_all_single(come, send, group=ranks)
    return _by_token(come) if to_heads else rearrange(come, "n b s h ... -> b s (n h) ...").contiguous()


def gather(x_BsX: Tensor, group: str) -> Tensor:
    """[B, S/n, ...] to [B, S, ...]: the tokens of all ranks, in the group's order.

    Every rank must have the same number of tokens.
    """
    return x_BsX if size_of(group) == 1 else _gather(x_BsX, group)


def scatter_sum(x_BSX: Tensor, group: str) -> Tensor:
    """[B, S, ...] to [B, S/n, ...]: this rank's tokens of the sum over the group's ranks.

    ValueError unless n divides S.
    """
    n = size_of(group)
    _require_even(x_BSX.shape[1], n, "tokens")
    return x_BSX if n == 1 else _scatter_sum(x_BSX, group)


def exchange(x: Tensor, group: str, to_heads: bool) -> Tensor:
    """From all heads of this rank's tokens to its heads of all tokens, [B, S/n, H, ...] to [B, S, H/n, ...].

    to_heads: False: the opposite direction.
    ValueError unless n divides the number of heads (in the opposite direction: of tokens).
    """
    n = size_of(group)
    _require_even(x.shape[2 if to_heads else 1], n, "heads" if to_heads else "tokens")
    return x if n == 1 else _exchange(x, group, to_heads)


def _pieces(x: Tensor, pieces: int, dim: int) -> tuple[Tensor, ...]:
    return x.tensor_split(min(pieces, max(1, x.shape[dim])), dim)


def _joined(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _gathered_linear_setup(ctx, inputs, output):
    x_BsD, weight, bias, ctx.group, _ = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x_BsD, weight)


def _gathered_linear_grads(ctx, dy_BSO):
    dx_BsD, dweight = _gathered_linear_backward(dy_BSO, *ctx.saved_tensors, ctx.group)
    dbias = dy_BSO.sum((0, 1)) if ctx.has_bias else None
    return dx_BsD, dweight, dbias, None, None


def _fake_gathered_linear(x_BsD, weight, bias, group, pieces):
    B, s, _ = x_BsD.shape
    return x_BsD.new_empty(B, s * group_of(group).size(), weight.shape[0])


@on_any_device(
    "gathered_linear",
    fake=_fake_gathered_linear,
    save=_gathered_linear_setup,
    differentiate=_gathered_linear_grads,
)
def _gathered_linear(x_BsD: Tensor, weight: Tensor, bias: Tensor | None, group: str, pieces: int) -> Tensor:
    """Multiplies one piece of every rank's tokens while the next pieces are gathered."""
    coming = [_start_gather(piece, group_of(group)) for piece in _pieces(x_BsD, pieces, 1)]
    return _by_token(_joined([F.linear(piece.wait(), weight, bias) for piece in coming], 2))


def _fake_gathered_linear_backward(dy_BSO, x_BsD, weight, group):
    return x_BsD.new_empty(x_BsD.shape), weight.new_empty(weight.shape)


@on_any_device("gathered_linear_backward", fake=_fake_gathered_linear_backward)
def _gathered_linear_backward(
    dy_BSO: Tensor, x_BsD: Tensor, weight: Tensor, group: str
) -> tuple[Tensor, Tensor]:
    """dx, summed over ranks, and dW of this rank's rows.

    x is gathered during the product for dx, and dx is sent during the product for dW.
    """
    ranks = group_of(group)
    x_nBsD = _start_gather(x_BsD, ranks)
    dy_nBsO = _by_rank(dy_BSO, ranks.size()).contiguous()
    dx_BsD = _start_scatter(dy_nBsO @ weight, ranks)
    dweight = dy_nBsO.flatten(0, -2).T @ x_nBsD.wait().flatten(0, -2)
    return dx_BsD.wait(), dweight


def gathered_linear(
    x_BsD: Tensor, weight: Tensor, bias: Tensor | None, group: str, chunks: int = 1
) -> Tensor:
    """linear(gather(x), weight, bias), [B, S/n, D] to [B, S, O]; backward gathers x again.

    Args:
        x_BsD: this rank's tokens.
        weight: [O, D], this rank's rows (its heads), of x's type.
        bias: [O], this rank's rows, of x's type; or None.
        group: name of the group.
        chunks: number of pieces of a rank's tokens; a piece is gathered while the one before is multiplied.
    """
    if size_of(group) == 1:
        return F.linear(x_BsD, weight, bias)
    return _gathered_linear(x_BsD, weight, bias, group, chunks)


def _linear_scattered_setup(ctx, inputs, output):
    y_BSO, weight, ctx.group, ctx.pieces = inputs
    ctx.save_for_backward(y_BSO, weight)


def _linear_scattered_grads(ctx, dz_BsD):
    return *_linear_scattered_backward(dz_BsD, *ctx.saved_tensors, ctx.group, ctx.pieces), None, None


def _fake_linear_scattered(y_BSO, weight, group, pieces):
    B, S, _ = y_BSO.shape
    return y_BSO.new_empty(B, S // group_of(group).size(), weight.shape[0])


@on_any_device(
    "linear_scattered",
    fake=_fake_linear_scattered,
    save=_linear_scattered_setup,
    differentiate=_linear_scattered_grads,
)
def _linear_scattered(y_BSO: Tensor, weight: Tensor, group: str, pieces: int) -> Tensor:
    """Sends a piece of every rank's tokens while the next piece is computed."""
    ranks = group_of(group)
    parts = _pieces(_by_rank(y_BSO, ranks.size()), pieces, 2)
    going = [_start_scatter(F.linear(part, weight), ranks) for part in parts]
    return _joined([piece.wait() for piece in going], 1)


def _fake_linear_scattered_backward(dz_BsD, y_BSO, weight, group, pieces):
    return y_BSO.new_empty(y_BSO.shape), weight.new_empty(weight.shape)


@on_any_device("linear_scattered_backward", fake=_fake_linear_scattered_backward)
def _linear_scattered_backward(
    dz_BsD: Tensor, y_BSO: Tensor, weight: Tensor, group: str, pieces: int
) -> tuple[Tensor, Tensor]:
    """dy of all tokens, and dW of this rank's columns. A piece of dz is gathered during others' products."""
    ranks = group_of(group)
    coming = [_start_gather(piece, ranks) for piece in _pieces(dz_BsD, pieces, 1)]
    parts = _pieces(_by_rank(y_BSO, ranks.size()), pieces, 2)
    dys, dweight = [], weight.new_zeros(weight.shape)
    for piece, part in zip(coming, parts, strict=True):
        dz_nBsD = piece.wait()
        dys.append(dz_nBsD @ weight)
        dweight.addmm_(dz_nBsD.flatten(0, -2).T, part.flatten(0, -2))
    return _by_token(_joined(dys, 2)), dweight


def linear_scattered(y_BSO: Tensor, weight: Tensor, group: str, chunks: int = 1) -> Tensor:
    """scatter_sum(linear(y, weight)), [B, S, O] to [B, S/n, D]; the caller adds a bias to the sum, once.

    Args:
        y_BSO: all tokens, this rank's columns.
        weight: [D, O], this rank's columns (its heads), of y's type.
        group: name of the group.
        chunks: number of pieces of every rank's tokens; a piece is sent while the next is multiplied.

    ValueError unless n divides S.
    """
    n = size_of(group)
    _require_even(y_BSO.shape[1], n, "tokens")
    if n == 1 or chunks == 1:
        return scatter_sum(F.linear(y_BSO, weight), group)
    return _linear_scattered(y_BSO, weight, group, chunks)


def positions(
    seq: int, cp: int = 1, cp_rank: int = 0, tp: int = 1, tp_rank: int = 0, device: torch.device | None = None
) -> Tensor:
    """The positions of a sequence that a rank works on: int64 [seq / (cp tp)].

    Rank r of cp holds chunks r and 2 cp - 1 - r of 2 cp, a head and a tail, so that causal attention needs
    the same work on every rank. A rank of tp holds a contiguous part of these positions. ValueError unless
    seq is a multiple of 2 cp tp (without cp: of tp).
    """
    for flag, value, ranks in (("cp", cp_rank, cp), ("tp", tp_rank, tp)):
        if not 0 <= value < ranks:
            raise ValueError(f"rank {value} of --parallel.{flag}={ranks}: must be from 0 to {ranks - 1}")
    unit = (2 * cp if cp > 1 else 1) * tp
    if seq % unit:
        what = "2 x cp x tp" if cp > 1 else "tp"
        below = seq // unit * unit
        valid = f"{below} or {below + unit}" if below else f"{unit}"
        raise ValueError(
            f"--train.seq={seq} with --parallel.cp={cp} and --parallel.tp={tp}: "
            f"must be a multiple of {what}, {unit}; valid: {valid}"
        )
    whole = torch.arange(seq, device=device)
    if cp > 1:
        chunks = whole.chunk(2 * cp)
        whole = torch.cat([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]])
    return whole.chunk(tp)[tp_rank]


def key_order(cp: int) -> tuple[int, ...]:
    """The places of a sequence's 2 cp chunks (without cp: of one chunk) in the result of `gather` over cp."""
    if cp == 1:
        return (0,)
    return tuple(2 * c if c < cp else 2 * (2 * cp - 1 - c) + 1 for c in range(2 * cp))


def in_key_order(x_BSX: Tensor, cp: int) -> Tensor:
    """The result of `gather` over cp, [B, S, ...], in the order of the sequence: whole chunks are copied."""
    if cp == 1:
        return x_BSX
    chunks = x_BSX.chunk(2 * cp, 1)
    return torch.cat([chunks[place] for place in key_order(cp)], 1)
