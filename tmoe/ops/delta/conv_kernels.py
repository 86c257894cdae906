"""Kernels of short_conv: the convolution with SiLU, and its gradients (formula: ops/delta/short_conv.py).

A program handles BT tokens and BX channels. Neighbours are read from the tables of `Runs`, or are the tokens
before and after in the row. Gradients of weight and bias are summed over the tokens of a program, and the
sums are added in a fixed order afterwards.

next: ops/delta/short_conv.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.delta.gpu import compiles
from tmoe.ops.launch.kernel_launch import cdiv, empty, launch

BT, BX = 64, 64


@triton.jit
def neighbour(t, S, T, table, places: tl.constexpr, taps: tl.constexpr, TABLE: tl.constexpr):
    """Positions among all tokens of the neighbours `places` before tokens t (after them if below 0).

    Also which of them exist.
    """
    if TABLE:
        place = places if places > 0 else -places
        at = tl.load(table + t.to(tl.int64) * (taps - 1) + place - 1, t < T, -1)
        return (t // S) * S + at.to(tl.int32), at >= 0
    at = t % S - places
    return t - places, (at >= 0) & (at < S) & (t < T)


@triton.jit
def summed(
    u, weight, bias, table, t, c, S, T, row, X, J: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr
):
    """The convolution without SiLU [BT, BX], in fp32."""
    total = tl.zeros([t.shape[0], c.shape[0]], tl.float32)
    if BIAS:
        total += tl.load(bias + c, c < X, 0.0).to(tl.float32)[None, :]
    for j in tl.static_range(J):
        at, there = (t, t < T) if j == 0 else neighbour(t, S, T, table, j, J, TABLE)
        mask = there[:, None] & (c < X)[None, :]
        seen = tl.load(u + at.to(tl.int64)[:, None] * row + c[None, :], mask, 0.0).to(tl.float32)
        total += seen * tl.load(weight + c * J + (J - 1 - j), c < X, 0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["S", "T"])
def conv_forward(
    u, weight, bias, back, y, S, T, row, X, J: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr,
    BT: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BX + tl.arange(0, BX)
    pre = summed(u, weight, bias, back, t, c, S, T, row, X, J, TABLE, BIAS)
    out = y + t.to(tl.int64)[:, None] * X + c[None, :]
    tl.store(out, (pre * tl.sigmoid(pre)).to(y.dtype.element_ty), (t < T)[:, None] & (c < X)[None, :])


@triton.jit(do_not_specialize=["S", "T"])
def conv_inner_back(
    dy, u, weight, bias, back, d, sums, S, T, row, X, J: tl.constexpr, TABLE: tl.constexpr,
    BIAS: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """The gradient before SiLU, in fp32, and the weight's gradient of these tokens, [programs, J, X].

    With a bias its gradient is one more row, [programs, J + 1, X].
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BX + tl.arange(0, BX)
    own = (t < T)[:, None] & (c < X)[None, :]
    pre = summed(u, weight, bias, back, t, c, S, T, row, X, J, TABLE, BIAS)
    share = tl.sigmoid(pre)
    at = t.to(tl.int64)[:, None] * X + c[None, :]
    made = tl.load(dy + at, own, 0.0).to(tl.float32) * share * (1 + pre * (1 - share))
    tl.store(d + at, made, own)
    first = sums + tl.program_id(0).to(tl.int64) * (J + BIAS) * X + c
    if BIAS:
        tl.store(first + J * X, tl.sum(tl.where(own, made, 0.0), 0), c < X)
    for j in tl.static_range(J):
        near, there = (t, t < T) if j == 0 else neighbour(t, S, T, back, j, J, TABLE)
        mask = there[:, None] & (c < X)[None, :]
        seen = tl.load(u + near.to(tl.int64)[:, None] * row + c[None, :], mask, 0.0).to(tl.float32)
        found = tl.sum(tl.where(mask, made * seen, 0.0), 0)
        tl.store(first + (J - 1 - j) * X, found, c < X)


@triton.jit(do_not_specialize=["S", "T"])
def conv_outer_back(
    d, weight, ahead, du, S, T, X, J: tl.constexpr, TABLE: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr
):
    """The gradient of u: a token's share of the tokens after it that read it."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BX + tl.arange(0, BX)
    total = tl.zeros([BT, BX], tl.float32)
    for j in tl.static_range(J):
        at, there = (t, t < T) if j == 0 else neighbour(t, S, T, ahead, -j, J, TABLE)
        mask = there[:, None] & (c < X)[None, :]
        found = tl.load(d + at.to(tl.int64)[:, None] * X + c[None, :], mask, 0.0)
        total += found * tl.load(weight + c * J + (J - 1 - j), c < X, 0.0).to(tl.float32)[None, :]
    out = du + t.to(tl.int64)[:, None] * X + c[None, :]
    tl.store(out, total.to(du.dtype.element_ty), (t < T)[:, None] & (c < X)[None, :])


def rows_of(u: Tensor) -> Tensor:
    """u with tokens at one distance and contiguous channels: itself, if it is a part of wider rows."""
    S, X = u.shape[1:]
    fit = u.stride(2) == 1 and (u.shape[0] == 1 or u.stride(0) == S * u.stride(1)) and u.stride(1) >= X
    return u if fit else u.contiguous()


def table_of(table: Tensor | None, J: int) -> Tensor | None:
    """A table of neighbours with J - 1 columns, contiguous."""
    return None if table is None or J == 1 else table[..., : J - 1].contiguous()


def forward(u: Tensor, weight: Tensor, bias: Tensor | None, back: Tensor | None) -> Tensor:
    """SiLU of the convolution, [B, S, X]."""
    u, weight = rows_of(u), weight.contiguous()
    (B, S, X), J = u.shape, weight.shape[1]
    back = table_of(back, J)
    y = empty(u.shape, u.dtype, u.device)
    grid = cdiv(B * S, BT), cdiv(X, BX)
    how = J, back is not None, bias is not None, BT, BX
    launch(
        conv_forward, grid, u, weight, weight if bias is None else bias.contiguous(),
        y if back is None else back, y, S, B * S, u.stride(1), X, *how,
        num_warps=4,
    )  # fmt: skip
    return y


def backward(
    dy: Tensor, u: Tensor, weight: Tensor, bias: Tensor | None, back: Tensor | None, ahead: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of u, of the weight and of the bias."""
    u, weight, dy = rows_of(u), weight.contiguous(), dy.contiguous()
    (B, S, X), J = u.shape, weight.shape[1]
    back, ahead = table_of(back, J), table_of(ahead, J)
    blocks = cdiv(B * S, BT)
    d = empty(u.shape, torch.float32, u.device)
    sums = empty((blocks, J + (bias is not None), X), torch.float32, u.device)
    du = empty(u.shape, dy.dtype, u.device)
    grid = blocks, cdiv(X, BX)
    launch(
        conv_inner_back, grid, dy, u, weight, weight if bias is None else bias.contiguous(),
        d if back is None else back, d, sums, S, B * S, u.stride(1), X, J, back is not None,
        bias is not None, BT, BX, num_warps=4,
    )  # fmt: skip
    table = d if ahead is None else ahead
    launch(conv_outer_back, grid, d, weight, table, du, S, B * S, X, J, back is not None, BT, BX, num_warps=4)
    found = sums.sum(0)
    of_bias = None if bias is None else found[J].to(bias.dtype)
    return du, found[:J].T.to(weight.dtype).contiguous(), of_bias


def trace(X: int, J: int, dtype: torch.dtype, runs: bool, trained: bool, biased: bool = False) -> None:
    """Launch the kernels on meta tensors, inside compile_only; not where they are not measured."""
    if not compiles():
        return
    u = torch.empty(1, BT + 1, X, dtype=dtype, device="meta")
    weight = torch.empty(X, J, device="meta")
    bias = torch.empty(X, device="meta") if biased else None
    table = torch.empty(1, BT + 1, max(J - 1, 1), dtype=torch.int64, device="meta") if runs else None
    forward(u, weight, bias, table)
    if trained:
        backward(u, u, weight, bias, table, table)
