"""The Triton kernels of experts in fp8, for Hopper: casts, and products of e4m3 over expert-sorted rows.

Every product reads blocks of 128 numbers along its sum. Hopper's matrix units add with 13 bits of mantissa,
so each block's product is multiplied by its scales and added in fp32. Casts of the activation and of dH are
in the epilogues of the kernels that compute them, so no pass over rows is added.

Operands are K-major, as Hopper's fp8 units demand: products of the backward read the transposed copies of
matrices. Row tiles have 128 rows: two tiles of fp8_codes.py, each with a scale.

The letters are those of kernels.py; a matrix m is one of an expert's halves.
"""

import triton
import triton.language as tl

from tmoe.ops.experts.kernels import (
    activate,
    activate_backward,
    constant,
    halves_of,
    load_rows,
    slices,
    store_rows,
)


@triton.jit
def po2(amax):
    """The power of two from amax / 448 upwards, and its inverse: `po2` of fp8_codes.py."""
    bits = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum((bits + 0x7FFFFF) >> 23, 1), 253)
    scale, inverse = exponent << 23, (254 - exponent) << 23
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def size(t):
    """|t|; 0 for NaN, which stays NaN as a code and must not choose a scale."""
    return tl.where(t == t, tl.abs(t), 0.0)


@triton.constexpr_function
def up_to_limit(ACT):
    """The largest number of three mantissa bits up to the limit of the activation ACT; 0.0: it has no limit.

    ACT is spelled with all its constants.
    """
    limit = float(ACT.partition("limit=")[2].partition(",")[0] or 0)
    return limit // step_at(limit) * step_at(limit) if limit else 0.0


@triton.constexpr_function
def over_limit(ACT):
    """The least number of three mantissa bits over the limit of ACT; 0.0: it has no limit."""
    limit = float(ACT.partition("limit=")[2].partition(",")[0] or 0)
    return (limit // step_at(limit) + 1) * step_at(limit) if limit else 0.0


@triton.constexpr_function
def step_at(number):
    """The distance of numbers with three mantissa bits, where `number` > 0 is."""
    step = 1.0
    while number >= 16 * step:
        step *= 2
    while number < 8 * step:
        step /= 2
    return step


@triton.jit
def sided(t, ACT: tl.constexpr):
    """t, of H, moved as little as needed for its code to be on t's side of the limit of ACT, and of -limit.

    The gradient is 0 over a limit. The code of a number just over it, rounded to nearest, would be the limit.
    The largest magnitude of many t's is that of the largest one.
    """
    LOW: tl.constexpr = up_to_limit(ACT)
    HIGH: tl.constexpr = over_limit(ACT)
    if HIGH == 0:
        return t
    else:
        LIMIT: tl.constexpr = constant(ACT, "limit")
        near = tl.abs(t)
        between = (near > LOW) & (near < HIGH)
        if LOW == LIMIT:
            return tl.where(between, tl.where(t < 0, -HIGH, HIGH), t)
        else:
            side = tl.where(near > LIMIT, HIGH, LOW)
            return tl.where(between, tl.where(t < 0, -side, side), t)


@triton.jit
def cast_rows_kernel(x, codes, scales, C, BLOCK: tl.constexpr):
    """One row in each program: its codes, and its scale. The conversion saturates, so nothing is clamped."""
    r = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    t = tl.load(x + r * C + cols, mask=cols < C, other=0.0).to(tl.float32)
    scale, inverse = po2(tl.max(size(t), 0))
    tl.store(codes + r * C + cols, (t * inverse).to(codes.dtype.element_ty), mask=cols < C)
    tl.store(scales + r, scale)


@triton.jit
def encode_kernel(w, codes, turned, scales, R, C, BLOCK: tl.constexpr):
    """A block of a matrix in each program: codes, the transposed copy with the same codes, and the scale.

    grid: matrices, blocks along R, blocks along C.
    """
    base = tl.program_id(0).to(tl.int64) * R * C
    r = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = (r < R)[:, None] & (c < C)[None, :]
    t = tl.load(w + base + r[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    scale, inverse = po2(tl.max(tl.max(size(t), 1), 0))
    coded = (t * inverse).to(codes.dtype.element_ty)
    tl.store(codes + base + r[:, None] * C + c[None, :], coded, mask=inside)
    turned_inside = (c < C)[:, None] & (r < R)[None, :]
    tl.store(turned + base + c[:, None] * R + r[None, :], tl.trans(coded), mask=turned_inside)
    part = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(scales + part, scale)


@triton.jit(do_not_specialize=["capacity"])
def turned_kernel(
    x, codes, scales, first, order, tiles, capacity, offsets, C, K: tl.constexpr, GATHER: tl.constexpr
):
    """A block of the transposed codes of rows in each program, from 128 rows of an expert and 128 columns.

    x: [T, C] with GATHER, else sorted rows [N, C]. codes [C, 128 capacity]: an expert's rows begin at block
    first[e], and are filled up to whole blocks with zeros. scales [ceil(C / 128), capacity].
    grid: capacity, ceil(C / 128).
    """
    p = tl.program_id(0)
    j = tl.program_id(1)
    if p < tl.load(tiles):
        e = tl.load(tiles + 4 + p)
        row = tl.load(tiles + 4 + capacity + p)
        r = row + tl.arange(0, 128)
        here = r < tl.load(offsets + e + 1)
        source = tl.load(order + r, mask=here, other=0) // K if GATHER else r
        c = j * 128 + tl.arange(0, 128)
        at = x + source.to(tl.int64)[:, None] * C + c[None, :]
        t = tl.load(at, mask=here[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)
        scale, inverse = po2(tl.max(tl.max(size(t), 1), 0))
        coded = tl.trans((t * inverse).to(codes.dtype.element_ty))
        to = codes + c.to(tl.int64)[:, None] * (128 * capacity) + p * 128 + tl.arange(0, 128)[None, :]
        tl.store(to, coded, mask=(c < C)[:, None])
        tl.store(scales + j * capacity + p, scale)
        if (j == 0) & (row == tl.load(offsets + e)):
            tl.store(first + e, p)


@triton.jit
def tile_with_number(t, tiles, capacity, offsets, num_n, GROUP):
    """Tile t's number among row tiles, and `tile_at` of kernels.py: expert, its rows lo..hi, row, column."""
    num_m = tl.load(tiles)
    per_group = GROUP * num_n
    first = t // per_group * GROUP
    height = tl.minimum(num_m - first, GROUP)
    pm = first + t % per_group % height
    e = tl.load(tiles + 4 + pm)
    lo, hi = tl.load(offsets + e), tl.load(offsets + e + 1)
    return pm, e, lo, hi, tl.load(tiles + 4 + capacity + pm), t % per_group // height


@triton.jit
def rows_block(a, tokens, row, L, k, GATHER: tl.constexpr, EVEN: tl.constexpr):
    """128 columns, from column 128 k on, of rows of length L: of tokens with GATHER, else from `row` on."""
    if GATHER:
        cols = k * 128 + tl.arange(0, 128)
        at = a + tokens.to(tl.int64)[:, None] * L + cols[None, :]
        return tl.load(at) if EVEN else tl.load(at, mask=(cols < L)[None, :], other=0.0)
    else:
        return a.load([row, k * 128])


@triton.jit
def matrix_block(b, m, column, k):
    """The block [128, 128] of matrix m at (column, 128 k), transposed for the product."""
    return tl.reshape(b.load([m, column, k * 128]), (128, 128)).T


@triton.jit
def up_sums(
    x, w, sw, tokens, e, row, pn, D, num_n,
    BM: tl.constexpr, HALVES: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Gate and up of a tile of up_fp8_kernel, without the scales of rows; gate is 0 without a gate."""
    steps = tl.cdiv(D, 128)
    gate = tl.zeros((BM, 128), tl.float32)
    up = tl.zeros((BM, 128), tl.float32)
    scales = sw + (e * HALVES * num_n + pn).to(tl.int64) * steps
    for k in range(steps):
        a = rows_block(x, tokens, row, D, k, GATHER, EVEN)
        up += tl.dot(a, matrix_block(w, e * HALVES + HALVES - 1, pn * 128, k)) * tl.load(
            scales + (HALVES - 1) * num_n * steps + k
        )
        if HALVES == 2:
            gate += tl.dot(a, matrix_block(w, e * HALVES, pn * 128, k)) * tl.load(scales + k)
    return gate, up


@triton.jit
def rows_sum(
    a, sa, b, sb, pm, e, row, pn, num_n, capacity, N, L, s_n, s_k, BM: tl.constexpr, HALVES: tl.constexpr
):
    """A tile of rows_fp8_kernel."""
    steps = tl.cdiv(L, 128)
    acc = tl.zeros((BM, 128), tl.float32)
    of_rows = sa + 2 * pm + tl.arange(0, BM) // 64
    for k in range(HALVES * steps):
        half = k // steps
        j = k % steps
        m = e * HALVES + half
        block = tl.load(sb + m.to(tl.int64) * num_n * steps + pn * s_n + j * s_k)
        s = tl.load(of_rows + k * 2 * capacity) * block
        acc += tl.dot(a.load([row + half * N, j * 128]), matrix_block(b, m, pn * 128, j)) * s[:, None]
    return acc


@triton.jit
def dh_sum(
    dy, sdy, w, sw, tokens, e, row, pn, D, num_n, BM: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr
):
    """A tile of dA of dh_fp8_kernel."""
    steps = tl.cdiv(D, 128)
    acc = tl.zeros((BM, 128), tl.float32)
    scales = sw + e.to(tl.int64) * num_n * steps + pn
    for k in range(steps):
        a = rows_block(dy, tokens, row, D, k, GATHER, EVEN)
        acc += tl.dot(a, matrix_block(w, e, pn * 128, k)) * tl.load(scales + k * num_n)
    return acc * tl.load(sdy + tokens)[:, None]


@triton.jit
def tile_scale(t, live, BM: tl.constexpr):
    """The scale of each 64 rows from the largest magnitude `t` of each of BM rows, and each row's inverse."""
    amax = tl.max(tl.reshape(tl.where(live, t, 0.0), (BM // 64, 64)), 1)
    scale, inverse = po2(amax)
    return scale, tl.reshape(tl.broadcast_to(inverse[:, None], (BM // 64, 64)), (BM,))


@triton.jit
def store_coded(c, scales, t, hi, row, pn, F, BM: tl.constexpr, SUB: tl.constexpr, ACT: tl.constexpr):
    """Codes of a tile of a half of H in c, in SUB column slices, and its scales at `scales`."""
    BS: tl.constexpr = 128 // SUB
    live = row + tl.arange(0, BM) < hi
    scale, inverse = tile_scale(sided(tl.max(size(t), 1), ACT), live, BM)
    tl.store(scales, scale)
    parts = slices(t, SUB)
    for j in tl.static_range(SUB):
        codes = sided(parts[j], ACT) * inverse[:, None]
        store_rows(c, codes, hi, row, pn * 128 + j * BS, F, F, True)


@triton.jit
def load_coded(c, scale, lo, hi, row, col, F, BM: tl.constexpr, BS: tl.constexpr):
    """BS columns of a tile of a half of H, of its codes c and the scale of each row."""
    return load_rows(c, lo, hi, row, col, F, F, BM, BS, True).to(tl.float32) * scale[:, None]


@triton.jit
def finish_up(
    gate, up, bias, h_gate, h_up, s_h, act, plain, s_act, pm, e, hi, row, pn, num_n, capacity, F,
    BM: tl.constexpr, SUB: tl.constexpr, ACT: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Adds the bias to a tile of H, and writes codes and scales of H, if KEEP, and of its activation.

    gate is not read if the activation has none. plain: None, or rows for the activation itself. The other
    letters are those of up_fp8_kernel.
    """
    HALVES: tl.constexpr = halves_of(ACT)
    BS: tl.constexpr = 128 // SUB
    if bias is not None:
        cols = pn * 128 + tl.arange(0, 128)
        at = bias + e.to(tl.int64) * HALVES * F + cols
        up += tl.load(at + (HALVES - 1) * F, mask=cols < F, other=0.0).to(tl.float32)[None, :]
        if HALVES == 2:
            gate += tl.load(at, mask=cols < F, other=0.0).to(tl.float32)[None, :]
    if HALVES == 1:
        gate = up
    if KEEP:
        at = s_h + pn.to(tl.int64) * 2 * capacity + 2 * pm + tl.arange(0, BM // 64)
        store_coded(h_gate, at, gate, hi, row, pn, F, BM, SUB, ACT)
        if HALVES == 2:
            store_coded(h_up, at + num_n * 2 * capacity, up, hi, row, pn, F, BM, SUB, ACT)
    most = tl.zeros((BM,), tl.float32)
    gates = slices(gate, SUB)
    ups = slices(up, SUB)
    acts = ()
    for j in tl.static_range(SUB):
        col = pn * 128 + j * BS
        cols = col + tl.arange(0, BS)
        y = tl.where((cols < F)[None, :], activate(gates[j], ups[j], False, ACT), 0.0)
        if plain is not None:
            store_rows(plain, y, hi, row, col, F, F, True)
        most = tl.maximum(most, tl.max(size(y), 1))
        acts = acts + (y,)
    scale, inverse = tile_scale(most, row + tl.arange(0, BM) < hi, BM)
    for j in tl.static_range(SUB):
        store_rows(act, acts[j] * inverse[:, None], hi, row, pn * 128 + j * BS, F, F, True)
    tl.store(s_act + pn.to(tl.int64) * 2 * capacity + 2 * pm + tl.arange(0, BM // 64), scale)


@triton.jit
def finish_dh(
    d_act, slots, h_gate, h_up, s_h, dh_gate, dh_up, act, gate_codes, up_codes, s_dh, weights, ds,
    pm, lo, hi, row, pn, num_n, capacity, N, F, BM: tl.constexpr, SUB: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """From a tile of dA: dH in its type, codes and scales of that, s * act, and partial sums of ds.

    slots: of the rows. The other letters are those of dh_fp8_kernel.
    dH stays in registers, because a tile's scale is known after its last slice.
    """
    HALVES: tl.constexpr = halves_of(ACT)
    BS: tl.constexpr = 128 // SUB
    r = row + tl.arange(0, BM)
    s = tl.load(weights + slots, mask=r < hi, other=0.0).to(tl.float32)
    parts = slices(d_act, SUB)
    total = tl.zeros((BM,), tl.float32)
    most_gate = tl.zeros((BM,), tl.float32)
    most_up = tl.zeros((BM,), tl.float32)
    gates = ()
    ups = ()
    of_up_half = num_n * 2 * capacity
    of_tiles = pn.to(tl.int64) * 2 * capacity + 2 * pm
    of_rows = s_h + of_tiles + tl.arange(0, BM) // 64
    of_gate = tl.load(of_rows)
    of_up = of_gate
    if HALVES == 2:
        of_up = tl.load(of_rows + of_up_half)
    for j in tl.static_range(SUB):
        col = pn * 128 + j * BS
        gate = load_coded(h_gate, of_gate, lo, hi, row, col, F, BM, BS)
        up = gate
        if HALVES == 2:
            up = load_coded(h_up, of_up, lo, hi, row, col, F, BM, BS)
        y, d_gate, d_up, d_weight = activate_backward(gate, up, parts[j], s[:, None], False, ACT)
        total += tl.sum(d_weight, 1)
        store_rows(act, y, hi, row, col, F, F, True)
        d_gate = d_gate.to(dh_gate.dtype)
        store_rows(dh_gate, d_gate, hi, row, col, F, HALVES * F, True)
        most_gate = tl.maximum(most_gate, tl.max(size(d_gate.to(tl.float32)), 1))
        gates = gates + (d_gate,)
        if HALVES == 2:
            d_up = d_up.to(dh_up.dtype)
            store_rows(dh_up, d_up, hi, row, col, F, HALVES * F, True)
            most_up = tl.maximum(most_up, tl.max(size(d_up.to(tl.float32)), 1))
            ups = ups + (d_up,)
    tl.store(ds + pn.to(tl.int64) * N + r, total, mask=r < hi)
    at = s_dh + of_tiles + tl.arange(0, BM // 64)
    scale, inverse = tile_scale(most_gate, r < hi, BM)
    tl.store(at, scale)
    for j in tl.static_range(SUB):
        col = pn * 128 + j * BS
        store_rows(gate_codes, gates[j].to(tl.float32) * inverse[:, None], hi, row, col, F, F, True)
    if HALVES == 2:
        scale, inverse = tile_scale(most_up, r < hi, BM)
        tl.store(at + of_up_half, scale)
        for j in tl.static_range(SUB):
            col = pn * 128 + j * BS
            store_rows(up_codes, ups[j].to(tl.float32) * inverse[:, None], hi, row, col, F, F, True)


@triton.jit(do_not_specialize=["capacity", "GROUP"])
def up_fp8_kernel(
    x, sx, w, sw, bias, h_gate, h_up, s_h, act, s_act, order, tiles, capacity, offsets, D, F,
    BM: tl.constexpr, GROUP, SUB: tl.constexpr, K: tl.constexpr, ACT: tl.constexpr, KEEP: tl.constexpr,
    GATHER: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """H = X[tokens] @ gate_up[e]^T (+ bias[e]); codes and scales of H, if KEEP, and of its activation.

    x [T, D], sx [T]: codes and scales of rows. w, sw: codes and scales of matrices [n E, F, D], of which a
    tile has 128 rows of each half. s_act [ceil(F / 128), 2 capacity]. h_gate, h_up, s_h: as in dh_fp8_kernel.
    """
    HALVES: tl.constexpr = halves_of(ACT)
    num_n = tl.cdiv(F, 128)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        pm, e, _, hi, row, pn = tile_with_number(t, tiles, capacity, offsets, num_n, GROUP)
        r = row + tl.arange(0, BM)
        tokens = tl.load(order + r, mask=r < hi, other=0) // K
        gate, up = up_sums(x, w, sw, tokens, e, row, pn, D, num_n, BM, HALVES, GATHER, EVEN)
        s = tl.load(sx + tokens)[:, None]
        gate *= s
        up *= s
        finish_up(
            gate, up, bias, h_gate, h_up, s_h, act, None, s_act, pm, e, hi, row, pn, num_n, capacity, F,
            BM, SUB, ACT, KEEP,
        )  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "GROUP", "N"])
def rows_fp8_kernel(
    a, sa, b, sb, c, tiles, capacity, offsets, N, L, W, s_n, s_k,
    BM: tl.constexpr, GROUP, HALVES: tl.constexpr,
):  # fmt: skip
    """C[rows of e] = the sum over halves of A_half[rows of e] @ B[e, half]^T: the down projection, and dX.

    a: codes [n N, L], the halves one after the other; sa [n ceil(L / 128), 2 capacity]: scales of tiles.
    b: codes of matrices [n E, W, L]; the scale of W's block i and L's block k is at i s_n + k s_k, from the
    matrix's first scale in sb on.
    """
    num_n = tl.cdiv(W, 128)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        pm, e, _, hi, row, pn = tile_with_number(t, tiles, capacity, offsets, num_n, GROUP)
        acc = rows_sum(a, sa, b, sb, pm, e, row, pn, num_n, capacity, N, L, s_n, s_k, BM, HALVES)
        store_rows(c, acc, hi, row, pn * 128, W, W, True)


@triton.jit(do_not_specialize=["capacity", "GROUP", "N"])
def dh_fp8_kernel(
    dy, sdy, w, sw, h_gate, h_up, s_h, dh_gate, dh_up, act, gate_codes, up_codes, s_dh, weights, ds, order,
    tiles, capacity, offsets, N, D, F,
    BM: tl.constexpr, GROUP, SUB: tl.constexpr, K: tl.constexpr, ACT: tl.constexpr,
    GATHER: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """dH in its type, and in codes of that, s * act, and partial sums of ds, from dA = dY[tokens] @ down[e].

    dy [T, D], sdy [T]: codes and scales of rows. w: the transposed codes [E, F, D] of down; sw: its scales
    [E, D blocks, F blocks]. h_gate, h_up: codes of the halves of H [N, F]; s_h, s_dh: scales of tiles [n
    ceil(F / 128), 2 capacity]. ds: as in dh_kernel of kernels.py.
    """
    num_n = tl.cdiv(F, 128)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        pm, e, lo, hi, row, pn = tile_with_number(t, tiles, capacity, offsets, num_n, GROUP)
        r = row + tl.arange(0, BM)
        slots = tl.load(order + r, mask=r < hi, other=0)
        tokens = slots // K
        acc = dh_sum(dy, sdy, w, sw, tokens, e, row, pn, D, num_n, BM, GATHER, EVEN)
        finish_dh(
            acc, slots, h_gate, h_up, s_h, dh_gate, dh_up, act, gate_codes, up_codes, s_dh, weights, ds,
            pm, lo, hi, row, pn, num_n, capacity, N, F, BM, SUB, ACT,
        )  # fmt: skip
