"""The threshold of top_k and top_p for a row of which too many tokens could be at it to list them all.

A sample of the row gives two keys that the threshold is probably between. One read of the row then sums the
weights below the first key, lists the tokens between the two keys, and sums the weights above them in each
group. The threshold is found by bisection over that list. If it is not between the keys, or if the list has
no room for all tokens, the next read has other keys. So a poor sample costs time and changes no token.

next: tmoe/ops/decode/sample_kernels.py
"""

import triton
import triton.language as tl

from tmoe.ops.decode.sample_numbers import drawn_group, drawn_token, number_of, ordered, scores


@triton.jit
def weight_near(key, top, counted):
    """The measure of a token with a key of the same upper 16 bits."""
    near = tl.maximum((key.to(tl.int32) >> 16) << 16, -2139095041)  # the key of -inf
    return tl.where(counted, 1.0, tl.exp(number_of(near) - top))


@triton.jit
def sampled_interval(
    logits, barred, temperature, top, low, high, floor, goal, counted, reach, reads,
    V: tl.constexpr, SAMPLED: tl.constexpr, DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """Keys from low to high between which a sample of the row places the threshold: the first, the last + 1.

    They are `reach` standard errors below and above the sample's own threshold. The sample is made of runs of
    eight neighbouring tokens, at equal distances; after `reads` reads it is another sample. Other arguments:
    see `find`.
    """
    RUNS: tl.constexpr = SAMPLED // 8
    ALL: tl.constexpr = (V + 7) // 8
    run = (tl.arange(0, RUNS) * ALL + reads * (ALL // 2)) // RUNS
    at = run[:, None] * 8 + tl.arange(0, 8)[None, :]
    _, z = scores(logits, barred, at, at < V, temperature, DIVIDE, BARRED)
    z = tl.reshape(z, (SAMPLED,))
    key = ordered(z)
    m = tl.where(counted, 1.0, tl.exp(z - top))
    m = tl.where(z >= number_of(floor.to(tl.int32)), m, 0.0)
    want = goal * (SAMPLED / V)
    low_a = low
    high_a = high
    low_b = low
    high_b = high
    while (high_a - low_a > 1) | (high_b - low_b > 1):
        a = low_a + (high_a - low_a) // 2
        b = low_b + (high_b - low_b) // 2
        of_a = tl.where(key < a.to(tl.int32), m, 0.0)
        of_b = tl.where(key < b.to(tl.int32), m, 0.0)
        # one reduction for four sums
        four = tl.sum(tl.join(tl.join(of_a, of_b), tl.join(of_a * of_a, of_b * of_b)), 0)
        of_measure, of_square = tl.split(four)
        sum_a, sum_b = tl.split(of_measure)
        squares_a, squares_b = tl.split(of_square)
        # The error of a sum over a sample, with two tokens more, because a sum of few is uncertain itself. It
        # has steps, so that another binary's rounding does not move the interval.
        one_a = weight_near(a, top, counted)
        one_b = weight_near(b, top, counted)
        error_a = tl.sqrt(tl.maximum(squares_a - sum_a * sum_a / SAMPLED, 0.0) + 2.0 * one_a * one_a)
        error_b = tl.sqrt(tl.maximum(squares_b - sum_b * sum_b / SAMPLED, 0.0) + 2.0 * one_b * one_b)
        below = (sum_a + reach * error_a <= want) | (a == low_a)
        low_a = tl.where(below, a, low_a)
        high_a = tl.where(below, high_a, a)
        above = (sum_b - reach * error_b > want) & (b > low_b)
        high_b = tl.where(above, b, high_b)
        low_b = tl.where(above, low_b, b)
    return low_a, tl.maximum(high_b, low_a + 1)


@triton.jit
def read_interval(
    logits, barred, sums, words, temperature, top, a, b, floor, counted, min_p, reads,
    V: tl.constexpr, NG: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr, STAGES: tl.constexpr,
    DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """Reads the row for the keys a <= key < b, and returns (the measure of tokens below a, below b).

    The measure of a token is its weight, or 1 if counted; it is 0 below the key `floor`. For each group,
    `sums` gets the weight from b on of tokens with a weight of at least min_p. For each 32 tokens, `words`
    gets a bit for each token: whether its key is between a and b.
    """
    from_a = number_of(a.to(tl.int32))
    from_b = number_of(b.to(tl.int32))
    least = number_of(floor.to(tl.int32))
    g = tl.arange(0, BG)
    c = tl.arange(0, GROUP)
    PART: tl.constexpr = GROUP // 32
    p = tl.arange(0, BG * PART)
    bit = tl.full((32,), 1, tl.int32) << tl.arange(0, 32)
    below_a = tl.zeros((BG, GROUP), tl.float32)
    below_b = tl.zeros((BG, GROUP), tl.float32)
    LAST: tl.constexpr = (NG - 1) // BG * BG
    tl.debug_barrier()  # an earlier reader of the scratch has finished
    for done in tl.range(0, NG, BG, num_stages=STAGES):
        # from the end that was read last, which may be in the L2 cache
        first = tl.where(reads % 2 == 0, LAST - done, done)
        at = (first + g)[:, None] * GROUP + c[None, :]
        _, z = scores(logits, barred, at, at < V, temperature, DIVIDE, BARRED)
        w = tl.exp(z - top)
        m = tl.where((at < V) & (z >= least), tl.where(counted, 1.0, w), 0.0)
        below_a += tl.where(z < from_a, m, 0.0)
        below_b += tl.where(z < from_b, m, 0.0)
        inside = tl.reshape((at < V) & (z >= from_a) & (z < from_b), (BG * PART, 32))
        at_word = first * PART + p
        tl.store(words + at_word, tl.sum(tl.where(inside, bit[None, :], 0), 1), at_word < NG * PART)
        upper = tl.sum(tl.where((z >= from_b) & (w >= min_p), w, 0.0), 1)
        tl.store(sums + first + g, upper, first + g < NG)
    tl.debug_barrier()
    return tl.sum(below_a), tl.sum(below_b)


@triton.jit
def bits_of(words, i, here):
    """(words of 32 bits, the number of ones in each)."""
    word = tl.load(words + i, here, 0).to(tl.uint32, bitcast=True)
    x = word - ((word >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x += x >> 8
    return word, ((x + (x >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def list_ones(words, ids, zero, NG: tl.constexpr, GROUP: tl.constexpr, LISTED: tl.constexpr):
    """Lists the tokens whose bits are 1, in the order of their ids, and returns their number.

    The list ends after LISTED tokens.
    """
    SIZE: tl.constexpr = LISTED // 4
    n = tl.full((), 0, tl.int32)
    for start in range(zero, NG * (GROUP // 32), SIZE):
        i = start + tl.arange(0, SIZE)
        word, count = bits_of(words, i, i < NG * (GROUP // 32))
        to = n + tl.cumsum(count, 0) - count
        for _ in range(tl.max(count)):
            lowest = word ^ (word & (word - 1))
            # the exponent of a power of two
            place = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            tl.store(ids + to, i * 32 + place, (word > 0) & (to < LISTED))
            word ^= lowest
            to += 1
        n += tl.sum(count)
    tl.debug_barrier()
    return n


@triton.jit
def listed(
    logits, barred, ids, n, start, temperature, top, counted, SIZE: tl.constexpr,
    DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """(id, existence, key, weight, measure) of SIZE listed tokens, which `start` tokens follow.

    The list is read from its end, because addresses that do not depend on n would be held in registers.
    """
    i = n - start - SIZE + tl.arange(0, SIZE)
    here = i >= 0
    token = tl.load(ids + i, here, 0)
    _, z = scores(logits, barred, token, here, temperature, DIVIDE, BARRED)
    w = tl.exp(z - top)
    return token, here, ordered(z), w, tl.where(here, tl.where(counted, 1.0, w), 0.0)


@triton.jit
def search_list(
    logits, barred, ids, n, temperature, top, a, b, goal, below_a, counted, LISTED: tl.constexpr,
    DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """(the greatest key from a to b below which the measure is at most goal, the measure below that key)."""
    HALF: tl.constexpr = LISTED // 2
    _, _, key0, _, m0 = listed(
        logits, barred, ids, n, 0, temperature, top, counted, HALF, DIVIDE, BARRED
    )  # fmt: skip
    tl.debug_barrier()  # addresses of one half at a time are in registers
    _, _, key1, _, m1 = listed(
        logits, barred, ids, n, HALF, temperature, top, counted, HALF, DIVIDE, BARRED
    )  # fmt: skip
    low = a
    high = b
    below = below_a
    while high - low > 1:
        middle = low + (high - low) // 2
        limit = middle.to(tl.int32)
        reached = below_a + tl.sum(tl.where(key0 < limit, m0, 0.0) + tl.where(key1 < limit, m1, 0.0))
        enough = reached <= goal
        low = tl.where(enough, middle, low)
        below = tl.where(enough, reached, below)
        high = tl.where(enough, high, middle)
    return low, below


@triton.jit
def begin_groups(
    words, groups, ones, zero, NG: tl.constexpr, NGP: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr
):
    """Begins `groups`: of each group the number of its tokens with a bit, or 0 if not `ones`, and 0."""
    PART: tl.constexpr = GROUP // 32
    for start in range(zero, NG, SIZE):
        i = start * PART + tl.arange(0, SIZE * PART)
        _, count = bits_of(words, i, ones & (i < NG * PART))
        group = start + tl.arange(0, SIZE)
        tl.store(groups + group, tl.sum(tl.reshape(count, (SIZE, PART)), 1), group < NG)
        tl.store(groups + NGP + group, tl.zeros((SIZE,), tl.int32), group < NG)
    tl.debug_barrier()


@triton.jit
def add_listed(
    logits, barred, groups, ids, n, temperature, top, lowest, unit, min_p,
    NGP: tl.constexpr, GROUP: tl.constexpr, LISTED: tl.constexpr, DIVIDE: tl.constexpr, BARRED: tl.constexpr,
):  # fmt: skip
    """Adds to `groups` the number of listed tokens with the key `lowest`, and the weight of those above it.

    The weight is a whole number of units, because whole numbers have one sum whatever the order.
    """
    for start in range(0, n, LISTED // 4):
        token, here, key, w, _ = listed(
            logits, barred, ids, n, start, temperature, top, False, LISTED // 4, DIVIDE, BARRED
        )  # fmt: skip
        tl.atomic_add(groups + token // GROUP, 1, here & (key == lowest), sem="relaxed")
        whole = (w / unit + 0.5).to(tl.int32)
        upper = here & (key > lowest) & (w >= min_p)
        tl.atomic_add(groups + NGP + token // GROUP, whole, upper, sem="relaxed")


@triton.jit
def find(
    logits, barred, sums, groups, words, ids, temperature, top, low, high, floor, goal, counted, min_p,
    V: tl.constexpr, NG: tl.constexpr, NGP: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr,
    LISTED: tl.constexpr, SAMPLED: tl.constexpr, STAGES: tl.constexpr, DIVIDE: tl.constexpr,
    BARRED: tl.constexpr,
):  # fmt: skip
    """(the greatest key from low to high below which the measure is at most goal, that measure, a unit).

    low, high: the first key, the last + 1. Tokens below the key `floor` have no measure. If counted, a
    token's measure is 1, otherwise its weight. Afterwards `sums` and `groups` have, of each group, the
    weight of kept tokens with greater keys in two parts (the second in units), and the number of tokens with
    the key. min_p leaves out tokens from the weights.

    The first read takes the sample's interval, and the second a wider or a narrower one. Each further read
    divides what is left by three.
    """
    lowest = low
    below = tl.full((), 0.0, tl.float32)
    unit = tl.full((), 1.0, tl.float32)
    reach = tl.full((), 4.0, tl.float32)
    start = low
    reads = tl.full((), 0, tl.int32)
    done = tl.full((), 0, tl.int32)
    while done == 0:
        left = high - start
        a = start + (left + 1) // 3
        b = high - left // 3
        if (reads < 2) & (left > 1):
            a, b = sampled_interval(
                logits, barred, temperature, top, start, high, floor, goal, counted, reach, reads,
                V, SAMPLED, DIVIDE, BARRED,
            )  # fmt: skip
        below_a, below_b = read_interval(
            logits, barred, sums, words, temperature, top, a, b, floor, counted, min_p, reads,
            V, NG, GROUP, BG, STAGES, DIVIDE, BARRED,
        )  # fmt: skip
        reads += 1
        if (below_a > goal) & (a > start):
            high = a
            reach = 16.0
        elif (below_b <= goal) & (b < high):
            start = b
            reach = 16.0
        else:
            start = a
            high = b
            reach = 1.0
            # The compiler does not know that this is 0. It would unroll loops from a constant, and hold their
            # addresses in registers.
            zero = tl.minimum(reads, 0)
            n = tl.full((), 0, tl.int32)
            if b - a > 1:
                n = list_ones(words, ids, zero, NG, GROUP, LISTED)
            if n <= LISTED:
                begin_groups(words, groups, n == 0, zero, NG, NGP, GROUP, LISTED // 8)
                lowest = a
                below = below_a
                done = 1
            if (n > 0) & (n <= LISTED):
                lowest, below = search_list(
                    logits, barred, ids, n, temperature, top, a, b, goal, below_a, counted,
                    LISTED, DIVIDE, BARRED,
                )  # fmt: skip
                # a token's weight is below 2^24 units, and the sum of 64 below 2^31
                unit = tl.maximum(tl.exp(number_of(b.to(tl.int32)) - top), 1e-30) * (1.0 / 16777216.0)
                add_listed(
                    logits, barred, groups, ids, n, temperature, top, lowest.to(tl.int32), unit, min_p,
                    NGP, GROUP, LISTED, DIVIDE, BARRED,
                )  # fmt: skip
    tl.debug_barrier()  # the groups' numbers are visible to the other threads
    return lowest, below, unit


@triton.jit
def kept_by_groups(
    sums, groups, group, unit, equal, goal, below, min_p, cut_ties, NG: tl.constexpr, NGP: tl.constexpr
):
    """(kept weight of each group, number of its tokens with the least key, how many of all those go).

    equal: the weight of a token with the least key; cut_ties: whether tokens with that key go while the
    measure up to them is at most goal.
    """
    # .cv: not from the L1 cache, which additions in memory pass by
    ties = tl.load(groups + group, group < NG, 0, cache_modifier=".cv")
    gone = tl.full((), 0, tl.int32)
    if cut_ties:
        gone = tl.maximum(tl.floor((goal - below) / equal), 0.0).to(tl.int32)
        gone = tl.minimum(gone, tl.maximum(tl.sum(ties) - 1, 0))
    stay = tl.minimum(ties, tl.maximum(tl.cumsum(ties, 0) - gone, 0)).to(tl.float32)
    mass = tl.load(sums + group, group < NG, 0.0)
    units = tl.load(groups + NGP + group, group < NG, 0, cache_modifier=".cv")
    mass += units.to(tl.float32) * unit
    return mass + stay * tl.where(equal >= min_p, equal, 0.0), ties, gone


@triton.jit
def draw_from_row(
    logits, barred, sums, groups, words, ids, temperature, u, bound, above, top, whole, group, top_k, cut,
    min_p, has_k, has_p,
    V: tl.constexpr, NG: tl.constexpr, NGP: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr,
    LISTED: tl.constexpr, SAMPLED: tl.constexpr, STAGES: tl.constexpr, DIVIDE: tl.constexpr,
    BARRED: tl.constexpr,
):  # fmt: skip
    """(token, sum of weights) of a draw from the row's tokens that the filters keep, in order of ids.

    bound: a key below which the filters keep no token; above: the greatest key + 1. top_p counts the weight
    that top_k keeps, so with both there are two searches.
    """
    least = tl.full((), -2139095041, tl.int64)  # the key of -inf
    lowest = bound
    floor = least
    below = tl.full((), 0.0, tl.float32)
    unit = tl.full((), 1.0, tl.float32)
    goal = tl.full((), 0.0, tl.float32)
    after = whole  # weight that top_k keeps
    turn = tl.full((), 0, tl.int32)
    turns = tl.where(has_k & has_p, 2, 1)
    while turn < turns:
        counted = has_k & (turn == 0)
        # without top_k and top_p the threshold is the bound itself
        until = tl.where(has_k | has_p, above, lowest + 1)
        goal = tl.where(counted, (V - top_k).to(tl.float32), cut * after)
        least_w = tl.where(turn == turns - 1, min_p, 0.0)
        lowest, below, unit = find(
            logits, barred, sums, groups, words, ids, temperature, top, lowest, until, floor, goal, counted,
            least_w, V, NG, NGP, GROUP, BG, LISTED, SAMPLED, STAGES, DIVIDE, BARRED,
        )  # fmt: skip
        floor = lowest
        turn += 1
        if turn < turns:
            equal = tl.exp(number_of(lowest.to(tl.int32)) - top)
            mass, _, _ = kept_by_groups(sums, groups, group, unit, equal, goal, below, 0.0, False, NG, NGP)
            after = tl.sum(mass)
    equal = tl.exp(number_of(lowest.to(tl.int32)) - top)
    mass, ties, gone = kept_by_groups(
        sums, groups, group, unit, equal, goal, below, min_p, has_p, NG, NGP
    )  # fmt: skip
    home, aim, kept = drawn_group(mass, u, group, NGP)
    at = home * GROUP + tl.arange(0, GROUP)
    _, z = scores(logits, barred, at, at < V, temperature, DIVIDE, BARRED)
    key = ordered(z)
    w = tl.exp(z - top)
    tie = ((key == lowest.to(tl.int32)) & (at < V)).to(tl.int32)
    rank = tl.sum(tl.where(group < home, ties, 0)) + tl.cumsum(tie, 0) - tie
    stays = (key > lowest.to(tl.int32)) | ((tie > 0) & (rank >= gone))
    return drawn_token(tl.where(stays & (w >= min_p), w, 0.0), aim, at, V), kept
