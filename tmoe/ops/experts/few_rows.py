"""Both products of a layer whose experts have few rows each, in one launch for Hopper (Gluon).

With few rows a layer takes as long as reading its weights, so this kernel reads them without interruption.
Two launches of `specialised` lose time at the start and at the end of each launch, and with its tiles of 64
rows the weights of an expert with 65 rows are read through L2 twice. In this kernel one warp loads the
weights of all up tiles and then of all down tiles into a ring of buffers, and waits only for free buffers.
Other warps load the rows. Rows of `act` are loaded after the up tiles of their expert have been stored by all
programs that computed them. The consumers run the epilogues themselves, while the ring is filled.

Tiles are drawn from a counter, all up tiles before the first down tile. So when a program has a down tile,
every up tile that it may wait for belongs to a running program. Therefore a kernel on another stream, for
example NCCL's, may occupy multiprocessors for any length of time without a deadlock.

Loads of weights form a queue in memory, and loads of data that is already in L2 (rows, tables) wait at the
end of that queue: 128 KB a multiprocessor take 4 us at the memory's bandwidth. Two stages in flight are
enough to keep memory busy; in a ring of four, the other stages hold loaded weights (docs/kernels.md,
eleventh).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from tmoe.ops.experts.gluon_names import bulk_load, reinterpret, thread_barrier, thread_load
from tmoe.ops.experts.kernels import activate, halves_of, slices


@gluon.jit
def place_of(t, tiles, capacity, offsets, num_n, BM: gl.constexpr):
    """Tile t's expert e, the expert's rows lo..hi, the tile's first row and its column block.

    The order is expert by expert, and within an expert rows vary fastest, so that weights which several row
    tiles need are read from memory once.
    """
    m = t // num_n
    e = gl.load(tiles + 4 + m)
    lo = gl.load(offsets + e)
    hi = gl.load(offsets + e + 1)
    before = (gl.load(tiles + 4 + capacity + m) - lo) // BM
    height = gl.cdiv(hi - lo, BM)
    u = t - (m - before) * num_n
    return e, lo, hi, lo + u % height * BM, u // height


@gluon.jit
def publish(t, i, drawn, told, heard, Q: gl.constexpr):
    """Publishes the i-th tile of this program, from the loader of weights to the other warps."""
    s = i % Q
    mbarrier.wait(heard.index(s), (i // Q & 1) ^ 1)
    drawn.index(s).store(gl.full([1], t, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(told.index(s), count=1)


@gluon.jit
def hear(i, drawn, told, heard, Q: gl.constexpr, WARPS: gl.constexpr):
    """This program's i-th tile, as published; after the last tile, a number beyond the table."""
    s = i % Q
    mbarrier.wait(told.index(s), i // Q & 1)
    t = gl.max(drawn.index(s).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    mbarrier.arrive(heard.index(s), count=1)
    return t


@gluon.jit
def room(it, full, empty, S: gl.constexpr, FLIGHT: gl.constexpr):
    """The buffer for step `it` in the ring, once it is free and the load of step it - FLIGHT is complete."""
    if FLIGHT < S:
        before = it + S - FLIGHT  # S is added so that it is never negative, which shifts the phase by one
        mbarrier.wait(full.index(before % S), (before // S & 1) ^ 1, pred=it >= FLIGHT)
    mbarrier.wait(empty.index(it % S), (it // S & 1) ^ 1)
    return it % S


@gluon.jit
def load_weights(
    gate_up, down, counter, tiles, capacity, offsets, num_up, num_down, up_steps, down_steps, bufs, full,
    empty,
    drawn, told, heard, guessed,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, S: gl.constexpr, FLIGHT: gl.constexpr,
    GUESS: gl.constexpr,
    HALVES: gl.constexpr, Q: gl.constexpr,
):  # fmt: skip
    """The loader of weights: draws tiles, one ahead of the tile it loads.

    It waits for free buffers in the ring, and keeps at most FLIGHT stages in flight.

    While routing still runs, it loads the first GUESS steps of the tile that this program would get if every
    expert had one row tile. The loaded data is discarded, but some program will load it again, and then finds
    it in L2. Loading two steps at once, or 256 bytes into L2 for each 128, cost 0 to 2% each; rings deeper
    than four stages gain nothing.
    """
    if GUESS > 0:
        p = gl.program_id(0)
        mbarrier.expect(guessed, GUESS * BN * BL * 2)
        for j in gl.static_range(GUESS):
            # loads zeros if there is no such expert
            at = [HALVES * (p // num_up), p % num_up * (BN // HALVES), j * BL]
            bulk_load(gate_up, at, guessed, bufs.index(j))
    gdc_wait()
    ups = gl.load(tiles) * num_up
    total = ups + gl.load(tiles) * num_down
    it = 0
    i = 1
    t = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    publish(t, 0, drawn, told, heard, Q)
    if GUESS > 0:
        mbarrier.wait(guessed, 0)
    while t < total:
        following = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
        publish(following, i, drawn, told, heard, Q)
        i += 1
        if t < ups:
            e, _, _, _, pn = place_of(t, tiles, capacity, offsets, num_up, BM)
            for k in range(up_steps):
                s = room(it, full, empty, S, FLIGHT)
                mbarrier.expect(full.index(s), BN * BL * 2)
                at = [HALVES * e, pn * (BN // HALVES), k * BL]
                bulk_load(gate_up, at, full.index(s), bufs.index(s))
                it += 1
        else:
            e, _, _, _, pn = place_of(t - ups, tiles, capacity, offsets, num_down, BM)
            for k in range(down_steps):
                s = room(it, full, empty, S, FLIGHT)
                mbarrier.expect(full.index(s), BN * BL * 2)
                tile = bufs.index(s).reshape([1, BN, BL])
                bulk_load(down, [e, pn * BN, k * BL], full.index(s), tile)
                it += 1
        t = following


@gluon.jit
def rows_at(
    index, row, hi, stride, BM: gl.constexpr, CHUNK: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr
):
    """The offsets of each CHUNK rows of a tile: of rows index[r] // K, or of rows r without an index."""
    offsets = ()
    for i in gl.static_range(BM // CHUNK):
        r = gl.minimum(row + i * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT)), hi - 1)
        if index is not None:
            r = gl.load(index + r) // K
        offsets = offsets + (r.to(gl.int64) * stride,)
    return offsets


@gluon.jit
def feed(
    source, offsets, count, steps, it, bufs, full, empty,
    BM: gl.constexpr, BL: gl.constexpr, S: gl.constexpr, CHUNK: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Loads one tile's rows, step by step.

    Chunks after the last of its `count` rows are left out, since their rows are never stored.
    """
    cols = gl.expand_dims(gl.arange(0, BL, layout=gl.SliceLayout(0, LAYOUT)), 0)
    chunks = reinterpret(bufs, bufs.dtype, [S * BM // CHUNK, CHUNK, BL], bufs.layout)
    for k in range(steps):
        s = it % S
        mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
        for i in gl.static_range(BM // CHUNK):
            if i * CHUNK < count:
                at = source + (gl.expand_dims(offsets[i], 1) + (k * BL + cols))
                thread_load(chunks.index(s * (BM // CHUNK) + i), at)
        async_copy.mbarrier_arrive(full.index(s), increment_count=False)
        it += 1
    return it


@gluon.jit
def load_rows(
    x, act, order, ready, tiles, capacity, offsets, D, F, num_up, num_down, up_steps, down_steps, bufs, full,
    empty,
    drawn, told, heard,
    BM: gl.constexpr, BL: gl.constexpr, S: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr,
    LAYOUT: gl.constexpr,
    Q: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The loader of rows: reads rows of x through the routing order, and for down tiles rows of act.

    Rows of act are read after all up tiles of their expert have been stored.
    """
    gdc_wait()
    ups = gl.load(tiles) * num_up
    total = ups + gl.load(tiles) * num_down
    it = 0
    i = 0
    t = hear(i, drawn, told, heard, Q, WARPS)
    while t < total:
        if t < ups:
            _, _, hi, row, _ = place_of(t, tiles, capacity, offsets, num_up, BM)
            at = rows_at(order, row, hi, D, BM, CHUNK, K, LAYOUT)
            it = feed(x, at, hi - row, up_steps, it, bufs, full, empty, BM, BL, S, CHUNK, LAYOUT)
        else:
            e, lo, hi, row, _ = place_of(t - ups, tiles, capacity, offsets, num_down, BM)
            wanted = gl.cdiv(hi - lo, BM) * num_up
            while gl.load(ready + e, volatile=True) < wanted:
                pass
            # One thread executes the atomic and broadcasts its result. The result is used below, because
            # the compiler removes an atomic whose result is unused.
            stored = gl.atomic_add(ready + e, 0, sem="acquire", scope="gpu")
            at = rows_at(None, row, hi + gl.minimum(stored - wanted, 0), F, BM, CHUNK, K, LAYOUT)
            it = feed(act, at, hi - row, down_steps, it, bufs, full, empty, BM, BL, S, CHUNK, LAYOUT)
        i += 1
        t = hear(i, drawn, told, heard, Q, WARPS)


@gluon.jit
def multiply(
    steps, ia, ib, a_bufs, b_bufs, a_full, a_empty, b_full, b_empty,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, SA: gl.constexpr, SB: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """One tile's product, and the next positions in both rings."""
    acc = warpgroup_mma_init(gl.zeros((BM, BN), gl.float32, layout=MMA))
    for k in range(steps):
        a = ia % SA
        b = ib % SB
        mbarrier.wait(a_full.index(a), ia // SA & 1)
        fence_async_shared()  # cp.async writes through the generic proxy, wgmma reads through the async proxy
        mbarrier.wait(b_full.index(b), ib // SB & 1)
        tile = b_bufs.index(b).reshape([BN, BL]).permute((1, 0))
        acc = warpgroup_mma(a_bufs.index(a), tile, acc, is_async=True, use_acc=k > 0)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        mbarrier.arrive(a_empty.index((ia + SA - 1) % SA), count=1, pred=k > 0)
        mbarrier.arrive(b_empty.index((ib + SB - 1) % SB), count=1, pred=k > 0)
        ia += 1
        ib += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(a_empty.index((ia + SA - 1) % SA), count=1)
    mbarrier.arrive(b_empty.index((ib + SB - 1) % SB), count=1)
    return acc, ia, ib


@gluon.jit
def store(c, part, row, hi, col, width, stride, LAYOUT: gl.constexpr):
    """Stores a slice of a tile to the rows below hi of c, by ordinary stores.

    The eviction policy makes L2 keep these rows longer than the weights: act and y are read again soon, and H
    can be written to memory later.
    """
    part = gl.convert_layout(part.to(c.dtype.element_ty), LAYOUT)
    r = row + gl.arange(0, part.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    cols = col + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = c + (gl.expand_dims(r.to(gl.int64) * stride, 1) + gl.expand_dims(cols, 0))
    mask = gl.expand_dims(r < hi, 1) & gl.expand_dims(cols < width, 0)
    gl.store(at, part, mask=mask, eviction_policy="evict_last")


@gluon.jit
def consume(
    bias, h, act, y, ready, tiles, capacity, offsets, D, F, num_up, num_down, up_steps, down_steps,
    a_bufs, b_bufs, a_full, a_empty, b_full, b_empty, drawn, told, heard,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, SUB: gl.constexpr, SA: gl.constexpr,
    SB: gl.constexpr, ACT: gl.constexpr,
    Q: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumers: compute products and epilogues.

    After each up tile they increment its expert's count of stored up tiles.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BN, 16]
    )
    W: gl.constexpr = BN // SUB
    HALVES: gl.constexpr = halves_of(ACT)
    HALF: gl.constexpr = SUB // HALVES
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [WARPS, 1], [1, 0])
    gdc_wait()
    ups = gl.load(tiles) * num_up
    total = ups + gl.load(tiles) * num_down
    ia = 0
    ib = 0
    i = 0
    t = hear(i, drawn, told, heard, Q, WARPS)
    while t < total:
        if t < ups:
            e, _, hi, row, pn = place_of(t, tiles, capacity, offsets, num_up, BM)
            acc, ia, ib = multiply(
                up_steps, ia, ib, a_bufs, b_bufs, a_full, a_empty, b_full, b_empty, BM, BN, BL, SA, SB, MMA
            )
            parts = slices(acc, SUB)
            for j in gl.static_range(HALF):
                gate = parts[j]
                up = gate
                if HALVES == 2:
                    up = parts[HALF + j]
                col = pn * (BN // HALVES) + j * W
                if bias is not None:
                    cols = col + gl.arange(0, W, layout=gl.SliceLayout(0, gate.type.layout))
                    at = bias + HALVES * e.to(gl.int64) * F + cols
                    gate += gl.expand_dims(gl.load(at, mask=cols < F, other=0.0).to(gl.float32), 0)
                    if HALVES == 2:
                        up += gl.expand_dims(gl.load(at + F, mask=cols < F, other=0.0).to(gl.float32), 0)
                gate = gate.to(act.dtype.element_ty)  # rounded, because backward has only the rounded values
                up = up.to(act.dtype.element_ty) if HALVES == 2 else gate
                if h is not None:
                    store(h, gate, row, hi, col, F, HALVES * F, OUT)
                    if HALVES == 2:
                        store(h + F, up, row, hi, col, F, HALVES * F, OUT)
                store(
                    act, activate(gate.to(gl.float32), up.to(gl.float32), True, ACT), row, hi, col, F, F, OUT
                )
            thread_barrier()  # all threads have stored
            gl.atomic_add(ready + e, 1, sem="release", scope="gpu")
        else:
            _, _, hi, row, pn = place_of(t - ups, tiles, capacity, offsets, num_down, BM)
            acc, ia, ib = multiply(
                down_steps, ia, ib, a_bufs, b_bufs, a_full, a_empty, b_full, b_empty, BM, BN, BL, SA, SB, MMA
            )
            parts = slices(acc, SUB)
            for j in gl.static_range(SUB):
                store(y, parts[j], row, hi, pn * BN + j * W, D, D, OUT)
        i += 1
        t = hear(i, drawn, told, heard, Q, WARPS)


@gluon.jit(do_not_specialize=["capacity"])
def few_rows(
    x, gate_up, down, bias, h, act, y, order, ready, counter, tiles, capacity, offsets, D, F, num_up,
    num_down, up_steps, down_steps,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, SUB: gl.constexpr, SA: gl.constexpr,
    SB: gl.constexpr, FLIGHT: gl.constexpr,
    GUESS: gl.constexpr, K: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """H, act and y of all experts: both products and the activation between them.

        H [N, 2F] (unless None) = tokens' rows of x @ gate_up[e]^T (+ bias[e])
        act [N, F] from H, and y [N, D] = act @ down[e]^T

    gate_up: [2E, F, D] in boxes of [2, BN/2, BL]; without a gate [E, F, D] in boxes of [1, BN, BL], and H is
        [N, F].
    down: [E, D, F] in boxes of [1, BN, BL].
    ready, counter: int32 [E] and [1], must be zero.
    SA, SB: stages of the rings of rows and of weights. FLIGHT: most stages of weights in flight.
    GUESS: see load_weights; at most SB, and 0 unless the routing kernel lets this kernel start early. Because
        of GUESS each kind of warps calls gdc_wait separately.
    """
    WARPS: gl.constexpr = BM // 16
    GATHER: gl.constexpr = 4 if BM == 64 else 2
    HALVES: gl.constexpr = halves_of(ACT)
    B_BOX: gl.constexpr = [HALVES, BN // HALVES, BL]
    Q: gl.constexpr = 4  # most published tiles that some kind of warps has not begun
    dtype: gl.constexpr = act.dtype.element_ty
    a_bufs = gl.allocate_shared_memory(
        dtype, [SA, BM, BL], gl.NVMMASharedLayout.get_default_for([BM, BL], dtype)
    )
    b_bufs = gl.allocate_shared_memory(
        dtype, [SB] + B_BOX, gl.NVMMASharedLayout.get_default_for(B_BOX, dtype)
    )
    a_full = gl.allocate_shared_memory(gl.int64, [SA, 1], mbarrier.MBarrierLayout())
    a_empty = gl.allocate_shared_memory(gl.int64, [SA, 1], mbarrier.MBarrierLayout())
    b_full = gl.allocate_shared_memory(gl.int64, [SB, 1], mbarrier.MBarrierLayout())
    b_empty = gl.allocate_shared_memory(gl.int64, [SB, 1], mbarrier.MBarrierLayout())
    drawn = gl.allocate_shared_memory(gl.int32, [Q, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [Q, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [Q, 1], mbarrier.MBarrierLayout())
    guessed = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(guessed.index(0), count=1)
    for i in gl.static_range(Q):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(heard.index(i), count=2)
    for i in gl.static_range(SA):
        mbarrier.init(a_full.index(i), count=32 * GATHER)  # one arrival for each cp.async thread
        mbarrier.init(a_empty.index(i), count=1)
    for i in gl.static_range(SB):
        mbarrier.init(b_full.index(i), count=1)
        mbarrier.init(b_empty.index(i), count=1)
    fence_async_shared()  # the load of a guess may complete at once
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BL, BL // 8], [GATHER, 1], [1, 0])
    gl.warp_specialize([
        (consume, (bias, h, act, y, ready, tiles, capacity, offsets, D, F, num_up, num_down, up_steps,
        down_steps,
                   a_bufs, b_bufs, a_full, a_empty, b_full, b_empty, drawn, told, heard, BM, BN, BL, SUB, SA,
                   SB, ACT, Q, WARPS)),
        (load_weights, (gate_up, down, counter, tiles, capacity, offsets, num_up, num_down, up_steps,
        down_steps,
                        b_bufs, b_full, b_empty, drawn, told, heard, guessed.index(0), BM, BN, BL, SB,
                        FLIGHT, GUESS, HALVES, Q)),
        (load_rows, (x, act, order, ready, tiles, capacity, offsets, D, F, num_up, num_down, up_steps,
        down_steps,
                     a_bufs, a_full, a_empty, drawn, told, heard, BM, BL, SA, K, 4 * GATHER, LAYOUT, Q,
                     GATHER)),
    ], [1, GATHER], [24, 96])  # fmt: skip
