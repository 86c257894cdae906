"""Kernels of the gated delta rule in chunks (formulas: ops/delta/chunks.py): the backward.

After `prepare` with the known T, and `scan`: `local_back` (P^T dO), `scan_back` (gradients of all states),
`solve_back` (through T, dv), `states_back` (products with states), `inner_back` (dq and dk, summed over the
heads that share q and k).

No product has a transposed accumulator as an operand (ops/delta/kernels.py): gradients of pairs of tokens
are written by `solve_back` and `states_back`, and `inner_back` reads them in both orders. F is computed again
from U, W and the state, and dF from P^T dO and the state's gradient, so a scan writes nothing but states.

next: ops/delta/gpu.py
"""

import triton
import triton.language as tl

from tmoe.ops.delta.kernels import (
    BAD,
    HEAD,
    RATE,
    ROWS,
    TAIL,
    L,
    even,
    product,
    put,
    put_state,
    put_tokens,
    reach,
    runs_of_chunk,
    tile,
    tokens_of,
    turned,
)


@triton.jit(do_not_specialize=["S", "N"])
def local_back(
    queries, keys, do, run, tokens, lost, do_of, df_of, S, N, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, RUNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dO in chunks, 0 where O is NaN, and P^T dO, of one chunk of one head."""
    DTYPE: tl.constexpr = df_of.dtype.element_ty
    bh, n = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    group = (b * G + h // (H // G)) * N + n
    own, _, _ = runs_of_chunk(run + b * S, n, S, RUNS)
    rows = tl.arange(0, L)
    live = n * L + rows < S
    first = b * S + n * L
    kept = live & (tl.load(lost + first * H + h + rows * H, live, 1) == 0)
    kc = tl.arange(0, KP)
    vc = tl.arange(0, VP)
    d = tokens_of(do + (first * H + h) * V, rows, H * V, vc, V, kept)
    put(do_of + chunk * L * V, rows, V, vc, V, d)
    key = tile(keys + group * L * K, rows, K, kc, K)
    query = turned(queries + group * L * K, rows, K, kc, K)
    sums = tl.load(tokens + chunk * (ROWS * L) + rows)
    scores = tl.dot(key, query, input_precision=PRECISION) * reach(sums, own)
    scores = tl.where(rows[:, None] <= rows[None, :], scores, 0.0)
    put(df_of + chunk * L * V, rows, V, vc, V, product(scores, d, DTYPE, PRECISION))


@triton.jit(do_not_specialize=["N"])
def scan_back(
    queries, keys, tokens, do_of, df_of, w_of, after, N, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    """Writes the transposed gradient of the state after each chunk, from the last, for BV channels of a head.

    df_of: P^T dO.
    """
    DTYPE: tl.constexpr = df_of.dtype.element_ty
    part, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    vc = part * BV + tl.arange(0, BV)
    kc = tl.arange(0, KP)
    rows = tl.arange(0, L)
    chunk = bh.to(tl.int64) * N
    group = (b * G + h // (H // G)) * N
    ds = tl.zeros([BV, KP], tl.float32)
    wholes = tokens + chunk * (ROWS * L) + HEAD + L - 1
    whole = tl.load(wholes + (N - 1) * (ROWS * L))
    for back in range(0, N):
        n = N - 1 - back
        next_whole = tl.load(wholes + tl.maximum(n - 1, 0) * (ROWS * L))
        of_token = tokens + (chunk + n) * (ROWS * L)
        head = tl.load(of_token + HEAD + rows)
        tail = tl.load(of_token + TAIL + rows)
        put_state(after + (chunk + n) * (K * V), kc, K, vc, V, ds)
        d = tl.zeros([BV, L], tl.float32)
        if CORRECT:
            key = turned(keys + (group + n) * (L * K), rows, K, kc, K)
            d -= tail[None, :] * product(ds, key, DTYPE, PRECISION)
            d -= turned(df_of + (chunk + n) * (L * V), rows, V, vc, V).to(tl.float32)
        incoming = turned(do_of + (chunk + n) * (L * V), rows, V, vc, V).to(tl.float32)
        query = tile(queries + (group + n) * (L * K), rows, K, kc, K)
        ds = whole * ds + product(head[None, :] * incoming, query, DTYPE, PRECISION)
        if CORRECT:
            ds += product(d, tile(w_of + (chunk + n) * (L * K), rows, K, kc, K), DTYPE, PRECISION)
        whole = next_whole


@triton.jit
def transposed_state(base, kc, K: tl.constexpr, vc, V: tl.constexpr):
    """A state's channels vc as they lie in memory, [V, K]."""
    at = base + vc[:, None] * K + kc[None, :]
    if even(K, kc.shape[0]) and even(V, vc.shape[0]):
        made = tl.load(at)
    else:
        made = tl.load(at, (vc < V)[:, None] & (kc < K)[None, :], 0.0)
    return made


@triton.jit(do_not_specialize=["S", "N"])
def solve_back(
    keys, v, run, tokens, df_of, t_of, u_of, w_of, states, after, lower_of, bk_of, dv, shares, S, N,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    RUNS: tl.constexpr, PRECISION: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    """dv, and what passes through the solve, of one chunk of one head.

    dF = P^T dO + (k tail) dS; d(beta v) = T^T dF; bk = d(beta head k) = -T^T dF S^T; the gradient of k k^T is
    that of A, -(d(beta v) U^T + bk W^T), with factors. shares [2, L]: of the gradients of g's sums, and of
    beta. Without the correction d(beta v) is dF.
    """
    DTYPE: tl.constexpr = df_of.dtype.element_ty
    bh, n = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    group = (b * G + h // (H // G)) * N + n
    rows = tl.arange(0, L)
    i = rows[:, None]
    j = rows[None, :]
    kc = tl.arange(0, KP)
    of_token = tokens + chunk * (ROWS * L) + rows
    tail = tl.load(of_token + TAIL)
    rate = tl.load(of_token + RATE)
    live = n * L + rows < S
    good = live & (tl.load(of_token + BAD) == 0)
    of_v = ((b * S + n * L) * H + h) * V
    of_beta = tl.zeros([L], tl.float32)
    into = tl.zeros([L, KP], tl.float32)
    lower = tl.zeros([L, L], tl.float32)
    for part in range(0, tl.cdiv(V, BV)):
        vc = part * BV + tl.arange(0, BV)
        key = tile(keys + group * L * K, rows, K, kc, K)  # each time: it is kept nowhere, registers are short
        ds = transposed_state(after + chunk * (K * V), kc, K, vc, V)
        made = tail[:, None] * product(key, tl.trans(ds), DTYPE, PRECISION)
        made += tile(df_of + chunk * L * V, rows, V, vc, V).to(tl.float32)
        if CORRECT:
            state = transposed_state(states + chunk * (K * V), kc, K, vc, V)
            into += product(-made, state, DTYPE, PRECISION)
            solve = turned(t_of + chunk * L * L, rows, L, rows, L)
            made = product(solve, made, DTYPE, PRECISION)
            lower += product(made, tl.trans(tile(u_of + chunk * L * V, rows, V, vc, V)), DTYPE, PRECISION)
        put_tokens(dv + of_v, rows, H * V, vc, V, live, rate[:, None] * made)
        value = tokens_of(v + of_v, rows, H * V, vc, V, good)
        of_beta += tl.sum(made * value.to(tl.float32), 1)
    of_sums = tl.zeros([L], tl.float32)
    if CORRECT:
        solve = turned(t_of + chunk * L * L, rows, L, rows, L)
        right = product(solve, into, DTYPE, PRECISION).to(DTYPE)
        put(bk_of + chunk * L * K, rows, K, kc, K, right)
        lower += product(right, tl.trans(tile(w_of + chunk * L * K, rows, K, kc, K)), DTYPE, PRECISION)
        own, _, _ = runs_of_chunk(run + b * S, n, S, RUNS)
        lower = tl.where(i > j, -lower * reach(tl.load(of_token), own), 0.0)
        put(lower_of + chunk * L * L, rows, L, rows, L, rate[:, None] * lower)
        key = tile(keys + group * L * K, rows, K, kc, K)
        lower *= tl.dot(key, tl.trans(key), input_precision=PRECISION)
        of_beta += tl.sum(lower, 1)
        lower *= rate[:, None]
        of_sums += tl.sum(lower, 1) - tl.sum(lower, 0)
    at = shares + chunk * (2 * L) + rows
    tl.store(at, of_sums)
    tl.store(at + L, of_beta)


@triton.jit(do_not_specialize=["S", "N"])
def states_back(
    queries, keys, run, tokens, do_of, u_of, w_of, states, after, pairs_of, bk_of, dq_of, dk_of, shares, dg,
    db, S, N, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr,
    BV: tl.constexpr, RUNS: tl.constexpr, PRECISION: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    """The states' shares of dq and dk, and the gradients of g and beta, of one chunk of one head.

    Also the transposed gradient of q k^T, F dO^T. Without the correction F is U.
    """
    DTYPE: tl.constexpr = u_of.dtype.element_ty
    bh, n = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    group = (b * G + h // (H // G)) * N + n
    own, _, _ = runs_of_chunk(run + b * S, n, S, RUNS)
    rows = tl.arange(0, L)
    i = rows[:, None]
    j = rows[None, :]
    kc = tl.arange(0, KP)
    of_token = tokens + chunk * (ROWS * L) + rows
    head = tl.load(of_token + HEAD)
    tail = tl.load(of_token + TAIL)
    of_whole = 0.0
    reads = tl.zeros([L, KP], tl.float32)
    writes = tl.zeros([L, KP], tl.float32)
    pairs = tl.zeros([L, L], tl.float32)
    write = tl.zeros([L, KP], DTYPE)
    if CORRECT:
        write = tile(w_of + chunk * L * K, rows, K, kc, K)
    for part in range(0, tl.cdiv(V, BV)):
        vc = part * BV + tl.arange(0, BV)
        state = transposed_state(states + chunk * (K * V), kc, K, vc, V)
        fresh = tile(u_of + chunk * L * V, rows, V, vc, V)
        if CORRECT:
            fresh = (fresh.to(tl.float32) - product(write, tl.trans(state), DTYPE, PRECISION)).to(DTYPE)
        incoming = tile(do_of + chunk * L * V, rows, V, vc, V)
        reads += product(incoming, state, DTYPE, PRECISION)
        pairs += product(fresh, tl.trans(incoming), DTYPE, PRECISION)
        ds = transposed_state(after + chunk * (K * V), kc, K, vc, V)
        writes += product(fresh, ds, DTYPE, PRECISION)
        of_whole += tl.sum(tl.sum(state.to(tl.float32) * ds.to(tl.float32), 1), 0)

    of_share = shares + chunk * (2 * L) + rows
    of_sums = tl.load(of_share)
    of_beta = tl.load(of_share + L)
    query = tile(queries + group * L * K, rows, K, kc, K)
    put(dq_of + chunk * L * K, rows, K, kc, K, head[:, None] * reads)
    of_sums += head * tl.sum(reads * query.to(tl.float32), 1)
    key = tile(keys + group * L * K, rows, K, kc, K)
    writes *= tail[:, None]
    of_tail = tl.sum(writes * key.to(tl.float32), 1)
    if CORRECT:
        right = tile(bk_of + chunk * L * K, rows, K, kc, K).to(tl.float32)
        rate = tl.load(of_token + RATE)
        by_head = head * tl.sum(right * key.to(tl.float32), 1)
        of_beta += by_head
        of_sums += rate * by_head
        writes += (rate * head)[:, None] * right
    put(dk_of + chunk * L * K, rows, K, kc, K, writes)
    pairs = tl.where(i <= j, pairs * reach(tl.load(of_token), own), 0.0)
    put(pairs_of + chunk * L * L, rows, L, rows, L, pairs)
    pairs *= tl.dot(key, tl.trans(query), input_precision=PRECISION)
    of_sums += tl.sum(pairs, 0) - tl.sum(pairs, 1)
    whole = tl.sum(tl.where(rows == L - 1, head, 0.0), 0)
    at_end = tl.sum(of_tail, 0) + whole * of_whole
    of_sums += tl.where(rows == L - 1, at_end, 0.0) - of_tail
    later = tl.where(i <= j, of_sums[None, :], 0.0)
    at = (b * S + n * L) * H + h + rows * H
    live = n * L + rows < S
    tl.store(dg + at, tl.sum(later, 1), live)
    tl.store(db + at, of_beta, live)


@triton.jit(do_not_specialize=["S", "N"])
def inner_back(
    queries, keys, pairs_of, lower_of, dq_of, dk_of, dq, dk, S, N, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    """dq and dk of one chunk, for BK channels: the sum over all heads that share q and k, with the products
    within the chunk.
    """
    DTYPE: tl.constexpr = pairs_of.dtype.element_ty
    bg, n = tl.program_id(0), tl.program_id(1)
    b = (bg // G).to(tl.int64)
    group = bg.to(tl.int64) * N + n
    rows = tl.arange(0, L)
    live = n * L + rows < S
    kc = tl.program_id(2) * BK + tl.arange(0, BK)
    new_q = tl.zeros([L, BK], tl.float32)
    new_k = tl.zeros([L, BK], tl.float32)
    for one in range(0, H // G):
        chunk = (b * H + (bg % G) * (H // G) + one) * N + n
        query = tile(queries + group * L * K, rows, K, kc, K)
        key = tile(keys + group * L * K, rows, K, kc, K)
        new_q += tile(dq_of + chunk * L * K, rows, K, kc, K).to(tl.float32)
        new_q += product(turned(pairs_of + chunk * L * L, rows, L, rows, L), key, DTYPE, PRECISION)
        new_k += tile(dk_of + chunk * L * K, rows, K, kc, K).to(tl.float32)
        new_k += product(tile(pairs_of + chunk * L * L, rows, L, rows, L), query, DTYPE, PRECISION)
        if CORRECT:
            both = tile(lower_of + chunk * L * L, rows, L, rows, L).to(tl.float32)
            both += turned(lower_of + chunk * L * L, rows, L, rows, L).to(tl.float32)
            new_k += product(both, key, DTYPE, PRECISION)
    of_group = ((b * S + n * L) * G + bg % G) * K
    put_tokens(dq + of_group, rows, G * K, kc, K, live, new_q)
    put_tokens(dk + of_group, rows, G * K, kc, K, live, new_k)
