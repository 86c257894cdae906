"""Encoders of Q2_K to Q6_K in torch: blocks of 256 values to bytes as llama.cpp lays them out.

The gguf package decodes these types and does not encode them. Formulas: make_qkx2_quants, make_qx_quants and
quantize_row_q*_K_ref of ggml/src/ggml-quants.c, llama.cpp 0c1e57098. Every function takes rows of many blocks
at once, on any device.

next: extras/gguf/encode.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

VALUES = 256  # of a block


class Grid(NamedTuple):
    """How scale and minimum of a group are looked for."""

    group: int
    """values that share a scale and a minimum"""
    top: int
    """largest number that stands for a value; the smallest is 0"""
    most: int
    """largest number that stands for a scale or a minimum"""
    first: float
    """first of the candidates, in steps of 0.1 that are added to `top`"""
    steps: int
    absolute: bool
    """whether errors count by magnitude, weighed by it, instead of squared"""


Q2 = Grid(16, 3, 15, -0.5, 15, True)
Q4 = Grid(32, 15, 63, -1.0, 20, False)
Q5 = Grid(32, 31, 63, -0.5, 15, False)


def q2_k(x: Tensor) -> Tensor:
    """Blocks x [N, 256] fp32 to bytes [N, 84]."""
    d, low, scales, minima, q = _with_minima(x, Q2)
    return torch.cat([scales | minima << 4, _fours(q), _bytes(d), _bytes(low)], 1)


def q3_k(x: Tensor) -> Tensor:
    """Blocks x [N, 256] fp32 to bytes [N, 110]."""
    d, scales, q = _signed(x, 4, -32, 31)
    scales = (scales + 32).to(torch.uint8)
    lows = (scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4
    highs = _bits((scales >> 4).view(-1, 4, 4), 2)
    return torch.cat([_bits((q >> 2).view(-1, 8, 32), 1), _fours(q & 3), lows, highs, _bytes(d)], 1)


def q4_k(x: Tensor) -> Tensor:
    """Blocks x [N, 256] fp32 to bytes [N, 144]."""
    d, low, scales, minima, q = _with_minima(x, Q4)
    return torch.cat([_bytes(d), _bytes(low), _pack6(scales, minima), _pairs(q)], 1)


def q5_k(x: Tensor) -> Tensor:
    """Blocks x [N, 256] fp32 to bytes [N, 176]."""
    d, low, scales, minima, q = _with_minima(x, Q5)
    high = _bits((q >> 4).view(-1, 8, 32), 1)
    return torch.cat([_bytes(d), _bytes(low), _pack6(scales, minima), high, _pairs(q & 15)], 1)


def q6_k(x: Tensor) -> Tensor:
    """Blocks x [N, 256] fp32 to bytes [N, 210]."""
    d, scales, q = _signed(x, 32, -128, 127)
    low = (q & 15).view(-1, 2, 4, 32)
    halves = [low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4]
    low = torch.cat(halves, -1).flatten(1)
    return torch.cat([low, _fours(q >> 4), scales.to(torch.int8).view(torch.uint8), _bytes(d)], 1)


ENCODERS = dict(Q2_K=q2_k, Q3_K=q3_k, Q4_K=q4_k, Q5_K=q5_k, Q6_K=q6_k)


# ---- scales ----


def _affine(x: Tensor, w: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """scale and minimum [N, G], both at least 0, of x ~ scale q - minimum, q in 0..top.

    x [N, G, group]; w: weight of each value. The plain grid between the extremes, then `steps` + 1 narrower
    ones, each fitted by least squares; the best is kept (make_qkx2_quants).
    """
    low = x.amin(-1, keepdim=True).clamp(max=0)
    span = x.amax(-1, keepdim=True) - low
    flat = span == 0
    span = torch.where(flat, 1, span)

    def cost(error: Tensor) -> Tensor:
        return (w * (error.abs() if grid.absolute else error * error)).sum(-1, keepdim=True)

    q = (grid.top / span * (x - low)).round().clamp(0, grid.top)
    scale, least = span / grid.top, low
    best = cost(scale * q + least - x)
    sum_w, sum_x = w.sum(-1, keepdim=True), (w * x).sum(-1, keepdim=True)
    for i in range(grid.steps + 1):
        q = ((grid.first + 0.1 * i + grid.top) / span * (x - low)).round().clamp(0, grid.top)
        sum_q, sum_qq, sum_xq = ((w * t).sum(-1, keepdim=True) for t in (q, q * q, q * x))
        det = sum_w * sum_qq - sum_q * sum_q
        s = (sum_w * sum_xq - sum_x * sum_q) / det
        m = (sum_qq * sum_x - sum_q * sum_xq) / det
        s, m = torch.where(m > 0, sum_xq / sum_qq, s), m.clamp(max=0)
        error = cost(s * q + m - x)
        better = (det > 0) & (error < best)
        best = torch.where(better, error, best)
        scale, least = torch.where(better, s, scale), torch.where(better, m, least)
    return torch.where(flat, 0, scale)[..., 0], -least[..., 0]


def _symmetric(x: Tensor, top: int) -> Tensor:
    """Signed scale [N, G] of x ~ scale q, q in -top..top-1, with errors weighed by x^2 (make_qx_quants)."""
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    zero = extreme.abs() < 1e-15
    extreme = torch.where(zero, 1, extreme)
    w = x * x
    scale, best = torch.zeros_like(extreme), torch.full_like(extreme, -1)
    for i in (0, *range(-9, 0), *range(1, 10)):
        q = (-(top + 0.1 * i) / extreme * x).round().clamp(-top, top - 1)
        sum_xq, sum_qq = (w * x * q).sum(-1, keepdim=True), (w * q * q).sum(-1, keepdim=True)
        better = (sum_qq > 0) & (sum_xq * sum_xq > best * sum_qq)
        s = sum_xq / torch.where(sum_qq > 0, sum_qq, 1)
        scale, best = torch.where(better, s, scale), torch.where(better, s * sum_xq, best)
    return torch.where(zero, 0, scale)[..., 0]


def _with_minima(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """d and dmin fp16 [N, 1]; scales and minima 0..most [N, G]; numbers [N, 256] (uint8)."""
    x = x.view(len(x), -1, grid.group)
    w = x.abs() if grid.absolute else x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    scale, least = _affine(x, w, grid)
    d, low = (t.amax(-1, keepdim=True) for t in (scale, least))

    def coded(t: Tensor, top: Tensor) -> Tensor:
        return (t * torch.where(top > 0, grid.most / top, 0)).round().clamp(max=grid.most)

    scales, minima = coded(scale, d), coded(least, low)
    d, low = (d / grid.most).half(), (low / grid.most).half()
    s = (d.float() * scales)[..., None]
    q = ((x + (low.float() * minima)[..., None]) / torch.where(s == 0, 1, s)).round().clamp(0, grid.top)
    q = torch.where(s == 0, 0, q)
    return d, low, scales.to(torch.uint8), minima.to(torch.uint8), q.to(torch.uint8).flatten(1)


def _signed(x: Tensor, top: int, least: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """d fp16 [N, 1]; scales least..most [N, 16] fp32; numbers 0..2 top - 1 [N, 256] uint8."""
    x = x.view(len(x), 16, 16)
    scale = _symmetric(x, top)
    extreme = scale.gather(-1, scale.abs().argmax(-1, keepdim=True))
    inverse = torch.where(extreme.abs() < 1e-15, 0, least / torch.where(extreme == 0, 1, extreme))
    scales = (inverse * scale).round().clamp(least, most)
    d = torch.where(inverse == 0, 0, 1 / torch.where(inverse == 0, 1, inverse)).half()
    s = (d.float() * scales)[..., None]
    q = (x / torch.where(s == 0, 1, s)).round().clamp(-top, top - 1)
    return d, scales, (torch.where(s == 0, 0, q) + top).to(torch.uint8).flatten(1)


# ---- bytes ----


def _bytes(t: Tensor) -> Tensor:
    """fp16 [N, 1] as bytes [N, 2]."""
    return t.contiguous().view(torch.uint8)


def _bits(q: Tensor, width: int) -> Tensor:
    """Numbers q [N, n, m] of `width` bits to bytes [N, m]: the i-th of n in bits from width i on."""
    shifts = torch.arange(0, width * q.shape[1], width, dtype=torch.uint8, device=q.device)
    return (q << shifts[:, None]).sum(1, dtype=torch.uint8)


def _pack6(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight scales and eight minima of 6 bits to 12 bytes (get_scale_min_k4)."""
    heads = [t[:, :4] | (t[:, 4:] >> 4 << 6) for t in (scales, minima)]
    return torch.cat([*heads, (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)], 1)


def _pairs(q: Tensor) -> Tensor:
    """256 numbers of 4 bits to 128 bytes: the first 32 of each 64 are the low halves."""
    q = q.view(-1, 4, 2, 32)
    return (q[:, :, 0] | q[:, :, 1] << 4).flatten(1)


def _fours(q: Tensor) -> Tensor:
    """256 numbers of 2 bits to 64 bytes: each 128 are four times 32."""
    q = q.view(-1, 2, 4, 32)
    return (q[:, :, 0] | q[:, :, 1] << 2 | q[:, :, 2] << 4 | q[:, :, 3] << 6).flatten(1)
