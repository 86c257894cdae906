"""The kernel of `sample`: draws a token from each row of logits in one program, as described in sample.py.

Every step of a draw is a function: reading the row, the bound from groups, the list of tokens above the
bound, the threshold of top_k and top_p, the draw. Their first arguments are the row's pointers and settings.

next: tmoe/ops/decode/sample.py
"""

import triton
import triton.language as tl


@triton.jit
def product(a, b):
    """(upper half, lower half) of the product of two numbers of 64 bits."""
    return tl.umulhi(a, b), a * b


@triton.jit
def uniform(seed, prompt, number, place):
    """The random number of `uniforms` at this place: Philox 4x64, ten rounds, with numpy's counter."""
    a = tl.full((1,), 0xD2E7470EE14C6C93, tl.uint64)
    b = tl.full((1,), 0xCA5A826395121157, tl.uint64)
    zero = tl.zeros((1,), tl.uint64)
    k0 = zero + seed.to(tl.int64).to(tl.uint64, bitcast=True)
    k1 = zero
    c0 = zero + (place // 4 + 1).to(tl.uint64)
    c1 = zero + prompt.to(tl.uint64)
    c2 = zero + number.to(tl.uint64)
    c3 = zero
    for _ in tl.static_range(10):
        high0, low0 = product(a, c0)
        high1, low1 = product(b, c2)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += tl.full((1,), 0x9E3779B97F4A7C15, tl.uint64)
        k1 += tl.full((1,), 0xBB67AE8584CAA73B, tl.uint64)
    which = place % 4
    word = tl.where(which == 0, c0, tl.where(which == 1, c1, tl.where(which == 2, c2, c3)))
    return tl.sum((word >> 11).to(tl.float64) * 1.1102230246251565e-16)


@triton.jit
def ordered(z):
    """Integers that have the same order as the fp32 numbers z."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)  # + 0.0 turns -0.0 into 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def number_of(key):
    """The inverse of `ordered`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def scores(logits, barred, ids, here, temperature, DIVIDE: tl.constexpr, BARRED: tl.constexpr):
    """(logits over the temperature, the same with -inf at barred tokens) of the tokens `ids`."""
    z = tl.load(logits + ids, here, float("-inf")).to(tl.float32)
    if DIVIDE:
        z = tl.div_rn(z, tl.zeros_like(z) + temperature)
    allowed = z
    if BARRED:
        allowed = tl.where(tl.load(barred + ids, here, 1) != 0, float("-inf"), z)
    return z, allowed


@triton.jit
def listed(
    logits, barred, ids, short, n, start, temperature, HELD: tl.constexpr, DIVIDE: tl.constexpr,
    BARRED: tl.constexpr,
):  # fmt: skip
    """(score, id, whether the token exists) of tokens start to start + HELD of the list, or of the row."""
    i = start + tl.arange(0, HELD)
    here = i < n
    token = tl.where(short, tl.load(ids + i, here & short, 0), i)
    _, z = scores(logits, barred, token, here, temperature, DIVIDE, BARRED)
    return z, token, here


@triton.jit
def read_row(
    logits, barred, greatest, sums, temperature,
    V: tl.constexpr, NG: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr, STAGES: tl.constexpr,
    DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """Stores the greatest score of each group and the sum of its weights, e^(z - greatest).

    If there are barred tokens, it returns the greatest of all scores and the sum of e^(z - greatest), both
    including barred tokens. Otherwise it returns -inf and 0, because the groups' numbers give both.
    """
    g = tl.arange(0, BG)
    c = tl.arange(0, GROUP)
    of_all = tl.full((), float("-inf"), tl.float32)
    total_of_all = tl.full((), 0.0, tl.float32)
    for first in tl.range(0, NG, BG, num_stages=STAGES):
        at = (first + g)[:, None] * GROUP + c[None, :]
        every, z = scores(logits, barred, at, at < V, temperature, DIVIDE, BARRED)
        most = tl.max(z, 1)
        weight = tl.exp(z - tl.where(most > float("-inf"), most, 0.0)[:, None])
        tl.store(greatest + first + g, most, first + g < NG)
        tl.store(sums + first + g, tl.sum(weight, 1), first + g < NG)
        if BARRED:
            higher = tl.maximum(of_all, tl.max(every))
            base = tl.where(higher > float("-inf"), higher, 0.0)
            total_of_all = total_of_all * tl.exp(of_all - base) + tl.sum(tl.exp(every - base))
            of_all = higher
    tl.debug_barrier()  # makes the stores visible to the other threads
    return of_all, total_of_all


@triton.jit
def greatest_token(
    logits, barred, temperature, most, top, group,
    V: tl.constexpr, NG: tl.constexpr, GROUP: tl.constexpr, DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """The first token with the greatest score."""
    home = tl.min(tl.where(most == top, group, NG - 1))
    at = home * GROUP + tl.arange(0, GROUP)
    _, z = scores(logits, barred, at, at < V, temperature, DIVIDE, BARRED)
    return tl.min(tl.where(z == top, at, V - 1))


@triton.jit
def draw_from_all(
    logits, barred, temperature, u, mass, top, group,
    V: tl.constexpr, NGP: tl.constexpr, GROUP: tl.constexpr, DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """(token, sum of weights) of a draw without filters: first a group is drawn, then a token in it."""
    until = tl.cumsum(mass.to(tl.float64), 0)
    kept = tl.max(until)
    aim = u * kept
    home = tl.min(tl.where((until > aim) & (mass > 0), group, NGP))
    home = tl.where(home == NGP, tl.max(tl.where(mass > 0, group, 0)), home)
    aim -= tl.sum(tl.where(group == home, until - mass.to(tl.float64), 0.0))
    at = home * GROUP + tl.arange(0, GROUP)
    _, z = scores(logits, barred, at, at < V, temperature, DIVIDE, BARRED)
    w = tl.exp(z - top)
    inside = tl.cumsum(w.to(tl.float64), 0)
    token = tl.min(tl.where((inside > aim) & (w > 0), at, V))
    return tl.where(token == V, tl.max(tl.where(w > 0, at, 0)), token), kept


@triton.jit
def bound_by_groups(
    most, mass, whole, top, above, group, top_k, cut, min_p, has_k, has_p, has_m,
    NG: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A key below which the filters keep no token, computed from the groups' numbers alone."""
    least = tl.full((), -2139095041, tl.int64)  # the key of -inf
    group_key = ordered(most)
    bound = least
    if has_k:
        if top_k <= NG:
            low = least
            high = above
            while high - low > 1:
                middle = low + (high - low) // 2
                enough = tl.sum(((group_key >= middle) & (group < NG)).to(tl.int32)) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            bound = low
    elif has_p:
        low = least
        high = above
        while high - low > 1:
            middle = low + (high - low) // 2
            upper = group_key >= middle
            rest = tl.sum(tl.where(upper, 0.0, mass))
            most_of_rest = tl.exp(number_of(middle.to(tl.int32)) - top) * GROUP
            rest += tl.sum(tl.where(upper, tl.minimum(mass, most_of_rest), 0.0))
            enough = rest <= cut * whole * 0.999
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        bound = low
    if has_m and not (has_k and has_p):  # top_p is a share of all tokens that top_k keeps
        bound = tl.maximum(bound, ordered(top + tl.log(min_p) - 1e-2).to(tl.int64))
    return tl.minimum(bound, above - 1)


@triton.jit
def list_tokens(
    logits, barred, temperature, groups, ids, most, bound, group,
    V: tl.constexpr, NG: tl.constexpr, GROUP: tl.constexpr, HELD: tl.constexpr, LISTED: tl.constexpr,
    DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """Lists the tokens with keys of at least the bound, in the order of their ids.

    Returns (whether they fit into the list, how many they are). If the list has no room for them the number
    is V, and `listed` reads the row.
    """
    c = tl.arange(0, GROUP)
    chosen = (ordered(most) >= bound) & (group < NG)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(groups + place, group, chosen)
    count = tl.sum(chosen.to(tl.int32))
    tl.debug_barrier()
    n = tl.full((), 0, tl.int32)
    first = tl.full((), 0, tl.int32)
    few: tl.constexpr = HELD // GROUP
    while (first < count) & (n <= LISTED):
        nth = first + tl.arange(0, few)
        source = tl.load(groups + nth, nth < count, 0)
        token_of = tl.reshape(source[:, None] * GROUP + c[None, :], (HELD,))
        live = tl.reshape((nth < count)[:, None] & (c < GROUP)[None, :], (HELD,))
        _, x = scores(logits, barred, token_of, live & (token_of < V), temperature, DIVIDE, BARRED)
        enters = live & (token_of < V) & (ordered(x) >= bound)
        to = n + tl.cumsum(enters.to(tl.int32), 0) - 1
        tl.store(ids + to, token_of, enters & (to < LISTED))
        n += tl.sum(enters.to(tl.int32))
        first += few
    tl.debug_barrier()
    short = n <= LISTED
    return short, tl.where(short, n, V)


@triton.jit
def count_from(
    key, key0, here0, logits, barred, ids, short, n, temperature,
    HELD: tl.constexpr, DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """The number of listed tokens with this key or a greater one; key0, here0: of the first HELD tokens."""
    count = tl.sum((here0 & (key0 >= key)).to(tl.int32))
    for start in range(HELD, n, HELD):
        z, _, here = listed(logits, barred, ids, short, n, start, temperature, HELD, DIVIDE, BARRED)
        count += tl.sum((here & (ordered(z) >= key)).to(tl.int32))
    return count


@triton.jit
def weight_from(
    key, key0, here0, w0, top, logits, barred, ids, short, n, temperature,
    HELD: tl.constexpr, DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """The sum of weights of listed tokens with this key or a greater one.

    key0, here0, w0: keys, existence and weights of the first HELD tokens.
    """
    weight = tl.sum(tl.where(here0 & (key0 >= key), w0, 0.0))
    for start in range(HELD, n, HELD):
        z, _, here = listed(logits, barred, ids, short, n, start, temperature, HELD, DIVIDE, BARRED)
        weight += tl.sum(tl.where(here & (ordered(z) >= key), tl.exp(z - top), 0.0))
    return weight


@triton.jit
def threshold(
    logits, barred, ids, short, n, temperature, bound, above, top, whole, top_k, cut, has_k, has_p,
    HELD: tl.constexpr, DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """(the least key that top_k and top_p keep, how many of the tokens with that key are left out).

    Among tokens with that key, the tokens with the lowest ids are left out.
    """
    z0, _, here0 = listed(logits, barred, ids, short, n, 0, temperature, HELD, DIVIDE, BARRED)
    key0 = ordered(z0)
    w0 = tl.exp(z0 - top)
    lowest = bound
    if has_k:
        low = bound
        high = above
        while high - low > 1:
            middle = low + (high - low) // 2
            reached = count_from(
                middle, key0, here0, logits, barred, ids, short, n, temperature, HELD, DIVIDE, BARRED
            )
            enough = reached >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        lowest = low
    gone = tl.full((), 0, tl.int32)
    if has_p:
        over = weight_from(
            lowest, key0, here0, w0, top, logits, barred, ids, short, n, temperature, HELD, DIVIDE, BARRED
        )
        after_k = whole
        if has_k:
            after_k = over
        # the weight below a key is the weight that top_k keeps, less the weight from the key on
        stays = after_k - cut * after_k
        low = lowest
        high = above
        from_low = over
        while high - low > 1:
            middle = low + (high - low) // 2
            reached = weight_from(
                middle, key0, here0, w0, top, logits, barred, ids, short, n, temperature, HELD, DIVIDE, BARRED
            )
            enough = reached >= stays
            low = tl.where(enough, middle, low)
            from_low = tl.where(enough, reached, from_low)
            high = tl.where(enough, high, middle)
        lowest = low
        equal = tl.exp(number_of(lowest.to(tl.int32)) - top)
        gone = tl.maximum(tl.floor((from_low - stays) / equal), 0.0).to(tl.int32)
        ties = tl.full((), 0, tl.int32)
        for start in range(0, n, HELD):
            z, _, here = listed(logits, barred, ids, short, n, start, temperature, HELD, DIVIDE, BARRED)
            ties += tl.sum((here & (ordered(z) == lowest)).to(tl.int32))
        gone = tl.minimum(gone, tl.maximum(ties - 1, 0))
    return lowest, gone


@triton.jit
def draw_from_list(
    logits, barred, ids, short, n, temperature, u, lowest, gone, top, min_p,
    V: tl.constexpr, HELD: tl.constexpr, DIVIDE: tl.constexpr, BARRED: tl.constexpr,
    TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """(token, sum of weights) of a draw from the listed tokens that the filters keep, in order of ids."""
    token = tl.full((), V, tl.int32)
    last = tl.full((), 0, tl.int32)
    kept = tl.full((), 0.0, tl.float64)
    for turn in tl.static_range(2):
        aim = u * kept
        until = tl.full((), 0.0, tl.float64)
        ties = tl.full((), 0, tl.int32)
        for start in range(0, n, HELD):
            z, token_of, here = listed(
                logits, barred, ids, short, n, start, temperature, HELD, DIVIDE, BARRED
            )  # fmt: skip
            key = ordered(z)
            w = tl.exp(z - top)
            stay = here & (key >= lowest)
            if TOP_P:
                tie = (here & (key == lowest)).to(tl.int32)
                rank = ties + tl.cumsum(tie, 0) - tie
                ties += tl.sum(tie)
                stay &= (key > lowest) | (rank >= gone)
            if MIN_P:
                stay &= w >= min_p
            w = tl.where(stay, w, 0.0).to(tl.float64)
            if turn == 0:
                kept += tl.sum(w)
            else:
                inside = until + tl.cumsum(w, 0)
                token = tl.minimum(token, tl.min(tl.where((inside > aim) & (w > 0), token_of, V)))
                last = tl.maximum(last, tl.max(tl.where(w > 0, token_of, 0)))
                until += tl.sum(w)
    return tl.where(token == V, last, token), kept


@triton.jit
def draw_filtered(
    logits, barred, groups, ids, temperature, u, most, mass, whole, top, group, top_k, cut, min_p,
    has_k, has_p, has_m,
    V: tl.constexpr, NG: tl.constexpr, GROUP: tl.constexpr, HELD: tl.constexpr, LISTED: tl.constexpr,
    DIVIDE: tl.constexpr, BARRED: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """(token, sum of weights) of a draw from the tokens that the row's filters keep."""
    above = ordered(top).to(tl.int64) + 1
    bound = bound_by_groups(
        most, mass, whole, top, above, group, top_k, cut, min_p, has_k, has_p, has_m, NG, GROUP
    )  # fmt: skip
    short, n = list_tokens(
        logits, barred, temperature, groups, ids, most, bound, group,
        V, NG, GROUP, HELD, LISTED, DIVIDE, BARRED,
    )  # fmt: skip
    lowest, gone = threshold(
        logits, barred, ids, short, n, temperature, bound, above, top, whole, top_k, cut, has_k, has_p,
        HELD, DIVIDE, BARRED,
    )  # fmt: skip
    return draw_from_list(
        logits, barred, ids, short, n, temperature, u, lowest, gone, top, min_p,
        V, HELD, DIVIDE, BARRED, TOP_P, MIN_P,
    )  # fmt: skip


@triton.jit(do_not_specialize=["seed", "temperature", "top_k", "cut", "min_p", "barred_row"])
def sample_kernel(
    logits, barred, prompts, numbers, places, tokens, logprobs, own_logprobs, greatest, sums, groups, ids,
    seed, temperature, top_k, cut, min_p, row, barred_row,
    V: tl.constexpr, NG: tl.constexpr, NGP: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr,
    HELD: tl.constexpr, LISTED: tl.constexpr, STAGES: tl.constexpr,
    GREEDY: tl.constexpr, DIVIDE: tl.constexpr, BARRED: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Draws one row's token. `cut`: 1 - top_p. Scratch of a row: greatest, sums, groups [NGP], ids [LISTED].

    Weights are e^(z - top), where top is the greatest score of a token that is not barred. ROWS: seed,
    temperature, top_k, cut and min_p are pointers to a value for each row, and the program's row decides
    which filters it has; GREEDY is then False, and DIVIDE, TOP_K, TOP_P and MIN_P are True.
    """
    b = tl.program_id(0).to(tl.int64)
    logits += b * row
    barred += b * barred_row
    greatest += b * NGP
    sums += b * NGP
    groups += b * NGP
    ids += b * LISTED
    if ROWS:
        given = tl.load(temperature + b)
        greedy = given == 0.0
        heat = tl.where(greedy, 1.0, given)
        key = tl.load(seed + b)
        k = tl.load(top_k + b)
        p = tl.load(cut + b)
        m = tl.load(min_p + b)
        has_k = (k > 0) & (k < V)
        has_p = p > 0.0
        has_m = m > 0.0
    else:
        greedy: tl.constexpr = GREEDY
        heat = temperature
        key = seed
        k = top_k
        p = cut
        m = min_p
        has_k: tl.constexpr = TOP_K
        has_p: tl.constexpr = TOP_P
        has_m: tl.constexpr = MIN_P
    of_all, total_of_all = read_row(
        logits, barred, greatest, sums, heat, V, NG, GROUP, BG, STAGES, DIVIDE, BARRED
    )

    group = tl.arange(0, NGP)
    most = tl.load(greatest + group, group < NG, float("-inf"))
    top = tl.max(most)
    mass = tl.load(sums + group, group < NG, 0.0) * tl.exp(most - top)
    mass = tl.where(most > float("-inf"), mass, 0.0)
    whole = tl.sum(mass)
    if not BARRED:
        of_all = top
        total_of_all = whole
    full = of_all + tl.log(total_of_all)

    kept = whole.to(tl.float64)  # total weight of the tokens that the draw chooses from
    if greedy:
        token = greatest_token(logits, barred, heat, most, top, group, V, NG, GROUP, DIVIDE, BARRED)
    else:
        u = uniform(key, tl.load(prompts + b), tl.load(numbers + b), tl.load(places + b))
        if not (has_k or has_p or has_m):
            token, kept = draw_from_all(
                logits, barred, heat, u, mass, top, group, V, NGP, GROUP, DIVIDE, BARRED
            )  # fmt: skip
        else:
            token, kept = draw_filtered(
                logits, barred, groups, ids, heat, u, most, mass, whole, top, group, k, p, m,
                has_k, has_p, has_m, V, NG, GROUP, HELD, LISTED, DIVIDE, BARRED, TOP_P, MIN_P,
            )  # fmt: skip

    score = tl.load(logits + token).to(tl.float32)
    if DIVIDE:
        score = tl.div_rn(score, heat + 0.0)
    tl.store(tokens + b, token.to(tl.int64))
    tl.store(logprobs + b, score - full)
    drawn_from = top + tl.log(kept.to(tl.float32))
    tl.store(own_logprobs + b, tl.where(greedy, 0.0, score - drawn_from))
