"""Kernels of the gated delta rule in chunks of 64 tokens (formulas: ops/delta/chunks.py): the forward.

`prepare` (decays, T, U and W of a chunk), `scan` (the states before all chunks), `outputs`. Decoding:
`one_token`. The backward: ops/delta/kernels_back.py.

A program handles one chunk of one head, or one head and a part of its V channels through all chunks. Buffers
of chunks have rows for all 64 tokens: `prepare` reads q, k, v, g and beta in place of all later kernels, and
writes 0 for padded tokens and for tokens with values that are not finite.

No product has a transposed accumulator as an operand: triton 3.4 to 3.7.0 compiles such a product wrongly for
sm_90 (flash-linear-attention issue 640). So the scans keep the transpose of a state, [V, K]: it and F^T are
first operands, which stay in registers from one chunk to the next, and second operands come from memory.

Products with intermediate results have the type of the buffers that hold these results: bf16, or fp32 (TF32
products). Products of inputs alone have the inputs' type.

next: ops/delta/kernels_back.py
"""

import triton
import triton.language as tl

L = tl.constexpr(64)  # tokens of a chunk
# rows of the buffer `tokens` [chunks, ROWS, L]: sums of g, decays from the state and to it, beta, and 1 for a
# token that is not finite
ROWS = tl.constexpr(5)
HEAD, TAIL, RATE, BAD = tl.constexpr(64), tl.constexpr(128), tl.constexpr(192), tl.constexpr(256)


@triton.constexpr_function
def even(columns, block):
    """Whether no tile of `block` columns crosses the last column."""
    return columns % block == 0


@triton.jit
def tile(base, row, stride, column, columns: tl.constexpr):
    """A tile [rows, columns] of a matrix with contiguous rows; 0 right of its columns."""
    at = base + row[:, None] * stride + column[None, :]
    if even(columns, column.shape[0]):
        made = tl.load(at)
    else:
        made = tl.load(at, (column < columns)[None, :], 0.0)
    return made


@triton.jit
def turned(base, row, stride, column, columns: tl.constexpr):
    """The same tile transposed [columns, rows]."""
    at = base + row[None, :] * stride + column[:, None]
    if even(columns, column.shape[0]):
        made = tl.load(at)
    else:
        made = tl.load(at, (column < columns)[:, None], 0.0)
    return made


@triton.jit
def put(base, row, stride, column, columns: tl.constexpr, values):
    """Stores a tile [rows, columns], but nothing right of its columns."""
    at = base + row[:, None] * stride + column[None, :]
    values = values.to(base.dtype.element_ty)
    if even(columns, column.shape[0]):
        tl.store(at, values)
    else:
        tl.store(at, values, (column < columns)[None, :])


@triton.jit
def tokens_of(base, row, stride, column, columns: tl.constexpr, mask):
    """A tile [rows, columns] of a tensor of tokens; 0 at rows without the mask, and right of its columns."""
    return tl.load(
        base + row[:, None] * stride + column[None, :], mask[:, None] & (column < columns)[None, :], 0.0
    )


@triton.jit
def put_tokens(base, row, stride, column, columns: tl.constexpr, mask, values):
    """Stores the rows of a tile that the mask names in a tensor of tokens."""
    at = base + row[:, None] * stride + column[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask[:, None] & (column < columns)[None, :])


@triton.jit
def put_state(base, kc, K: tl.constexpr, vc, V: tl.constexpr, values):
    """Stores channels vc of the transpose [V, K] of a state."""
    at = base + vc[:, None] * K + kc[None, :]
    values = values.to(base.dtype.element_ty)
    if even(K, kc.shape[0]) and even(V, vc.shape[0]):
        tl.store(at, values)
    else:
        tl.store(at, values, (vc < V)[:, None] & (kc < K)[None, :])


@triton.jit
def product(a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """a b with operands of a type, summed in fp32."""
    return tl.dot(a.to(DTYPE), b.to(DTYPE), input_precision=PRECISION)


@triton.jit
def runs_of_chunk(run, n, S, RUNS: tl.constexpr):
    """The runs of the chunk's tokens [L], the run before the chunk, and that of its last token."""
    s = n * L + tl.arange(0, L)
    if RUNS:
        last = tl.load(run + tl.minimum(n * L + L, S) - 1)
        own = tl.load(run + s, s < S, -1)
        own = tl.where(s < S, own, last)
        before = tl.load(run + tl.maximum(n * L - 1, 0))
    else:
        own = s * 0
        last = 0
        before = 0
    return own, before, last


@triton.jit
def reach(sums, own):
    """Decays between tokens of a run [L, L]: D for j <= i, and its transpose for j >= i."""
    i = tl.arange(0, L)[:, None]
    j = tl.arange(0, L)[None, :]
    apart = sums[:, None] - sums[None, :]
    return tl.exp(tl.where(own[:, None] == own[None, :], tl.where(i >= j, apart, -apart), float("-inf")))


@triton.jit
def finite(values):
    """1 for each row of which all values are finite, else 0."""
    return tl.min((tl.abs(values.to(tl.float32)) < float("inf")).to(tl.int32), 1)


@triton.jit
def inverse(lower, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower matrix [L, L], in fp32.

    Its four diagonal blocks of 16 by elimination, column after column, which is stable for any entries; then
    twice the rule for two blocks, [[A, 0], [C, B]]^-1 = [[a, 0], [-b C a, b]], with a and b the inverses.
    """
    i = tl.arange(0, L)[:, None]
    j = tl.arange(0, L)[None, :]
    four = tl.arange(0, 4)
    same = four[:, None, None, None] == four[None, None, :, None]
    blocks = tl.sum(tl.where(same, tl.reshape(lower, [4, 16, 4, 16]), 0.0), 2)
    r = tl.arange(0, 16)[None, :, None]
    c = tl.arange(0, 16)[None, None, :]
    small = tl.zeros([4, 16, 16], tl.float32) + tl.where(r == c, 1.0, 0.0)
    for p in range(0, 15):
        column = tl.sum(tl.where(c == p, blocks, 0.0), 2)
        row = tl.sum(tl.where(r == p, small, 0.0), 1)
        small -= column[:, :, None] * row[:, None, :]
    solved = tl.reshape(tl.where(same, small[:, :, None, :], 0.0), [L, L])
    corner = tl.where((i // 16 != j // 16) & (i // 32 == j // 32), lower, 0.0)
    half = tl.dot(solved, corner, input_precision=PRECISION)
    solved -= tl.dot(half, solved, input_precision=PRECISION)
    corner = tl.where(i // 32 != j // 32, lower, 0.0)
    half = tl.dot(solved, corner, input_precision=PRECISION)
    return solved - tl.dot(half, solved, input_precision=PRECISION)


@triton.jit(do_not_specialize=["S", "N"])
def prepare(
    q, k, v, g, beta, run, queries, keys, tokens, marks, t_of, u_of, w_of, S, N, H: tl.constexpr,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    RUNS: tl.constexpr, PRECISION: tl.constexpr, CORRECT: tl.constexpr, SOLVE: tl.constexpr,
    ACCURATE: tl.constexpr,
):  # fmt: skip
    """q and k in chunks, `tokens`, T = (I + A)^-1, U = T (beta v), W = T (beta head k).

    Without the correction U is F = beta v, and there are no T and W. SOLVE: else T is read. ACCURATE: how the
    products of the inverse are computed. A mark has bit 0 if a token of the chunk's last run is not finite,
    and bit 1 if that run began before the chunk.
    """
    DTYPE: tl.constexpr = u_of.dtype.element_ty
    bh, n = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    group = (b * G + h // (H // G)) * N + n
    first = b * S + n * L
    rows = tl.arange(0, L)
    live = n * L + rows < S
    own, before, last = runs_of_chunk(run + b * S, n, S, RUNS)
    kc = tl.arange(0, KP)
    vc = tl.arange(0, VP)
    of_group = (first * G + h // (H // G)) * K
    query = tokens_of(q + of_group, rows, G * K, kc, K, live)
    fine = finite(query)
    if h % (H // G) == 0:
        put(queries + group * L * K, rows, K, kc, K, tl.where(fine[:, None] > 0, query, 0.0))
    key = tokens_of(k + of_group, rows, G * K, kc, K, live)
    fine_key = finite(key)
    key = tl.where(fine_key[:, None] > 0, key, 0.0).to(keys.dtype.element_ty)
    if h % (H // G) == 0:
        put(keys + group * L * K, rows, K, kc, K, key)
    values = v + (first * H + h) * V
    fine *= fine_key * finite(tokens_of(values, rows, H * V, vc, V, live))
    of_head = first * H + h
    decay = tl.load(g + of_head + rows * H, live, 0.0)
    rate = tl.load(beta + of_head + rows * H, live, 0.0)
    good = (fine > 0) & (tl.abs(rate) < float("inf")) & (decay < float("inf"))  # -inf forgets the state
    rate = tl.where(good, rate, 0.0)
    bad = tl.where(good, 0.0, 1.0)

    # exp of less than -88 is 0 in fp32; sums stay small, so that differences of sums are precise
    sums = tl.cumsum(tl.where(good, tl.maximum(decay, -88.0), 0.0), 0)
    at_end = tl.sum(tl.where(rows == L - 1, sums, 0.0), 0)
    head = tl.exp(tl.where(own == before, sums, float("-inf")))
    of_token = tokens + chunk * (ROWS * L) + rows
    tl.store(of_token, sums)
    tl.store(of_token + HEAD, head)
    tl.store(of_token + TAIL, tl.exp(tl.where(own == last, at_end - sums, float("-inf"))))
    tl.store(of_token + RATE, rate)
    tl.store(of_token + BAD, bad)
    broken = tl.max(tl.where(own == last, bad, 0.0), 0) > 0
    tl.store(marks + chunk, broken.to(tl.int32) + 2 * (last == before))

    t = tl.zeros([L, L], DTYPE)
    if CORRECT:  # keys and values are read again, since registers are short
        t_at = t_of + chunk * (L * L) + rows[:, None] * L + rows[None, :]
        if SOLVE:
            kk = tl.dot(key, tl.trans(key), input_precision=PRECISION)
            lower = tl.where(rows[:, None] > rows[None, :], rate[:, None] * kk * reach(sums, own), 0.0)
            t = inverse(lower, ACCURATE).to(DTYPE)
            tl.store(t_at, t)
        else:
            t = tl.load(t_at)
        key = tokens_of(k + of_group, rows, G * K, kc, K, live & good).to(tl.float32)
        into = product(t, (rate * head)[:, None] * key, DTYPE, PRECISION)
        put(w_of + chunk * L * K, rows, K, kc, K, into)
    fresh = rate[:, None] * tokens_of(values, rows, H * V, vc, V, live & good).to(tl.float32)
    if CORRECT:
        fresh = product(t, fresh, DTYPE, PRECISION)
    put(u_of + chunk * L * V, rows, V, vc, V, fresh)


@triton.jit(do_not_specialize=["N"])
def scan(
    keys, tokens, marks, u_of, w_of, states, lost_of, N, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    """Writes the transpose of the state before each chunk, for BV channels of one head, chunk after chunk.

    Also whether a token before the chunk, in the run that reaches into it, is not finite. Without the
    correction w is not read.
    """
    DTYPE: tl.constexpr = u_of.dtype.element_ty
    part, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    vc = part * BV + tl.arange(0, BV)
    kc = tl.arange(0, KP)
    rows = tl.arange(0, L)
    chunk = bh.to(tl.int64) * N
    group = (b * G + h // (H // G)) * N
    state = tl.zeros([BV, KP], tl.float32)
    lost = 0
    wholes = tokens + chunk * (ROWS * L) + HEAD + L - 1
    whole = tl.load(wholes)
    mark = tl.load(marks + chunk)
    for n in range(0, N):
        ahead = tl.minimum(n + 1, N - 1)  # single numbers are loaded a chunk ahead: triton does so for tiles
        next_whole = tl.load(wholes + ahead * (ROWS * L))
        next_mark = tl.load(marks + chunk + ahead)
        tail = tl.load(tokens + (chunk + n) * (ROWS * L) + TAIL + rows)
        put_state(states + (chunk + n) * (K * V), kc, K, vc, V, state)
        tl.store(lost_of + chunk + n, lost, part == 0)
        lost = (mark & 1) | (lost & (mark >> 1))
        fresh = turned(u_of + (chunk + n) * (L * V), rows, V, vc, V).to(tl.float32)
        if CORRECT:
            into = turned(w_of + (chunk + n) * (L * K), rows, K, kc, K)
            fresh -= product(state, into, DTYPE, PRECISION)
        key = tile(keys + (group + n) * (L * K), rows, K, kc, K)
        state = whole * state + product(tail[None, :] * fresh, key, DTYPE, PRECISION)
        whole = next_whole
        mark = next_mark


@triton.jit(do_not_specialize=["S", "N"])
def outputs(
    queries, keys, run, tokens, u_of, w_of, states, lost_of, o, lost, S, N, H: tl.constexpr, G: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, RUNS: tl.constexpr,
    PRECISION: tl.constexpr, CORRECT: tl.constexpr,
):  # fmt: skip
    """F = U - W S and O = (q head) S + (q k^T D) F of one chunk of one head, for BV channels.

    O is NaN from the first token of a run that is not finite; `lost` [B, S, H] names these tokens.
    """
    DTYPE: tl.constexpr = u_of.dtype.element_ty
    bh, n, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    chunk = bh.to(tl.int64) * N + n
    group = (b * G + h // (H // G)) * N + n
    own, before, _ = runs_of_chunk(run + b * S, n, S, RUNS)
    rows = tl.arange(0, L)
    kc = tl.arange(0, KP)
    vc = part * BV + tl.arange(0, BV)
    query = tile(queries + group * L * K, rows, K, kc, K)
    key = turned(keys + group * L * K, rows, K, kc, K)
    of_token = tokens + chunk * (ROWS * L) + rows
    seen = rows[:, None] >= rows[None, :]
    scores = tl.dot(query, key, input_precision=PRECISION) * reach(tl.load(of_token), own)
    scores = tl.where(seen, scores, 0.0)
    state = states_of(states + chunk * (K * V), kc, K, vc, V)
    fresh = tile(u_of + chunk * L * V, rows, V, vc, V).to(tl.float32)
    if CORRECT:
        fresh -= product(tile(w_of + chunk * L * K, rows, K, kc, K), state, DTYPE, PRECISION)
    y = tl.load(of_token + HEAD)[:, None] * product(query, state, DTYPE, PRECISION)
    y += product(scores, fresh, DTYPE, PRECISION)

    bad = tl.load(of_token + BAD)
    here = tl.where(seen & (own[:, None] == own[None, :]), bad[None, :], 0.0)
    carried = (own == before) & (tl.load(lost_of + chunk) > 0)
    gone = (tl.max(here, 1) > 0) | carried
    live = n * L + rows < S
    first = b * S + n * L
    tl.store(lost + first * H + h + rows * H, gone.to(tl.uint8), live & (part == 0))
    y = tl.where(gone[:, None], float("nan"), y)
    put_tokens(o + (first * H + h) * V, rows, H * V, vc, V, live, y)


@triton.jit
def states_of(base, kc, K: tl.constexpr, vc, V: tl.constexpr):
    """A state's channels vc, [K, V], from its transpose in memory."""
    at = base + vc[None, :] * K + kc[:, None]
    if even(K, kc.shape[0]) and even(V, vc.shape[0]):
        made = tl.load(at)
    else:
        made = tl.load(at, (kc < K)[:, None] & (vc < V)[None, :], 0.0)
    return made


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
