"""sample: a token from each row of logits, filtered as in transformers but without a sort; random numbers.

A row's numbers are functions of (seed, prompt, sample, place) by Philox, so slots, batches and ranks change
no token. The kernel and `uniforms` compute the same bits.

One program a row reads the logits once and keeps the greatest of each 64 and their sum of weights. Without
filters that names the 64 in which the token lies. Filters first bound their threshold from below by these
numbers: k groups whose greatest is t or more have k tokens of t or more. Tokens above the bound are
listed, and the threshold is found by halving an interval of ordered bits over that list, in registers.

next: tmoe/generate/sampler.py
"""

import math
from typing import NamedTuple, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.check import FLOATS, check_device, require
from tmoe.ops.experts.routing import power_of_2
from tmoe.ops.launch.launch import cdiv, device_facts, empty, launch

GROUP = 64  # neighbouring tokens of whom the greatest is kept
BLOCK = 4096  # tokens that are read at once
HELD = 2048  # tokens of the list that stay in registers
LISTED = 8192  # tokens that the list has room for; more, and each step of a search reads the row


class Filters(Protocol):
    """Settings of a draw; `tmoe.generate.Sampling` has them."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


class Keys(NamedTuple):
    """What the random number of each row is a function of; int64 [B], on the logits' device."""

    seed: int
    prompt_B: Tensor
    sample_B: Tensor
    place_B: Tensor  # of the token in its answer


class Drawn(NamedTuple):
    """A token for each row, and its log-probabilities, fp32."""

    tokens_B: Tensor
    logprobs_B: (
        Tensor  # by the softmax of logits / temperature over the whole vocabulary; greedy: of the logits
    )
    sampler_logprobs_B: Tensor  # by what it was drawn from; greedy: 0


def sample(logits_BV: Tensor, keys: Keys, filters: Filters, barred: Tensor | None = None) -> Drawn:
    """`draw` with the numbers of `keys`, on a GPU in one launch that asks the GPU nothing.

    On a GPU sums are added in another order than `draw`'s, so a token whose share lies within 1e-6 of a
    filter's edge may be left out here and not there. Logits equal to the k-th all stay, in both. Of equal
    logits at the edge of top_p as many stay in both: here those with the higher ids, in `draw`, as in
    transformers, those that torch.sort happens to put last.

    Args:
        logits_BV: [B, V] of any float type, rows contiguous. B may be 0.
        keys: see there.
        filters: temperature, top_k, top_p, min_p, as in `tmoe.generate.Sampling`.
        barred: bool [B, V] or [V], contiguous: True at tokens that may not come. One of each row may.

    Raises ValueError for shapes, types or devices that do not fit.
    """
    fits = logits_BV.dim() == 2 and logits_BV.shape[1] and logits_BV.stride(1) == 1
    require(fits, "logits", f"shape {tuple(logits_BV.shape)}", "[B, V], rows contiguous")
    require(logits_BV.dtype in FLOATS, "logits", logits_BV.dtype, "float32, bfloat16 or float16")
    B, V = logits_BV.shape
    for name in ("prompt_B", "sample_B", "place_B"):
        t = getattr(keys, name)
        require(t.shape == (B,) and t.dtype == torch.int64, name, (tuple(t.shape), t.dtype), f"int64 [{B}]")
        check_device(logits_BV, **{name: t})
    require(0 <= keys.seed < 2**64, "seed", keys.seed, "from 0 to 2**64 - 1")
    if barred is not None:
        fits = tuple(barred.shape) in ((V,), (B, V)) and barred.dtype == torch.bool and barred.is_contiguous()
        words = f"shape {tuple(barred.shape)}, {barred.dtype}"
        require(fits, "barred", words, f"bool [B={B}, V={V}] or [V], contiguous")
        check_device(logits_BV, barred=barred)
    if logits_BV.is_cuda:
        return forward(logits_BV, keys, filters, barred)
    return draw(logits_BV, uniforms_at(keys), filters, barred)


# ---- random numbers ----


def philox(seed: int, counter: list[int]) -> np.random.Philox:
    """numpy's generator; of a list it would take numbers from 2^63 on through floats."""
    return np.random.Philox(key=np.array([seed, 0], np.uint64), counter=np.array(counter, np.uint64))


def uniforms(seed: int, prompt: int, sample: int, count: int) -> Tensor:
    """Numbers [count] in [0, 1) for the tokens of one answer: functions of the seed, both numbers, the place.

    Philox 4x64 (Salmon et al. 2011), counted by place: the first numbers do not depend on `count`.
    """
    raw = philox(seed, [0, prompt, sample, 0]).random_raw(count)
    return torch.from_numpy((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def uniforms_at(keys: Keys) -> Tensor:
    """The number of each row, fp64 [B], on the CPU: that of its place among its answer's `uniforms`."""
    found = []
    rows = zip(*(t.tolist() for t in keys[1:]), strict=True)
    for prompt, number, place in rows:
        counter = [place // 4, prompt, number, 0]  # four numbers each
        raw = philox(keys.seed, counter).random_raw(place % 4 + 1)[-1]
        found.append(int(raw >> np.uint64(11)) * 2.0**-53)
    return torch.tensor(found, dtype=torch.float64)


# ---- the plain twin ----


def draw(logits_BV: Tensor, uniform_B: Tensor, filters: Filters, barred: Tensor | None = None) -> Drawn:
    """One token a row, the one at which the filtered probabilities, added up in order of ids, pass uniform.

    barred: bool [B, V] or [V], True at tokens that may not come; log-probabilities over the whole vocabulary
    know nothing of it.
    """
    z_BV = logits_BV.float()
    greedy = filters.temperature == 0
    if not greedy:
        z_BV = z_BV / filters.temperature
    full_B = z_BV.logsumexp(-1)
    open_BV = z_BV if barred is None else z_BV.masked_fill(barred, -math.inf)
    if greedy:
        tokens_B = open_BV.argmax(-1)
        own_B = z_BV.gather(-1, tokens_B[:, None])[:, 0]
        return Drawn(tokens_B, own_B - full_B, torch.zeros_like(own_B))
    kept_BV = keep(open_BV, filters)
    tokens_B = pick(kept_BV.softmax(-1), uniform_B)
    own_B = z_BV.gather(-1, tokens_B[:, None])[:, 0]
    return Drawn(tokens_B, own_B - full_B, own_B - kept_BV.logsumexp(-1))


def keep(z_BV: Tensor, filters: Filters) -> Tensor:
    """Logits over the temperature with -inf at tokens that top_k, top_p or min_p leave out."""
    V = z_BV.shape[-1]
    if 0 < filters.top_k < V:
        least_B1 = z_BV.topk(filters.top_k, -1).values[:, -1:]
        z_BV = z_BV.masked_fill(z_BV < least_B1, -math.inf)
    if filters.top_p < 1:
        # from the least probable on: what all up to and with a token have together
        sorted_BV, order_BV = z_BV.sort(dim=-1, descending=False)
        below_BV = sorted_BV.softmax(-1).cumsum(-1) <= 1 - filters.top_p
        below_BV[:, -1] = False  # the most probable one stays
        z_BV = z_BV.masked_fill(below_BV.scatter(-1, order_BV, below_BV), -math.inf)
    if filters.min_p > 0:
        p_BV = z_BV.softmax(-1)
        z_BV = z_BV.masked_fill(p_BV < filters.min_p * p_BV.amax(-1, keepdim=True), -math.inf)
    return z_BV


def pick(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Ids [B] at which sums of the probabilities pass uniform's share of the whole.

    Never one whose probability is 0. Some id where probabilities are NaN.
    """
    sums_BV = p_BV.double().cumsum(-1)
    whole_B1 = sums_BV[:, -1:]
    at_B1 = torch.minimum(uniform_B[:, None] * whole_B1, whole_B1.nextafter(torch.zeros_like(whole_B1)))
    return torch.searchsorted(sums_BV, at_B1, right=True)[:, 0].clamp(max=p_BV.shape[-1] - 1)


# ---- the kernel ----


@triton.jit
def product(a, b):
    """(upper half, lower half) of the product of two numbers of 64 bits."""
    return tl.umulhi(a, b), a * b


@triton.jit
def uniform(seed, prompt, number, place):
    """The number of `uniforms` at this place: Philox 4x64, ten rounds, as numpy counts."""
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
    """Integers in the order of the numbers."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)  # + 0.0: no -0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def number_of(key):
    """The inverse of `ordered`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def scores(logits, barred, ids, here, temperature, DIVIDE: tl.constexpr, BARRED: tl.constexpr):
    """(logits over the temperature, the same with -inf where a token may not come) of these tokens."""
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
    """(score, id, whether there is one) of tokens start to start + HELD of the list, or of the row."""
    i = start + tl.arange(0, HELD)
    here = i < n
    token = tl.where(short, tl.load(ids + i, here & short, 0), i)
    _, z = scores(logits, barred, token, here, temperature, DIVIDE, BARRED)
    return z, token, here


@triton.jit(do_not_specialize=["seed", "temperature", "top_k", "cut", "min_p", "barred_row"])
def sample_kernel(
    logits, barred, prompts, numbers, places, tokens, logprobs, own_logprobs, greatest, sums, groups, ids,
    seed, temperature, top_k, cut, min_p, row, barred_row,
    V: tl.constexpr, NG: tl.constexpr, NGP: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr,
    HELD: tl.constexpr, LISTED: tl.constexpr, STAGES: tl.constexpr,
    GREEDY: tl.constexpr, DIVIDE: tl.constexpr, BARRED: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr,
):  # fmt: skip
    """One row. `cut`: 1 - top_p. Scratch of a row: greatest, sums, groups [NGP], ids [LISTED].

    Weights are e^(z - top), top the greatest score of a token that may come.
    """
    b = tl.program_id(0).to(tl.int64)
    logits += b * row
    barred += b * barred_row
    greatest += b * NGP
    sums += b * NGP
    groups += b * NGP
    ids += b * LISTED

    # the one reading of the row
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
    tl.debug_barrier()  # other threads' stores

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
    kept = whole.to(tl.float64)  # what the token is drawn from

    if GREEDY:
        home = tl.min(tl.where(most == top, group, NG - 1))
        at = home * GROUP + c
        _, z = scores(logits, barred, at, at < V, temperature, DIVIDE, BARRED)
        token = tl.min(tl.where(z == top, at, V - 1))
    else:
        u = uniform(seed, tl.load(prompts + b), tl.load(numbers + b), tl.load(places + b))
        if not (TOP_K or TOP_P or MIN_P):
            until = tl.cumsum(mass.to(tl.float64), 0)
            kept = tl.max(until)
            aim = u * kept
            home = tl.min(tl.where((until > aim) & (mass > 0), group, NGP))
            home = tl.where(home == NGP, tl.max(tl.where(mass > 0, group, 0)), home)
            aim -= tl.sum(tl.where(group == home, until - mass.to(tl.float64), 0.0))
            at = home * GROUP + c
            _, z = scores(logits, barred, at, at < V, temperature, DIVIDE, BARRED)
            w = tl.exp(z - top)
            inside = tl.cumsum(w.to(tl.float64), 0)
            token = tl.min(tl.where((inside > aim) & (w > 0), at, V))
            token = tl.where(token == V, tl.max(tl.where(w > 0, at, 0)), token)
        else:
            # a bound: no token below it stays
            least = tl.full((), -2139095041, tl.int64)  # of -inf
            above = ordered(top).to(tl.int64) + 1
            group_key = ordered(most)
            bound = least
            if TOP_K:
                if top_k <= NG:
                    low = least
                    high = above
                    while high - low > 1:
                        middle = low + (high - low) // 2
                        enough = tl.sum(((group_key >= middle) & (group < NG)).to(tl.int32)) >= top_k
                        low = tl.where(enough, middle, low)
                        high = tl.where(enough, high, middle)
                    bound = low
            elif TOP_P:
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
            if MIN_P and not (TOP_K and TOP_P):  # the share of top_p is one of all that top_k keeps
                bound = tl.maximum(bound, ordered(top + tl.log(min_p) - 1e-2).to(tl.int64))
            bound = tl.minimum(bound, above - 1)

            # the tokens above it, in the order of their ids
            chosen = (group_key >= bound) & (group < NG)
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
            n = tl.where(short, n, V)
            z0, _, here0 = listed(
                logits, barred, ids, short, n, 0, temperature, HELD, DIVIDE, BARRED
            )  # fmt: skip
            key0 = ordered(z0)
            w0 = tl.exp(z0 - top)

            lowest = bound  # the least key that stays
            if TOP_K:
                low = bound
                high = above
                while high - low > 1:
                    middle = low + (high - low) // 2
                    found = tl.sum((here0 & (key0 >= middle)).to(tl.int32))
                    for start in range(HELD, n, HELD):
                        z, _, here = listed(
                            logits, barred, ids, short, n, start, temperature, HELD, DIVIDE, BARRED
                        )  # fmt: skip
                        found += tl.sum((here & (ordered(z) >= middle)).to(tl.int32))
                    enough = found >= top_k
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle)
                lowest = low
            gone = tl.full((), 0, tl.int32)  # of those with the least key, by their ids
            if TOP_P:
                after_k = whole
                if TOP_K:
                    after_k = tl.sum(tl.where(here0 & (key0 >= lowest), w0, 0.0))
                    for start in range(HELD, n, HELD):
                        z, _, here = listed(
                            logits, barred, ids, short, n, start, temperature, HELD, DIVIDE, BARRED
                        )  # fmt: skip
                        after_k += tl.sum(tl.where(here & (ordered(z) >= lowest), tl.exp(z - top), 0.0))
                over = tl.sum(tl.where(here0 & (key0 >= lowest), w0, 0.0))
                for start in range(HELD, n, HELD):
                    z, _, here = listed(
                        logits, barred, ids, short, n, start, temperature, HELD, DIVIDE, BARRED
                    )  # fmt: skip
                    over += tl.sum(tl.where(here & (ordered(z) >= lowest), tl.exp(z - top), 0.0))
                # what lies below a key is what is over, less what lies from it on
                stays = after_k - cut * after_k
                low = lowest
                high = above
                from_low = over
                while high - low > 1:
                    middle = low + (high - low) // 2
                    found = tl.sum(tl.where(here0 & (key0 >= middle), w0, 0.0))
                    for start in range(HELD, n, HELD):
                        z, _, here = listed(
                            logits, barred, ids, short, n, start, temperature, HELD, DIVIDE, BARRED
                        )  # fmt: skip
                        found += tl.sum(tl.where(here & (ordered(z) >= middle), tl.exp(z - top), 0.0))
                    enough = found >= stays
                    low = tl.where(enough, middle, low)
                    from_low = tl.where(enough, found, from_low)
                    high = tl.where(enough, high, middle)
                lowest = low
                equal = tl.exp(number_of(lowest.to(tl.int32)) - top)
                gone = tl.maximum(tl.floor((from_low - stays) / equal), 0.0).to(tl.int32)

            ties = tl.full((), 0, tl.int32)
            if TOP_P:
                for start in range(0, n, HELD):
                    z, _, here = listed(
                        logits, barred, ids, short, n, start, temperature, HELD, DIVIDE, BARRED
                    )  # fmt: skip
                    ties += tl.sum((here & (ordered(z) == lowest)).to(tl.int32))
                gone = tl.minimum(gone, tl.maximum(ties - 1, 0))

            # what stays, and then the token: in the order of ids
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
            token = tl.where(token == V, last, token)

    own = tl.load(logits + token).to(tl.float32)
    if DIVIDE:
        own = tl.div_rn(own, temperature + 0.0)
    tl.store(tokens + b, token.to(tl.int64))
    tl.store(logprobs + b, own - full)
    drawn_from = top + tl.log(kept.to(tl.float32))
    tl.store(own_logprobs + b, 0.0 if GREEDY else own - drawn_from)


def forward(logits: Tensor, keys: Keys, filters: Filters, barred: Tensor | None) -> Drawn:
    """`sample` on a GPU."""
    B, V = logits.shape
    device = logits.device
    tokens = empty((B,), torch.int64, device)
    logprobs, own = (empty((B,), torch.float32, device) for _ in range(2))
    if not B:
        return Drawn(tokens, logprobs, own)
    NG = cdiv(V, GROUP)
    NGP = max(16, power_of_2(NG))
    BG = min(BLOCK // GROUP, NGP)
    greatest, sums = (empty((B, NGP), torch.float32, device) for _ in range(2))
    groups = empty((B, NGP), torch.int32, device)
    ids = empty((B, LISTED), torch.int32, device)
    greedy = filters.temperature == 0
    seed = keys.seed if keys.seed < 2**63 else keys.seed - 2**64
    flags = (
        not greedy and 0 < filters.top_k < V,
        not greedy and filters.top_p < 1,
        not greedy and filters.min_p > 0,
    )
    # Blocks under way, as many as the registers of two programs on a multiprocessor allow.
    stages = 4 if logits.dtype == torch.float32 and V % 16 == logits.stride(0) % 16 == 0 else 2
    on_cuda = device.type != "cpu" and device_facts(device)[0].startswith("cuda")  # the interpreter: a CPU
    options = {"maxnreg": 128} if on_cuda else {}
    launch(
        sample_kernel, (B,), logits, logits if barred is None else barred, *keys[1:], tokens, logprobs, own,
        greatest, sums, groups, ids, seed, float(filters.temperature), filters.top_k,
        float(1 - filters.top_p), float(filters.min_p), logits.stride(0),
        barred.stride(0) if barred is not None and barred.dim() == 2 else 0,
        V, NG, NGP, GROUP, BG, HELD, LISTED, stages, greedy, not greedy and filters.temperature != 1,
        barred is not None, *flags, num_warps=8, **options,
    )  # fmt: skip
    return Drawn(tokens, logprobs, own)


class _Given(NamedTuple):
    """Settings of a draw."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def trace(V: int, dtype: torch.dtype, filters: Filters) -> None:
    """Launch the kernel on meta tensors, inside compile_only: with barred tokens and without."""
    logits = torch.empty(1, V, dtype=dtype, device="meta")
    number = torch.empty(1, dtype=torch.int64, device="meta")
    for barred in (None, torch.empty(1, V, dtype=torch.bool, device="meta")):
        forward(logits, Keys(0, number, number, number), filters, barred)
