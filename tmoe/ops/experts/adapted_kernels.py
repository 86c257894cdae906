"""Triton kernels of moe_mlp_adapted: the kernels of kernels.py with one more step of the inner loop.

The step adds u[rows, r] @ B[e] to a tile after its product, in the same accumulator. So H, y, dA and dX are
written once and not read again. Ranks are masked to whole steps of RB. The step reads its operands by
pointers, even if the base has descriptors, because their rows may have fewer than 16 bytes.

next: ops/experts/kernels.py
"""

import triton
import triton.language as tl

from tmoe.ops.experts.kernels import finish_dh, finish_up, halves_of, product, slices, store_rows, tile_at


@triton.jit
def step(
    acc, u, b, e, hi, row, pn, width, R, b_e, b_n, b_r,
    BM: tl.constexpr, BN: tl.constexpr, RB: tl.constexpr, PAIR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc[BM, BN] + u rows @ B[e]; B[e] has `width` columns at strides b_n, and R rows at strides b_r.

    With PAIR the tile has columns of gate, then of up, as in `product`, and B[e] has 2 width columns.
    """
    BW: tl.constexpr = BN // 2 if PAIR else BN
    r = row + tl.arange(0, BM)
    k = tl.arange(0, RB)
    j = tl.arange(0, BN)
    n = pn * BW + j % BW
    column = n + j // BW * width if PAIR else n
    u_at = u + r.to(tl.int64)[:, None] * R + k[None, :]
    b_at = b + e.to(tl.int64) * b_e + column[None, :].to(tl.int64) * b_n + k[:, None] * b_r
    for i in range(tl.cdiv(R, RB)):
        left = tl.load(u_at + i * RB, mask=(r < hi)[:, None] & (k < R - i * RB)[None, :], other=0.0)
        right = tl.load(b_at + i * RB * b_r, mask=(n < width)[None, :] & (k < R - i * RB)[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["capacity", "GROUP"])
def up_adapted(
    x, gate_up, bias, u, b, h_gate, h_up, act, order, tiles, capacity, offsets, D, F, R, stride_x,
    BM: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, GROUP, SUB: tl.constexpr, K: tl.constexpr,
    RB: tl.constexpr, ACT: tl.constexpr,
    KEEP: tl.constexpr, GATHER: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """up_kernel with H += u b[e]^T; b [E, 2F, R], without a gate [E, F, R]."""
    HALVES: tl.constexpr = halves_of(ACT)
    num_n = tl.cdiv(F, BN // HALVES)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        e, lo, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        acc = product(x, gate_up, order, e, hi, row, pn, F, D, stride_x, HALVES * F * D, D, 1,
                      BM, BN, BL, HALVES == 2, True, K, GATHER, TMA, EVEN, PRECISION)  # fmt: skip
        acc = step(acc, u, b, e, hi, row, pn, F, R, HALVES * F * R, R, 1, BM, BN, RB, HALVES == 2, PRECISION)
        finish_up(acc, bias, h_gate, h_up, act, e, lo, hi, row, pn, F, BN, SUB, ACT, KEEP, TMA)


@triton.jit(do_not_specialize=["capacity", "GROUP"])
def rows_adapted(
    a, b, u, v, c, tiles, capacity, offsets, L, W, R, b_e, b_n, b_l, v_n, v_r,
    BM: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, GROUP, SUB: tl.constexpr, RB: tl.constexpr,
    B_ROWS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """rows_kernel with C += u v[e]; v[e] has W columns at strides v_n and R rows at strides v_r."""
    num_n = tl.cdiv(W, BN)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        e, lo, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        acc = product(a, b, offsets, e, hi, row, pn, W, L, L, b_e, b_n, b_l,
                      BM, BN, BL, False, B_ROWS, 1, False, TMA, EVEN, PRECISION)  # fmt: skip
        acc = step(acc, u, v, e, hi, row, pn, W, R, W * R, v_n, v_r, BM, BN, RB, False, PRECISION)
        parts = slices(acc, SUB)
        for j in tl.static_range(SUB):
            store_rows(c, parts[j], lo, hi, row, pn * BN + j * (BN // SUB), W, W, TMA)


@triton.jit(do_not_specialize=["capacity", "N", "GROUP"])
def dh_adapted(
    dy, down, u, v, h_gate, h_up, dh_gate, dh_up, act, weights, ds, order, tiles, capacity, offsets, N, D, F,
    R, stride_dy,
    BM: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, GROUP, SUB: tl.constexpr, K: tl.constexpr,
    RB: tl.constexpr, ACT: tl.constexpr,
    GATHER: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dh_kernel with dA += u v[e]; v [E, R, F]."""
    num_n = tl.cdiv(F, BN)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        e, lo, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        acc = product(dy, down, order, e, hi, row, pn, F, D, stride_dy, D * F, 1, F,
                      BM, BN, BL, False, False, K, GATHER, TMA, EVEN, PRECISION)  # fmt: skip
        acc = step(acc, u, v, e, hi, row, pn, F, R, R * F, 1, F, BM, BN, RB, False, PRECISION)
        finish_dh(acc, h_gate, h_up, dh_gate, dh_up, act, weights, ds, order, lo, hi, row, pn, N, F,
                  BM, BN, SUB, ACT, TMA)  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "GROUP"])
def narrow_kernel(
    a, b, c, order, tiles, capacity, offsets, L, R, b_n, b_l,
    BM: tl.constexpr, RB: tl.constexpr, BL: tl.constexpr, GROUP, K: tl.constexpr,
    GATHER: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C[rows of e] [N, R] = A rows @ B[e], the u of `step`. B[e] has R columns at strides b_n, and L rows
    at strides b_l. With GATHER the rows of A are those of the tokens order[r] // K."""
    num_n = tl.cdiv(R, RB)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        e, lo, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        acc = product(a, b, order, e, hi, row, pn, R, L, L, L * R, b_n, b_l,
                      BM, RB, BL, False, True, K, GATHER, False, EVEN, PRECISION)  # fmt: skip
        store_rows(c, acc, lo, hi, row, pn * RB, R, R, False)
