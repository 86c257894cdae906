"""The Triton kernels of quantised weights: products of few rows that read the codes, and a weight's values.

A product of few rows takes as long as reading the weight. So the weight is the left operand: codes are loaded
and converted in registers, and the tensor cores take them from there; the rows of x are the narrow right
operand. A tile is [BN rows of the weight, BM rows of x]. Codes are integers or fp8 numbers that bf16 holds
exactly, sums are in fp32, and scales are applied to sums, so nothing is rounded before the result.

PTX: conversions of four codes at a time by NVIDIA's instructions. Without them (other chips, fp32, the
interpreter) the same values are computed in plain arithmetic.

next: quantised/gpu.py
"""

import struct

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tmoe.base.quantised import NF4
from tmoe.ops.experts.kernels import activate, halves_of

GROUP = tl.constexpr(128)  # of int4; tmoe/base/quantised.py
HALF = tl.constexpr(64)


@triton.constexpr_function
def instructions(kind):
    """PTX that converts four codes in a register to four bf16 numbers in two.

    int8: 128 + its low seven bits, minus 128 or 256 by its sign; bf16 holds each of them exactly.
    int4: 128 + a code of four bits, minus 136.
    fp8: its bits at bf16's place are the value times 2^-120.
    """
    pairs = "prmt.b32 a, {0}, 0, {1}; prmt.b32 b, {0}, 0, {2};"
    low, high = "0x4140", "0x4342"  # bytes 0 and 1, bytes 2 and 3, each in the low half of 16 bits
    mask = "lop3.b32 {0}, {1}, {2}, {3}, 0xEA;"  # (second & third) | fourth
    add = "fma.rn.bf16x2 {0}, {1}, {2}, {3};"
    one = "0x3F803F80"
    text = "{ .reg .b32 w, a, b, c, d, one; mov.b32 one, " + one + "; mov.b32 w, $2; "
    if kind == "high":
        text += "shr.u32 w, w, 4; "
    if kind == "fp8":
        text += pairs.format("w", "0x1404", "0x3424")  # in the high half
        for half, out in (("a", "$0"), ("b", "$1")):
            text += f"and.b32 c, {half}, 0x80008000; shr.u32 {half}, {half}, 4;"
            text += mask.format("d", half, "0x07F007F0", "c")
            text += "mov.b32 c, 0x80008000; mov.b32 one, 0x7B807B80;"  # -0 and 2^120
            text += add.format(out, "d", "one", "c")
        return text + " }"
    text += pairs.format("w", low, high)
    for half, out in (("a", "$0"), ("b", "$1")):
        if kind == "int8":
            text += "mov.b32 c, 0xC300C300;" + mask.format("c", half, "0x00800080", "c")
            text += "mov.b32 d, 0x43004300;" + mask.format("d", half, "0x007F007F", "d")
        else:
            text += "mov.b32 c, 0xC308C308; mov.b32 d, 0x43004300;"
            text += mask.format("d", half, "0x000F000F", "d")
        text += add.format(out, "d", "one", "c")
    return text + " }"


# bf16 rounds NF4's numbers. A sum with positive rows of x adds up the mean of the errors: a layer of gpt-oss
# was wrong by 0.013. This scale, by which maxima are divided, makes the mean 300 times smaller.
NF4_SCALE = tl.constexpr(1.1884765625)


def nf4_instructions() -> str:
    """PTX that converts four bytes of NF4, $4, to bf16: high four bits to $0 and $1, the low to $2 and $3.

    A byte permutation looks four codes up in a table of eight bytes. A table of 16 bf16 numbers has four such
    tables: the low and the high bytes of the numbers of codes below 8, and those of the other codes. A fifth
    permutation chooses between the two kinds of codes.
    """
    bits = [int.from_bytes(struct.pack("<f", value * NF4_SCALE.value), "little") for value in NF4]
    halves = [(b + 0x7FFF + (b >> 16 & 1)) >> 16 for b in bits]  # rounded to the nearest, ties to even
    text = "{ .reg .b32 s, g, m, n, lo, hi, " + ", ".join(f"l{i}, h{i}" for i in range(4)) + "; "
    for name, shift in (("l", 0), ("h", 8)):
        for i in range(4):
            word = sum((half >> shift & 0xFF) << 8 * k for k, half in enumerate(halves[4 * i : 4 * i + 4]))
            text += f"mov.b32 {name}{i}, {word:#x}; "
    text += "and.b32 s, $4, 0x77777777; shr.u32 g, $4, 1; "
    text += "lop3.b32 g, g, 0x44444444, 0x32103210, 0xEA; "  # byte i of m, or of n if the code is 8 or more
    for first, second in (("$0", "$2"), ("$1", "$3")):
        for name, out in (("l", "lo"), ("h", "hi")):
            text += f"prmt.b32 m, {name}0, {name}1, s; prmt.b32 n, {name}2, {name}3, s; "
            text += f"prmt.b32 {out}, m, n, g; "
        text += f"prmt.b32 {first}, lo, hi, 0x7351; prmt.b32 {second}, lo, hi, 0x6240; "
        text += "shr.u32 s, s, 16; shr.u32 g, g, 16; " if first == "$0" else ""
    return text + "}"


NF4_TEXT = tl.constexpr(nf4_instructions())


@triton.jit
def nf4_numbers(codes):
    """The numbers of NF4 times NF4_SCALE in bf16: those of the high four bits, and of the low."""
    return tl.inline_asm_elementwise(
        NF4_TEXT,  # pyrefly: ignore[bad-argument-type] (the text of a constexpr)
        "=r,=r,=r,=r,r",
        [codes],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def numbers(codes, KIND: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """The numbers that codes stand for, before scales. codes: uint8.

    KIND: int8 or fp8; "low" and "high" for int4's values in these bits of each byte.
    """
    if PTX and dtype == tl.bfloat16:
        text: tl.constexpr = instructions(KIND)
        return tl.inline_asm_elementwise(
            text,  # pyrefly: ignore[bad-argument-type] (the text of a constexpr)
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    elif KIND == "int8":
        return codes.to(tl.int8, bitcast=True).to(tl.float32).to(dtype)
    elif KIND == "fp8":
        wide = codes.to(tl.int32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120
    elif KIND == "low":
        return ((codes & 15).to(tl.float32) - 8.0).to(dtype)
    else:
        tl.static_assert(KIND == "high")
        return ((codes >> 4).to(tl.float32) - 8.0).to(dtype)


@triton.jit
def maximum_of(maxima, most, offset, eight, block, here):
    """The maximum of NF4's blocks, by their numbers. eight: the table of 8 bits."""
    code = tl.load(maxima + block, mask=here, other=0)
    scale = tl.load(most + block // 256, mask=here, other=0.0)
    return tl.load(eight + code) * scale + tl.load(offset)


@triton.jit
def times_rows(
    x_at, codes_at, scales, most, offset, four, eight, first, here, l, L,
    KIND: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [BN, BM] = rows of the weight times rows of x, over the length L.

    x_at: [BL, BM], for int4 [64, BM], for nf4 [32, BM] of even columns, or of pairs of bf16 as int32:
        addresses of the first step; columns without a row repeat a valid one.
    codes_at: the same of codes, [BN, BL], [BN, 64] or [BN, 32].
    first: [BN], the number of the row's first scale. here: [BN], whether the row of the weight exists.
    l: 0, 1, ... of a step.
    EVEN: whether L is a multiple of a step.
    """
    acc = tl.zeros((BN, BM), tl.float32)
    dtype: tl.constexpr = x_at.dtype.element_ty
    if KIND == "int4":
        for g in range(tl.cdiv(L, GROUP)):
            scale = tl.load(scales + first + g, mask=here, other=0.0)
            codes = tl.load(codes_at + g * HALF, mask=here[:, None], other=0)
            if EVEN:
                x_low = tl.load(x_at + g * GROUP)
                x_high = tl.load(x_at + g * GROUP + HALF)
            else:
                x_low = tl.load(x_at + g * GROUP, mask=(l < L - g * GROUP)[:, None], other=0.0)
                x_high = tl.load(x_at + g * GROUP + HALF, mask=(l < L - g * GROUP - HALF)[:, None], other=0.0)
            part = tl.dot(numbers(codes, "low", dtype, PTX), x_low, input_precision=PRECISION)
            part = tl.dot(numbers(codes, "high", dtype, PTX), x_high, part, input_precision=PRECISION)
            acc += part * scale.to(tl.float32)[:, None]
        return acc
    elif KIND == "nf4":
        for g in range(tl.cdiv(L, HALF)):
            codes = tl.load(codes_at + g * (HALF // 2), mask=here[:, None], other=0)
            if dtype == tl.int32:
                high, low = nf4_numbers(codes)
                pairs = tl.load(x_at + g * (HALF // 2))
                even = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
                odd = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
            else:
                high = (tl.load(four + (codes >> 4)) * NF4_SCALE).to(dtype)
                low = (tl.load(four + (codes & 15)) * NF4_SCALE).to(dtype)
                even = tl.load(x_at + g * HALF)
                odd = tl.load(x_at + g * HALF + 1)
            part = tl.dot(high, even, input_precision=PRECISION)
            part = tl.dot(low, odd, part, input_precision=PRECISION)
            acc += part * (maximum_of(scales, most, offset, eight, first + g, here) / NF4_SCALE)[:, None]
        return acc
    else:
        for k in range(tl.cdiv(L, BL)):
            if EVEN:
                codes = tl.load(codes_at + k * BL, mask=here[:, None], other=0)
                x = tl.load(x_at + k * BL)
            else:
                inside = l < L - k * BL
                codes = tl.load(codes_at + k * BL, mask=here[:, None] & inside[None, :], other=0)
                x = tl.load(x_at + k * BL, mask=inside[:, None], other=0.0)
            acc = tl.dot(numbers(codes, KIND, dtype, PTX), x, acc, input_precision=PRECISION)
        return acc * tl.load(scales + first, mask=here, other=0.0).to(tl.float32)[:, None]


@triton.constexpr_function
def halves(ACT):
    """Rows of the matrix for each column of the result."""
    return 1 if ACT is None else halves_of(ACT)


@triton.constexpr_function
def codes_of(kind, BL):
    """Codes of a row in a step."""
    return dict(int4=64, nf4=32).get(kind, BL)


@triton.jit
def both(acc, BW: tl.constexpr):
    """The first and the last BW rows of a tile of 2 BW rows."""
    return tl.split(tl.permute(tl.reshape(acc, (2, BW, acc.shape[1])), (1, 2, 0)))


@triton.jit
def rows_at(x, source, l, L, KIND: tl.constexpr, PAIRS: tl.constexpr):
    """`x_at` of `times_rows` for these rows of x. PAIRS: of bf16, as int32."""
    row = source.to(tl.int64)[None, :]
    if PAIRS:
        return x.to(tl.pointer_type(tl.int32), bitcast=True) + (row * (L // 2) + l[:, None])
    else:
        return x + row * L + (l * 2 if KIND == "nf4" else l)[:, None]


@triton.jit(do_not_specialize=["capacity", "T"])
def few_rows(
    x, codes, scales, most, offset, four, eight, bias, order, tiles, capacity, offsets, y,
    T, W, L, C, G, num_n,
    KIND: tl.constexpr, ACT: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, TABLE: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y [N, W] = rows of x times each expert's quantised matrix, or with ACT the activation of that product.

    codes [E, W, C], or with ACT and a gate [E, 2W, C], scales [E, W, G]. bias: [E, W] or [E, 2W], or None.
    most, offset, four, eight: of nf4, whose scales are maxima, and the tables of its codes and maxima.
    order: rows of x are those of the tokens order[r] // K; None: x is sorted, and its row r is r.
    TABLE: tiles, capacity and offsets are the table of ROWS-row tiles of experts. Else the T rows of x belong
        to a single matrix.
    A program computes BN rows of a matrix, for all rows of x in a row tile, BM at a time.
    PARTS: of the length of a sum with a single matrix, whose bias is None; y is fp32 [PARTS, T, W]. Steps
        divide a part.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    HALVES: tl.constexpr = halves(ACT)
    BW: tl.constexpr = BN // HALVES
    pm = tl.program_id(0) // num_n
    pn = tl.program_id(0) % num_n
    if TABLE:
        if pm >= tl.load(tiles):
            return
        e = tl.load(tiles + 4 + pm).to(tl.int64)
        first = tl.load(tiles + 4 + capacity + pm)
        hi = tl.load(offsets + e + 1)
    else:
        e = pm.to(tl.int64) * 0
        first = pm * ROWS
        hi = T
    last = tl.minimum(first + ROWS, hi)
    j = tl.arange(0, BN)
    n = pn * BW + j % BW
    here = n < W
    row = e * HALVES * W + j // BW * W + tl.minimum(n, W - 1)
    step: tl.constexpr = codes_of(KIND, BL)
    l = tl.arange(0, step)
    codes_at = codes + row[:, None] * C + l[None, :]
    PAIRS: tl.constexpr = KIND == "nf4" and PTX and x.dtype.element_ty == tl.bfloat16
    for begin in range(first, last, BM):
        r = begin + tl.arange(0, BM)
        source = tl.minimum(r, last - 1)
        if order is not None:
            source = tl.load(order + source) // K
        codes_of_part, scale, length = codes_at, row * G, L // PARTS
        x_at = rows_at(x, source, l, L, KIND, PAIRS)
        if PARTS > 1:
            part = tl.program_id(1)
            x_at += part * (length // 2 if PAIRS else length)
            codes_of_part += part * (C // PARTS)
            if KIND == "int4" or KIND == "nf4":
                scale += part * (G // PARTS)
        acc = times_rows(
            x_at, codes_of_part, scales, most, offset, four, eight, scale, here, l, length,
            KIND, BN, BM, BL, EVEN, PTX, PRECISION,
        )  # fmt: skip
        if bias is not None:
            acc += tl.load(bias + row, mask=here, other=0.0).to(tl.float32)[:, None]
        out = acc
        if ACT is not None:
            rounded = acc.to(y.dtype.element_ty).to(tl.float32)  # like H in training
            if HALVES == 2:
                gate, up = both(rounded, BW)
                out = activate(gate, up, PTX, ACT)
            else:
                out = activate(rounded, rounded, PTX, ACT)
        cols = pn * BW + tl.arange(0, BW)
        at = y + r.to(tl.int64)[None, :] * W + cols[:, None]
        if PARTS > 1:
            at += tl.program_id(1).to(tl.int64) * T * W
        tl.store(at, out.to(y.dtype.element_ty), mask=(cols < W)[:, None] & (r < last)[None, :])


@triton.jit(do_not_specialize=["n"])
def add_parts(parts, bias, y, n, W, PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """y [T, W] = the sum of parts fp32 [PARTS, T, W] in their order, plus the bias [W] or None. n: T W."""
    if EARLY:
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, mask=at < n, other=0.0)
    for p in tl.static_range(1, PARTS):
        total += tl.load(parts + p * n + at, mask=at < n, other=0.0)
    if bias is not None:
        total += tl.load(bias + at % W, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=["M"])
def values(
    codes, scales, out, M, W, C, G,
    KIND: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """out [M, W] = the values of a weight with these codes [M, C] and scales [M, G]; not of nf4."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    there = (r < M)[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    if KIND == "int4":
        g = tl.program_id(1)
        l = tl.arange(0, HALF)
        scale = tl.load(scales + r * G + g, mask=r < M, other=0.0).to(tl.float32)[:, None]
        found = tl.load(codes + r[:, None] * C + g * HALF + l[None, :], mask=there, other=0)
        low = numbers(found, "low", dtype, PTX).to(tl.float32) * scale
        high = numbers(found, "high", dtype, PTX).to(tl.float32) * scale
        col = g * GROUP + l
        at = out + r[:, None] * W + col[None, :]
        tl.store(at, low.to(dtype), mask=there & (col < W)[None, :])
        tl.store(at + HALF, high.to(dtype), mask=there & (col < W - HALF)[None, :])
    else:
        col = tl.program_id(1) * BL + tl.arange(0, BL)
        inside = there & (col < W)[None, :]
        scale = tl.load(scales + r, mask=r < M, other=0.0).to(tl.float32)[:, None]
        found = tl.load(codes + r[:, None] * C + col[None, :], mask=inside, other=0)
        wide = numbers(found, KIND, dtype, PTX).to(tl.float32) * scale
        tl.store(out + r[:, None] * W + col[None, :], wide.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["n"])
def nf4_values(codes, maxima, most, offset, four, eight, out, n, BLOCKS: tl.constexpr, EVEN: tl.constexpr):
    """out [n] = the values of a flat weight in nf4, whatever its shape.

    A program computes BLOCKS blocks of 64. EVEN: whether 64 divides n; then a block is stored whole, and
    vectors are loaded and stored. Launch it without fused products and sums, so that a maximum has the bits
    of torch's separate product and sum.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    there = block * HALF < n
    byte = block[:, None] * (HALF // 2) + tl.arange(0, HALF // 2)[None, :]
    i = block[:, None] * HALF + tl.arange(0, HALF)[None, :]
    if EVEN:
        here = there[:, None]
        inside = there[:, None]
    else:
        here = byte * 2 < n
        inside = i < n
    top = maximum_of(maxima, most, offset, eight, block, there)[:, None]
    found = tl.load(codes + byte, mask=here, other=0)
    first = (tl.load(four + (found >> 4)) * top).to(out.dtype.element_ty)
    second = (tl.load(four + (found & 15)) * top).to(out.dtype.element_ty)
    tl.store(out + i, tl.interleave(first, second), mask=inside)
