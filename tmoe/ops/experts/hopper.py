"""The products for Hopper, warp-specialised (Gluon): a loader, consumers and finishers.

The plain kernels of kernels.py stop loading during a tile's epilogue, so the tensor cores are idle. In these
kernels the loader keeps the ring of operand tiles full during the epilogue. The consumers are eight warps on
a 128x256 tile, or four on 64x256 if experts have few rows. They only round a finished tile into shared
memory. From there the copy engine stores a plain product. Epilogues that need many instructions are run by
the finishers, while the consumers multiply the next tile.

Two warpgroups that alternate on 128x128 tiles hide epilogues too, but read more shared memory and L2 for each
product (docs/kernels.md has the figures). The loader either gathers rows (GATHER: two or four warps of
cp.async), or is one warp that issues bulk copies.

Operands, results and tile order are those of `up_kernel`, `rows_kernel`, `dh_kernel` and `dw_kernel`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tmoe.ops.experts.gluon_names import bulk_load, bulk_store, reinterpret, thread_load
from tmoe.ops.experts.kernels import (
    RAGGED,
    activate,
    activate_backward,
    halves_of,
    slices,
    tile_at,
    weight_tile_at,
)


@gluon.jit
def tile_count(tiles, E, num_m, num_n, KIND: gl.constexpr):
    """The number of tiles: for dw from the shapes, otherwise from the table."""
    if KIND == "dw":
        return E * num_m * num_n
    else:
        return gl.load(tiles) * num_n


@gluon.jit
def locate(t, tiles, capacity, offsets, num_m, num_n, GROUP, BM: gl.constexpr, KIND: gl.constexpr):
    """Tile t as (expert, its rows lo..hi, first row of the tile, column tile); tiles is by_size for dw."""
    if KIND == "dw":
        e, lo, hi, pm, pn = weight_tile_at(t, tiles, offsets, num_m, num_n, GROUP)
        return e, lo, hi, pm * BM, pn
    else:
        return tile_at(t, tiles, capacity, offsets, num_n, GROUP)


@gluon.constexpr_function
def b_box(BN, BL, KIND, B_ROWS):
    """The box of a step of BL numbers of operand B."""
    dw = [1, 1, BL, BN] if KIND == "dw" else [1, BL, BN]
    return [2, BN // 2, BL] if KIND == "up" else [1, BN, BL] if B_ROWS else dw


@gluon.constexpr_function
def per_buffer(shape, size):
    """Number of tiles of `size` elements for which a buffer of a ring of this shape has room."""
    buffer = 1
    for length in shape[1:]:
        buffer *= length
    return buffer // size


@gluon.jit
def stage(bufs, s, BOX: gl.constexpr, PARTS: gl.constexpr):
    """The first 1 / PARTS of buffer s of a ring, as a tile of shape BOX."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BOX, bufs.dtype)
    return reinterpret(bufs, bufs.dtype, [bufs.shape[0] * PARTS] + BOX, LAYOUT).index(s * PARTS)


@gluon.jit
def load_b(b, arrived, buf, e, pn, first, BN: gl.constexpr, KIND: gl.constexpr, B_ROWS: gl.constexpr):
    """Load a tile of b[e]: its columns of number pn, and rows of the sum from `first` on."""
    if KIND == "up":
        bulk_load(b, [2 * e, pn * (BN // 2), first], arrived, buf)
    elif B_ROWS:
        bulk_load(b, [e, pn * BN, first], arrived, buf)
    else:
        bulk_load(b, [e, first, pn * BN], arrived, buf)


@gluon.jit
def load_tiles_of_rows(
    a, b, u, v, order, tiles, capacity, offsets, E, num_m, num_n, steps, more, GROUP, stride, a_bufs, b_bufs,
    full, empty,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, RL: gl.constexpr, S: gl.constexpr, K: gl.constexpr,
    KIND: gl.constexpr, B_ROWS: gl.constexpr, GATHER: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """`load_tiles` of every product but dw; GATHER is "a" or "".

    The last `more` steps of a tile load u and v, RL columns a step. Their rows are not gathered.
    """
    it = 0
    for t in range(gl.program_id(0), tile_count(tiles, E, num_m, num_n, KIND), gl.num_programs(0)):
        e, _, hi, row, pn = locate(t, tiles, capacity, offsets, num_m, num_n, GROUP, BM, KIND)
        if GATHER == "a":
            r = row + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
            # Rows past the end are never stored. Tiles of 64 rows do not load them, which costs full tiles
            # 5%. If all of them read token 0, in every program at the same time, that cost half of a tile's
            # time.
            tok = gl.load(order + gl.minimum(r, hi - 1)) // K
            cols = gl.arange(0, BL, layout=gl.SliceLayout(0, LAYOUT))
            a_rows = a + gl.expand_dims(tok.to(gl.int64) * stride, 1) + gl.expand_dims(cols, 0)
        for k in range(steps):
            s = it % S
            mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
            arrived = full.index(s)
            mbarrier.expect(arrived, ((0 if GATHER == "a" else BM) + BN) * BL * 2)
            if GATHER == "a":
                rows = a_bufs.index(s).reshape([BM, BL])
                if BM == 64:
                    thread_load(rows, a_rows + k * BL, mask=gl.expand_dims(r < hi, 1))
                else:
                    thread_load(rows, a_rows + k * BL)
            else:
                at = [RAGGED, hi, RAGGED - (hi - row), k * BL]
                bulk_load(a, at, arrived, a_bufs.index(s))
            load_b(b, arrived, b_bufs.index(s), e, pn, k * BL, BN, KIND, B_ROWS)
            if GATHER == "a":
                async_copy.mbarrier_arrive(arrived, increment_count=False)
            it += 1
        if u is not None:
            for k in range(more):
                s = it % S
                mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
                arrived = full.index(s)
                mbarrier.expect(arrived, (BM + BN) * RL * 2)
                left = stage(a_bufs, s, [1, 1, BM, RL], BL // RL)
                right = stage(b_bufs, s, b_box(BN, RL, KIND, B_ROWS), BL // RL)
                bulk_load(u, [RAGGED, hi, RAGGED - (hi - row), k * RL], arrived, left)
                load_b(v, arrived, right, e, pn, k * RL, BN, KIND, B_ROWS)
                if GATHER == "a":
                    async_copy.mbarrier_arrive(arrived, increment_count=False)
                it += 1


@gluon.jit
def load_tiles_of_dw(
    a, b, order, tiles, capacity, offsets, E, num_m, num_n, GROUP, stride, a_bufs, b_bufs, full, empty,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, S: gl.constexpr, K: gl.constexpr,
    GATHER: gl.constexpr, EDGE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """`load_tiles` of dw: a step is BL rows of the tile's expert."""
    it = 0
    for t in range(gl.program_id(0), tile_count(tiles, E, num_m, num_n, "dw"), gl.num_programs(0)):
        _, lo, hi, row, pn = locate(t, tiles, capacity, offsets, num_m, num_n, GROUP, BM, "dw")
        if GATHER != "":
            r = lo + gl.arange(0, BL, layout=gl.SliceLayout(1, LAYOUT))
            tok = gl.load(order + r, mask=r < hi, other=0) // K
            W: gl.constexpr = BM if GATHER == "a" else BN
            cols = (row if GATHER == "a" else pn * BN) + gl.arange(0, W, layout=gl.SliceLayout(0, LAYOUT))
        for k in range(gl.cdiv(hi - lo, BL)):
            s = it % S
            mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
            arrived = full.index(s)
            mbarrier.expect(arrived, ((0 if GATHER == "a" else BM) + (0 if GATHER == "b" else BN)) * BL * 2)
            if GATHER != "":
                bufs = (a_bufs if GATHER == "a" else b_bufs).index(s).reshape([BL, W])
                source = (a if GATHER == "a" else b) + gl.expand_dims(tok.to(gl.int64) * stride, 1)
                mask = gl.expand_dims(r < hi, 1)  # rows past the end are zeros
                if EDGE:  # the memory after the last token's row may not be mapped
                    mask = mask & gl.expand_dims(cols < stride, 0)
                thread_load(bufs, source + gl.expand_dims(cols, 0), mask=mask)
                r += BL
                tok = gl.load(order + r, mask=r < hi, other=0) // K  # a step ahead
            at = [RAGGED, hi, RAGGED - (hi - lo) + k * BL]
            if GATHER != "a":
                bulk_load(a, at + [row], arrived, a_bufs.index(s))
            if GATHER != "b":
                bulk_load(b, at + [pn * BN], arrived, b_bufs.index(s))
            if GATHER != "":
                async_copy.mbarrier_arrive(arrived, increment_count=False)
            it += 1


@gluon.jit
def load_tiles(
    a, b, u, v, order, tiles, capacity, offsets, E, num_m, num_n, steps, more, GROUP, stride, a_bufs, b_bufs,
    full, empty,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, RL: gl.constexpr, S: gl.constexpr, K: gl.constexpr,
    KIND: gl.constexpr, B_ROWS: gl.constexpr, GATHER: gl.constexpr, EDGE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The loader: loads A and B for every step of every tile of this program."""
    if KIND == "dw":
        load_tiles_of_dw(
            a, b, order, tiles, capacity, offsets, E, num_m, num_n, GROUP, stride, a_bufs, b_bufs, full,
            empty, BM, BN, BL, S, K, GATHER, EDGE, LAYOUT,
        )  # fmt: skip
    else:
        load_tiles_of_rows(
            a, b, u, v, order, tiles, capacity, offsets, E, num_m, num_n, steps, more, GROUP, stride, a_bufs,
            b_bufs, full, empty, BM, BN, BL, RL, S, K, KIND, B_ROWS, GATHER, LAYOUT,
        )  # fmt: skip


@gluon.jit
def store_tile(c, smem, e, hi, row, col, KIND: gl.constexpr):
    """Store a tile from shared memory by the copy engine; rows from hi on are clipped."""
    if KIND == "dw":
        bulk_store(c, [e, row, col], smem.reshape([1] + smem.shape))
    else:
        bulk_store(c, [RAGGED, hi, RAGGED - (hi - row), col], smem.reshape([1, 1] + smem.shape))


@gluon.jit
def multiply(
    acc, steps, it, a_bufs, b_bufs, full, empty,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, L: gl.constexpr, S: gl.constexpr,
    KIND: gl.constexpr, B_ROWS: gl.constexpr, GATHER: gl.constexpr, AFTER: gl.constexpr,
):  # fmt: skip
    """acc and `it` after `steps` further steps of L numbers; the last one may still run.

    BL: numbers for which a buffer of A has room. A buffer of B may have room for several tiles [BN, L].
    AFTER: acc is the result of other steps, at least one.
    """
    PARTS: gl.constexpr = per_buffer(b_bufs.shape, BN * L)
    for k in range(steps):
        s = it % S
        mbarrier.wait(full.index(s), it // S & 1)
        if GATHER != "":
            # cp.async writes through the generic proxy, wgmma reads through the async proxy
            fence_async_shared()
        if L == BL:
            a_tile = a_bufs.index(s)
        else:
            a_tile = stage(a_bufs, s, [1, 1, BM, L], BL // L)
        if PARTS == 1:
            b_tile = b_bufs.index(s)
        else:
            b_tile = stage(b_bufs, s, b_box(BN, L, KIND, B_ROWS), PARTS)
        if KIND == "dw":
            a_tile = a_tile.reshape([L, BM]).permute((1, 0))
        else:
            a_tile = a_tile.reshape([BM, L])
        if B_ROWS:
            b_tile = b_tile.reshape([BN, L]).permute((1, 0))
        else:
            b_tile = b_tile.reshape([L, BN])
        later = k > 0
        if AFTER:
            later = k >= 0
        acc = warpgroup_mma(a_tile, b_tile, acc, is_async=True, use_acc=later)
        # wait returns a plain tensor
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        mbarrier.arrive(empty.index((it + S - 1) % S), count=1, pred=later)  # the previous step is done
        it += 1
    return acc, it


@gluon.jit
def load_slice(at, mask, HOW: gl.constexpr, like):
    """The values of a sum at these addresses; zeros if they are not needed."""
    if HOW == "add":
        return gl.load(at, mask=mask, other=0.0)
    else:
        return gl.zeros_like(like)


@gluon.jit
def into_sum(
    c, parts, e, row, col, P, Q, BM: gl.constexpr, W: gl.constexpr, SUB: gl.constexpr, HOW: gl.constexpr
):
    """Writes a tile's column slices into the sum c [E, P, Q] in fp32, or adds them to it.

    The threads that hold the product do it, since the copy engine cannot wait for what it would add to. Four
    threads have 32 consecutive bytes of a row, which is what memory transfers at least.

    HOW: "write"; "add": a slice is loaded while the slice before it is stored; "red": the L2 cache adds, and
        no thread waits for a load. Each element is added to once, so all three give the same bits each time.
    """
    layout: gl.constexpr = parts[0].type.layout
    r = row + gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, W, layout=gl.SliceLayout(0, layout))
    at = c + e.to(gl.int64) * P * Q + gl.expand_dims(r.to(gl.int64) * Q, 1) + gl.expand_dims(cols, 0)
    here = gl.expand_dims(r < P, 1)
    ahead = load_slice(at, here & gl.expand_dims(cols < Q, 0), HOW, parts[0])
    for j in gl.static_range(SUB):
        mask = here & gl.expand_dims(cols + j * W < Q, 0)
        values = ahead
        if j + 1 < SUB:
            ahead = load_slice(
                at + (j + 1) * W, here & gl.expand_dims(cols + (j + 1) * W < Q, 0), HOW, parts[0]
            )
        if HOW == "red":
            gl.atomic_add(at + j * W, parts[j], mask=mask, sem="relaxed")
        else:
            gl.store(at + j * W, parts[j] + values, mask=mask)


@gluon.jit
def consume_tiles(
    c, bias, tiles, capacity, offsets, E, F, num_m, num_n, steps, more, GROUP, P, Q, a_bufs, b_bufs, full,
    empty, out, staged, taken,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, RL: gl.constexpr, S: gl.constexpr,
    SUB: gl.constexpr, OUTS: gl.constexpr,
    KIND: gl.constexpr, B_ROWS: gl.constexpr, GATHER: gl.constexpr, SUMS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumers: compute the product of every tile of this program, rounded into shared memory.

    From there the copy engine stores "rows" and "dw", through OUTS buffers; the finishers process the tiles
    of "up", "ungated" and "dh". A dw with SUMS is not rounded, and stored by the consumers.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BN, 16]
    )
    W: gl.constexpr = BN // SUB
    HALVES: gl.constexpr = 1 if KIND == "ungated" else 2
    it = 0
    phase = 0
    for t in range(gl.program_id(0), tile_count(tiles, E, num_m, num_n, KIND), gl.num_programs(0)):
        e, lo, hi, row, pn = locate(t, tiles, capacity, offsets, num_m, num_n, GROUP, BM, KIND)
        n_steps = steps
        if KIND == "dw":
            n_steps = gl.cdiv(hi - lo, BL)
        acc = warpgroup_mma_init(gl.zeros((BM, BN), gl.float32, layout=mma))
        acc, it = multiply(acc, n_steps, it, a_bufs, b_bufs, full, empty, BM, BN, BL, BL, S, KIND, B_ROWS,
                           GATHER, False)  # fmt: skip
        if RL > 0:
            acc, it = multiply(acc, more, it, a_bufs, b_bufs, full, empty, BM, BN, BL, RL, S, KIND, B_ROWS,
                               GATHER, True)  # fmt: skip
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((it + S - 1) % S), count=1, pred=n_steps > 0)
        parts = slices(acc, SUB)
        if KIND == "up" or KIND == "ungated" or KIND == "dh":
            mbarrier.wait(taken, phase ^ 1)
            for j in gl.static_range(SUB):
                part = parts[j]
                if bias is not None:
                    row_of_bias = HALVES * e.to(gl.int64) + j // (SUB // HALVES)
                    cols = (
                        pn * (BN // HALVES)
                        + j % (SUB // HALVES) * W
                        + gl.arange(0, W, layout=gl.SliceLayout(0, part.type.layout))
                    )
                    loaded = gl.load(bias + row_of_bias * F + cols, mask=cols < F, other=0.0)
                    part += gl.expand_dims(loaded.to(gl.float32), 0)
                out.index(j).store(part.to(out.dtype))
            if KIND == "up" or KIND == "ungated":
                fence_async_shared()  # the copy engine reads the tile
            mbarrier.arrive(staged, count=1)
            phase ^= 1
        elif SUMS != "":
            if SUMS == "write" or n_steps > 0:
                into_sum(c, parts, e, row, pn * BN, P, Q, BM, W, SUB, SUMS)
        else:
            for j in gl.static_range(SUB):
                tma.store_wait(pendings=OUTS - 1)  # the store that last used this buffer has read it
                buf = out.index(j % OUTS)
                buf.store(parts[j].to(out.dtype))
                fence_async_shared()
                store_tile(c, buf, e, hi, row, pn * BN + j * W, KIND)
    tma.store_wait(pendings=0)


@gluon.jit
def chunk(out, j, i, BM: gl.constexpr, W: gl.constexpr, R: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows i * R to (i + 1) * R of the staged tile's slice j, in float32."""
    rows = reinterpret(out, out.dtype, [out.shape[0] * BM // R, R, W], out.layout)
    return rows.index(j * (BM // R) + i).load(LAYOUT).to(gl.float32)


@gluon.jit
def finish_up(
    c, c2, act, tiles, capacity, offsets, F, num_n, GROUP, out, staged, taken,
    BM: gl.constexpr, BN: gl.constexpr, SUB: gl.constexpr, ACT: gl.constexpr, KEEP: gl.constexpr,
    R: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The finishers of "up" and "ungated".

    The copy engine stores H, if it is kept; the activation is written by ordinary stores.
    """
    W: gl.constexpr = BN // SUB
    HALVES: gl.constexpr = halves_of(ACT)
    HALF: gl.constexpr = SUB // HALVES
    phase = 0
    for t in range(gl.program_id(0), gl.load(tiles) * num_n, gl.num_programs(0)):
        e, _, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        mbarrier.wait(staged, phase)
        if KEEP:
            for j in gl.static_range(HALF):
                col = pn * (BN // HALVES) + j * W
                store_tile(c, out.index(j), e, hi, row, col, "up")
                if HALVES == 2:
                    store_tile(c2, out.index(HALF + j), e, hi, row, col, "up")
        for i in range(BM // R):
            r = row + i * R + gl.arange(0, R, layout=gl.SliceLayout(1, LAYOUT))
            for j in gl.static_range(HALF):
                cols = pn * (BN // HALVES) + j * W + gl.arange(0, W, layout=gl.SliceLayout(0, LAYOUT))
                gate = chunk(out, j, i, BM, W, R, LAYOUT)
                up = gate
                if HALVES == 2:
                    up = chunk(out, HALF + j, i, BM, W, R, LAYOUT)
                at = act + gl.expand_dims(r.to(gl.int64) * F, 1) + gl.expand_dims(cols, 0)
                mask = gl.expand_dims(r < hi, 1) & gl.expand_dims(cols < F, 0)
                gl.store(at, activate(gate, up, True, ACT).to(out.dtype), mask=mask)
        tma.store_wait(pendings=0)
        mbarrier.arrive(taken, count=1)
        phase ^= 1


@gluon.jit
def load_h(h, r, hi, col, F, SUB: gl.constexpr, W: gl.constexpr, HALVES: gl.constexpr, LAYOUT: gl.constexpr):
    """SUB slices of gate and up, alternating, for the rows r below hi; without a gate SUB slices of H."""
    loaded = ()
    for j in gl.static_range(SUB):
        cols = col + j * W + gl.arange(0, W, layout=gl.SliceLayout(0, LAYOUT))
        at = h + gl.expand_dims(r.to(gl.int64) * (HALVES * F), 1) + gl.expand_dims(cols, 0)
        mask = gl.expand_dims(r < hi, 1) & gl.expand_dims(cols < F, 0)
        if HALVES == 2:
            loaded = loaded + (gl.load(at, mask=mask, other=0.0), gl.load(at + F, mask=mask, other=0.0))
        else:
            loaded = loaded + (gl.load(at, mask=mask, other=0.0),)
    return loaded


@gluon.jit
def finish_dh(
    h, dh, act, weights, ds, order, tiles, capacity, offsets, N, F, num_n, GROUP, out, scale, staged, taken,
    BM: gl.constexpr, BN: gl.constexpr, SUB: gl.constexpr, ACT: gl.constexpr, R: gl.constexpr,
    LAYOUT: gl.constexpr,
    CREW: gl.constexpr,
):  # fmt: skip
    """The finishers of "dh".

    From the staged gradient of act and from H they compute the gradients of both halves of H, s * act, and
    this column tile's part of <d_act, act>.

    H is loaded 2 R rows ahead. With R rows the latency of loads, not the arithmetic, was the limit (dh of
    Qwen3's shape took 1.57 ms; with 2 R rows it takes 1.43).
    """
    W: gl.constexpr = BN // SUB
    HALVES: gl.constexpr = halves_of(ACT)
    phase = 0
    for t in range(gl.program_id(0), gl.load(tiles) * num_n, gl.num_programs(0)):
        _, _, hi, row, pn = tile_at(t, tiles, capacity, offsets, num_n, GROUP)
        r = row + gl.arange(0, R, layout=gl.SliceLayout(1, LAYOUT))
        end = gl.minimum(hi, row + BM)
        ahead = load_h(h, r, end, pn * BN, F, SUB, W, HALVES, LAYOUT)
        further = load_h(h, r + R, end, pn * BN, F, SUB, W, HALVES, LAYOUT)
        places = row + gl.arange(0, BM, layout=gl.BlockedLayout([1], [32], [CREW], [0]))
        slot = gl.load(order + places, mask=places < hi, other=0)
        s = gl.load(weights + slot, mask=places < hi, other=0.0).to(gl.float32)
        reinterpret(scale, gl.float32, [BM], scale.layout).store(s)
        mbarrier.wait(staged, phase)
        for i in range(BM // R):
            loaded = ahead
            ahead = further
            further = load_h(h, r + 2 * R, end, pn * BN, F, SUB, W, HALVES, LAYOUT)
            w = gl.expand_dims(scale.index(i).load(gl.SliceLayout(1, LAYOUT)), 1)
            total = gl.zeros((R, W), gl.float32, layout=LAYOUT)
            for j in gl.static_range(SUB):
                gate = loaded[HALVES * j].to(gl.float32)
                up = gate
                if HALVES == 2:
                    up = loaded[HALVES * j + 1].to(gl.float32)
                d_act = chunk(out, j, i, BM, W, R, LAYOUT)
                a, d_gate, d_up, d_weight = activate_backward(gate, up, d_act, w, True, ACT)
                total += d_weight
                cols = pn * BN + j * W + gl.arange(0, W, layout=gl.SliceLayout(0, LAYOUT))
                mask = gl.expand_dims(r < hi, 1) & gl.expand_dims(cols < F, 0)
                at = gl.expand_dims(r.to(gl.int64) * F, 1) + gl.expand_dims(cols, 0)
                gl.store(act + at, a.to(out.dtype), mask=mask)
                if HALVES == 2:
                    at += gl.expand_dims(r.to(gl.int64) * F, 1)  # rows of dH are twice as long
                gl.store(dh + at, d_gate.to(out.dtype), mask=mask)
                if HALVES == 2:
                    gl.store(dh + at + F, d_up.to(out.dtype), mask=mask)
            gl.store(ds + pn.to(gl.int64) * N + r, gl.sum(total, 1), mask=r < hi)
            r += R
        mbarrier.arrive(taken, count=1)
        phase ^= 1


@gluon.jit
def finish_tiles(
    h, c, c2, c3, weights, ds, order, tiles, capacity, offsets, N, F, num_n, GROUP, out, scale, staged, taken,
    BM: gl.constexpr, BN: gl.constexpr, SUB: gl.constexpr, KIND: gl.constexpr, ACT: gl.constexpr,
    KEEP: gl.constexpr, LAYOUT: gl.constexpr, CREW: gl.constexpr,
):  # fmt: skip
    """The finishers; a warp handles four rows at a time."""
    if KIND == "up" or KIND == "ungated":
        finish_up(
            c, c2, c3, tiles, capacity, offsets, F, num_n, GROUP, out, staged, taken,
            BM, BN, SUB, ACT, KEEP, 4 * CREW, LAYOUT,
        )  # fmt: skip
    elif KIND == "dh":
        finish_dh(
            h, c, c3, weights, ds, order, tiles, capacity, offsets, N, F, num_n, GROUP, out, scale, staged,
            taken,
            BM, BN, SUB, ACT, 4 * CREW, LAYOUT, CREW,
        )  # fmt: skip


@gluon.jit
def barriers(S: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers (full, empty) of S buffers and (staged, taken) of a tile.

    ARRIVALS: number of arrivals after which a buffer is full.
    """
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    staged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(staged, count=1)
    mbarrier.init(taken, count=1)
    return full, empty, staged, taken


@gluon.jit(do_not_specialize=["capacity", "N", "E", "GROUP"])
def specialised(
    a, b, u, v, bias, h, c, c2, c3, weights, ds, order, tiles, capacity, offsets, N, E, F, num_m, num_n,
    steps, more, GROUP, stride, P, Q,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, RL: gl.constexpr, S: gl.constexpr,
    SUB: gl.constexpr, OUTS: gl.constexpr, K: gl.constexpr,
    KIND: gl.constexpr, ACT: gl.constexpr, B_ROWS: gl.constexpr, KEEP: gl.constexpr, GATHER: gl.constexpr,
    SUMS: gl.constexpr, EDGE: gl.constexpr,
):  # fmt: skip
    """One of the products, by KIND.

        "rows"  C = A @ B[e]
        "up"    c, c2, c3 = gate, up, act
        "ungated"  as "up", for experts without a gate: c, c3 = H, act
        "dh"    c, c3 = dH, s * act, from h = H; and partial sums of ds
        "dw"    C[e] = A[rows]^T @ B[rows]

    GATHER: the operand ("a", "b") that is [T, D] in memory, with row stride `stride`, and is read through the
        routing order; "": none.
    EDGE: the last tile of a gathered dw is wider than its rows.
    SUMS: of a dw whose C [E, P, Q] is a sum in fp32, what `into_sum` does with it; "": C has A's type.
    KEEP: if False, "up" stores act alone.
    ACT: the activation, see `activate`.
    bias: [E, 2F] or None; added to H.
    u, v: None, or a low-rank step after the product, in the same accumulator: A @ B[e] + u[rows] @ v[e]. They
        are sorted rows [N, R] and an operand with B's axes. more: number of steps of R, of RL numbers each;
        else 0. Their boxes are those of A and B with RL in place of BL. Not in dw.
    """
    WARPS: gl.constexpr = 4 if BM == 64 else 8
    A_BOX: gl.constexpr = [1, 1, BL, BM] if KIND == "dw" else [1, 1, BM, BL]
    B_BOX: gl.constexpr = b_box(BN, BL, KIND, B_ROWS)
    FINISH: gl.constexpr = KIND == "up" or KIND == "ungated" or KIND == "dh"
    # Number of warps that gather, and of warps that finish. With more than twelve warps in all, ptxas would
    # have too few registers for 256 columns.
    CREW: gl.constexpr = 2 if FINISH and BM == 128 else 4
    ELEMENT: gl.constexpr = a.dtype if GATHER == "b" else b.dtype  # of the descriptor
    OUT_BOX: gl.constexpr = [BM, BN // SUB]
    a_bufs = gl.allocate_shared_memory(
        ELEMENT, [S] + A_BOX, gl.NVMMASharedLayout.get_default_for(A_BOX, ELEMENT)
    )
    b_bufs = gl.allocate_shared_memory(
        ELEMENT, [S] + B_BOX, gl.NVMMASharedLayout.get_default_for(B_BOX, ELEMENT)
    )
    out = gl.allocate_shared_memory(
        ELEMENT, [OUTS] + OUT_BOX, gl.NVMMASharedLayout.get_default_for(OUT_BOX, ELEMENT)
    )
    scale = gl.allocate_shared_memory(
        gl.float32, [BM // (4 * CREW), 4 * CREW], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    # one arrival for each cp.async thread
    full, empty, staged, taken = barriers(S, 1 if GATHER == "" else 32 * CREW + 1)
    LANES_W: gl.constexpr = BL if KIND != "dw" else BM if GATHER == "a" else BN
    LANES: gl.constexpr = LANES_W // 8 if LANES_W < 256 else 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [CREW, 1], [1, 0])
    CHUNK: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [CREW, 1], [1, 0])
    LOADERS: gl.constexpr = 1 if GATHER == "" else CREW
    REGS: gl.constexpr = 24 if GATHER == "" else 40 if KIND != "dw" else 88
    FINISH_REGS: gl.constexpr = 184 if KIND == "dh" else 96
    if FINISH:
        gl.warp_specialize([
            (consume_tiles, (c, bias, tiles, capacity, offsets, E, F, num_m, num_n, steps, more, GROUP,
                             P, Q, a_bufs, b_bufs, full, empty, out, staged, taken,
                             BM, BN, BL, RL, S, SUB, OUTS, KIND, B_ROWS, GATHER, SUMS, WARPS)),
            (load_tiles, (a, b, u, v, order, tiles, capacity, offsets, E, num_m, num_n, steps, more, GROUP,
                          stride, a_bufs, b_bufs, full, empty, BM, BN, BL, RL, S, K, KIND, B_ROWS, GATHER,
                          EDGE, LAYOUT)),
            (finish_tiles, (h, c, c2, c3, weights, ds, order, tiles, capacity, offsets, N, F, num_n, GROUP,
                            out, scale, staged, taken, BM, BN, SUB, KIND, ACT, KEEP, CHUNK, CREW)),
        ], [LOADERS, CREW], [REGS, FINISH_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_tiles, (c, bias, tiles, capacity, offsets, E, F, num_m, num_n, steps, more, GROUP,
                             P, Q, a_bufs, b_bufs, full, empty, out, staged, taken,
                             BM, BN, BL, RL, S, SUB, OUTS, KIND, B_ROWS, GATHER, SUMS, WARPS)),
            (load_tiles, (a, b, u, v, order, tiles, capacity, offsets, E, num_m, num_n, steps, more, GROUP,
                          stride, a_bufs, b_bufs, full, empty, BM, BN, BL, RL, S, K, KIND, B_ROWS, GATHER,
                          EDGE, LAYOUT)),
        ], [LOADERS], [REGS])  # fmt: skip
