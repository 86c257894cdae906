"""The product dh in fp8 for Hopper (Gluon): two consumers with separate tiles, rings and loaders.

The epilogue of dh takes as long as its product. In fp8_hopper.py both consumers share a ring: one stops soon
after the other begins its epilogue, and the tensor cores with it (Qwen3: about 1.4 ms, as in bf16). Here a
consumer multiplies a tile of 128 x 128 while the other one, at any place in another tile, runs its epilogue.
No GPU has run this kernel yet, so fp8_table.py chooses it only where a table names it.

The loader also loads the codes of H through the ring. The gradients of H are written over them, and from
there the copy engine stores them and their codes are made, so they need no registers.

Operands, results, scales and tile order are those of `dh_fp8_kernel`.
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

from tmoe.ops.experts.fp8_hopper import (
    BLOCKS,
    QUARTER,
    SLICE,
    backward_slice,
    largest,
    put_codes,
    summed,
    whole,
)
from tmoe.ops.experts.fp8_kernels import tile_with_number
from tmoe.ops.experts.gluon_names import bulk_load, bulk_store, reinterpret, thread_load
from tmoe.ops.experts.kernels import RAGGED, halves_of, slices


@gluon.jit
def slices_of(bufs, N: gl.constexpr):
    """A ring of N tiles as 2 N slices [64, 64] in bf16, two in each tile."""
    BOX: gl.constexpr = [1, 1, 64, 64]
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BOX, gl.bfloat16)
    return reinterpret(bufs, gl.bfloat16, [2 * N] + BOX, SHARED)


@gluon.jit
def slices_of_codes(bufs, N: gl.constexpr):
    """A ring of N tiles as 4 N slices [64, 64] of codes, four in each tile.

    H is in the last two. The gradient's first slice in bf16 has the memory of the first two, which is free.
    """
    BOX: gl.constexpr = [1, 1, 64, 64]
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BOX, gl.float8e4nv)
    return reinterpret(bufs, gl.float8e4nv, [4 * N] + BOX, SHARED)


@gluon.jit
def load_own_tiles(
    dy, w, h_gate, h_up, order, tiles, capacity, offsets, num_n, steps, GROUP, stride, a_bufs, b_bufs, full,
    empty,
    S: gl.constexpr, K: gl.constexpr, GATHER: gl.constexpr, EVEN: gl.constexpr, LAYOUT: gl.constexpr,
    WHO: gl.constexpr,
):  # fmt: skip
    """The loader of a consumer: dY and matrices for every step of its tiles, and then H, 64 rows a step."""
    gates = slices_of_codes(a_bufs, 2 * S)
    ups = slices_of_codes(b_bufs, 2 * S)
    it = 0
    for t in range(2 * gl.program_id(0) + WHO, gl.load(tiles) * num_n, 2 * gl.num_programs(0)):
        _, e, _, hi, row, pn = tile_with_number(t, tiles, capacity, offsets, num_n, GROUP)
        if GATHER:
            r = row + gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
            tok = gl.load(order + gl.minimum(r, hi - 1)) // K  # rows past the end are never stored
            cols = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
            rows = dy + gl.expand_dims(tok.to(gl.int64) * stride, 1) + gl.expand_dims(cols, 0)
        for k in range(steps):
            s = WHO * S + it % S
            mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
            arrived = full.index(s)
            mbarrier.expect(arrived, (1 if GATHER else 2) * 128 * 128)
            if GATHER:
                if EVEN:
                    thread_load(a_bufs.index(s), rows + k * 128)
                else:
                    mask = gl.expand_dims(cols < stride - k * 128, 0)
                    thread_load(a_bufs.index(s), rows + k * 128, mask=mask)
            else:
                bulk_load(dy, [row, k * 128], arrived, a_bufs.index(s))
            bulk_load(w, [e, pn * 128, k * 128], arrived, b_bufs.index(s))
            if GATHER:
                async_copy.mbarrier_arrive(arrived, increment_count=False)
            it += 1
        for i in range(2):
            s = WHO * S + it % S
            mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
            arrived = full.index(s)
            mbarrier.expect(arrived, (1 if h_up is None else 2) * 64 * 128)
            for j in gl.static_range(2):
                at = [RAGGED, hi, RAGGED - (hi - (row + i * 64)), pn * 128 + j * 64]
                bulk_load(h_gate, at, arrived, gates.index(4 * s + 2 + j))
                if h_up is not None:
                    bulk_load(h_up, at, arrived, ups.index(4 * s + 2 + j))
            if GATHER:
                async_copy.mbarrier_arrive(arrived, increment_count=False)
            it += 1


@gluon.jit
def multiply_own(
    scales, b_step, steps, it, a_bufs, b_bufs, full, empty,
    S: gl.constexpr, GATHER: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """The sums of the first and the last 64 rows of a tile over `steps` blocks, and `it` after them.

    scales: where a matrix's first scale is; the next ones follow at distances of b_step.
    """
    acc0 = gl.zeros((64, 128), gl.float32, layout=BLOCKS)
    acc1 = acc0
    part = acc0
    by_next = gl.load(scales)
    for k in range(steps):
        s = WHO * S + it % S
        by = by_next
        mbarrier.wait(full.index(s), it // S & 1)
        if GATHER:
            # cp.async writes through the generic proxy, wgmma reads through the async proxy
            fence_async_shared()
        b = b_bufs.index(s).reshape([128, 128]).permute((1, 0))
        upper = a_bufs.index(s).slice(0, 64, dim=0)
        lower = a_bufs.index(s).slice(64, 64, dim=0)
        token = warpgroup_mma(upper, b, warpgroup_mma_init(part), use_acc=False, is_async=True)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(token,))
        acc0 += part * by
        token = warpgroup_mma(lower, b, warpgroup_mma_init(part), use_acc=False, is_async=True)
        by_next = gl.load(scales + gl.minimum(k + 1, steps - 1) * b_step)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(token,))
        mbarrier.arrive(empty.index(s), count=1)
        acc1 += part * by
        it += 1
    return acc0, acc1, it


@gluon.jit
def finish_rows(
    acc, act, dh_gate, dh_up, gate_codes, up_codes, sc, sh, it, slots, live, sdy, weights, hi, row, pn,
    capacity, tile, F, a_bufs, b_bufs, out, full, empty,
    S: gl.constexpr, K: gl.constexpr, ACT: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """The epilogue for 64 rows; returns their part of ds, and `it` after it. slots: of rows.

    Stores in their order: s * act, dH's gate, dH's up, all again, codes of gate, codes of up. Without a gate
    those of up lack. `out` has two buffers: for s * act of both slices, then for both codes.
    """
    HALVES: gl.constexpr = halves_of(ACT)
    gates = slices_of(a_bufs, 2 * S)
    ups = slices_of(b_bufs, 2 * S)
    h_gates = slices_of_codes(a_bufs, 2 * S)
    h_ups = slices_of_codes(b_bufs, 2 * S)
    b = WHO * S + it % S
    s = gl.load(sdy + slots // K)
    w = gl.where(live, gl.load(weights + slots).to(gl.float32), 0.0)
    at_scale = sh + pn * 2 * capacity + tile
    of_gate = gl.load(at_scale)
    of_up = of_gate
    if HALVES == 2:
        of_up = gl.load(at_scale + gl.cdiv(F, 128) * 2 * capacity)
    total = summed(gl.zeros((64, 32), gl.float32, layout=QUARTER))
    most_gate = largest(gl.zeros((64, 32), gl.float32, layout=QUARTER))
    most_up = most_gate
    parts = slices(acc, 2)
    mbarrier.wait(full.index(b), it // S & 1)
    for j in gl.static_range(2):
        gate = gates.index(2 * b + j)
        up = ups.index(2 * b + j)
        g = h_gates.index(4 * b + 2 + j).reshape([64, 64]).load(SLICE)
        u = g
        if HALVES == 2:
            u = h_ups.index(4 * b + 2 + j).reshape([64, 64]).load(SLICE)
        d_act = gl.convert_layout(parts[j], SLICE)
        ys, d_gates, d_ups, total, most_gate, most_up = backward_slice(
            g, u, of_gate, of_up, d_act, s, w, total, most_gate, most_up, ACT
        )
        tma.store_wait(pendings=HALVES - 1 if j == 0 else HALVES + 1)
        staged = out.index(2 * WHO + j)
        staged.store(gl.convert_layout(whole(ys), SLICE))
        gate.reshape([64, 64]).store(gl.convert_layout(whole(d_gates), SLICE))
        if HALVES == 2:
            up.reshape([64, 64]).store(gl.convert_layout(whole(d_ups), SLICE))
        fence_async_shared()
        at = [RAGGED, hi, RAGGED - (hi - row), pn * 128 + j * 64]
        bulk_store(act, at, staged.reshape([1, 1, 64, 64]))
        bulk_store(dh_gate, at, gate)
        if HALVES == 2:
            bulk_store(dh_up, at, up)
    left = gates.index(2 * b).reshape([64, 64]).load(SLICE)
    right = gates.index(2 * b + 1).reshape([64, 64]).load(SLICE)
    put_codes(gate_codes, sc, out, (left, right), most_gate, live, hi, row, pn, capacity, tile, F, 2 * WHO,
              2 * HALVES + 1)  # fmt: skip
    if HALVES == 2:
        left = ups.index(2 * b).reshape([64, 64]).load(SLICE)
        right = ups.index(2 * b + 1).reshape([64, 64]).load(SLICE)
        of_up = sc + gl.cdiv(F, 128) * 2 * capacity
        put_codes(up_codes, of_up, out, (left, right), most_up, live, hi, row, pn, capacity, tile, F,
                  2 * WHO + 1, HALVES + 1)  # fmt: skip
    tma.store_wait(pendings=HALVES)  # dH has been read
    mbarrier.arrive(empty.index(b), count=1)
    return gl.convert_layout(gl.sum(total, 1), live.type.layout), it + 1


@gluon.jit
def consume_own_tiles(
    act, dh_gate, dh_up, gate_codes, up_codes, sc, sh, weights, ds, sdy, sw, order, tiles, capacity, offsets,
    N, F, num_n, steps, GROUP, a_bufs, b_bufs, out, full, empty,
    S: gl.constexpr, K: gl.constexpr, ACT: gl.constexpr, GATHER: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """A consumer: every second tile of this program."""
    it = 0
    for t in range(2 * gl.program_id(0) + WHO, gl.load(tiles) * num_n, 2 * gl.num_programs(0)):
        pm, e, _, hi, row, pn = tile_with_number(t, tiles, capacity, offsets, num_n, GROUP)
        r0 = row + gl.arange(0, 64, layout=gl.SliceLayout(1, QUARTER))
        rows = (r0, r0 + 64)
        slots = (
            gl.load(order + gl.minimum(r0, hi - 1)),
            gl.load(order + gl.minimum(r0 + 64, hi - 1)),
        )
        acc0, acc1, it = multiply_own(
            sw + e.to(gl.int64) * num_n * steps + pn, num_n, steps, it, a_bufs, b_bufs, full, empty,
            S, GATHER, WHO,
        )  # fmt: skip
        accs = (acc0, acc1)
        tma.store_wait(pendings=0)  # the last tile's stores have read `out`
        for i in gl.static_range(2):
            live = rows[i] < hi
            total, it = finish_rows(
                accs[i], act, dh_gate, dh_up, gate_codes, up_codes, sc, sh, it, slots[i], live, sdy, weights,
                hi, row + i * 64, pn, capacity, 2 * pm + i, F, a_bufs, b_bufs, out, full, empty, S, K, ACT,
                WHO,
            )  # fmt: skip
            gl.store(ds + pn.to(gl.int64) * N + rows[i], total, mask=live)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["capacity", "N", "F", "num_n", "steps", "GROUP"])
def dh_fp8_specialised(
    dy, sdy, w, sw, h_gate, h_up, s_h, dh_gate, dh_up, act, gate_codes, up_codes, s_dh, weights, ds, order,
    tiles, capacity, offsets, N, F, num_n, steps, GROUP, stride,
    S: gl.constexpr, K: gl.constexpr, ACT: gl.constexpr, GATHER: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """`dh_fp8_kernel`. steps, num_n: blocks of D and of F.

    dy: [T, D] with row stride `stride` and GATHER, else a descriptor of sorted rows. The other descriptors
    have boxes of 64 rows. S: stages of each consumer's ring. EVEN: `stride` is a multiple of 128.
    """
    FP8: gl.constexpr = gl.float8e4nv
    A_BOX: gl.constexpr = [128, 128]
    B_BOX: gl.constexpr = [1, 128, 128]
    OUT_BOX: gl.constexpr = [64, 64]
    WARPS: gl.constexpr = 2 if GATHER else 1  # of a loader
    a_bufs = gl.allocate_shared_memory(FP8, [2 * S] + A_BOX, gl.NVMMASharedLayout.get_default_for(A_BOX, FP8))
    b_bufs = gl.allocate_shared_memory(FP8, [2 * S] + B_BOX, gl.NVMMASharedLayout.get_default_for(B_BOX, FP8))
    out = gl.allocate_shared_memory(
        gl.bfloat16, [4] + OUT_BOX, gl.NVMMASharedLayout.get_default_for(OUT_BOX, gl.bfloat16)
    )
    full = gl.allocate_shared_memory(gl.int64, [2 * S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * S):
        mbarrier.init(full.index(i), count=32 * WARPS + 1 if GATHER else 1)
        mbarrier.init(empty.index(i), count=1)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    gl.warp_specialize([
        (consume_own_tiles, (act, dh_gate, dh_up, gate_codes, up_codes, s_dh, s_h, weights, ds, sdy, sw,
                             order, tiles, capacity, offsets, N, F, num_n, steps, GROUP, a_bufs, b_bufs, out,
                             full, empty, S, K, ACT, GATHER, 0)),
        (consume_own_tiles, (act, dh_gate, dh_up, gate_codes, up_codes, s_dh, s_h, weights, ds, sdy, sw,
                             order, tiles, capacity, offsets, N, F, num_n, steps, GROUP, a_bufs, b_bufs, out,
                             full, empty, S, K, ACT, GATHER, 1)),
        (load_own_tiles, (dy, w, h_gate, h_up, order, tiles, capacity, offsets, num_n, steps, GROUP, stride,
                          a_bufs, b_bufs, full, empty, S, K, GATHER, EVEN, LAYOUT, 0)),
        (load_own_tiles, (dy, w, h_gate, h_up, order, tiles, capacity, offsets, num_n, steps, GROUP, stride,
                          a_bufs, b_bufs, full, empty, S, K, GATHER, EVEN, LAYOUT, 1)),
    ], [4, WARPS, WARPS], [232, 56, 56] if GATHER else [240, 24, 24])  # fmt: skip
