"""Products of stacks of matrices for Hopper, warp-specialised (Gluon): a loader and consumers.

    gram, mix    C = s (alpha A A^T + beta D + gamma I), which is symmetric: the tiles on and below the
                 diagonal are computed, and each is stored twice
    commuting    C = s A B of symmetric matrices that commute: C is symmetric, and half of it is computed
    update       C = A B

C may have another 16-bit type than A and B.

The loader keeps a ring of operand tiles full by bulk copies, during the epilogue too. The consumers, eight
warps on a tile of 128 rows, round a finished tile into shared memory; the copy engine stores it from there.
A tile of 256 columns reads less shared memory for each product than one of 128. On the diagonal every second
such tile would be half in vain: a tile there has 128 columns, whose two operands are the same rows of A.

next: ops/symmetric.py
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tmoe.ops.experts.gluon_names import bulk_load, bulk_store
from tmoe.ops.experts.hopper import multiply
from tmoe.ops.experts.kernels import slices


@gluon.jit
def place(t, tiles, num_n, BM: gl.constexpr, BN: gl.constexpr, HALF: gl.constexpr):
    """Tile t as (matrix, row tile, column tile, whether it is the left half of a tile on the diagonal).

    tiles: of one matrix. HALF: they are those on and below the diagonal, along their rows.

    With HALF a matrix begins with another tile than the matrices of the previous round of tiles. 132 programs
    have 11 matrices of 12 tiles a round: without this rule a program would compute tiles of one place alone,
    and those that are half as wide would wait for the others, 12% of the time.
    """
    e = t // tiles
    r = t - e * tiles
    if HALF:
        r = (r + e * tiles // gl.num_programs(0)) % tiles
        R: gl.constexpr = BN // BM  # row tiles of as many column tiles
        q = r * 0
        while R * (q + 1) * (q + 2) // 2 <= r:
            q += 1
        r -= R * q * (q + 1) // 2
        i = R * q + r // (q + 1)
        j = r % (q + 1)
        return e, i, j, j * BN == i * BM
    else:
        i = r // num_n
        return e, i, r - i * num_n, False


@gluon.jit
def load_tiles(
    a, b, total, tiles, num_n, steps, a_bufs, b_bufs, full, empty,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, S: gl.constexpr,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, HALF: gl.constexpr, SQUARE: gl.constexpr,
):  # fmt: skip
    """The loader: loads A and B for every step of every tile of this program.

    SQUARE: B is A, which alone is loaded on the diagonal.
    """
    it = 0
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        e, i, j, narrow = place(t, tiles, num_n, BM, BN, HALF)
        for k in range(steps):
            s = it % S
            mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
            arrived = full.index(s)
            if narrow and SQUARE:
                mbarrier.expect(arrived, BM * BL * 2)
            else:
                mbarrier.expect(arrived, (BM + BN) * BL * 2)
                if B_ROWS:
                    bulk_load(b, [e, j * BN, k * BL], arrived, b_bufs.index(s))
                else:
                    bulk_load(b, [e, k * BL, j * BN], arrived, b_bufs.index(s))
            if A_ROWS:
                bulk_load(a, [e, i * BM, k * BL], arrived, a_bufs.index(s))
            else:
                bulk_load(a, [e, k * BL, i * BM], arrived, a_bufs.index(s))
            it += 1


@gluon.jit
def product(
    steps, it, a_bufs, b_bufs, full, empty,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, S: gl.constexpr,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr,
):  # fmt: skip
    """A tile's product [BM, BN] of `steps` steps, from step `it` of the ring on."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, BN, 16]
    )
    acc = warpgroup_mma_init(gl.zeros((BM, BN), gl.float32, layout=mma))
    KIND: gl.constexpr = "rows" if A_ROWS else "dw"
    acc, it = multiply(
        acc, steps, it, a_bufs, b_bufs, full, empty, BM, BN, BL, BL, S, KIND, B_ROWS, "", False
    )
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((it + S - 1) % S), count=1)
    return acc


@gluon.jit
def load_part(d, e, row, col, m, like, BM: gl.constexpr, W: gl.constexpr):
    """The numbers of D [E, m, m] that lie where a part [BM, W] of a tile does; zeros outside."""
    layout: gl.constexpr = like.type.layout
    r = row + gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    c = col + gl.arange(0, W, layout=gl.SliceLayout(0, layout))
    at = d + e.to(gl.int64) * m * m + gl.expand_dims(r * m, 1) + gl.expand_dims(c, 0)
    return gl.load(at, mask=gl.expand_dims(r < m, 1) & gl.expand_dims(c < m, 0), other=0.0)


@gluon.jit
def with_one(part, row, col, gamma, BM: gl.constexpr, W: gl.constexpr):
    """A part [BM, W] of a tile, to whose numbers on the diagonal gamma is added."""
    layout: gl.constexpr = part.type.layout
    r = row + gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    c = col + gl.arange(0, W, layout=gl.SliceLayout(0, layout))
    return gl.where(gl.expand_dims(r, 1) == gl.expand_dims(c, 0), part + gamma, part)


@gluon.jit
def compute_tile(
    c, mirror, d, scale, e, row, col, m, alpha, beta, gamma, steps, it, a_bufs, b_bufs, full, empty, out,
    turned,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, S: gl.constexpr, W: gl.constexpr,
    OUTS: gl.constexpr, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, MIRRORED: gl.constexpr,
):  # fmt: skip
    """Computes a tile and stores it in parts of W columns; with MIRRORED, those below the diagonal twice.

    The second store of a part on the diagonal is outside of C, where nothing is written: its transpose would
    be written to elements that the part itself contains.
    """
    SUB: gl.constexpr = BN // W
    parts = slices(product(steps, it, a_bufs, b_bufs, full, empty, BM, BN, BL, S, A_ROWS, B_ROWS), SUB)
    if d is not None:
        ahead = load_part(d, e, row, col, m, parts[0], BM, W)
    tma.store_wait(pendings=0)
    for j in gl.static_range(SUB):
        at = col + j * W
        part = parts[j]
        if scale is not None:
            part = part * alpha
            if d is not None:
                part = with_one(part + beta * ahead.to(gl.float32), row, at, gamma, BM, W)
                if j + 1 < SUB:
                    ahead = load_part(d, e, row, at + W, m, part, BM, W)
            part = part * scale
        rounded = part.to(out.dtype)
        if j >= OUTS:  # the stores that last used these buffers have read them
            tma.store_wait(pendings=(2 if MIRRORED else 1) * (OUTS - 1))
        out.index(j % OUTS).reshape([BM, W]).store(rounded)
        if MIRRORED:
            turned.index(j % OUTS).reshape([W, BM]).permute((1, 0)).store(rounded)
        fence_async_shared()
        bulk_store(c, [e, row, at], out.index(j % OUTS))
        if MIRRORED:
            bulk_store(mirror, [e, gl.where(at < row, at, m), row], turned.index(j % OUTS))


@gluon.jit
def consume_tiles(
    c, mirror, d, scales, total, tiles, num_n, steps, m, alpha, beta, gamma,
    a_bufs, b_bufs, full, empty, out, turned,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, S: gl.constexpr, W: gl.constexpr,
    OUTS: gl.constexpr, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, HALF: gl.constexpr,
    SQUARE: gl.constexpr,
):  # fmt: skip
    """The consumers: compute every tile of this program and have the copy engine store it."""
    second = b_bufs  # of operand B on the diagonal; its first BM rows are read
    if SQUARE:
        second = a_bufs
    it = 0
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        e, i, j, narrow = place(t, tiles, num_n, BM, BN, HALF)
        row, col = i * BM, j * BN
        scale = None
        if HALF:
            scale = gl.load(scales + e)
        if narrow:
            compute_tile(c, mirror, d, scale, e, row, col, m, alpha, beta, gamma, steps, it, a_bufs, second,
                         full, empty, out, turned, BM, BM, BL, S, W, OUTS, A_ROWS, A_ROWS, False)  # fmt: skip
        else:
            compute_tile(c, mirror, d, scale, e, row, col, m, alpha, beta, gamma, steps, it, a_bufs, b_bufs,
                         full, empty, out, turned, BM, BN, BL, S, W, OUTS, A_ROWS, B_ROWS, HALF)  # fmt: skip
        it += steps
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["total", "tiles", "num_n", "steps", "m", "alpha", "beta", "gamma"])
def stacked_kernel(
    a, b, c, mirror, d, scales, total, tiles, num_n, steps, m, alpha, beta, gamma,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, S: gl.constexpr, W: gl.constexpr,
    OUTS: gl.constexpr, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, HALF: gl.constexpr,
    SQUARE: gl.constexpr,
):  # fmt: skip
    """C[e] of every matrix of a stack.

    a, b: descriptors of the operands; A_ROWS, B_ROWS: the sum runs along their rows. With SQUARE, which needs
        HALF, b is a with another box.
    c, mirror: descriptors of C with boxes [BM, W] and [W, BM]; mirror with HALF alone.
    d, scales: with HALF, D [E, m, m] of A's type or None, and s [E] in fp32.
    total: number of tiles. tiles: of a matrix. steps: of BL numbers of a sum.
    S, OUTS: buffers of the ring, and of the parts of W columns that are being stored.
    """
    A_BOX: gl.constexpr = [1, BM, BL] if A_ROWS else [1, BL, BM]
    B_BOX: gl.constexpr = [1, BN, BL] if B_ROWS else [1, BL, BN]
    ELEMENT: gl.constexpr = a.dtype
    a_bufs = gl.allocate_shared_memory(
        ELEMENT, [S] + A_BOX, gl.NVMMASharedLayout.get_default_for(A_BOX, ELEMENT)
    )
    b_bufs = gl.allocate_shared_memory(
        ELEMENT, [S] + B_BOX, gl.NVMMASharedLayout.get_default_for(B_BOX, ELEMENT)
    )
    RESULT: gl.constexpr = c.dtype
    out = gl.allocate_shared_memory(
        RESULT, [OUTS, 1, BM, W], gl.NVMMASharedLayout.get_default_for([1, BM, W], RESULT)
    )
    turned = out
    if HALF:
        turned = gl.allocate_shared_memory(
            RESULT, [OUTS, 1, W, BM], gl.NVMMASharedLayout.get_default_for([1, W, BM], RESULT)
        )
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize([
        (consume_tiles, (c, mirror, d, scales, total, tiles, num_n, steps, m, alpha, beta, gamma,
                         a_bufs, b_bufs, full, empty, out, turned,
                         BM, BN, BL, S, W, OUTS, A_ROWS, B_ROWS, HALF, SQUARE)),
        (load_tiles, (a, b, total, tiles, num_n, steps, a_bufs, b_bufs, full, empty,
                      BM, BN, BL, S, A_ROWS, B_ROWS, HALF, SQUARE)),
    ], [1], [24])  # fmt: skip
