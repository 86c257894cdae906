"""Kernels of the gated delta rule in chunks of 64 tokens (formulas: ops/delta/chunks.py).

Forward: `prepare` (sums of g, T, U, W), `scan` (F, states), `outputs`. Backward: `prepare` with the known T,
and `scan`, again; `local_back` (P^T dO), `scan_back` (dF and the states' gradients), `values_back` (T^T dF,
dv), `keys_back` and `states_back` (products with states), `lower_back`, `upper_back` and `scores_back`
(products within a chunk). They are separate so that registers suffice. Decoding: `one_token`.

Without the correction (CORRECT false) `weigh` takes the place of `prepare`, since F is beta v, and there are
no `keys_back`, `lower_back` and `upper_back`.

A program handles one chunk of one head, or one head and a part of its V channels through all chunks. Padded
tokens and channels are masked on loads. No product has a transposed accumulator as an operand: triton 3.4 to
3.7.0 compiles such a product wrongly for sm_90 (flash-linear-attention issue 640). A transposed operand is
loaded transposed, or its product is computed in the other order.

Products with intermediate results have the type of the buffers that hold these results: the inputs' type, or
fp32 (TF32 products). Products of inputs alone have the inputs' type.

next: ops/delta/gpu.py
"""

import triton
import triton.language as tl

L = tl.constexpr(64)  # tokens of a chunk


@triton.jit
def rows_of(n, S):
    """The tokens of chunk n [L], and which of them are in the row of S tokens."""
    s = n * L + tl.arange(0, L)
    return s, s < S


@triton.jit
def tile(base, row, row_stride, column, columns, mask):
    """A tile [rows, columns] of a matrix with contiguous rows, 0 outside."""
    at = row.to(tl.int64)[:, None] * row_stride + column[None, :]
    return tl.load(base + at, mask[:, None] & (column < columns)[None, :], 0.0)


@triton.jit
def turned(base, row, row_stride, column, columns, mask):
    """The same tile transposed [columns, rows]."""
    at = row.to(tl.int64)[None, :] * row_stride + column[:, None]
    return tl.load(base + at, mask[None, :] & (column < columns)[:, None], 0.0)


@triton.jit
def put(base, row, row_stride, column, columns, mask, values):
    at = row.to(tl.int64)[:, None] * row_stride + column[None, :]
    tl.store(base + at, values.to(base.dtype.element_ty), mask[:, None] & (column < columns)[None, :])


@triton.jit
def product(a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """a b with operands of a type, summed in fp32."""
    return tl.dot(a.to(DTYPE), b.to(DTYPE), input_precision=PRECISION)


@triton.jit
def runs_of_chunk(run, s, live, n, S, RUNS: tl.constexpr):
    """The runs of the chunk's tokens [L], the run before the chunk, and that of its last token."""
    if RUNS:
        own = tl.load(run + s, live, -1)
        last = tl.load(run + tl.minimum(n * L + L, S) - 1)
        own = tl.where(live, own, last)
        before = tl.load(run + tl.maximum(n * L - 1, 0))
    else:
        own = s * 0
        last = 0
        before = 0
    return own, before, last


@triton.jit
def decays(sums, own, before, last):
    """head, tail [L] and whole, from the sums of g within a chunk."""
    at_end = tl.sum(tl.where(tl.arange(0, L) == L - 1, sums, 0.0), 0)
    never = float("-inf")
    head = tl.exp(tl.where(own == before, sums, never))
    tail = tl.exp(tl.where(own == last, at_end - sums, never))
    whole = tl.exp(tl.where(last == before, at_end, never))
    return head, tail, whole


@triton.jit
def reach(sums, own):
    """D [L, L]: decays from token j to token i >= j of the same run."""
    i = tl.arange(0, L)[:, None]
    j = tl.arange(0, L)[None, :]
    seen = (i >= j) & (own[:, None] == own[None, :])
    return tl.exp(tl.where(seen, sums[:, None] - sums[None, :], float("-inf")))


@triton.jit
def reach_turned(sums, own):
    """D transposed: element [j, i] for i >= j."""
    j = tl.arange(0, L)[:, None]
    i = tl.arange(0, L)[None, :]
    seen = (i >= j) & (own[:, None] == own[None, :])
    return tl.exp(tl.where(seen, sums[None, :] - sums[:, None], float("-inf")))


@triton.jit(do_not_specialize=["S", "N"])
def prepare(
    k, v, g, beta, run, sums_out, t_out, u_out, w_out, S, N, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, RUNS: tl.constexpr,
    SOLVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of g, T = (I + A)^-1, U = T (beta v), W = T (beta head k). SOLVE: else sums and T are read."""
    DTYPE: tl.constexpr = t_out.dtype.element_ty
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    s, live = rows_of(n, S)
    at = (b * S + s) * H + h
    own, before, last = runs_of_chunk(run + b * S, s, live, n, S, RUNS)
    rows = tl.arange(0, L)
    c = tl.arange(0, L)
    rate = tl.load(beta + at, live, 0.0)
    k_base = k + b * S * G * K + (h // (H // G)) * K
    kc = tl.arange(0, KP)
    key = tile(k_base, s, G * K, kc, K, live)
    if SOLVE:
        # exp of less is 0 in fp32; sums stay small, so that differences of sums are precise
        sums = tl.cumsum(tl.maximum(tl.load(g + at, live, 0.0), -88.0), 0)
        tl.store(sums_out + chunk * L + rows, sums)
        kk = tl.dot(key, tl.trans(key), input_precision=PRECISION)
        lower = tl.where(rows[:, None] > c[None, :], rate[:, None] * kk * reach(sums, own), 0.0)
        # kk is symmetric: the transpose of `lower` without an exchange between threads
        upper = tl.where(rows[:, None] < c[None, :], rate[None, :] * kk * reach_turned(sums, own), 0.0)
        solved = tl.zeros([L, L], tl.float32)
        for i in range(1, L):
            across = tl.sum(tl.where(rows[:, None] == i, lower, 0.0), 0)  # row i of A, along columns
            along = tl.sum(tl.where(c[None, :] == i, upper, 0.0), 1)  # the same, along rows
            new = -across - tl.sum(along[:, None] * solved, 0)
            solved = tl.where(rows[:, None] == i, new[None, :], solved)
        solved += tl.where(rows[:, None] == c[None, :], 1.0, 0.0)
        t = solved.to(DTYPE)
        tl.store(t_out + chunk * L * L + rows[:, None] * L + c[None, :], t)
    else:
        sums = tl.load(sums_out + chunk * L + rows)
        t = tl.load(t_out + chunk * L * L + rows[:, None] * L + c[None, :])
    head, _, _ = decays(sums, own, before, last)
    right = (rate * head)[:, None] * key.to(tl.float32)
    every = rows < L
    put(w_out + chunk * L * K, rows, K, kc, K, every, product(t, right, DTYPE, PRECISION))
    vc = tl.arange(0, VP)
    value = tile(v + b * S * H * V + h * V, s, H * V, vc, V, live)
    right = rate[:, None] * value.to(tl.float32)
    put(u_out + chunk * L * V, rows, V, vc, V, every, product(t, right, DTYPE, PRECISION))


@triton.jit(do_not_specialize=["S", "N"])
def weigh(v, g, beta, sums_out, fresh, S, N, H: tl.constexpr, V: tl.constexpr, VP: tl.constexpr):
    """Sums of g, and F = beta v, of one chunk of one head, without the correction."""
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    s, live = rows_of(n, S)
    at = (b * S + s) * H + h
    rows = tl.arange(0, L)
    sums = tl.cumsum(tl.maximum(tl.load(g + at, live, 0.0), -88.0), 0)  # as in `prepare`
    tl.store(sums_out + chunk * L + rows, sums)
    vc = tl.arange(0, VP)
    value = tile(v + b * S * H * V + h * V, s, H * V, vc, V, live).to(tl.float32)
    put(fresh + chunk * L * V, rows, V, vc, V, rows < L, tl.load(beta + at, live, 0.0)[:, None] * value)


@triton.jit(do_not_specialize=["S", "N"])
def scan(
    k, run, sums, u, w, states, S, N, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, RUNS: tl.constexpr, PRECISION: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    """Writes the state before each chunk, and F over U, for BV channels of one head, chunk after chunk.

    Without the correction u is F already, and w is not read.
    """
    DTYPE: tl.constexpr = u.dtype.element_ty
    part, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    vc = part * BV + tl.arange(0, BV)
    kc = tl.arange(0, KP)
    rows = tl.arange(0, L)
    every = rows < L
    keys = kc < K
    k_base = k + b * S * G * K + (h // (H // G)) * K
    state = tl.zeros([KP, BV], tl.float32)
    for n in range(0, N):
        chunk = bh.to(tl.int64) * N + n
        s, live = rows_of(n, S)
        own, before, last = runs_of_chunk(run + b * S, s, live, n, S, RUNS)
        _, tail, whole = decays(tl.load(sums + chunk * L + rows), own, before, last)
        put(states + chunk * K * V, kc, V, vc, V, keys, state)
        fresh = tile(u + chunk * L * V, rows, V, vc, V, every).to(tl.float32)
        if CORRECT:
            into = tile(w + chunk * L * K, rows, K, kc, K, every)
            fresh -= product(into, state, DTYPE, PRECISION)
            put(u + chunk * L * V, rows, V, vc, V, every, fresh)
        key = turned(k_base, s, G * K, kc, K, live)
        state = whole * state + product(key, tail[:, None] * fresh, DTYPE, PRECISION)


@triton.jit(do_not_specialize=["S", "N"])
def outputs(
    q, k, run, sums, fresh, states, o, S, N, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, RUNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O = (q head) S + (q k^T D) F of one chunk of one head, for BV channels."""
    DTYPE: tl.constexpr = fresh.dtype.element_ty
    n, bh, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    s, live = rows_of(n, S)
    own, before, last = runs_of_chunk(run + b * S, s, live, n, S, RUNS)
    rows = tl.arange(0, L)
    every = rows < L
    total = tl.load(sums + chunk * L + rows)
    head, _, _ = decays(total, own, before, last)
    kc = tl.arange(0, KP)
    vc = part * BV + tl.arange(0, BV)
    of_keys = b * S * G * K + (h // (H // G)) * K
    query = tile(q + of_keys, s, G * K, kc, K, live)
    key = turned(k + of_keys, s, G * K, kc, K, live)
    scores = tl.dot(query, key, input_precision=PRECISION) * reach(total, own)
    state = tile(states + chunk * K * V, kc, V, vc, V, kc < K)
    new = tile(fresh + chunk * L * V, rows, V, vc, V, every)
    y = head[:, None] * product(query, state, DTYPE, PRECISION)
    y += product(scores, new, DTYPE, PRECISION)
    put(o + b * S * H * V + h * V, s, H * V, vc, V, live, y)


@triton.jit(do_not_specialize=["S", "N"])
def local_back(
    q, k, do, run, sums, df, S, N, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, RUNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P^T dO of one chunk of one head, for BV channels."""
    DTYPE: tl.constexpr = df.dtype.element_ty
    n, bh, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    s, live = rows_of(n, S)
    own, _, _ = runs_of_chunk(run + b * S, s, live, n, S, RUNS)
    rows = tl.arange(0, L)
    total = tl.load(sums + chunk * L + rows)
    kc = tl.arange(0, KP)
    vc = part * BV + tl.arange(0, BV)
    of_keys = b * S * G * K + (h // (H // G)) * K
    key = tile(k + of_keys, s, G * K, kc, K, live)
    query = turned(q + of_keys, s, G * K, kc, K, live)
    scores = tl.dot(key, query, input_precision=PRECISION) * reach_turned(total, own)
    d = tile(do + b * S * H * V + h * V, s, H * V, vc, V, live)
    made = product(scores, d, DTYPE, PRECISION)
    put(df + chunk * L * V, rows, V, vc, V, rows < L, made)


@triton.jit(do_not_specialize=["S", "N"])
def scan_back(
    q, k, do, run, sums, w, df, after, S, N, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, RUNS: tl.constexpr, PRECISION: tl.constexpr,
    CORRECT: tl.constexpr,
):  # fmt: skip
    """Adds the state's share to dF, and writes the gradient of the state after each chunk, from the last."""
    DTYPE: tl.constexpr = df.dtype.element_ty
    part, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    vc = part * BV + tl.arange(0, BV)
    kc = tl.arange(0, KP)
    rows = tl.arange(0, L)
    every = rows < L
    of_keys = b * S * G * K + (h // (H // G)) * K
    ds = tl.zeros([KP, BV], tl.float32)
    for back in range(0, N):
        n = N - 1 - back
        chunk = bh.to(tl.int64) * N + n
        s, live = rows_of(n, S)
        own, before, last = runs_of_chunk(run + b * S, s, live, n, S, RUNS)
        head, tail, whole = decays(tl.load(sums + chunk * L + rows), own, before, last)
        put(after + chunk * K * V, kc, V, vc, V, kc < K, ds)
        key = tile(k + of_keys, s, G * K, kc, K, live)
        d = tile(df + chunk * L * V, rows, V, vc, V, every).to(tl.float32)
        d += tail[:, None] * product(key, ds, DTYPE, PRECISION)
        put(df + chunk * L * V, rows, V, vc, V, every, d)
        query = turned(q + of_keys, s, G * K, kc, K, live)
        incoming = tile(do + b * S * H * V + h * V, s, H * V, vc, V, live)
        scaled = head[:, None] * incoming.to(tl.float32)
        ds = whole * ds + product(query, scaled, DTYPE, PRECISION)
        if CORRECT:
            into = turned(w + chunk * L * K, rows, K, kc, K, every)
            ds -= product(into, d, DTYPE, PRECISION)


@triton.jit(do_not_specialize=["S", "N"])
def values_back(
    v, beta, t, df, d_bv, dv, d_beta, S, N, H: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    PRECISION: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    """d(beta v) = T^T dF, dv, and the share of beta's gradient, of one chunk of one head.

    Without the correction d(beta v) is dF, and d_beta is beta's whole gradient, in beta's order.
    """
    DTYPE: tl.constexpr = df.dtype.element_ty
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    s, live = rows_of(n, S)
    rows = tl.arange(0, L)
    every = rows < L
    rate = tl.load(beta + (b * S + s) * H + h, live, 0.0)
    vc = tl.arange(0, VP)
    d = tile(df + chunk * L * V, rows, V, vc, V, every)
    made = d.to(tl.float32)
    if CORRECT:
        made = product(turned(t + chunk * L * L, rows, L, rows, L, every), d, DTYPE, PRECISION)
        put(d_bv + chunk * L * V, rows, V, vc, V, every, made)
    put(dv + b * S * H * V + h * V, s, H * V, vc, V, live, rate[:, None] * made)
    value = tile(v + b * S * H * V + h * V, s, H * V, vc, V, live).to(tl.float32)
    share = tl.sum(made * value, 1)
    if CORRECT:
        tl.store(d_beta + chunk * L + rows, share)
    else:
        tl.store(d_beta + (b * S + s) * H + h, share, live)


@triton.jit(do_not_specialize=["S", "N"])
def keys_back(
    k, run, sums, beta, t, states, df, after, dk, d_bk, d_beta, d_sums, S, N,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    RUNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dW = -dF S^T, d(beta head k) = T^T dW, and their shares of dk, of beta's gradient and of g's sums."""
    DTYPE: tl.constexpr = t.dtype.element_ty
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    s, live = rows_of(n, S)
    own, before, last = runs_of_chunk(run + b * S, s, live, n, S, RUNS)
    rows = tl.arange(0, L)
    every = rows < L
    head, _, whole = decays(tl.load(sums + chunk * L + rows), own, before, last)
    rate = tl.load(beta + (b * S + s) * H + h, live, 0.0)
    kc = tl.arange(0, KP)
    into = tl.zeros([L, KP], tl.float32)
    of_whole = tl.zeros([BV], tl.float32)
    for part in range(0, tl.cdiv(V, BV)):
        vc = part * BV + tl.arange(0, BV)
        state = turned(states + chunk * K * V, kc, V, vc, V, kc < K)  # [BV, KP]
        ds = turned(after + chunk * K * V, kc, V, vc, V, kc < K)
        of_whole += tl.sum(state.to(tl.float32) * ds.to(tl.float32), 1)
        d = tile(df + chunk * L * V, rows, V, vc, V, every)
        into -= product(d, state, DTYPE, PRECISION)
    solve = turned(t + chunk * L * L, rows, L, rows, L, every)
    right = product(solve, into, DTYPE, PRECISION)
    put(d_bk + chunk * L * K, rows, K, kc, K, every, right)
    put(dk + b * S * H * K + h * K, s, H * K, kc, K, live, (rate * head)[:, None] * right)
    of_keys = b * S * G * K + (h // (H // G)) * K
    key = tile(k + of_keys, s, G * K, kc, K, live).to(tl.float32)
    by_head = head * tl.sum(right * key, 1)
    at_end = whole * tl.sum(of_whole, 0)
    tl.store(d_sums + chunk * L + rows, rate * by_head + tl.where(rows == L - 1, at_end, 0.0))
    at = d_beta + chunk * L + rows
    tl.store(at, tl.load(at) + by_head)


@triton.jit(do_not_specialize=["S", "N"])
def states_back(
    q, k, do, run, sums, fresh, states, after, dq, dk, d_sums, S, N, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, RUNS: tl.constexpr,
    PRECISION: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    """dO S^T and F dS^T: the states' shares of dq, of dk and of g's sums.

    Without the correction it is the first kernel to write dk and the shares of g's sums.
    """
    DTYPE: tl.constexpr = fresh.dtype.element_ty
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    s, live = rows_of(n, S)
    own, before, last = runs_of_chunk(run + b * S, s, live, n, S, RUNS)
    rows = tl.arange(0, L)
    every = rows < L
    head, tail, whole = decays(tl.load(sums + chunk * L + rows), own, before, last)
    kc = tl.arange(0, KP)
    of_keys = b * S * G * K + (h // (H // G)) * K
    of_head = b * S * H * K + h * K
    of_whole = tl.zeros([BV], tl.float32)
    reads = tl.zeros([L, KP], tl.float32)
    for part in range(0, tl.cdiv(V, BV)):
        vc = part * BV + tl.arange(0, BV)
        incoming = tile(do + b * S * H * V + h * V, s, H * V, vc, V, live)
        state = turned(states + chunk * K * V, kc, V, vc, V, kc < K)  # [BV, KP]
        reads += product(incoming, state, DTYPE, PRECISION)
        if not CORRECT:  # else `keys_back` has this share
            ds = turned(after + chunk * K * V, kc, V, vc, V, kc < K)
            of_whole += tl.sum(state.to(tl.float32) * ds.to(tl.float32), 1)
    query = tile(q + of_keys, s, G * K, kc, K, live).to(tl.float32)
    shares = head * tl.sum(reads * query, 1)
    put(dq + of_head, s, H * K, kc, K, live, head[:, None] * reads)
    writes = tl.zeros([L, KP], tl.float32)
    for part in range(0, tl.cdiv(V, BV)):
        vc = part * BV + tl.arange(0, BV)
        new = tile(fresh + chunk * L * V, rows, V, vc, V, every)
        ds = turned(after + chunk * K * V, kc, V, vc, V, kc < K)
        writes += product(new, ds, DTYPE, PRECISION)
    key = tile(k + of_keys, s, G * K, kc, K, live).to(tl.float32)
    of_tail = tail * tl.sum(writes * key, 1)
    new_k = tail[:, None] * writes
    at_end = tl.sum(of_tail, 0)
    at = d_sums + chunk * L + rows
    if CORRECT:
        new_k += tile(dk + of_head, s, H * K, kc, K, live)
        shares += tl.load(at)
    else:
        at_end += whole * tl.sum(of_whole, 0)
    put(dk + of_head, s, H * K, kc, K, live, new_k)
    tl.store(at, shares + tl.where(rows == L - 1, at_end, 0.0) - of_tail)


@triton.jit(do_not_specialize=["S", "N"])
def lower_back(
    k, run, sums, beta, u, w, d_bv, d_bk, dk, d_beta, d_sums, db, S, N, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, RUNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of A, -(d_bv U^T + d_bk W^T): its shares of dk and of g's sums, and beta's gradient."""
    DTYPE: tl.constexpr = u.dtype.element_ty
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    s, live = rows_of(n, S)
    own, _, _ = runs_of_chunk(run + b * S, s, live, n, S, RUNS)
    rows = tl.arange(0, L)
    every = rows < L
    at = (b * S + s) * H + h
    rate = tl.load(beta + at, live, 0.0)
    kc = tl.arange(0, KP)
    row = tile(d_bk + chunk * L * K, rows, K, kc, K, every)
    lower = -product(row, turned(w + chunk * L * K, rows, K, kc, K, every), DTYPE, PRECISION)
    for part in range(0, tl.cdiv(V, BV)):
        vc = part * BV + tl.arange(0, BV)
        d = tile(d_bv + chunk * L * V, rows, V, vc, V, every)
        lower -= product(d, turned(u + chunk * L * V, rows, V, vc, V, every), DTYPE, PRECISION)
    lower = tl.where(rows[:, None] > rows[None, :], lower, 0.0)
    lower *= reach(tl.load(sums + chunk * L + rows), own)
    of_keys = b * S * G * K + (h // (H // G)) * K
    of_head = b * S * H * K + h * K
    key = tile(k + of_keys, s, G * K, kc, K, live)
    new_k = tile(dk + of_head, s, H * K, kc, K, live)
    new_k += product(rate[:, None] * lower, key, DTYPE, PRECISION)
    put(dk + of_head, s, H * K, kc, K, live, new_k)
    lower *= tl.dot(key, turned(k + of_keys, s, G * K, kc, K, live), input_precision=PRECISION)
    tl.store(db + at, tl.sum(lower, 1) + tl.load(d_beta + chunk * L + rows), live)
    lower *= rate[:, None]
    share = d_sums + chunk * L + rows
    tl.store(share, tl.load(share) + tl.sum(lower, 1) - tl.sum(lower, 0))


@triton.jit(do_not_specialize=["S", "N"])
def upper_back(
    k, run, sums, beta, u, w, d_bv, d_bk, dk, S, N, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, RUNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The transpose of the gradient of A, by products in the other order: its share of dk."""
    DTYPE: tl.constexpr = u.dtype.element_ty
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    s, live = rows_of(n, S)
    own, _, _ = runs_of_chunk(run + b * S, s, live, n, S, RUNS)
    rows = tl.arange(0, L)
    every = rows < L
    rate = tl.load(beta + (b * S + s) * H + h, live, 0.0)
    kc = tl.arange(0, KP)
    row = tile(w + chunk * L * K, rows, K, kc, K, every)
    upper = -product(row, turned(d_bk + chunk * L * K, rows, K, kc, K, every), DTYPE, PRECISION)
    for part in range(0, tl.cdiv(V, BV)):
        vc = part * BV + tl.arange(0, BV)
        made = tile(u + chunk * L * V, rows, V, vc, V, every)
        upper -= product(made, turned(d_bv + chunk * L * V, rows, V, vc, V, every), DTYPE, PRECISION)
    upper = tl.where(rows[:, None] < rows[None, :], upper, 0.0)
    upper *= reach_turned(tl.load(sums + chunk * L + rows), own)
    key = tile(k + b * S * G * K + (h // (H // G)) * K, s, G * K, kc, K, live)
    of_head = b * S * H * K + h * K
    new_k = tile(dk + of_head, s, H * K, kc, K, live)
    new_k += product(rate[None, :] * upper, key, DTYPE, PRECISION)
    put(dk + of_head, s, H * K, kc, K, live, new_k)


@triton.jit(do_not_specialize=["S", "N"])
def scores_back(
    q, k, do, run, sums, fresh, dq, dk, d_sums, dg, S, N, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, RUNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of q k^T within a chunk, dO F^T, in both orders: the last shares of dq and dk, and dg."""
    DTYPE: tl.constexpr = fresh.dtype.element_ty
    n, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    s, live = rows_of(n, S)
    own, _, _ = runs_of_chunk(run + b * S, s, live, n, S, RUNS)
    rows = tl.arange(0, L)
    every = rows < L
    total = tl.load(sums + chunk * L + rows)
    kc = tl.arange(0, KP)
    i = rows[:, None]
    j = rows[None, :]
    of_keys = b * S * G * K + (h // (H // G)) * K
    of_head = b * S * H * K + h * K
    scores = tl.zeros([L, L], tl.float32)
    turned_scores = tl.zeros([L, L], tl.float32)
    out = do + b * S * H * V + h * V
    for part in range(0, tl.cdiv(V, BV)):
        vc = part * BV + tl.arange(0, BV)
        new = turned(fresh + chunk * L * V, rows, V, vc, V, every)
        scores += product(tile(out, s, H * V, vc, V, live), new, DTYPE, PRECISION)
        new = tile(fresh + chunk * L * V, rows, V, vc, V, every)
        turned_scores += product(new, turned(out, s, H * V, vc, V, live), DTYPE, PRECISION)
    scores *= reach(total, own)
    turned_scores *= reach_turned(total, own)
    query = tile(q + of_keys, s, G * K, kc, K, live)
    new_k = tile(dk + of_head, s, H * K, kc, K, live) + product(turned_scores, query, DTYPE, PRECISION)
    put(dk + of_head, s, H * K, kc, K, live, new_k)
    apart = scores * tl.dot(query, turned(k + of_keys, s, G * K, kc, K, live), input_precision=PRECISION)
    shares = tl.sum(apart, 1) - tl.sum(apart, 0) + tl.load(d_sums + chunk * L + rows)
    back = tl.sum(tl.where(i <= j, shares[None, :], 0.0), 1)  # the sum over this and later tokens
    tl.store(dg + (b * S + s) * H + h, back, live)
    key = tile(k + of_keys, s, G * K, kc, K, live)
    new_q = tile(dq + of_head, s, H * K, kc, K, live)
    new_q += product(scores, key, DTYPE, PRECISION)
    put(dq + of_head, s, H * K, kc, K, live, new_q)


@triton.jit
def one_token(
    q, k, v, g, beta, state, o, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    """The rule for one token of one sequence and head, for BV channels; the state is overwritten."""
    bh, part = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    kc = tl.arange(0, KP)
    vc = part * BV + tl.arange(0, BV)
    of_keys = (b * G + h // (H // G)) * K
    of_values = bh.to(tl.int64) * V
    at = bh.to(tl.int64) * K * V + kc[:, None] * V + vc[None, :]
    mask = (kc < K)[:, None] & (vc < V)[None, :]
    query = tl.load(q + of_keys + kc, kc < K, 0.0).to(tl.float32)
    key = tl.load(k + of_keys + kc, kc < K, 0.0).to(tl.float32)
    value = tl.load(v + of_values + vc, vc < V, 0.0).to(tl.float32)
    held = tl.load(state + at, mask, 0.0) * tl.exp(tl.load(g + bh))
    if CORRECT:
        value -= tl.sum(held * key[:, None], 0)
    fresh = tl.load(beta + bh) * value
    held += key[:, None] * fresh[None, :]
    tl.store(state + at, held, mask)
    tl.store(o + of_values + vc, tl.sum(held * query[:, None], 0).to(o.dtype.element_ty), vc < V)
