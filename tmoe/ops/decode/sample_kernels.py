"""The kernel of `sample`: draws a token from each row of logits in one program, as described in sample.py.

Every step of a draw is a function: reading the row, the bound from groups, the list of tokens above the
bound, the threshold of top_k and top_p, the draw. Their first arguments are the row's pointers and settings.
If the list has no room for the tokens above the bound, sample_row.py finds the threshold and draws.

next: tmoe/ops/decode/sample.py
"""

import triton
import triton.language as tl

from tmoe.ops.decode.sample_numbers import drawn_group, drawn_token, number_of, ordered, scores, uniform
from tmoe.ops.decode.sample_row import draw_from_row


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
    home, aim, kept = drawn_group(mass, u, group, NGP)
    at = home * GROUP + tl.arange(0, GROUP)
    _, z = scores(logits, barred, at, at < V, temperature, DIVIDE, BARRED)
    return drawn_token(tl.exp(z - top), aim, at, V), kept


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
    V: tl.constexpr, NG: tl.constexpr, GROUP: tl.constexpr, HELD: tl.constexpr,
    DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """Lists the tokens with keys of at least the bound, in the order of their ids, and returns their number.

    With more than HELD tokens the number is only known to be above HELD. Tokens of more than HELD // 2 groups
    are not listed, because `draw_from_row` is faster.
    """
    c = tl.arange(0, GROUP)
    chosen = (ordered(most) >= bound) & (group < NG)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(groups + place, group, chosen)
    count = tl.sum(chosen.to(tl.int32))
    tl.debug_barrier()
    n = tl.full((), 0, tl.int32)
    if (V > HELD) & (count > HELD // 2):
        n += HELD + 1
    first = tl.full((), 0, tl.int32)
    few: tl.constexpr = HELD // GROUP
    while (first < count) & (n <= HELD):
        nth = first + tl.arange(0, few)
        source = tl.load(groups + nth, nth < count, 0)
        token_of = tl.reshape(source[:, None] * GROUP + c[None, :], (HELD,))
        live = tl.reshape((nth < count)[:, None] & (c < GROUP)[None, :], (HELD,))
        _, x = scores(logits, barred, token_of, live & (token_of < V), temperature, DIVIDE, BARRED)
        enters = live & (token_of < V) & (ordered(x) >= bound)
        to = n + tl.cumsum(enters.to(tl.int32), 0) - 1
        tl.store(ids + to, token_of, enters & (to < HELD))
        n += tl.sum(enters.to(tl.int32))
        first += few
    tl.debug_barrier()
    return n


@triton.jit
def threshold(key, w, here, bound, above, top, whole, top_k, cut, has_k, has_p):
    """(the least key that top_k and top_p keep, how many of the tokens with that key are left out).

    key, w, here: key, weight and existence of the listed tokens. Among tokens with the least key, the tokens
    with the lowest ids are left out.
    """
    lowest = bound
    if has_k:
        low = bound
        high = above
        while high - low > 1:
            middle = low + (high - low) // 2
            enough = tl.sum((here & (key >= middle)).to(tl.int32)) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        lowest = low
    gone = tl.full((), 0, tl.int32)
    if has_p:
        over = tl.sum(tl.where(here & (key >= lowest), w, 0.0))
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
            reached = tl.sum(tl.where(here & (key >= middle), w, 0.0))
            enough = reached >= stays
            low = tl.where(enough, middle, low)
            from_low = tl.where(enough, reached, from_low)
            high = tl.where(enough, high, middle)
        lowest = low
        equal = tl.exp(number_of(lowest.to(tl.int32)) - top)
        gone = tl.maximum(tl.floor((from_low - stays) / equal), 0.0).to(tl.int32)
        ties = tl.sum((here & (key == lowest)).to(tl.int32))
        gone = tl.minimum(gone, tl.maximum(ties - 1, 0))
    return lowest, gone


@triton.jit
def draw_from_list(
    logits, barred, ids, n, temperature, u, bound, above, top, whole, top_k, cut, min_p, has_k, has_p,
    V: tl.constexpr, HELD: tl.constexpr, DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """(token, sum of weights) of a draw from the n listed tokens that the filters keep, in order of ids."""
    i = tl.arange(0, HELD)
    here = i < n
    token_of = tl.load(ids + i, here, 0)
    _, z = scores(logits, barred, token_of, here, temperature, DIVIDE, BARRED)
    key = ordered(z)
    w = tl.exp(z - top)
    lowest, gone = threshold(key, w, here, bound, above, top, whole, top_k, cut, has_k, has_p)
    tie = (here & (key == lowest)).to(tl.int32)
    rank = tl.cumsum(tie, 0) - tie
    stay = here & (w >= min_p) & ((key > lowest) | ((tie > 0) & (rank >= gone)))
    w = tl.where(stay, w, 0.0)
    kept = tl.sum(w.to(tl.float64))
    return drawn_token(w, u * kept, token_of, V), kept


@triton.jit
def draw_filtered(
    logits, barred, sums, groups, words, ids, temperature, u, most, mass, whole, top, group, top_k, cut,
    min_p, has_k, has_p, has_m,
    V: tl.constexpr, NG: tl.constexpr, NGP: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr,
    HELD: tl.constexpr, LISTED: tl.constexpr, SAMPLED: tl.constexpr, STAGES: tl.constexpr,
    DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """(token, sum of weights) of a draw from the tokens that the row's filters keep."""
    above = ordered(top).to(tl.int64) + 1
    bound = bound_by_groups(
        most, mass, whole, top, above, group, top_k, cut, min_p, has_k, has_p, has_m, NG, GROUP
    )  # fmt: skip
    n = list_tokens(
        logits, barred, temperature, groups, ids, most, bound, group, V, NG, GROUP, HELD, DIVIDE, BARRED
    )  # fmt: skip
    if n <= HELD:
        token, kept = draw_from_list(
            logits, barred, ids, n, temperature, u, bound, above, top, whole, top_k, cut, min_p,
            has_k, has_p, V, HELD, DIVIDE, BARRED,
        )  # fmt: skip
    else:
        token, kept = draw_from_row(
            logits, barred, sums, groups, words, ids, temperature, u, bound, above, top, whole, group, top_k,
            cut, min_p, has_k, has_p, V, NG, NGP, GROUP, BG, LISTED, SAMPLED, STAGES, DIVIDE, BARRED,
        )  # fmt: skip
    return token, kept


@triton.jit(do_not_specialize=["seed", "temperature", "top_k", "cut", "min_p", "barred_row"])
def sample_kernel(
    logits, barred, prompts, numbers, places, tokens, logprobs, own_logprobs, greatest, sums, groups, words,
    ids, seed, temperature, top_k, cut, min_p, row, barred_row,
    V: tl.constexpr, NG: tl.constexpr, NGP: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr,
    HELD: tl.constexpr, LISTED: tl.constexpr, SAMPLED: tl.constexpr, STAGES: tl.constexpr,
    GREEDY: tl.constexpr, DIVIDE: tl.constexpr, BARRED: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Draws one row's token. Scratch of a row: greatest, sums [NGP], groups, words [2, NGP], ids [LISTED].

    Weights are e^(z - top), where top is the greatest score of a token that is not barred; `cut` is
    1 - top_p. ROWS: seed, temperature, top_k, cut and min_p are pointers to a value for each row, and the
    program's row decides which filters it has; GREEDY is then False, and DIVIDE, TOP_K, TOP_P and MIN_P are
    True.
    """
    b = tl.program_id(0).to(tl.int64)
    logits += b * row
    barred += b * barred_row
    greatest += b * NGP
    sums += b * NGP
    groups += b * 2 * NGP
    words += b * 2 * NGP
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
    full = of_all + tl.log(total_of_all) if BARRED else top + tl.log(whole)

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
                logits, barred, sums, groups, words, ids, heat, u, most, mass, whole, top, group, k, p, m,
                has_k, has_p, has_m, V, NG, NGP, GROUP, BG, HELD, LISTED, SAMPLED, STAGES, DIVIDE, BARRED,
            )  # fmt: skip

    score = tl.load(logits + token).to(tl.float32)
    if DIVIDE:
        score = tl.div_rn(score, heat + 0.0)
    tl.store(tokens + b, token.to(tl.int64))
    tl.store(logprobs + b, score - full)
    drawn_from = top + tl.log(kept.to(tl.float32))
    tl.store(own_logprobs + b, tl.where(greedy, 0.0, score - drawn_from))
