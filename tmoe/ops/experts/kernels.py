"""The Triton kernels of the experts: four products over expert-sorted rows, and the sum over a token's rows.

Every product is persistent (a fixed grid strides over tiles; the number of tiles is read on the device) and
has a single kernel for both kinds of operands. With TMA, operands are tensor descriptors, and results are
stored through ragged descriptors, whose hardware clipping prevents a tile from writing into the next expert's
rows. Without TMA, the same arguments are pointers and masks do the clipping; this path serves all other GPUs,
and all shapes that descriptors cannot describe. GATHER reads an operand's rows through the routing order, so
x and dy need no gathered copies. SUB slices the accumulator's columns in the epilogue, which needs less
shared memory and fewer live registers.

The letters are those of all modules: N routed rows, D model width, F expert width, E experts, K experts per
token. `e, lo, hi, row` locate a tile: its expert, the expert's rows lo..hi, the tile's first row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tmoe.base import activations

RAGGED = tl.constexpr(0x40000000)  # the origin of create_ragged_descriptor's two extra dimensions


@triton.jit
def tile_at(t, tiles, capacity, offsets, num_n, GROUP):
    """Tile t's expert, the expert's rows lo..hi, the tile's first row and its column tile.

    Within GROUP row tiles, rows vary fastest, so tiles that run at the same time share both operands in L2.
    """
    num_m = tl.load(tiles)
    per_group = GROUP * num_n
    first = t // per_group * GROUP
    height = tl.minimum(num_m - first, GROUP)
    pm = first + t % per_group % height
    pn = t % per_group // height
    e = tl.load(tiles + 4 + pm)
    row = tl.load(tiles + 4 + capacity + pm)
    return e, tl.load(offsets + e), tl.load(offsets + e + 1), row, pn


@triton.jit
def weight_tile_at(t, by_size, offsets, num_m, num_n, GROUP):
    """Tile t of the experts' weight gradients: experts by decreasing row count, tiles in tile_at's order."""
    e = tl.load(by_size + t // (num_m * num_n))
    u = t % (num_m * num_n)
    first = u // (GROUP * num_n) * GROUP
    height = tl.minimum(num_m - first, GROUP)
    pm = first + u % (GROUP * num_n) % height
    pn = u % (GROUP * num_n) // height
    return e, tl.load(offsets + e), tl.load(offsets + e + 1), pm, pn


@triton.jit
def load_tile(desc, lo, count, r, c):
    """Rows from lo+r on of a ragged descriptor, with zeros from row lo+count on.

    (The function of triton.tools.ragged_tma fails in the interpreter.)
    """
    t = desc.load([RAGGED, lo + count, RAGGED - count + r, c])
    return tl.reshape(t, (t.shape[2], t.shape[3]))


@triton.jit
def store_rows(c, tile, hi, row, col, width, stride, TMA: tl.constexpr):
    """Store the tile at (row, col) of an [N, width] result, clipped to the expert's rows and to the width."""
    if TMA:
        box = tl.reshape(tile.to(c.dtype), (1, 1, tile.shape[0], tile.shape[1]))
        c.store([RAGGED, hi, RAGGED - (hi - row), col], box)
    else:
        r = row + tl.arange(0, tile.shape[0])
        cols = col + tl.arange(0, tile.shape[1])
        at = c + r.to(tl.int64)[:, None] * stride + cols[None, :]
        tl.store(
            at,
            tile.to(c.dtype.element_ty),
            mask=(r < hi)[:, None] & (cols < width)[None, :],
        )


@triton.jit
def load_rows(
    a, lo, hi, row, col, width, stride, BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """A [BM, BN] tile at (row, col) of an [N, width] operand; rows from hi on are zero."""
    if TMA:
        return load_tile(a, lo, hi - lo, row - lo, col)
    else:
        r = row + tl.arange(0, BM)
        cols = col + tl.arange(0, BN)
        at = a + r.to(tl.int64)[:, None] * stride + cols[None, :]
        return tl.load(at, mask=(r < hi)[:, None] & (cols < width)[None, :], other=0.0)


@triton.jit
def halves(acc):
    """The left and right half of the columns, split in registers."""
    M: tl.constexpr = acc.shape[0]
    return tl.split(tl.permute(tl.reshape(acc, (M, 2, acc.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def slices(acc, SUB: tl.constexpr):
    """The accumulator as SUB column slices, left to right."""
    if SUB == 1:
        return (acc,)
    else:
        left, right = halves(acc)
        return slices(left, SUB // 2) + slices(right, SUB // 2)


@triton.jit
def product(
    a, b, order, e, hi, row, pn, width, L, stride_a, b_e, b_n, b_l,
    BM: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, PAIR: tl.constexpr, B_ROWS: tl.constexpr,
    K: tl.constexpr, GATHER: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc[BM, BN] = A rows @ B[e] over the length L.

    A's rows are consecutive, or with GATHER the rows of the tokens order[r] // K. B[e] is [width, L] if
    B_ROWS, else [L, width]; with PAIR it is [2, width, L], and the tile's columns are BN/2 gate columns,
    followed by the BN/2 up columns of the same numbers.
    """
    BW: tl.constexpr = BN // 2 if PAIR else BN  # width of B covered by this tile
    l = tl.arange(0, BL)
    r = row + tl.arange(0, BM)
    if GATHER:
        # rows past the end read token 0 and are never stored
        r = tl.load(order + r, mask=r < hi, other=0) // K
    a_at = a
    if GATHER or not TMA:
        a_at = a + r.to(tl.int64)[:, None] * stride_a + l[None, :]
    b_at = b
    j = tl.arange(0, BN)
    n = pn * BW + j % BW
    if not TMA:
        b_row = n + j // BW * width if PAIR else n
        b_at = b + e.to(tl.int64) * b_e + b_row[None, :].to(tl.int64) * b_n + l[:, None] * b_l
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(L, BL)):
        if TMA and not GATHER:
            x = a.load([row, k * BL])
        elif EVEN:
            x = tl.load(
                a_at + k * BL,
                mask=None if GATHER else (r < hi)[:, None],
                other=None if GATHER else 0.0,
            )
        else:
            x = tl.load(
                a_at + k * BL,
                mask=(l < L - k * BL)[None, :] & ((r < hi)[:, None] | GATHER),
                other=0.0,
            )
        if TMA:
            if PAIR:
                w = tl.reshape(b.load([2 * e, pn * BW, k * BL]), (BN, BL)).T
            elif B_ROWS:
                w = tl.reshape(b.load([e, pn * BN, k * BL]), (BN, BL)).T
            else:
                w = tl.reshape(b.load([e, k * BL, pn * BN]), (BL, BN))
        else:
            w = tl.load(
                b_at + k * BL * b_l,
                mask=(n < width)[None, :] & (l < L - k * BL)[:, None],
                other=0.0,
            )
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def reciprocal(d, FAST: tl.constexpr):
    """1 / d. FAST (NVIDIA): one hardware instruction with an error of 1 ulp, instead of eight."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 / d


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """1 / (1 + exp(-x))."""
    return reciprocal(1 + tl.exp2(x * -1.4426950408889634), FAST)


@triton.jit
def normal_cdf(x, FAST: tl.constexpr):
    """(1 + erf(x / sqrt 2)) / 2, so that GELU is x * normal_cdf(x).

    FAST: to 1e-7 by five terms (Abramowitz and Stegun 7.1.26), in fewer registers than erf needs.
    """
    if FAST:
        t = reciprocal(1 + 0.3275911 * 0.7071067811865476 * tl.abs(x), FAST)
        terms = (((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592
        tail = 0.5 * terms * t * tl.exp2(x * x * -0.7213475204444817)
        return tl.where(x < 0, tail, 1 - tail)
    else:
        return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)


UNGATED = activations.UNGATED  # read only by constexpr functions


@triton.constexpr_function
def name_of(ACT):
    """The name, in tmoe/base/activations.py, of an activation that is spelled with all its constants."""
    return ACT.partition(":")[0]


@triton.constexpr_function
def halves_of(ACT):
    """Columns of H for each column of act: 2 with a gate, else 1."""
    return 1 if ACT.partition(":")[0] in UNGATED else 2


@triton.constexpr_function
def constant(ACT, name):
    """A constant of the activation, which is spelled as "clamped:alpha=1.702,limit=7.0"."""
    return float(ACT.partition(f"{name}=")[2].partition(",")[0])


@triton.jit
def within(x, LIMIT: tl.constexpr):
    """x clamped to -LIMIT .. LIMIT; NaN stays NaN."""
    nan: tl.constexpr = tl.PropagateNan.ALL
    return tl.maximum(tl.minimum(x, LIMIT, propagate_nan=nan), -LIMIT, propagate_nan=nan)


@triton.jit
def below(x, LIMIT: tl.constexpr):
    """min(x, LIMIT); NaN stays NaN."""
    return tl.minimum(x, LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu_gate(x, FAST: tl.constexpr):
    """The factor of GELU's tanh form, gelu(x) = x * factor, and the factor's derivative."""
    # (1 + tanh z) / 2 = sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
    square = x * x
    s = sigmoid(x * (1.5957691216057308 + 0.07135481282052137 * square), FAST)
    return s, s * (1 - s) * (1.5957691216057308 + 0.21406443846156411 * square)


@triton.jit
def activate(gate, up, FAST: tl.constexpr, ACT: tl.constexpr):
    """The activation ACT: silu(gate) * up for SwiGLU; tmoe/base/activations.py defines all activations.

    Without a gate, `gate` and `up` are the same tensor. A new activation is added to this function, and its
    derivative to activate_backward.
    """
    NAME: tl.constexpr = name_of(ACT)
    if NAME == "clamped":
        ALPHA: tl.constexpr = constant(ACT, "alpha")
        LIMIT: tl.constexpr = constant(ACT, "limit")
        up = within(up, LIMIT)
        gate = below(gate, LIMIT)
        return gate * sigmoid(ALPHA * gate, FAST) * (up + 1)
    elif NAME == "clamped_silu":
        LIMIT: tl.constexpr = constant(ACT, "limit")
        gate = below(gate, LIMIT)
        return gate * sigmoid(gate, FAST) * within(up, LIMIT)
    elif NAME == "geglu":
        s, _ = gelu_gate(gate, FAST)
        return gate * s * up
    elif NAME == "relu2":
        positive = tl.maximum(up, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive
    elif NAME == "relu":
        return tl.maximum(up, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif NAME == "gelu":
        return up * normal_cdf(up, FAST)
    else:
        tl.static_assert(NAME == "swiglu")
        return gate * sigmoid(gate, FAST) * up


@triton.jit
def activate_backward(gate, up, d, w, FAST: tl.constexpr, ACT: tl.constexpr):
    """Recompute the activation and chain the gradient d of w * act: (w * act, d_gate, d_up, d * act).

    It needs ten multiplications: the epilogue that calls it is bound by instructions, so common factors are
    computed once. Without a gate d_gate is the whole gradient, and d_up is equal to it.
    """
    NAME: tl.constexpr = name_of(ACT)
    if NAME == "clamped":
        ALPHA: tl.constexpr = constant(ACT, "alpha")
        LIMIT: tl.constexpr = constant(ACT, "limit")
        u = within(up, LIMIT)
        g = below(gate, LIMIT)
        sig = sigmoid(ALPHA * g, FAST)
        glu = g * sig
        weighted = (u + 1) * w
        d_glu = d * glu
        d_gate = tl.where(gate > LIMIT, 0.0, d * weighted * (sig + ALPHA * glu * (1 - sig)))
        d_up = tl.where(tl.abs(up) > LIMIT, 0.0, d_glu * w)
        return glu * weighted, d_gate, d_up, d_glu * (u + 1)
    elif NAME == "clamped_silu":
        LIMIT: tl.constexpr = constant(ACT, "limit")
        u = within(up, LIMIT)
        g = below(gate, LIMIT)
        sig = sigmoid(g, FAST)
        silu = g * sig
        weighted = u * w
        d_silu = d * silu
        d_gate = tl.where(gate > LIMIT, 0.0, d * weighted * (sig + silu * (1 - sig)))
        return silu * weighted, d_gate, tl.where(tl.abs(up) > LIMIT, 0.0, d_silu * w), d_silu * u
    elif NAME == "geglu":
        s, ds = gelu_gate(gate, FAST)
        glu = gate * s
        weighted = up * w
        d_glu = d * glu
        return glu * weighted, d * weighted * (s + gate * ds), d_glu * w, d_glu * up
    elif NAME == "relu2":
        positive = tl.maximum(up, 0.0, propagate_nan=tl.PropagateNan.ALL)
        weighted = positive * w
        d_up = 2 * d * weighted
        return positive * weighted, d_up, d_up, d * positive * positive
    elif NAME == "relu":
        positive = tl.maximum(up, 0.0, propagate_nan=tl.PropagateNan.ALL)
        d_up = tl.where(up > 0, d * w, 0.0)
        return positive * w, d_up, d_up, d * positive
    elif NAME == "gelu":
        cdf = normal_cdf(up, FAST)
        density = 0.3989422804014327 * tl.exp2(up * up * -0.7213475204444817)
        act = up * cdf
        d_up = d * w * (cdf + up * density)
        return act * w, d_up, d_up, d * act
    else:
        tl.static_assert(NAME == "swiglu")
        sig = sigmoid(gate, FAST)
        silu = gate * sig
        weighted = up * w
        d_silu = d * silu
        return silu * weighted, d * weighted * (sig + silu * (1 - sig)), d_silu * w, d_silu * up


@triton.jit
def finish_up(
    acc, bias, h_gate, h_up, act, e, hi, row, pn, F,
    BN: tl.constexpr, SUB: tl.constexpr, ACT: tl.constexpr, KEEP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds the bias to a tile of products, and stores the tiles of H (KEEP) and of act."""
    HALVES: tl.constexpr = halves_of(ACT)
    BF: tl.constexpr = BN // HALVES
    BS: tl.constexpr = BF // SUB
    if HALVES == 2:
        gate, up = halves(acc)
        gates = slices(gate, SUB)
        ups = slices(up, SUB)
    else:
        gates = slices(acc, SUB)
        ups = gates
    for j in tl.static_range(SUB):
        col = pn * BF + j * BS
        gate = gates[j]
        up = ups[j]
        if bias is not None:
            cols = col + tl.arange(0, BS)
            at = bias + e.to(tl.int64) * HALVES * F + cols
            gate += tl.load(at, mask=cols < F, other=0.0).to(tl.float32)[None, :]
            if HALVES == 2:
                up += tl.load(at + F, mask=cols < F, other=0.0).to(tl.float32)[None, :]
            else:
                up = gate
        if KEEP:
            store_rows(h_gate, gate, hi, row, col, F, HALVES * F, TMA)
            if HALVES == 2:
                store_rows(h_up, up, hi, row, col, F, HALVES * F, TMA)
        store_rows(act, activate(gate, up, False, ACT), hi, row, col, F, F, TMA)


@triton.jit(do_not_specialize=["capacity", "GROUP"])
def up_kernel(
    x, gate_up, bias, h_gate, h_up, act, order, tiles, capacity, offsets, D, F, stride_x,
    BM: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, GROUP, SUB: tl.constexpr, K: tl.constexpr,
    ACT: tl.constexpr,
    KEEP: tl.constexpr, GATHER: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """H = X[tokens] @ gate_up[e]^T (+ bias[e]) and act = silu(gate) * up, or the activation ACT.

    A tile has BN/2 columns of each half; without a gate it has BN columns, and H is h_gate alone.
    """
    HALVES: tl.constexpr = halves_of(ACT)
    num_n = tl.cdiv(F, BN // HALVES)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        e, _, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        acc = product(x, gate_up, order, e, hi, row, pn, F, D, stride_x, HALVES * F * D, D, 1,
                      BM, BN, BL, HALVES == 2, True, K, GATHER, TMA, EVEN, PRECISION)  # fmt: skip
        finish_up(acc, bias, h_gate, h_up, act, e, hi, row, pn, F, BN, SUB, ACT, KEEP, TMA)


@triton.jit(do_not_specialize=["capacity", "GROUP"])
def rows_kernel(
    a, b, c, tiles, capacity, offsets, L, W, b_e, b_n, b_l,
    BM: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, GROUP, SUB: tl.constexpr,
    B_ROWS: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C[rows of e] = A[rows of e] @ B[e]^T (B_ROWS) or @ B[e].

    It serves the down projection, the product of grouped_mm, and every dX.
    """
    num_n = tl.cdiv(W, BN)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        e, _, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        acc = product(a, b, offsets, e, hi, row, pn, W, L, L, b_e, b_n, b_l,
                      BM, BN, BL, False, B_ROWS, 1, False, TMA, EVEN, PRECISION)  # fmt: skip
        parts = slices(acc, SUB)
        for j in tl.static_range(SUB):
            store_rows(c, parts[j], hi, row, pn * BN + j * (BN // SUB), W, W, TMA)


@triton.jit
def finish_dh(
    acc, h_gate, h_up, dh_gate, dh_up, act, weights, ds, order, lo, hi, row, pn, N, F,
    BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr, ACT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Stores a tile of dH and of s * act, and a part of ds, from the tile of dA."""
    HALVES: tl.constexpr = halves_of(ACT)
    BS: tl.constexpr = BN // SUB
    r = row + tl.arange(0, BM)
    s = tl.load(weights + tl.load(order + r, mask=r < hi, other=0), mask=r < hi, other=0.0).to(tl.float32)
    parts = slices(acc, SUB)
    total = tl.zeros((BM,), tl.float32)
    for j in tl.static_range(SUB):
        col = pn * BN + j * BS
        gate = load_rows(h_gate, lo, hi, row, col, F, HALVES * F, BM, BS, TMA).to(tl.float32)
        if HALVES == 2:
            up = load_rows(h_up, lo, hi, row, col, F, HALVES * F, BM, BS, TMA).to(tl.float32)
        else:
            up = gate
        a, d_gate, d_up, d_weight = activate_backward(gate, up, parts[j], s[:, None], False, ACT)
        total += tl.sum(d_weight, 1)
        store_rows(act, a, hi, row, col, F, F, TMA)
        store_rows(dh_gate, d_gate, hi, row, col, F, HALVES * F, TMA)
        if HALVES == 2:
            store_rows(dh_up, d_up, hi, row, col, F, HALVES * F, TMA)
    tl.store(ds + pn.to(tl.int64) * N + r, total, mask=r < hi)


@triton.jit(do_not_specialize=["capacity", "N", "GROUP"])
def dh_kernel(
    dy, down, h_gate, h_up, dh_gate, dh_up, act, weights, ds, order, tiles, capacity, offsets, N, D, F,
    stride_dy,
    BM: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, GROUP, SUB: tl.constexpr, K: tl.constexpr,
    ACT: tl.constexpr,
    GATHER: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dH, s * act (for down's gradient) and partial sums of ds.

    They are computed from dA = dY[tokens] @ down[e], with the activation recomputed from H. ds[pn, r] is this
    column tile's part of <dA, act>, the gradient of row r's routing weight s; combine_kernel adds the parts
    in a fixed order. Without a gate H and dH are h_gate and dh_gate alone.
    """
    num_n = tl.cdiv(F, BN)
    for t in tl.range(tl.program_id(0), tl.load(tiles) * num_n, tl.num_programs(0)):
        e, lo, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        acc = product(dy, down, order, e, hi, row, pn, F, D, stride_dy, D * F, 1, F,
                      BM, BN, BL, False, False, K, GATHER, TMA, EVEN, PRECISION)  # fmt: skip
        finish_dh(acc, h_gate, h_up, dh_gate, dh_up, act, weights, ds, order, lo, hi, row, pn, N, F,
                  BM, BN, SUB, ACT, TMA)  # fmt: skip


@triton.jit
def dw_operand(
    a, tok, lo, hi, k, col, width, BL: tl.constexpr, BW: tl.constexpr, GATHER: tl.constexpr, TMA: tl.constexpr
):
    """BL rows of the expert from lo+k*BL on, and BW columns from col on; zeros past the expert's end."""
    if GATHER:
        here = lo + k * BL + tl.arange(0, BL) < hi
        cols = col + tl.arange(0, BW)
        at = a + tok.to(tl.int64)[:, None] * width + cols[None, :]
        return tl.load(at, mask=here[:, None] & (cols < width)[None, :], other=0.0)
    else:
        return load_rows(a, lo, hi, lo + k * BL, col, width, width, BL, BW, TMA)


@triton.jit(do_not_specialize=["GROUP", "E"])
def dw_kernel(
    a, b, c, order, offsets, by_size, E, P, Q,
    BM: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr, GROUP, SUB: tl.constexpr, K: tl.constexpr,
    GATHER: tl.constexpr, TMA: tl.constexpr, BOXES: tl.constexpr, HOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C[e] = a[rows of e]^T @ b[rows of e], [P, Q] for every expert; GATHER is "a", "b" or "".

    TMA: operands are descriptors. BOXES: C is one; a sum in fp32 is a pointer.
    HOW: "write": for an expert without rows zeros are stored, so no memset is needed. "add", "again": C's
    values are added to, and C of an expert without rows is not read; with "again" usually none has rows.

    Experts are handled by decreasing row count. The token index of the next step is loaded one step ahead
    explicitly, since an index load inside the loop halves the depth of the compiler's pipeline.
    """
    num_m = tl.cdiv(P, BM)
    num_n = tl.cdiv(Q, BN)
    experts = E
    if HOW == "again":
        experts = tl.where(tl.load(offsets + E) > 0, E, 0)  # usually there are no rows to add
    for t in tl.range(tl.program_id(0), experts * num_m * num_n, tl.num_programs(0)):
        e, lo, hi, pm, pn = weight_tile_at(t, by_size, offsets, num_m, num_n, GROUP)
        acc = tl.zeros((BM, BN), tl.float32)
        r = lo + tl.arange(0, BL)
        tok = tl.load(order + r, mask=r < hi, other=0) // K if GATHER != "" else r
        for k in range(tl.cdiv(hi - lo, BL)):
            left = dw_operand(a, tok, lo, hi, k, pm * BM, P, BL, BM, GATHER == "a", TMA)
            right = dw_operand(b, tok, lo, hi, k, pn * BN, Q, BL, BN, GATHER == "b", TMA)
            if GATHER != "":
                r += BL
                tok = tl.load(order + r, mask=r < hi, other=0) // K
            acc = tl.dot(left.T, right, acc, input_precision=PRECISION)
        store_weight_tile(c, acc, e, pm * BM, pn * BN, P, Q, hi > lo, BM, BN, SUB, BOXES, HOW != "write")


@triton.jit
def store_weight_tile(
    c, acc, e, row, col, P, Q, some,
    BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr, BOXES: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Stores dw_kernel's tile at (row, col) of C[e], or adds it if the expert has some rows."""
    parts = slices(acc, SUB)
    if BOXES:
        if some or not ADD:
            for j in tl.static_range(SUB):
                part, at = parts[j], col + j * (BN // SUB)
                if ADD:
                    part += tl.reshape(c.load([e, row, at]), (BM, BN // SUB)).to(tl.float32)
                c.store([e, row, at], tl.reshape(part.to(c.dtype), (1, BM, BN // SUB)))
    else:
        # masks and no branch: for sm_100 triton 3.6 does not compile a branch after a product
        end = tl.where(some, P, 0) if ADD else P
        c_e = c + e.to(tl.int64) * P * Q
        for j in tl.static_range(SUB):
            part, at = parts[j], col + j * (BN // SUB)
            if ADD:
                part += load_rows(c_e, 0, end, row, at, Q, Q, BM, BN // SUB, False).to(tl.float32)
            store_rows(c_e, part, end, row, at, Q, Q, False)


@triton.jit
def add_slots(
    acc, t, at, rows, weights, cols, N, D,
    FIRST: tl.constexpr, G: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """acc + the (weighted) rows at[FIRST..FIRST + G - 1] of token t, in this order.

    All loads are issued before the first row is added.
    """
    loaded = ()
    for k in tl.static_range(FIRST, FIRST + G):
        if k < K:
            here = (at[k] >= 0) & (at[k] < N)
            mask = (cols < D) & here
            x = tl.load(
                rows + at[k].to(tl.int64) * D + cols, mask=mask, other=0.0, eviction_policy="evict_first"
            )
            w = 1.0
            if WEIGHTED:
                # a slot without a row may have any weight, even NaN
                w = tl.load(weights + t * K + k, mask=here, other=0.0).to(tl.float32)
            loaded = loaded + (x, w)
    for j in tl.static_range(G):
        if FIRST + j < K:
            x = loaded[2 * j].to(tl.float32)
            if WEIGHTED:
                x *= loaded[2 * j + 1]
            acc += x
    return acc


@triton.jit
def any_here(at, N, FIRST: tl.constexpr, G: tl.constexpr, K: tl.constexpr):
    """Whether any of the rows at[FIRST..FIRST + G - 1] is in the window of N rows."""
    some = tl.zeros((), tl.int1)
    for k in tl.static_range(FIRST, FIRST + G):
        if k < K:
            some |= (at[k] >= 0) & (at[k] < N)
    return some


@triton.jit
def add_parts(
    t, row_of, ds, d_weights, base, N, num_parts, K: tl.constexpr, KP: tl.constexpr, ADD: tl.constexpr
):
    """Stores d_weights of token t: the sum of the parts that dh_kernel stored in ds, in order.

    For a slot without a row in the window it is 0 (with ADD it does not change).
    """
    k = tl.arange(0, KP)
    row = tl.load(row_of + t * K + k, mask=k < K, other=-1) - base
    here = (row >= 0) & (row < N)
    total = tl.zeros((KP,), tl.float32)
    part = ds + row
    for _ in range(num_parts):
        total += tl.load(part, mask=here, other=0.0)
        part += N
    tl.store(d_weights + t * K + k, total.to(d_weights.dtype.element_ty), mask=here if ADD else k < K)


@triton.jit
def combine_token(
    t, rows, weights, row_of, y, ds, d_weights, base, N, D, num_parts,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr, WEIGHTED: tl.constexpr,
    DS: tl.constexpr,
    ADD: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """combine_kernel for one token and BLOCK columns."""
    t += tl.zeros((), tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slots = ()
    stored = tl.zeros((), tl.int1)
    for k in tl.static_range(K):
        row = tl.load(row_of + t * K + k)
        stored |= row >= 0
        slots = slots + (row - base,)
    if ADD:
        stored = any_here(slots, N, 0, K, K)  # without a row to add, y does not change
    elif FILL:
        stored = tl.full((), True, tl.int1)
    if stored:
        acc = tl.zeros((BLOCK,), tl.float32)
        if ADD:
            acc += tl.load(y + t * D + cols, mask=cols < D, other=0.0).to(tl.float32)
        if G >= K:
            acc = add_slots(acc, t, slots, rows, weights, cols, N, D, 0, K, K, WEIGHTED)
        else:
            for first in tl.static_range(0, K, G):
                if any_here(slots, N, first, G, K):
                    acc = add_slots(acc, t, slots, rows, weights, cols, N, D, first, G, K, WEIGHTED)
        tl.store(y + t * D + cols, acc.to(y.dtype.element_ty), mask=cols < D)
        if DS and tl.program_id(1) == 0:
            add_parts(t, row_of, ds, d_weights, base, N, num_parts, K, KP, ADD)


@triton.jit(do_not_specialize=["base", "N", "E", "T"])
def combine_kernel(
    rows, weights, row_of, offsets, y, ds, d_weights, base, N, E, T, D, num_parts,
    K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr, G: tl.constexpr, WEIGHTED: tl.constexpr,
    DS: tl.constexpr,
    ADD: tl.constexpr, FILL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[t] = sum over k of (weights[t, k] *) rows[row_of[t, k] - base], in float32 in slot order.

    A slot whose row is outside of the N rows from base on adds nothing; G slots are skipped together if none
    of them has a row.

    DS: also compute d_weights from ds.
    ADD: add to the values of y and d_weights, in a few programs that loop over all tokens, because there is
        nearly always nothing to add.
    FILL: if False, y and d_weights do not change for a token without any slot in row_of.
    EARLY: see `early` in kernel_launch.py.
    """
    if EARLY:
        gdc_wait()
    if ADD:
        tokens = tl.where(tl.load(offsets + E) > 0, T, 0)
        for t in range(tl.program_id(0), tokens, tl.num_programs(0)):
            combine_token(t, rows, weights, row_of, y, ds, d_weights, base, N, D, num_parts, K, KP, BLOCK, G,
                          WEIGHTED, DS, True, FILL)  # fmt: skip
    else:
        combine_token(tl.program_id(0), rows, weights, row_of, y, ds, d_weights, base, N, D, num_parts, K,
        KP, BLOCK, G,
                      WEIGHTED, DS, False, FILL)  # fmt: skip


@triton.jit
def bias_kernel(dh, d_bias, offsets, W, R: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """d_bias[e] = sum of the expert's rows of dH [N, W], in float32, in order.

    ADD: add to the values of d_bias.
    """
    e = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lo = tl.load(offsets + e)
    hi = tl.load(offsets + e + 1)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.cdiv(hi - lo, R)):
        acc += tl.sum(
            load_rows(dh, lo, hi, lo + i * R, tl.program_id(1) * BLOCK, W, W, R, BLOCK, False).to(tl.float32),
            0,
        )
    at = d_bias + e.to(tl.int64) * W + cols
    if ADD:
        acc += tl.load(at, mask=cols < W, other=0.0).to(tl.float32)
    tl.store(at, acc.to(d_bias.dtype.element_ty), mask=cols < W)


@triton.jit(do_not_specialize=["E"])
def gather_kernel(x, order, offsets, rows, D, E, K: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    """rows[r] = x[order[r] // K] for all rows of experts. A program copies R rows: its loads overlap."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = r < tl.load(offsets + E)
    t = tl.load(order + r, mask=here, other=0) // K
    mask = here[:, None] & (cols < D)[None, :]
    tile = tl.load(x + t.to(tl.int64)[:, None] * D + cols[None, :], mask=mask)
    tl.store(rows + r.to(tl.int64)[:, None] * D + cols[None, :], tile, mask=mask)


@triton.jit(do_not_specialize=["N", "E"])
def clear_kernel(c, offsets, N, E, W, R: tl.constexpr, BLOCK: tl.constexpr):
    """Stores zeros in the rows of C [N, W] past the last expert's end."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rest = (r >= tl.load(offsets + E)) & (r < N)
    zeros = tl.zeros((R, BLOCK), c.dtype.element_ty)
    tl.store(c + r.to(tl.int64)[:, None] * W + cols[None, :], zeros, mask=rest[:, None] & (cols < W)[None, :])
