"""Numbers that the kernels of `sample` share: random numbers, keys in the order of logits, scores of tokens.

next: tmoe/ops/decode/sample_row.py
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
def drawn_group(mass, u, group, NGP: tl.constexpr):
    """(the group of the draw, the weight in the group up to the draw, the sum of all weights)."""
    until = tl.cumsum(mass.to(tl.float64), 0)
    kept = tl.max(until)
    aim = u * kept
    home = tl.min(tl.where((until > aim) & (mass > 0), group, NGP))
    home = tl.where(home == NGP, tl.max(tl.where(mass > 0, group, 0)), home)
    aim -= tl.sum(tl.where(group == home, until - mass.to(tl.float64), 0.0))
    return home, aim, kept


@triton.jit
def drawn_token(w, aim, at, V: tl.constexpr):
    """The first of the tokens `at` at which the sum of weights w exceeds aim, or the last with a weight."""
    inside = tl.cumsum(w.to(tl.float64), 0)
    token = tl.min(tl.where((inside > aim) & (w > 0), at, V))
    return tl.where(token == V, tl.max(tl.where(w > 0, at, 0)), token)
