"""The product of few rows with codes for NVIDIA's tensor cores (Gluon), without shared memory.

A tensor core may sum over the columns of a fragment in any order that both operands share. So a thread loads
16 consecutive bytes of a row, and keeps them as its part of four products of 16 columns. Loads have 128 bits,
codes are converted in the registers that they are loaded to, and products need no barrier. kernels.few_rows
copies codes to shared memory, and its compiler reads them back two bytes at a time; that takes more
instructions than the conversion does.

Codes of the next step (of int4 with `deep_product` of three) are loaded before this step's product. Rows of
x are read through L1, which codes bypass.

Order of 64 columns in memory: [4 threads, 4 products, 2, 2]; in a fragment: [4 products, 2, 4 threads, 2].

next: quantised/gpu.py
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tmoe.ops.experts.kernels import activate, halves_of
from tmoe.ops.quantised.kernels import instructions


@gluon.constexpr_function
def halves(ACT):
    """Rows of the matrix for each column of the result."""
    return 1 if ACT is None else halves_of(ACT)


@gluon.constexpr_function
def columns(KIND, BL):
    """Pairs of numbers of x in a step."""
    return BL if KIND == "int4" else BL // 2


@gluon.constexpr_function
def doubled(first, last):
    """first, 2 first, ... below last."""
    out = []
    while first < last:
        out.append(first)
        first *= 2
    return out


@gluon.constexpr_function
def codes_layout(BN, BL, WARPS):
    """[BN, BL / 4] words: a warp has 16 rows at a time, and a thread 4 words of rows r and r + 8."""
    registers = [[0, 1], [0, 2], [8, 0]]
    registers += [[m, 0] for m in doubled(16 * WARPS, BN)] + [[0, k] for k in doubled(16, BL // 4)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    warps = [[m, 0] for m in doubled(16, 16 * WARPS)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BN, BL // 4])


@gluon.constexpr_function
def rows_layout(BL, BM, WARPS):
    """[BL / 2, BM] pairs of x: a thread has 8 pairs of a row. All warps have the same."""
    registers = [[k, 0] for k in (1, 2, 4)] + [[0, m] for m in doubled(8, BM)]
    registers += [[k, 0] for k in doubled(32, BL // 2)]
    lanes = [[8, 0], [16, 0], [0, 1], [0, 2], [0, 4]]
    warps = [[0, 0] for _ in doubled(1, WARPS)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BL // 2, BM])


@gluon.constexpr_function
def apart(text):
    """PTX whose two registers of two bf16 numbers each become four results. $0 to $3; the word is $4."""
    text = text.replace("$2", "$4").replace("$0", "p").replace("$1", "q")
    return "{ .reg .b32 p, q; " + text + " mov.b32 {$0, $1}, p; mov.b32 {$2, $3}, q; }"


@gluon.jit
def weight(words, KIND: gl.constexpr, MMA: gl.constexpr):
    """The left operand [BN, BL] from words of four codes."""
    BN: gl.constexpr = words.shape[0]
    BL: gl.constexpr = words.shape[1] * 4
    a, b, c, d = gl.inline_asm_elementwise(
        apart(instructions(KIND)),
        "=h,=h,=h,=h,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    found = gl.join(gl.join(a, b), gl.join(c, d))  # the last columns: of a pair, pairs
    found = found.reshape([BN, BL // 64, 4, 4, 2, 2]).permute((0, 1, 3, 5, 2, 4)).reshape([BN, BL])
    return gl.convert_layout(found, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def narrow(pairs, MMA: gl.constexpr):
    """The right operand [BL, BM] from pairs of x, [BL / 2, BM]."""
    BL: gl.constexpr = pairs.shape[0] * 2
    BM: gl.constexpr = pairs.shape[1]
    a, b = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [pairs],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    x = gl.join(a, b).reshape([BL // 64, 4, 4, 2, BM, 2]).permute((0, 2, 3, 1, 5, 4)).reshape([BL, BM])
    return gl.convert_layout(x, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)


@gluon.jit
def step(acc, words, x, x_high, scale, KIND: gl.constexpr, MMA: gl.constexpr):
    """acc plus the product over one step; of int4 that is a group with its scales."""
    if KIND == "int4":
        part = gl.zeros(acc.shape, gl.float32, layout=MMA)
        part = mma_v2(weight(words, "low", MMA), narrow(x, MMA), part)
        part = mma_v2(weight(words, "high", MMA), narrow(x_high, MMA), part)
        return acc + part * gl.expand_dims(scale.to(gl.float32), 1)
    else:
        return mma_v2(weight(words, KIND, MMA), narrow(x, MMA), acc)


@gluon.jit
def load_codes(codes_at, k, BL: gl.constexpr):
    """Codes of step k. They are read once, so they are not kept in L1."""
    return gl.load(codes_at + k * (BL // 4), cache_modifier=".cg")


@gluon.jit
def load_rows(x_at, scales_at, k, KIND: gl.constexpr, BL: gl.constexpr):
    """Rows of x and scales of step k."""
    if KIND == "int4":
        x = gl.load(x_at + k * BL)
        x_high = gl.load(x_at + k * BL + BL // 2)
        scale = gl.load(scales_at + k)
    else:
        x = gl.load(x_at + k * (BL // 2))
        x_high = x
        scale = 0
    return x, x_high, scale


@gluon.jit
def product(
    acc, a, codes_at, x_at, scales_at, steps,
    KIND: gl.constexpr, BL: gl.constexpr, ODD: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """acc plus the product over all steps. a: codes of the first.

    Two sets of registers hold this step and the next in turn.
    Loads of a step precede the product of the step before; a copy between sets would be a fifth of all
    instructions.
    """
    a_x, a_high, a_scale = load_rows(x_at, scales_at, 0, KIND, BL)
    for i in range((steps - 1) // 2):
        b = load_codes(codes_at, 2 * i + 1, BL)
        b_x, b_high, b_scale = load_rows(x_at, scales_at, 2 * i + 1, KIND, BL)
        acc = step(acc, a, a_x, a_high, a_scale, KIND, MMA)
        a = load_codes(codes_at, 2 * i + 2, BL)
        a_x, a_high, a_scale = load_rows(x_at, scales_at, 2 * i + 2, KIND, BL)
        acc = step(acc, b, b_x, b_high, b_scale, KIND, MMA)
    if not ODD:
        b = load_codes(codes_at, steps - 1, BL)
        b_x, b_high, b_scale = load_rows(x_at, scales_at, steps - 1, KIND, BL)
        acc = step(acc, a, a_x, a_high, a_scale, KIND, MMA)
        return step(acc, b, b_x, b_high, b_scale, KIND, MMA)
    else:
        return step(acc, a, a_x, a_high, a_scale, KIND, MMA)


@gluon.jit
def load_group(codes_at, scales_at, k, BL: gl.constexpr):
    """Codes and scales of step k."""
    return load_codes(codes_at, k, BL), gl.load(scales_at + k)


@gluon.jit
def load_columns(x_at, k, BL: gl.constexpr):
    """Rows of x of step k: of the low and of the high four bits of codes."""
    return gl.load(x_at + k * BL), gl.load(x_at + k * BL + BL // 2)


@gluon.jit
def deep_product(
    acc, a, codes_at, x_at, scales_at, steps, BL: gl.constexpr, LAST: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """`product` of int4 with three steps of codes and one of x on their way while a step is computed.

    LAST: the steps after the loop, 3 to 6, or fewer if there are fewer in all.
    """
    a_scale = gl.load(scales_at)
    if LAST > 1:
        b, b_scale = load_group(codes_at, scales_at, 1, BL)
    if LAST > 2:
        c, c_scale = load_group(codes_at, scales_at, 2, BL)
    x, x_high = load_columns(x_at, 0, BL)
    k = 0
    if LAST > 2:
        for _ in range((steps - LAST) // 4):
            d, d_scale = load_group(codes_at, scales_at, k + 3, BL)
            y, y_high = load_columns(x_at, k + 1, BL)
            acc = step(acc, a, x, x_high, a_scale, "int4", MMA)
            a, a_scale = load_group(codes_at, scales_at, k + 4, BL)
            x, x_high = load_columns(x_at, k + 2, BL)
            acc = step(acc, b, y, y_high, b_scale, "int4", MMA)
            b, b_scale = load_group(codes_at, scales_at, k + 5, BL)
            y, y_high = load_columns(x_at, k + 3, BL)
            acc = step(acc, c, x, x_high, c_scale, "int4", MMA)
            c, c_scale = load_group(codes_at, scales_at, k + 6, BL)
            x, x_high = load_columns(x_at, k + 4, BL)
            acc = step(acc, d, y, y_high, d_scale, "int4", MMA)
            k += 4
    if LAST > 3:
        d, d_scale = load_group(codes_at, scales_at, k + 3, BL)
    if LAST > 1:
        y, y_high = load_columns(x_at, k + 1, BL)
    acc = step(acc, a, x, x_high, a_scale, "int4", MMA)
    if LAST > 4:
        a, a_scale = load_group(codes_at, scales_at, k + 4, BL)
    if LAST > 2:
        x, x_high = load_columns(x_at, k + 2, BL)
    if LAST > 1:
        acc = step(acc, b, y, y_high, b_scale, "int4", MMA)
    if LAST > 5:
        b, b_scale = load_group(codes_at, scales_at, k + 5, BL)
    if LAST > 3:
        y, y_high = load_columns(x_at, k + 3, BL)
    if LAST > 2:
        acc = step(acc, c, x, x_high, c_scale, "int4", MMA)
    if LAST > 4:
        x, x_high = load_columns(x_at, k + 4, BL)
    if LAST > 3:
        acc = step(acc, d, y, y_high, d_scale, "int4", MMA)
    if LAST > 5:
        y, y_high = load_columns(x_at, k + 5, BL)
    if LAST > 4:
        acc = step(acc, a, x, x_high, a_scale, "int4", MMA)
    if LAST > 5:
        acc = step(acc, b, y, y_high, b_scale, "int4", MMA)
    return acc


@gluon.jit(do_not_specialize=["capacity", "T", "G", "num_n", "steps"])
def few_rows_direct(
    x, codes, scales, bias, order, tiles, capacity, offsets, y,
    T, W, L, C, G, num_n, steps,
    KIND: gl.constexpr, ACT: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, TABLE: gl.constexpr,
    BN: gl.constexpr, BM: gl.constexpr, BL: gl.constexpr, ODD: gl.constexpr, WARPS: gl.constexpr,
    PARTS: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """kernels.few_rows for int8, int4 and fp8 with rows of x in bf16.

    x and codes are int32, so L counts pairs of numbers and C words of four bytes. BL: bytes of a row in a
    step, a multiple of 64; of int4 64, a group. steps: of a part of a row. ODD: whether their number is odd.
    AHEAD: the previous kernel writes nothing that this one reads but rows of x, so the first codes are loaded
        while it runs.
    """
    HALVES: gl.constexpr = halves(ACT)
    BW: gl.constexpr = BN // HALVES
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    A: gl.constexpr = codes_layout(BN, BL, WARPS)
    B: gl.constexpr = rows_layout(BL, BM, WARPS)
    pm = gl.program_id(0) // num_n
    pn = gl.program_id(0) % num_n
    if EARLY and not AHEAD:
        gdc_wait()
    if TABLE:  # not through L1, which may be older than the table
        count = gl.load(tiles, cache_modifier=".cg")
        e = gl.load(tiles + 4 + pm, cache_modifier=".cg").to(gl.int64)
        first = gl.load(tiles + 4 + capacity + pm, cache_modifier=".cg")
        if pm >= count:
            if EARLY and AHEAD:
                gdc_wait()  # a launch that has ended waited for the previous one
            return
    else:
        e = pm.to(gl.int64) * 0
        first = pm * ROWS
    before = e * (HALVES * W)  # rows of other experts; this expert's numbers fit in 32 bits
    row = row_of(gl.arange(0, BN, layout=gl.SliceLayout(1, A)), pn, W, BW, HALVES)
    word = gl.arange(0, BL // 4, layout=gl.SliceLayout(0, A))
    codes_at = codes + before * C + (gl.expand_dims(row * C, 1) + gl.expand_dims(word, 0))
    own = row_of(gl.arange(0, BN, layout=gl.SliceLayout(1, MMA)), pn, W, BW, HALVES)
    scales_at = scales + before * G + own * G
    if PARTS > 1:
        skipped = gl.program_id(1) * steps
        codes_at += skipped * (BL // 4)
        x += skipped * columns(KIND, BL)
        y += gl.program_id(1).to(gl.int64) * T * W
        if KIND == "int4":
            scales_at += skipped
    words = load_codes(codes_at, 0, BL)
    if KIND != "int4":
        scale = gl.load(scales_at).to(gl.float32)
    if EARLY:
        if AHEAD:
            gdc_wait()
        gdc_launch_dependents()
    hi = T
    if TABLE:
        hi = gl.load(offsets + e + 1, cache_modifier=".cg")
    last = gl.minimum(first + ROWS, hi)
    for begin in range(first, last, BM):
        r = gl.minimum(begin + gl.arange(0, BM, layout=gl.SliceLayout(0, B)), last - 1)
        if order is not None:
            r = gl.load(order + r) // K
        l = gl.expand_dims(gl.arange(0, BL // 2, layout=gl.SliceLayout(1, B)), 1)
        x_at = x + (gl.expand_dims(r.to(gl.int64) * L, 0) + l)
        acc = gl.zeros((BN, BM), gl.float32, layout=MMA)
        if LAST > 0:
            acc = deep_product(acc, words, codes_at, x_at, scales_at, steps, BL, LAST, MMA)
        else:
            acc = product(acc, words, codes_at, x_at, scales_at, steps, KIND, BL, ODD, MMA)
        if KIND != "int4":
            acc = acc * gl.expand_dims(scale, 1)
        if bias is not None:
            acc += gl.expand_dims(gl.load(bias + before + own).to(gl.float32), 1)
        out = activated(acc, y, ACT)
        store(y, out, begin, last, pn * BW, W, WARPS)
        if begin + BM < last:
            words = load_codes(codes_at, 0, BL)


@gluon.jit
def activated(acc, y, ACT: gl.constexpr):
    """The activation of a tile [BN, BM], whose gate's rows are those of `row_of`; without one the tile."""
    if ACT is None:
        return acc
    else:
        rounded = acc.to(y.dtype.element_ty).to(gl.float32)  # like H in training
        if halves(ACT) == 2:
            BN: gl.constexpr = acc.shape[0]
            BM: gl.constexpr = acc.shape[1]
            both = rounded.reshape([BN // 16, 2, 8, BM]).permute((0, 2, 3, 1))
            gate, up = gl.split(both)
            return activate(gate, up, True, ACT).reshape([BN // 2, BM])
        else:
            return activate(rounded, rounded, True, ACT)


@gluon.jit
def row_of(j, pn, W, BW: gl.constexpr, HALVES: gl.constexpr):
    """The row of an expert's matrix for row j of a tile; beyond the last it repeats the last.

    With a gate, eight rows of the gate alternate with the same eight of the other half, so that a thread has
    both numbers of a column.
    """
    if HALVES == 2:
        n = pn * BW + j // 16 * 8 + j % 8
        half = j // 8 % 2
    else:
        n = pn * BW + j
        half = j * 0
    return half * W + gl.minimum(n, W - 1)


@gluon.jit
def store(y, out, begin, last, col, W, WARPS: gl.constexpr):
    """Stores a tile [columns, rows] to rows of y."""
    BW: gl.constexpr = out.shape[0]
    BM: gl.constexpr = out.shape[1]
    OUT: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, WARPS], [0, 1])
    out = gl.convert_layout(out.to(y.dtype.element_ty), OUT)
    cols = col + gl.arange(0, BW, layout=gl.SliceLayout(1, OUT))
    r = begin + gl.arange(0, BM, layout=gl.SliceLayout(0, OUT))
    at = y + (gl.expand_dims(r.to(gl.int64) * W, 0) + gl.expand_dims(cols, 1))
    gl.store(at, out, mask=gl.expand_dims(cols < W, 1) & gl.expand_dims(r < last, 0))
