"""The fp8 products for Hopper, warp-specialised (Gluon): one loader and two warpgroups of consumers.

A tile has 128 rows and 256 columns; each consumer owns 64 rows of it. It holds two sums of 64 x 128 in fp32
and one product of a block of 128 numbers, which it multiplies by its scales and adds to the sum. Meanwhile
the tensor cores work for the other consumer. So the consumers are separate partitions, which share only the
ring of operand tiles.

Each consumer also runs its epilogue, and the other one multiplies during that time until the ring is empty.
The loader either gathers rows (GATHER: four warps of cp.async), or is one warp that issues bulk copies. For
"dh" it also loads the codes of H through the ring, so no thread waits for memory in the epilogue.

Operands, results, scales and tile order are those of fp8_kernels.py. Sums are stored in another order only.
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

from tmoe.ops.experts.fp8_kernels import po2, sided, tile_with_number
from tmoe.ops.experts.gluon_names import bulk_load, bulk_store, reinterpret, thread_load
from tmoe.ops.experts.hopper import into_sum, tile_count
from tmoe.ops.experts.kernels import (
    RAGGED,
    activate,
    activate_backward,
    halves_of,
    slices,
    weight_tile_at,
)

# A slice of 64 columns of a consumer's rows: 16-bit numbers in boxes of 128 bytes.
SLICE = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32])
)
QUARTER = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 32])
)
BLOCKS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
)


@gluon.jit
def locate(
    t, tiles, capacity, offsets, first, num_m, num_n, steps, GROUP, KIND: gl.constexpr, PARTS: gl.constexpr
):
    """Tile t's number among row tiles, expert, end of the expert's rows, first row, column tile, and steps.

    Also the first block of the sum, which is 0 but for "dw". There rows are those of the result, and `tiles`
    is by_size.
    """
    if KIND == "dw":
        e, lo, hi, pm, pn = weight_tile_at(t, tiles, offsets, num_m, num_n, GROUP)
        n_steps = gl.cdiv(hi - lo, 128)
        start = gl.load(first + e, mask=n_steps > 0, other=0)
        return pm, e, hi, pm * 128, pn, n_steps, start
    else:
        pm, e, _, hi, row, pn = tile_with_number(t, tiles, capacity, offsets, num_n, GROUP)
        return pm, e, hi, row, pn, PARTS * steps, 0


@gluon.jit
def columns(e, pn, k, steps, PAIR: gl.constexpr, PARTS: gl.constexpr, NB: gl.constexpr):
    """Step k's matrices of a tile's two blocks, the blocks' first rows in them, and its block of the sum."""
    if PAIR:
        return 2 * e, 2 * e + 1, pn * 128, pn * 128, k
    else:
        half = (k >= steps).to(gl.int32) if PARTS == 2 else 0
        m = e * PARTS + half
        return m, m, pn * NB * 128, pn * NB * 128 + 128, k - half * steps


@gluon.jit
def slices_of_h(bufs, N: gl.constexpr):
    """A ring of N tiles as 2 N slices [128, 64] of codes, two in each tile."""
    BOX: gl.constexpr = [1, 1, 128, 64]
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BOX, gl.float8e4nv)
    return reinterpret(bufs, gl.float8e4nv, [2 * N] + BOX, SHARED)


@gluon.jit
def load_tiles(
    a, b, h_gate, h_up, order, tiles, capacity, offsets, first, N, E, num_m, num_n, steps, GROUP, stride,
    a_bufs, b_bufs, full, empty,
    S: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, PAIR: gl.constexpr, PARTS: gl.constexpr,
    NB: gl.constexpr, GATHER: gl.constexpr, EVEN: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The loader: A and B for every step of every tile of this program, and for "dh" the blocks of H."""
    gates = slices_of_h(a_bufs, S)
    ups = slices_of_h(b_bufs, NB * S)
    it = 0
    for t in range(gl.program_id(0), tile_count(tiles, E, num_m, num_n, KIND), gl.num_programs(0)):
        _, e, hi, row, pn, n_steps, start = locate(
            t, tiles, capacity, offsets, first, num_m, num_n, steps, GROUP, KIND, PARTS
        )
        if GATHER:
            r = row + gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
            tok = gl.load(order + gl.minimum(r, hi - 1)) // K  # rows past the end are never stored
            cols = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
            a_rows = a + gl.expand_dims(tok.to(gl.int64) * stride, 1) + gl.expand_dims(cols, 0)
        for k in range(n_steps):
            s = it % S
            m0, m1, n0, n1, j = columns(0 if KIND == "dw" else e, pn, k, steps, PAIR, PARTS, NB)
            mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
            arrived = full.index(s)
            mbarrier.expect(arrived, (NB if GATHER else NB + 1) * 128 * 128)
            if GATHER:
                rows = a_bufs.index(s)
                if EVEN:
                    thread_load(rows, a_rows + k * 128)
                else:
                    thread_load(rows, a_rows + k * 128, mask=gl.expand_dims(cols < stride - k * 128, 0))
            elif PARTS == 2:
                bulk_load(a, [row + (k - j) // steps * N, j * 128], arrived, a_bufs.index(s))
            else:
                bulk_load(a, [row, (start + j) * 128], arrived, a_bufs.index(s))
            bulk_load(b, [m0, n0, (start + j) * 128], arrived, b_bufs.index(NB * s))
            if NB == 2:
                bulk_load(b, [m1, n1, (start + j) * 128], arrived, b_bufs.index(NB * s + 1))
            if GATHER:
                async_copy.mbarrier_arrive(arrived, increment_count=False)
            it += 1
        if KIND == "dh":
            for i in range(NB):
                s = it % S
                mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
                arrived = full.index(s)
                mbarrier.expect(arrived, (1 if h_up is None else 2) * 128 * 128)
                for j in gl.static_range(2):
                    at = [RAGGED, hi, RAGGED - (hi - row), (pn * NB + i) * 128 + j * 64]
                    bulk_load(h_gate, at, arrived, gates.index(2 * s + j))
                    if h_up is not None:
                        bulk_load(h_up, at, arrived, ups.index(2 * NB * s + j))
                if GATHER:
                    async_copy.mbarrier_arrive(arrived, increment_count=False)
                it += 1


@gluon.jit
def scale_places(
    e, pm, pn, tile, start, blocks, steps, capacity, s_n,
    KIND: gl.constexpr, PAIR: gl.constexpr, PARTS: gl.constexpr, NB: gl.constexpr,
):  # fmt: skip
    """Where a tile's scales begin: those of A, their distance, and those of both blocks of B."""
    if KIND == "dw":
        of_b = start + NB * pn * s_n
        return pm * capacity + start, 1, of_b, start + gl.minimum(NB * pn + 1, blocks - 1) * s_n
    elif PAIR:
        of_b = 2 * e * blocks * steps + pn * s_n
        return tile, 2 * capacity, of_b, of_b + blocks * steps
    else:
        of_b = e * PARTS * blocks * steps
        return tile, 2 * capacity, of_b + NB * pn * s_n, of_b + gl.minimum(NB * pn + 1, blocks - 1) * s_n


@gluon.jit
def scales_of_h(sh, pn, tile, blocks, capacity, NB: gl.constexpr, ACT: gl.constexpr):
    """The scales of H's gate and up, of a row tile and NB blocks of columns, the first of which is NB pn."""
    found = ()
    for i in gl.static_range(NB):
        at = sh + gl.minimum(pn * NB + i, blocks - 1) * 2 * capacity + tile
        gate = gl.load(at)
        up = gate
        if halves_of(ACT) == 2:
            up = gl.load(at + blocks * 2 * capacity)
        found = found + ((gate, up),)
    return found


@gluon.jit
def multiply(
    sa, sb, a_at, a_step, b0_at, b1_at, b_step, steps, it, a_bufs, b_bufs, full, empty,
    S: gl.constexpr, NB: gl.constexpr, TILES: gl.constexpr, GATHER: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """The sums of this consumer's rows, for NB blocks of 128 columns, over `steps` blocks; `it` after them.

    TILES: A has a scale for each of its tiles, at sa + a_at + k * a_step in step k; else none here. The
    blocks of B have theirs at sb + b0_at + k * b_step and sb + b1_at + k * b_step.
    """
    acc0 = gl.zeros((64, 128), gl.float32, layout=BLOCKS)
    acc1 = acc0
    part = acc0
    a_next = 1.0
    if TILES:
        a_next = gl.load(sa + a_at)
    b0_next = gl.load(sb + b0_at)
    b1_next = 1.0
    if NB == 2:
        b1_next = gl.load(sb + b1_at)
    for k in range(steps):
        s = it % S
        by0 = b0_next
        by1 = b1_next
        if TILES:
            by0 = a_next * b0_next
            by1 = a_next * b1_next
        mbarrier.wait(full.index(s), it // S & 1)
        if GATHER:
            # cp.async writes through the generic proxy, wgmma reads through the async proxy
            fence_async_shared()
        a_tile = a_bufs.index(s).slice(WHO * 64, 64, dim=0)
        b0 = b_bufs.index(NB * s).reshape([128, 128]).permute((1, 0))
        token = warpgroup_mma(a_tile, b0, warpgroup_mma_init(part), use_acc=False, is_async=True)
        if NB == 2:
            part = warpgroup_mma_wait(num_outstanding=0, deps=(token,))
            acc0 += part * by0
            b1 = b_bufs.index(NB * s + 1).reshape([128, 128]).permute((1, 0))
            token = warpgroup_mma(a_tile, b1, warpgroup_mma_init(part), use_acc=False, is_async=True)
        ahead = gl.minimum(k + 1, steps - 1)  # the scales of the next step arrive during this product
        if TILES:
            a_next = gl.load(sa + a_at + ahead * a_step)
        b0_next = gl.load(sb + b0_at + ahead * b_step)
        if NB == 2:
            b1_next = gl.load(sb + b1_at + ahead * b_step)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(token,))
        mbarrier.arrive(empty.index(s), count=1)
        if NB == 2:
            acc1 += part * by1
        else:
            acc0 += part * by0
        it += 1
    return acc0, acc1, it


@gluon.constexpr_function
def puts(KIND, HALVES, KEEP):
    """How many times the epilogue of a block of 128 columns calls `put`."""
    return 2 + 3 * HALVES if KIND == "dh" else 1 + HALVES * KEEP


@gluon.jit
def put(c, buf, values, hi, row, col, PENDING: gl.constexpr):
    """Store values at (row, col) of c through `buf`, which all stores but the last PENDING have read."""
    tma.store_wait(pendings=PENDING)
    buf.store(values.to(buf.dtype))
    fence_async_shared()
    bulk_store(c, [RAGGED, hi, RAGGED - (hi - row), col], buf.reshape([1, 1] + buf.shape))


@gluon.jit
def put_slice(c, out, values, hi, row, col, n: gl.constexpr, OUTS: gl.constexpr, WHO: gl.constexpr):
    """`put` of 64 columns in c's type, the n-th of a tile."""
    put(c, out.index(WHO * OUTS + n % OUTS), gl.convert_layout(values, SLICE), hi, row, col, OUTS - 1)


@gluon.jit
def put_gradient(c, out, parts, e, row, col, n: gl.constexpr, OUTS: gl.constexpr, WHO: gl.constexpr):
    """Store two slices in c [E, P, Q], the n-th and the next of a tile."""
    for j in gl.static_range(2):
        tma.store_wait(pendings=OUTS - 1)
        buf = out.index(WHO * OUTS + (n + j) % OUTS)
        buf.store(gl.convert_layout(parts[j], SLICE).to(out.dtype))
        fence_async_shared()
        bulk_store(c, [e, row, col + j * 64], buf.reshape([1] + buf.shape))


@gluon.jit
def whole(parts):
    """Two column slices as one; the inverse of `slices`."""
    M: gl.constexpr = parts[0].shape[0]
    return gl.reshape(gl.permute(gl.join(parts[0], parts[1]), (0, 2, 1)), (M, 2 * parts[0].shape[1]))


@gluon.jit
def bf16(values):
    """In bfloat16, two numbers an instruction. The compiler converts single ones, at 1/4 of the speed."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [values], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def put_codes(
    c, scales, out, parts, most, live, hi, row, part, capacity, tile, F,
    BUF: gl.constexpr, PENDING: gl.constexpr,
):  # fmt: skip
    """The codes of two slices, through buffer number BUF, and the scale of tile number `tile`.

    most: `largest` of the rows, before they were rounded to the slices' type; NaN does not count, since
    max.f32 leaves it out. live: of rows, in any layout. part: the block of 128 columns.
    """
    most = gl.max(most, 1).to(parts[0].dtype).to(gl.float32)
    live = gl.convert_layout(live, most.type.layout)
    scale, inverse = po2(gl.max(gl.where(live, most, 0.0), 0))
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], gl.float8e4nv)
    bufs = reinterpret(out, gl.float8e4nv, [out.shape[0], 64, 128], SHARED)
    codes = gl.convert_layout(whole(parts).to(gl.float32) * inverse, BLOCKS)
    put(c, bufs.index(BUF), codes, hi, row, part * 128, PENDING)
    gl.store(scales + part * 2 * capacity + tile, scale, mask=part * 128 < F)


@gluon.jit
def largest(t):
    """The largest magnitudes of t's rows [64, 4], one for each thread that holds a part of the row.

    Threads compare their numbers once a tile, not once a slice.
    """
    parts = gl.reshape(gl.abs(t), (t.shape[0], t.shape[1] // 8, 4, 2))
    return gl.max(gl.max(parts, 3), 1)


@gluon.jit
def summed(t):
    """The sums of t's rows [64, 4], one for each thread that holds a part of the row."""
    parts = gl.reshape(t, (t.shape[0], t.shape[1] // 8, 4, 2))
    return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def finish_up(
    gate_acc, up_acc, c, h_gate, h_up, sc, sh, bias, e, live, s, hi, row, part, capacity, tile, F, out,
    n: gl.constexpr, OUTS: gl.constexpr, ACT: gl.constexpr, KEEP: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """The epilogue of "up" for a block of 128 columns: the codes of H, and those of the activation.

    s: scales of rows. Columns from F on are zeros: matrices have zeros there, and no activation makes any
    other number of zeros.
    """
    HALVES: gl.constexpr = halves_of(ACT)
    gates = slices(gate_acc, 2)
    ups = slices(up_acc, 2)
    most = largest(gl.zeros((64, 64), gl.float32, layout=SLICE))
    most_gate = most
    most_up = most
    all_g = ()
    all_u = ()
    for j in gl.static_range(2):
        col = part * 128 + j * 64
        u = gl.convert_layout(ups[j], SLICE) * gl.expand_dims(s, 1)
        g = u
        if HALVES == 2:
            g = gl.convert_layout(gates[j], SLICE) * gl.expand_dims(s, 1)
        if bias is not None:
            cols = col + gl.arange(0, 64, layout=gl.SliceLayout(0, SLICE))
            at = bias + e.to(gl.int64) * HALVES * F + cols
            of_up = gl.load(at + (HALVES - 1) * F, mask=cols < F, other=0.0)
            u += gl.expand_dims(of_up.to(gl.float32), 0)
            if HALVES == 2:
                g += gl.expand_dims(gl.load(at, mask=cols < F, other=0.0).to(gl.float32), 0)
            else:
                g = u
        if KEEP:
            most_gate = gl.maximum(most_gate, largest(g))
            if HALVES == 2:
                most_up = gl.maximum(most_up, largest(u))
        all_g = all_g + (g,)
        all_u = all_u + (u,)
    if KEEP:
        coded = (sided(all_g[0], ACT), sided(all_g[1], ACT))
        put_codes(h_gate, sh, out, coded, sided(most_gate, ACT), live, hi, row, part, capacity, tile, F,
                  WHO * OUTS + n % OUTS, OUTS - 1)  # fmt: skip
        if HALVES == 2:
            coded = (sided(all_u[0], ACT), sided(all_u[1], ACT))
            of_up = sh + gl.cdiv(F, 128) * 2 * capacity
            put_codes(h_up, of_up, out, coded, sided(most_up, ACT), live, hi, row, part, capacity, tile, F,
                      WHO * OUTS + (n + 1) % OUTS, OUTS - 1)  # fmt: skip
    acts = ()
    for j in gl.static_range(2):
        y = activate(all_g[j], all_u[j], True, ACT)
        most = gl.maximum(most, largest(y))
        acts = acts + (y,)
    last: gl.constexpr = n + HALVES * KEEP
    put_codes(
        c, sc, out, acts, most, live, hi, row, part, capacity, tile, F, WHO * OUTS + last % OUTS, OUTS - 1
    )  # fmt: skip


@gluon.jit
def backward_slice(
    gate, up, of_gate, of_up, d_act, s, w, total, most_gate, most_up, ACT: gl.constexpr
):  # fmt: skip
    """s * act, dH's gate and up, each in halves of the slice, which need fewer registers; and sums of rows.

    gate, up: codes of H, with the scales of_gate, of_up. d_act is still to be multiplied by s. The sums: ds
    (`summed`), and the largest magnitudes of both halves of dH (`largest`).
    """
    gates = slices(gate, 2)
    ups = slices(up, 2)
    d_acts = slices(d_act, 2)
    ys = ()
    d_gates = ()
    d_ups = ()
    for i in gl.static_range(2):
        g = gl.convert_layout(gates[i], QUARTER).to(gl.float32) * of_gate
        u = g
        if halves_of(ACT) == 2:
            u = gl.convert_layout(ups[i], QUARTER).to(gl.float32) * of_up
        d = gl.convert_layout(d_acts[i], QUARTER) * gl.expand_dims(s, 1)
        y, d_gate, d_up, d_weight = activate_backward(g, u, d, gl.expand_dims(w, 1), True, ACT)
        total += summed(d_weight)
        most_gate = gl.maximum(most_gate, largest(d_gate))
        ys = ys + (bf16(y),)
        d_gates = d_gates + (bf16(d_gate),)
        if halves_of(ACT) == 2:
            most_up = gl.maximum(most_up, largest(d_up))
            d_ups = d_ups + (bf16(d_up),)
    return ys, d_gates, d_ups, total, most_gate, most_up


@gluon.jit
def finish_dh(
    acc, act, dh_gate, dh_up, gate_codes, up_codes, sc, of_h, total, it, live, s, w, hi, row, part, capacity,
    tile, F, a_bufs, b_bufs, out, full, empty,
    n: gl.constexpr, S: gl.constexpr, NB: gl.constexpr, OUTS: gl.constexpr, ACT: gl.constexpr,
    WHO: gl.constexpr,
):  # fmt: skip
    """The epilogue of "dh" for a block of 128 columns; returns this block's part of ds, and `it` after it.

    s, w: scales and routing weights of rows. The codes of H come through the ring; of_h: their scales.
    """
    HALVES: gl.constexpr = halves_of(ACT)
    most_gate = largest(gl.zeros((64, 32), gl.float32, layout=QUARTER))
    most_up = most_gate
    parts = slices(acc, 2)
    gates = ()
    ups = ()
    h_gates = slices_of_h(a_bufs, S)
    h_ups = slices_of_h(b_bufs, NB * S)
    b = it % S
    mbarrier.wait(full.index(b), it // S & 1)
    for j in gl.static_range(2):
        col = part * 128 + j * 64
        gate = h_gates.index(2 * b + j).reshape([128, 64]).slice(WHO * 64, 64, dim=0).load(SLICE)
        up = gate
        if HALVES == 2:
            up = h_ups.index(2 * NB * b + j).reshape([128, 64]).slice(WHO * 64, 64, dim=0).load(SLICE)
        if j == 1:
            mbarrier.arrive(empty.index(b), count=1)
        d_act = gl.convert_layout(parts[j], SLICE)
        ys, d_gates, d_ups, total, most_gate, most_up = backward_slice(
            gate, up, *of_h, d_act, s, w, total, most_gate, most_up, ACT
        )
        put_slice(act, out, whole(ys), hi, row, col, n + (1 + HALVES) * j, OUTS, WHO)
        gates = gates + (whole(d_gates),)
        put_slice(dh_gate, out, gates[j], hi, row, col, n + (1 + HALVES) * j + 1, OUTS, WHO)
        if HALVES == 2:
            ups = ups + (whole(d_ups),)
            put_slice(dh_up, out, ups[j], hi, row, col, n + (1 + HALVES) * j + 2, OUTS, WHO)
    last: gl.constexpr = n + 2 * (1 + HALVES)
    put_codes(
        gate_codes, sc, out, gates, most_gate, live, hi, row, part, capacity, tile, F,
        WHO * OUTS + last % OUTS, OUTS - 1,
    )  # fmt: skip
    if HALVES == 2:
        of_up = sc + gl.cdiv(F, 128) * 2 * capacity
        put_codes(
            up_codes, of_up, out, ups, most_up, live, hi, row, part, capacity, tile, F,
            WHO * OUTS + (last + 1) % OUTS, OUTS - 1,
        )  # fmt: skip
    return total, it + 1


@gluon.jit
def consume_tiles(
    h_gate, h_up, sh, c, c_gate, c_up, gate_codes, up_codes, sc, bias, weights, ds, sa, sb, order, tiles,
    capacity, offsets, first, N, E, P, F, num_m, num_n, steps, s_n, s_k, GROUP, a_bufs, b_bufs, out, full,
    empty,
    S: gl.constexpr, OUTS: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, ACT: gl.constexpr,
    KEEP: gl.constexpr, PAIR: gl.constexpr, PARTS: gl.constexpr, NB: gl.constexpr, GATHER: gl.constexpr,
    SUMS: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """A consumer: rows WHO * 64 to WHO * 64 + 64 of every tile of this program."""
    ROWS: gl.constexpr = QUARTER if KIND == "dh" else SLICE
    PUTS: gl.constexpr = puts(KIND, halves_of(ACT), KEEP)
    blocks = gl.cdiv(F, 128)
    it = 0
    for t in range(gl.program_id(0), tile_count(tiles, E, num_m, num_n, KIND), gl.num_programs(0)):
        pm, e, hi, row, pn, n_steps, start = locate(
            t, tiles, capacity, offsets, first, num_m, num_n, steps, GROUP, KIND, PARTS
        )
        tile = 2 * pm + WHO
        mine = row + WHO * 64
        r = mine + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
        live = r < hi
        if KIND == "up" or KIND == "dh":
            slots = gl.load(order + gl.minimum(r, hi - 1))
        of_h = scales_of_h(sh, pn, tile, blocks, capacity, NB if KIND == "dh" else 0, ACT)
        of_a, a_step, of_b0, of_b1 = scale_places(
            e, pm, pn, tile, start, blocks, steps, capacity, s_n, KIND, PAIR, PARTS, NB
        )
        acc0, acc1, it = multiply(
            sa, sb, of_a, a_step, of_b0, of_b1, s_k, n_steps, it, a_bufs, b_bufs, full, empty,
            S, NB, KIND == "rows" or KIND == "dw", GATHER, WHO,
        )  # fmt: skip
        accs = (acc0, acc1)
        tma.store_wait(pendings=0)  # the last tile's stores have read `out`
        if KIND == "rows":
            for i in gl.static_range(NB):
                parts = slices(accs[i], 2)
                for j in gl.static_range(2):
                    put_slice(c, out, parts[j], hi, mine, (pn * NB + i) * 128 + j * 64, 2 * i + j, OUTS, WHO)
        elif KIND == "dw":
            for i in gl.static_range(NB):
                col = (pn * NB + i) * 128
                if SUMS == "":
                    put_gradient(c, out, slices(accs[i], 2), e, mine, col, 2 * i, OUTS, WHO)
                elif SUMS == "write" or n_steps > 0:
                    into_sum(c, slices(accs[i], 4), e, mine, col, P, F, 64, 32, 4, SUMS)
        else:
            s = gl.load(sa + slots // K)
            if PAIR:
                finish_up(acc0, acc1, c, h_gate, h_up, sc, sh, bias, e, live, s, hi, mine, pn, capacity, tile,
                          F, out, 0, OUTS, ACT, KEEP, WHO)  # fmt: skip
            elif KIND == "up":
                for i in gl.static_range(NB):
                    finish_up(accs[i], accs[i], c, h_gate, h_up, sc, sh, bias, e, live, s, hi, mine,
                              pn * NB + i, capacity, tile, F, out, PUTS * i, OUTS, ACT, KEEP,
                              WHO)  # fmt: skip
            else:
                w = gl.where(live, gl.load(weights + slots).to(gl.float32), 0.0)
                total = summed(gl.zeros((64, 32), gl.float32, layout=QUARTER))
                for i in gl.static_range(NB):
                    total, it = finish_dh(
                        accs[i], c, c_gate, c_up, gate_codes, up_codes, sc, of_h[i], total, it, live, s, w,
                        hi, mine, pn * NB + i, capacity, tile, F, a_bufs, b_bufs, out, full, empty,
                        PUTS * i, S, NB, OUTS, ACT, WHO,
                    )  # fmt: skip
                total = gl.convert_layout(gl.sum(total, 1), r.type.layout)
                gl.store(ds + pn.to(gl.int64) * N + r, total, mask=live)
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=["capacity", "N", "E", "P", "F", "num_m", "num_n", "steps", "s_n", "s_k", "GROUP"]
)
def fp8_specialised(
    a, sa, b, sb, bias, h_gate, h_up, sh, c, c_gate, c_up, gate_codes, up_codes, sc, weights, ds, order,
    tiles, capacity, offsets, first, N, E, P, F, num_m, num_n, steps, s_n, s_k, GROUP, stride,
    BN: gl.constexpr, S: gl.constexpr, OUTS: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr,
    ACT: gl.constexpr, KEEP: gl.constexpr, PARTS: gl.constexpr, GATHER: gl.constexpr, EVEN: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """One of the products, by KIND; F: columns of its result, or of one half of it.

        "up"    `up_fp8_kernel`: c, sc: codes and scales of the activation; with KEEP also those of H
        "rows"  `rows_fp8_kernel`: c, with PARTS halves of A and B
        "dh"    `dh_fp8_kernel`: c = s * act; c_gate, c_up: dH; gate_codes, up_codes, sc: its codes and scales
        "dw"    c [E, P, F] = A[columns of e] @ B[columns of e]^T, of `turned_kernel`'s copies a, sa and b, sb

    a: [T, D] with row stride `stride` and GATHER, else a descriptor of sorted rows; sa: its scales.
    b: a descriptor of matrices [M, F, L] whose rows are multiplied; sb: its scales, where the block i of rows
    and the block k of columns have theirs at i s_n + k s_k, from the matrix's first scale on.
    h_gate, h_up, sh: codes and scales of H, which "dh" reads. ds: [ceil(F / BN), N].
    BN: columns of a tile, 128 or 256; 256 for "up" with a gate: 128 of each half.
    SUMS: of a "dw" whose c is a sum in fp32, as in hopper.py; else "".
    S: stages of the ring. OUTS: staging buffers of a consumer. EVEN: `stride` is a multiple of 128.
    """
    FP8: gl.constexpr = gl.float8e4nv
    PAIR: gl.constexpr = KIND == "up" and halves_of(ACT) == 2
    NB: gl.constexpr = BN // 128
    A_BOX: gl.constexpr = [128, 128]
    B_BOX: gl.constexpr = [1, 128, 128]
    OUT_BOX: gl.constexpr = [64, 64]
    a_bufs = gl.allocate_shared_memory(FP8, [S] + A_BOX, gl.NVMMASharedLayout.get_default_for(A_BOX, FP8))
    b_bufs = gl.allocate_shared_memory(
        FP8, [NB * S] + B_BOX, gl.NVMMASharedLayout.get_default_for(B_BOX, FP8)
    )
    out = gl.allocate_shared_memory(
        gl.bfloat16, [2 * OUTS] + OUT_BOX, gl.NVMMASharedLayout.get_default_for(OUT_BOX, gl.bfloat16)
    )
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=129 if GATHER else 1)  # one arrival of each cp.async thread
        mbarrier.init(empty.index(i), count=2)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    gl.warp_specialize([
        (consume_tiles, (h_gate, h_up, sh, c, c_gate, c_up, gate_codes, up_codes, sc, bias, weights, ds, sa,
                         sb, order, tiles, capacity, offsets, first, N, E, P, F, num_m, num_n, steps, s_n,
                         s_k, GROUP, a_bufs, b_bufs, out, full, empty, S, OUTS, K, KIND, ACT, KEEP, PAIR,
                         PARTS, NB, GATHER, SUMS, 0)),
        (consume_tiles, (h_gate, h_up, sh, c, c_gate, c_up, gate_codes, up_codes, sc, bias, weights, ds, sa,
                         sb, order, tiles, capacity, offsets, first, N, E, P, F, num_m, num_n, steps, s_n,
                         s_k, GROUP, a_bufs, b_bufs, out, full, empty, S, OUTS, K, KIND, ACT, KEEP, PAIR,
                         PARTS, NB, GATHER, SUMS, 1)),
        (load_tiles, (a, b, h_gate, h_up, order, tiles, capacity, offsets, first, N, E, num_m, num_n, steps,
                      GROUP, stride, a_bufs, b_bufs, full, empty, S, K, KIND, PAIR, PARTS, NB, GATHER, EVEN,
                      LAYOUT)),
    ], [4, 4 if GATHER else 1], [232, 40] if GATHER else [240, 24])  # fmt: skip
