"""The kernels of fp8_kernels.py with the low-rank step of adapted_kernels.py before each cast.

The step adds u[rows, r] @ B[e] to a tile in fp32, after the tile has got the scales of its rows. Codes and
scales of results therefore include what the adapters add.

next: ops/experts/fp8_kernels.py
"""

import triton
import triton.language as tl

from tmoe.ops.experts.adapted_kernels import step
from tmoe.ops.experts.fp8_kernels import dh_sum, finish_dh, finish_up, rows_sum, tile_with_number, up_sums
from tmoe.ops.experts.kernels import halves_of, store_rows


@triton.jit(do_not_specialize=["capacity", "GROUP", "R"])  # R = 1 as a constant spills 552 bytes a thread
def up_fp8_adapted(
    x, sx, w, sw, bias, u, b, h_gate, h_up, s_h, act, plain, s_act, order, tiles, capacity, offsets, D, F, R,
    stride_u,
    BM: tl.constexpr, GROUP, SUB: tl.constexpr, K: tl.constexpr, RB: tl.constexpr, ACT: tl.constexpr,
    KEEP: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """up_fp8_kernel with H += u b[e]^T, unless u is None; b [E, n F, R].

    plain: None, or the activation in the type of x.
    """
    HALVES: tl.constexpr = halves_of(ACT)
    num_n = tl.cdiv(F, 128)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        pm, e, _, hi, row, pn = tile_with_number(t, tiles, capacity, offsets, num_n, GROUP)
        r = row + tl.arange(0, BM)
        tokens = tl.load(order + r, mask=r < hi, other=0) // K
        gate, up = up_sums(x, w, sw, tokens, e, row, pn, D, num_n, BM, HALVES, GATHER, EVEN)
        s = tl.load(sx + tokens)[:, None]
        b_e = HALVES * F * R
        up *= s
        gate *= s
        if u is not None:
            up = step(up, u, b + (HALVES - 1) * F * R, e, hi, row, pn, F, R, stride_u, b_e, R, 1, BM, 128, RB,
                      False, PRECISION)  # fmt: skip
            if HALVES == 2:
                gate = step(
                    gate, u, b, e, hi, row, pn, F, R, stride_u, b_e, R, 1, BM, 128, RB, False, PRECISION
                )
        finish_up(
            gate, up, bias, h_gate, h_up, s_h, act, plain, s_act, pm, e, hi, row, pn, num_n, capacity, F,
            BM, SUB, ACT, KEEP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "GROUP", "N"])
def rows_fp8_adapted(
    a, sa, b, sb, u, v, c, tiles, capacity, offsets, N, L, W, R, stride_u, s_n, s_k, v_n, v_r,
    BM: tl.constexpr, GROUP, RB: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """rows_fp8_kernel with C += u v[e]; v[e] has W columns at strides v_n and R rows at strides v_r."""
    num_n = tl.cdiv(W, 128)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        pm, e, _, hi, row, pn = tile_with_number(t, tiles, capacity, offsets, num_n, GROUP)
        acc = rows_sum(a, sa, b, sb, pm, e, row, pn, num_n, capacity, N, L, s_n, s_k, BM, HALVES)
        acc = step(acc, u, v, e, hi, row, pn, W, R, stride_u, W * R, v_n, v_r, BM, 128, RB, False, PRECISION)
        store_rows(c, acc, hi, row, pn * 128, W, W, True)


@triton.jit(do_not_specialize=["capacity", "GROUP", "N"])
def dh_fp8_adapted(
    dy, sdy, w, sw, u, v, h_gate, h_up, s_h, dh_gate, dh_up, act, gate_codes, up_codes, s_dh, weights, ds,
    order, tiles, capacity, offsets, N, D, F, R, stride_u,
    BM: tl.constexpr, GROUP, SUB: tl.constexpr, K: tl.constexpr, RB: tl.constexpr, ACT: tl.constexpr,
    GATHER: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dh_fp8_kernel with dA += u v[e]; v [E, R, F]. dH is rounded to its type before its cast."""
    num_n = tl.cdiv(F, 128)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        pm, e, lo, hi, row, pn = tile_with_number(t, tiles, capacity, offsets, num_n, GROUP)
        r = row + tl.arange(0, BM)
        slots = tl.load(order + r, mask=r < hi, other=0)
        tokens = slots // K
        acc = dh_sum(dy, sdy, w, sw, tokens, e, row, pn, D, num_n, BM, GATHER, EVEN)
        acc = step(acc, u, v, e, hi, row, pn, F, R, stride_u, R * F, 1, F, BM, 128, RB, False, PRECISION)
        finish_dh(
            acc, slots, h_gate, h_up, s_h, dh_gate, dh_up, act, gate_codes, up_codes, s_dh, weights, ds,
            pm, lo, hi, row, pn, num_n, capacity, N, F, BM, SUB, ACT,
        )  # fmt: skip
