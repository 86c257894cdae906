"""Triton kernels of moe_mlp_adapted: the kernels of kernels.py with one more step of the inner loop.

The step adds u[rows, r] @ B[e] to a tile after its product, in the same accumulator. So H, y, dA and dX are
written once and not read again. Ranks are masked to whole steps of RB. The step reads its operands by
pointers, even if the base has descriptors, because their rows may have fewer than 16 bytes.

next: ops/experts/kernels.py
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tmoe.ops.experts.kernels import (
    finish_dh,
    finish_up,
    halves_of,
    product,
    slices,
    store_rows,
    tile_at,
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
        e, _, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        acc = product(x, gate_up, order, e, hi, row, pn, F, D, stride_x, HALVES * F * D, D, 1,
                      BM, BN, BL, HALVES == 2, True, K, GATHER, TMA, EVEN, PRECISION)  # fmt: skip
        acc = step(acc, u, b, e, hi, row, pn, F, R, stride_u, HALVES * F * R, R, 1, BM, BN, RB,
                   HALVES == 2, PRECISION)  # fmt: skip
        finish_up(acc, bias, h_gate, h_up, act, e, hi, row, pn, F, BN, SUB, ACT, KEEP, TMA)


@triton.jit(do_not_specialize=["capacity", "GROUP"])
def rows_adapted(
    a, b, u, v, c, tiles, capacity, offsets, L, W, R, stride_u, b_e, b_n, b_l, v_n, v_r,
    BM: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, GROUP, SUB: tl.constexpr, RB: tl.constexpr,
    B_ROWS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """rows_kernel with C += u v[e]; v[e] has W columns at strides v_n and R rows at strides v_r."""
    num_n = tl.cdiv(W, BN)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        e, _, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        acc = product(a, b, offsets, e, hi, row, pn, W, L, L, b_e, b_n, b_l,
                      BM, BN, BL, False, B_ROWS, 1, False, TMA, EVEN, PRECISION)  # fmt: skip
        acc = step(acc, u, v, e, hi, row, pn, W, R, stride_u, W * R, v_n, v_r, BM, BN, RB, False, PRECISION)
        parts = slices(acc, SUB)
        for j in tl.static_range(SUB):
            store_rows(c, parts[j], hi, row, pn * BN + j * (BN // SUB), W, W, TMA)


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


@triton.jit(do_not_specialize=["capacity", "GROUP", "E", "bits", "scale", "height", "programs"])
def narrow_kernel(
    a, b, c, other, wide, order, tiles, capacity, offsets, E, bits, L, R, W, height, scale, programs,
    BM: tl.constexpr, RB: tl.constexpr, BL: tl.constexpr, COPY: tl.constexpr, WP: tl.constexpr,
    EP: tl.constexpr, GROUP, K: tl.constexpr, GATHER: tl.constexpr, SPREAD: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """C[rows of e] = scale * A rows @ B[e]^T, the u of `step`; the columns R..W of C are zero.

    programs: the number of programs that compute C.
    other: None, or the adapter's other factor [height, R]. The further programs copy it to `wide`
    [height, W], COPY rows at a time, with zeros in the columns from R on: a tensor descriptor needs rows of
    16 bytes. A launch that only copies would cost a decode step more than the copy. WP: a power of two, at
    least W.

    B is [E, R, L]. With GATHER the rows of A are those of the tokens order[r] // K. SPREAD: row tiles are in
    the order of `spread_at`, else in that of the table. EVEN: BL divides L.

    Rows past the expert's end are not loaded: if all of them were one token's row, all programs would read
    the same memory at the same time (hopper.py's loader).
    """
    if EARLY:
        gdc_wait()
    pid = tl.program_id(0)
    if other is not None:
        k = tl.arange(0, WP)[None, :]
        copies = tl.cdiv(height, COPY)
        begin = tl.where(pid < programs, copies, pid - programs)
        for t in tl.range(begin, copies, tl.maximum(tl.num_programs(0) - programs, 1)):
            i = (t * COPY + tl.arange(0, COPY)).to(tl.int64)[:, None]
            values = tl.load(other + i * R + k, mask=(i < height) & (k < R), other=0.0)
            tl.store(wide + i * W + k, values, mask=(i < height) & (k < W))
    num_n = tl.cdiv(W, RB)
    l = tl.arange(0, BL)
    for t in tl.range(pid, tl.where(pid < programs, tl.load(tiles) * num_n, 0), programs):
        if SPREAD:
            e, j, _, lo, hi = spread_at(t // num_n, offsets, E, bits, BM, EP)
            row = lo + j * BM
            pn = t % num_n
        else:
            e, _, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        r = row + tl.arange(0, BM)
        here = r < hi
        n = pn * RB + tl.arange(0, RB)
        source = tl.load(order + r, mask=here, other=0) // K if GATHER else r
        a_at = a + source.to(tl.int64)[:, None] * L + l[None, :]
        b_at = b + e.to(tl.int64) * R * L + n[None, :] * L + l[:, None]
        acc = tl.zeros((BM, RB), tl.float32)
        for i in range(tl.cdiv(L, BL)):
            inside = (l < L - i * BL) | EVEN
            x = tl.load(a_at + i * BL, mask=here[:, None] & inside[None, :], other=0.0)
            w = tl.load(b_at + i * BL, mask=(n < R)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        at = c + r.to(tl.int64)[:, None] * W + n[None, :]
        tl.store(at, (acc * scale).to(c.dtype.element_ty), mask=here[:, None] & (n < W)[None, :])


@triton.jit
def blocks_of(offsets, E, BM: tl.constexpr, EP: tl.constexpr):
    """Each expert's first row, the row after its last one and its number of blocks of BM rows, [EP]."""
    i = tl.arange(0, EP)
    los = tl.load(offsets + i, mask=i < E, other=0)
    his = tl.load(offsets + i + 1, mask=i < E, other=0)
    return los, his, tl.where(i < E, tl.cdiv(his - los, BM), 0)


@triton.jit
def spread_at(t, offsets, E, bits, BM: tl.constexpr, EP: tl.constexpr):
    """Block t as (expert e, block j of e, number of blocks of the experts before e, e's rows lo..hi).

    Order: block 0 of all experts, then block 1 of all that have one, and so on; e is E after the last block.
    An expert's rows are sorted by token, so blocks that are read at the same time have the same tokens, whose
    rows are in L2 after the first of a token's K experts has read them. An order by experts reads every row
    of x K times from memory. Short last blocks are at the end, where they fill idle multiprocessors.

    bits: no expert has 2^bits blocks or more. EP: a power of two, at least E.
    """
    los, his, counts = blocks_of(offsets, E, BM, EP)
    i = tl.arange(0, EP)
    j = t * 0
    for k in range(bits):  # the largest j with at most t blocks of smaller numbers
        candidate = j + (1 << (bits - 1 - k))
        j = tl.where(tl.sum(tl.minimum(counts, candidate), 0) <= t, candidate, j)
    earlier = tl.sum(tl.minimum(counts, j), 0)
    has = tl.where(counts > j, 1, 0)
    mine = (has > 0) & (tl.cumsum(has, 0) - 1 == t - earlier)
    e = tl.where(tl.sum(tl.where(mine, 1, 0), 0) > 0, tl.sum(tl.where(mine, i, 0), 0), E)
    first = tl.sum(tl.where(i < e, counts, 0), 0)
    return e, j, first, tl.sum(tl.where(mine, los, 0), 0), tl.sum(tl.where(mine, his, 0), 0)


@triton.jit(do_not_specialize=["E", "bits", "scale", "chunks"])
def narrow_and_factor_kernel(
    g, b, u, weights, v, parts, order, offsets, E, bits, L, R, W, scale, chunks,
    BM: tl.constexpr, RB: tl.constexpr, BL: tl.constexpr, EP: tl.constexpr, K: tl.constexpr,
    GATHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """V[rows of e] = scale * G rows @ B[e], and parts of the gradient of B[e], G rows^T @ U rows.

    G is read once for both: a program has a chunk of BM rows of an expert, in the order of `spread_at`, and
    `parts` [chunks, L, R] in fp32 gets the chunk's part, which `sum_chunks_kernel` adds up. B [E, L, R].
    V [N, W] and U [N, W] have sorted rows. With GATHER the rows of G are those of the tokens order[r] // K,
    and the rows of U are multiplied by their routing weights and rounded.
    """
    num_n = tl.cdiv(W, RB)
    for t in tl.range(tl.program_id(0), chunks * num_n, tl.num_programs(0)):
        e, j, first, lo, hi = spread_at(t // num_n, offsets, E, bits, BM, EP)
        if e < E:
            chunk = first + j
            k = t % num_n * RB + tl.arange(0, RB)
            l = tl.arange(0, BL)
            r = lo + j * BM + tl.arange(0, BM)
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


@triton.jit(do_not_specialize=["E", "SLAB"])
def factor_kernel(
    v, x, c, order, offsets, by_size, E, R, W, L,
    RB: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, SLAB, K: tl.constexpr, GATHER: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C[e] [R, L] = V[rows of e]^T @ X rows, for every expert; V is [N, W]. ADD: added to C.

    With GATHER the rows of X are those of the tokens order[r] // K. As in `dw_kernel`, experts are handled by
    decreasing row count, and zeros are stored for an expert without rows.

    SLAB column tiles of all experts are handled before the next SLAB, which divides their number. So with
    GATHER the columns that are read at one time fit into L2, and K experts read them from memory once.
    """
    num_m = tl.cdiv(R, RB)
    num_n = tl.cdiv(L, BN)
    experts = E
    if ADD:
        experts = tl.where(tl.load(offsets + E) > 0, E, 0)  # usually there are no rows to add
    for t in tl.range(tl.program_id(0), experts * num_m * num_n, tl.num_programs(0)):
        slab = t // (experts * num_m * SLAB)
        at = t % (experts * num_m * SLAB)
        e = tl.load(by_size + at // (num_m * SLAB))
        lo = tl.load(offsets + e)
        hi = tl.load(offsets + e + 1)
        pm = at // SLAB % num_m
        pn = slab * SLAB + at % SLAB
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
        c_at = c + e.to(tl.int64) * R * L + m[None, :] * L + n[:, None]
        mask = (m < R)[None, :] & (n < L)[:, None]
        if ADD:
            acc += tl.load(c_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(c_at, acc.to(c.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["E"])
def sum_chunks_kernel(
    parts, c, offsets, E, n, BM: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """C[e] [n] = the sum of the expert's chunks, in their order; ADD: added to C."""
    e = tl.program_id(0)
    i = tl.arange(0, EP)
    _, _, counts = blocks_of(offsets, E, BM, EP)
    first = tl.sum(tl.where(i < e, counts, 0), 0)
    count = tl.sum(tl.where(i == e, counts, 0), 0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if ADD:
        total += tl.load(c + e.to(tl.int64) * n + at, mask=at < n, other=0.0).to(tl.float32)
    for j in range(count):
        total += tl.load(parts + (first + j).to(tl.int64) * n + at, mask=at < n, other=0.0)
    tl.store(c + e.to(tl.int64) * n + at, total.to(c.dtype.element_ty), mask=at < n)
