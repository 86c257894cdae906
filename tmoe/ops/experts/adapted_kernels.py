"""Triton kernels of moe_mlp_adapted: the kernels of kernels.py with one more step of the inner loop.

The step adds u[rows, r] @ B[e] to a tile after its product, in the same accumulator. So H, y, dA and dX are
written once and not read again. Ranks are masked to whole steps of RB. The step reads its operands by
pointers, even if the base has descriptors, because their rows may have fewer than 16 bytes.

next: ops/experts/kernels.py
"""

import triton
import triton.language as tl

from tmoe.ops.experts.kernels import (
    finish_dh,
    finish_up,
    halves_of,
    product,
    slices,
    store_rows,
    tile_at,
    weight_tile_at,
)


@triton.jit
def step(
    acc, u, b, e, hi, row, pn, width, R, stride_u, b_e, b_n, b_r,
    BM: tl.constexpr, BN: tl.constexpr, RB: tl.constexpr, PAIR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc[BM, BN] + u rows @ B[e]; B[e] has `width` columns at strides b_n, and R rows at strides b_r.

    u: sorted rows of at least R columns, at strides stride_u.
    With PAIR the tile has columns of gate, then of up, as in `product`, and B[e] has 2 width columns.
    """
    BW: tl.constexpr = BN // 2 if PAIR else BN
    r = row + tl.arange(0, BM)
    k = tl.arange(0, RB)
    j = tl.arange(0, BN)
    n = pn * BW + j % BW
    column = n + j // BW * width if PAIR else n
    u_at = u + r.to(tl.int64)[:, None] * stride_u + k[None, :]
    b_at = b + e.to(tl.int64) * b_e + column[None, :].to(tl.int64) * b_n + k[:, None] * b_r
    for i in range(tl.cdiv(R, RB)):
        left = tl.load(u_at + i * RB, mask=(r < hi)[:, None] & (k < R - i * RB)[None, :], other=0.0)
        right = tl.load(b_at + i * RB * b_r, mask=(n < width)[None, :] & (k < R - i * RB)[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["capacity", "GROUP"])
def up_adapted(
    x, gate_up, bias, u, b, h_gate, h_up, act, order, tiles, capacity, offsets, D, F, R, stride_u, stride_x,
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
        acc = step(acc, u, b, e, hi, row, pn, F, R, stride_u, HALVES * F * R, R, 1, BM, BN, RB,
                   HALVES == 2, PRECISION)  # fmt: skip
        finish_up(acc, bias, h_gate, h_up, act, e, lo, hi, row, pn, F, BN, SUB, ACT, KEEP, TMA)


@triton.jit(do_not_specialize=["capacity", "GROUP"])
def rows_adapted(
    a, b, u, v, c, tiles, capacity, offsets, L, W, R, stride_u, b_e, b_n, b_l, v_n, v_r,
    BM: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, GROUP, SUB: tl.constexpr, RB: tl.constexpr,
    B_ROWS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """rows_kernel with C += u v[e]; v[e] has W columns at strides v_n and R rows at strides v_r."""
    num_n = tl.cdiv(W, BN)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        e, lo, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        acc = product(a, b, offsets, e, hi, row, pn, W, L, L, b_e, b_n, b_l,
                      BM, BN, BL, False, B_ROWS, 1, False, TMA, EVEN, PRECISION)  # fmt: skip
        acc = step(acc, u, v, e, hi, row, pn, W, R, stride_u, W * R, v_n, v_r, BM, BN, RB, False, PRECISION)
        parts = slices(acc, SUB)
        for j in tl.static_range(SUB):
            store_rows(c, parts[j], lo, hi, row, pn * BN + j * (BN // SUB), W, W, TMA)


@triton.jit(do_not_specialize=["capacity", "N", "GROUP"])
def dh_adapted(
    dy, down, u, v, h_gate, h_up, dh_gate, dh_up, act, weights, ds, order, tiles, capacity, offsets, N, D, F,
    R, stride_u, stride_dy,
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
        acc = step(acc, u, v, e, hi, row, pn, F, R, stride_u, R * F, 1, F, BM, BN, RB, False, PRECISION)
        finish_dh(acc, h_gate, h_up, dh_gate, dh_up, act, weights, ds, order, lo, hi, row, pn, N, F,
                  BM, BN, SUB, ACT, TMA)  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "GROUP", "scale"])
def narrow_kernel(
    a, b, c, order, tiles, capacity, offsets, L, R, W, scale,
    BM: tl.constexpr, RB: tl.constexpr, BL: tl.constexpr, GROUP, K: tl.constexpr,
    GATHER: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C[rows of e] = scale * A rows @ B[e]^T, the u of `step`; the columns R..W of C are zero.

    B is [E, R, L]. With GATHER the rows of A are those of the tokens order[r] // K.
    """
    num_n = tl.cdiv(W, RB)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        e, lo, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        acc = product(a, b, order, e, hi, row, pn, R, L, L, L * R, L, 1,
                      BM, RB, BL, False, True, K, GATHER, False, EVEN, PRECISION)  # fmt: skip
        store_rows(c, acc * scale, lo, hi, row, pn * RB, W, W, False)


@triton.jit
def widen_kernel(b, c, rows, R, W, BLOCK: tl.constexpr, BW: tl.constexpr):
    """C [rows, W] = B [rows, R], and zeros in the columns from R on."""
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    k = tl.arange(0, BW)[None, :]
    values = tl.load(b + r * R + k, mask=(r < rows) & (k < R), other=0.0)
    tl.store(c + r * W + k, values, mask=(r < rows) & (k < W))


@triton.jit
def chunk_at(t, offsets, E, BM: tl.constexpr, EP: tl.constexpr):
    """Chunk t of BM rows as (expert, its chunks' first number, its rows lo..hi); the expert is E after all.

    An expert's rows are divided into chunks, and chunks are numbered in the order of experts. EP: a power of
    two, at least E.
    """
    i = tl.arange(0, EP)
    los = tl.load(offsets + i, mask=i < E, other=0)
    his = tl.load(offsets + i + 1, mask=i < E, other=0)
    counts = tl.where(i < E, tl.cdiv(his - los, BM), 0)
    ends = tl.cumsum(counts, 0)
    e = tl.sum(tl.where((i < E) & (ends <= t), 1, 0), 0)
    mine = i == e
    first = tl.sum(tl.where(mine, ends - counts, 0), 0)
    return e, first, tl.sum(tl.where(mine, los, 0), 0), tl.sum(tl.where(mine, his, 0), 0)


@triton.jit(do_not_specialize=["E", "scale", "chunks"])
def narrow_and_factor_kernel(
    g, b, u, weights, v, parts, order, offsets, E, L, R, W, scale, chunks,
    BM: tl.constexpr, RB: tl.constexpr, BL: tl.constexpr, EP: tl.constexpr, K: tl.constexpr,
    GATHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """V[rows of e] = scale * G rows @ B[e], and parts of the gradient of B[e], G rows^T @ U rows.

    G is read once for both: a program has a chunk of BM rows of an expert, and `parts` [chunks, L, R] in fp32
    gets the chunk's part, which `sum_chunks_kernel` adds up. B [E, L, R]. V [N, W] and U [N, W] have sorted
    rows. With GATHER the rows of G are those of the tokens order[r] // K, and the rows of U are multiplied
    by their routing weights and rounded.
    """
    num_n = tl.cdiv(W, RB)
    for t in tl.range(tl.program_id(0), chunks * num_n, tl.num_programs(0)):
        chunk = t // num_n
        e, first, lo, hi = chunk_at(chunk, offsets, E, BM, EP)
        if e < E:
            k = t % num_n * RB + tl.arange(0, RB)
            l = tl.arange(0, BL)
            r = lo + (chunk - first) * BM + tl.arange(0, BM)
            here = r < hi
            slot = tl.load(order + r, mask=here, other=0)
            row = slot // K if GATHER else r
            at_u = r.to(tl.int64)[:, None] * W + k[None, :]
            inside = here[:, None] & (k < W)[None, :]
            low = tl.load(u + at_u, mask=inside, other=0.0)
            if GATHER:
                weight = tl.load(weights + slot, mask=here, other=0.0).to(tl.float32)
                low = (low.to(tl.float32) * weight[:, None]).to(u.dtype.element_ty)
            rows_at = g + row.to(tl.int64)[:, None] * L + l[None, :]
            b_at = b + e.to(tl.int64) * L * R + l[:, None] * R + k[None, :]
            part_at = parts + chunk.to(tl.int64) * L * R + l[:, None] * R + k[None, :]
            acc = tl.zeros((BM, RB), tl.float32)
            for i in range(tl.cdiv(L, BL)):
                left = L - i * BL
                tile = tl.load(rows_at + i * BL, mask=here[:, None] & (l < left)[None, :], other=0.0)
                mask = (l < left)[:, None] & (k < R)[None, :]
                right = tl.load(b_at + i * BL * R, mask=mask, other=0.0)
                acc = tl.dot(tile, right, acc, input_precision=PRECISION)
                tl.store(part_at + i * BL * R, tl.dot(tile.T, low, input_precision=PRECISION), mask=mask)
            tl.store(v + at_u, (acc * scale).to(v.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["E", "GROUP"])
def factor_kernel(
    v, x, c, order, offsets, by_size, E, R, W, L,
    RB: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, GROUP, K: tl.constexpr, GATHER: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C[e] [R, L] = V[rows of e]^T @ X rows, for every expert; V is [N, W]. ADD: added to C.

    With GATHER the rows of X are those of the tokens order[r] // K. As in `dw_kernel`, experts are handled by
    decreasing row count, and zeros are stored for an expert without rows.
    """
    num_m = tl.cdiv(R, RB)
    num_n = tl.cdiv(L, BN)
    experts = E
    if ADD:
        experts = tl.where(tl.load(offsets + E) > 0, E, 0)  # usually there are no rows to add
    for t in tl.range(tl.program_id(0), experts * num_m * num_n, tl.num_programs(0)):
        e, lo, hi, pm, pn = weight_tile_at(t, by_size, offsets, num_m, num_n, GROUP)
        m = pm * RB + tl.arange(0, RB)
        n = pn * BN + tl.arange(0, BN)
        acc = tl.zeros((BN, RB), tl.float32)
        r = lo + tl.arange(0, BL)
        row = tl.load(order + r, mask=r < hi, other=0) // K if GATHER else r
        for _ in range(tl.cdiv(hi - lo, BL)):
            here = (r < hi)[:, None]
            at_x = x + row.to(tl.int64)[:, None] * L + n[None, :]
            right = tl.load(at_x, mask=here & (n < L)[None, :], other=0.0)
            low = tl.load(
                v + r.to(tl.int64)[:, None] * W + m[None, :], mask=here & (m < W)[None, :], other=0.0
            )
            r += BL
            row = tl.load(order + r, mask=r < hi, other=0) // K if GATHER else r  # a step ahead
            acc = tl.dot(right.T, low, acc, input_precision=PRECISION)
        at = c + e.to(tl.int64) * R * L + m[None, :] * L + n[:, None]
        mask = (m < R)[None, :] & (n < L)[:, None]
        if ADD:
            acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, acc.to(c.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["E"])
def sum_chunks_kernel(
    parts, c, offsets, E, n, BM: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """C[e] [n] = the sum of the expert's chunks, in their order; ADD: added to C."""
    e = tl.program_id(0)
    i = tl.arange(0, EP)
    los = tl.load(offsets + i, mask=i < E, other=0)
    his = tl.load(offsets + i + 1, mask=i < E, other=0)
    counts = tl.where(i < E, tl.cdiv(his - los, BM), 0)
    first = tl.sum(tl.where(i < e, counts, 0), 0)
    count = tl.sum(tl.where(i == e, counts, 0), 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if ADD:
        total += tl.load(c + e.to(tl.int64) * n + at, mask=at < n, other=0.0).to(tl.float32)
    for j in range(count):
        total += tl.load(parts + (first + j).to(tl.int64) * n + at, mask=at < n, other=0.0)
    tl.store(c + e.to(tl.int64) * n + at, total.to(c.dtype.element_ty), mask=at < n)
