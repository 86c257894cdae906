"""The products for Hopper, warp-specialised (Gluon): a loader keeps the ring of operand tiles full, consumers multiply.

The plain kernels of kernels.py stop loading during a tile's epilogue and wait for each of its stores. Here the loader runs
ahead through the epilogue, and results leave by the copy engine while the next tile is multiplied. The consumer is eight warps
on a 128x256 tile: two warpgroups taking turns on 128x128 tiles hide the epilogue whole, but read shared memory 640 cycles a
step where the product takes 512 (measured for dh, Qwen3 shape: 1.85 ms by turns, 1.70 ms so). The loader gathers rows itself
(GATHER, four warps of cp.async), or is one warp that issues bulk copies.

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

from tmoe.ops.kernels import RAGGED, activate, activate_backward, halves, slices, tile_at, weight_tile_at


@gluon.jit
def tile_count(tiles, E, num_m, num_n, KIND: gl.constexpr):
    """How many tiles there are: for dw from the shapes, else from the table."""
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


@gluon.jit
def load_h(h_gate, h_up, h_bufs, h_full, h_empty, i, row, col, BM: gl.constexpr, BS: gl.constexpr, HS: gl.constexpr):
    """Load the i-th slice of H that this program needs into its place in the ring of HS slices."""
    s = i % HS
    mbarrier.wait(h_empty.index(s), (i // HS & 1) ^ 1)
    mbarrier.expect(h_full.index(s), 2 * BM * BS * 2)
    tma.async_copy_global_to_shared(h_gate, [row, col], h_full.index(s), h_bufs.index(2 * s))
    tma.async_copy_global_to_shared(h_up, [row, col], h_full.index(s), h_bufs.index(2 * s + 1))


@gluon.jit
def load_tiles(
    a, b, h_gate, h_up, order, tiles, capacity, offsets, E, num_m, num_n, steps, GROUP, stride,
    a_bufs, b_bufs, full, empty, h_bufs, h_full, h_empty,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, S: gl.constexpr, SUB: gl.constexpr, HS: gl.constexpr, K: gl.constexpr,
    KIND: gl.constexpr, B_ROWS: gl.constexpr, GATHER: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The loader: every step's A and B of every tile of this program, and for dh the slices of H that its epilogue reads.

    A tile's first HS slices of H are loaded once its first S steps fill the ring (the epilogue before is over by the time they
    have room), the other slices then too, while the next tile's steps wait for this one's epilogue.
    """
    BS: gl.constexpr = BN // SUB
    it = 0
    tile = 0
    last_row = 0
    last_pn = 0
    for t in range(gl.program_id(0), tile_count(tiles, E, num_m, num_n, KIND), gl.num_programs(0)):
        e, lo, hi, row, pn = locate(t, tiles, capacity, offsets, num_m, num_n, GROUP, BM, KIND)
        n_steps = steps
        if KIND == "dw":
            n_steps = gl.cdiv(hi - lo, BL)
        if GATHER == "a" and KIND != "dw":
            r = row + gl.arange(0, BM, layout=gl.SliceLayout(1, LAYOUT))
            tok = gl.load(order + r, mask=r < hi, other=0) // K  # rows past the end read token 0 and are never stored
            cols = gl.arange(0, BL, layout=gl.SliceLayout(0, LAYOUT))
            a_rows = a + gl.expand_dims(tok.to(gl.int64) * stride, 1) + gl.expand_dims(cols, 0)
        if GATHER != "" and KIND == "dw":
            r = lo + gl.arange(0, BL, layout=gl.SliceLayout(1, LAYOUT))
            tok = gl.load(order + r, mask=r < hi, other=0) // K
            W: gl.constexpr = BM if GATHER == "a" else BN
            cols = (row if GATHER == "a" else pn * BN) + gl.arange(0, W, layout=gl.SliceLayout(0, LAYOUT))
        for k in range(n_steps):
            s = it % S
            mbarrier.wait(empty.index(s), (it // S & 1) ^ 1)
            arrived = full.index(s)
            mbarrier.expect(arrived, ((0 if GATHER == "a" else BM) + (0 if GATHER == "b" else BN)) * BL * 2)
            if KIND == "dw":
                if GATHER != "":
                    rows = (
                        (a if GATHER == "a" else b)
                        + gl.expand_dims(tok.to(gl.int64) * stride, 1)
                        + gl.expand_dims(cols, 0)
                    )
                    bufs = (a_bufs if GATHER == "a" else b_bufs).index(s).reshape([BL, W])
                    async_copy.async_copy_global_to_shared(
                        bufs, rows, mask=gl.expand_dims(r < hi, 1)
                    )  # zeros past the end
                    r += BL
                    tok = gl.load(order + r, mask=r < hi, other=0) // K  # a step ahead
                if GATHER != "a":
                    tma.async_copy_global_to_shared(
                        a, [RAGGED, hi, RAGGED - (hi - lo) + k * BL, row], arrived, a_bufs.index(s)
                    )
                if GATHER != "b":
                    at = [RAGGED, hi, RAGGED - (hi - lo) + k * BL, pn * BN]
                    tma.async_copy_global_to_shared(b, at, arrived, b_bufs.index(s))
            else:
                if GATHER == "a":
                    async_copy.async_copy_global_to_shared(a_bufs.index(s), a_rows + k * BL)
                else:
                    tma.async_copy_global_to_shared(a, [row, k * BL], arrived, a_bufs.index(s))
                if KIND == "up":
                    tma.async_copy_global_to_shared(b, [2 * e, pn * (BN // 2), k * BL], arrived, b_bufs.index(s))
                elif B_ROWS:
                    tma.async_copy_global_to_shared(b, [e, pn * BN, k * BL], arrived, b_bufs.index(s))
                else:
                    tma.async_copy_global_to_shared(b, [e, k * BL, pn * BN], arrived, b_bufs.index(s))
            if GATHER != "":
                async_copy.mbarrier_arrive(arrived, increment_count=False)
            it += 1
            if KIND == "dh":
                if k == gl.minimum(S, n_steps) - 1:
                    if tile > 0:
                        for j in gl.static_range(HS, SUB):
                            load_h(
                                h_gate,
                                h_up,
                                h_bufs,
                                h_full,
                                h_empty,
                                (tile - 1) * SUB + j,
                                last_row,
                                last_pn * BN + j * BS,
                                BM,
                                BS,
                                HS,
                            )
                    for j in gl.static_range(HS):
                        load_h(h_gate, h_up, h_bufs, h_full, h_empty, tile * SUB + j, row, pn * BN + j * BS, BM, BS, HS)
        last_row = row
        last_pn = pn
        tile += 1
    if KIND == "dh":
        if tile > 0:
            for j in gl.static_range(HS, SUB):
                load_h(
                    h_gate,
                    h_up,
                    h_bufs,
                    h_full,
                    h_empty,
                    (tile - 1) * SUB + j,
                    last_row,
                    last_pn * BN + j * BS,
                    BM,
                    BS,
                    HS,
                )


@gluon.jit
def store_tile(c, smem, e, hi, row, col, KIND: gl.constexpr):
    """Hand a tile in shared memory to the copy engine; rows from hi on are clipped."""
    if KIND == "dw":
        tma.async_copy_shared_to_global(c, [e, row, col], smem)
    else:
        tma.async_copy_shared_to_global(c, [RAGGED, hi, RAGGED - (hi - row), col], smem)


@gluon.jit
def backward_slice(d_act, w, gate_smem, up_smem, act_smem, freed, pred, ACT: gl.constexpr):
    """Turn a slice of H in shared memory into dH in place, leave w * act beside it; returns this slice's <d_act, act>.

    The slice before has left shared memory by the time this one has been computed: its buffers are then handed back (freed).
    """
    layout: gl.constexpr = d_act.type.layout
    gate = gate_smem.load(layout).to(gl.float32)
    up = up_smem.load(layout).to(gl.float32)
    w = gl.expand_dims(gl.convert_layout(w, gl.SliceLayout(1, layout)), 1)
    act, d_gate, d_up, d_weight = activate_backward(gate, up, d_act, w, True, ACT)
    tma.store_wait(pendings=0)
    mbarrier.arrive(freed, count=1, pred=pred)
    gate_smem.store(d_gate.to(gate_smem.dtype))
    up_smem.store(d_up.to(up_smem.dtype))
    act_smem.store(act.to(act_smem.dtype))
    fence_async_shared()
    return gl.sum(d_weight, 1)


@gluon.jit
def consume_tiles(
    c, c2, c3, bias, bias_width, weights, ds, order, tiles, capacity, offsets, N, E, num_m, num_n, steps, GROUP,
    a_bufs, b_bufs, full, empty, h_bufs, h_full, h_empty, out,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, S: gl.constexpr, SUB: gl.constexpr, OUTS: gl.constexpr,
    HS: gl.constexpr, KIND: gl.constexpr, ACT: gl.constexpr, B_ROWS: gl.constexpr, KEEP: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """The consumer: the product and the epilogue of every tile of this program."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, BN, 16])
    it = 0
    i = 0  # slices of H
    for t in range(gl.program_id(0), tile_count(tiles, E, num_m, num_n, KIND), gl.num_programs(0)):
        e, lo, hi, row, pn = locate(t, tiles, capacity, offsets, num_m, num_n, GROUP, BM, KIND)
        n_steps = steps
        if KIND == "dw":
            n_steps = gl.cdiv(hi - lo, BL)
        if KIND == "dh":
            r = row + gl.arange(0, BM, layout=gl.SliceLayout(1, mma))
            slot = gl.load(order + r, mask=r < hi, other=0)
            w = gl.load(weights + slot, mask=r < hi, other=0.0).to(gl.float32)
        acc = warpgroup_mma_init(gl.zeros((BM, BN), gl.float32, layout=mma))
        for k in range(n_steps):
            s = it % S
            mbarrier.wait(full.index(s), it // S & 1)
            if GATHER != "":
                fence_async_shared()  # cp.async wrote through the generic proxy, wgmma reads through the async one
            a_tile = a_bufs.index(s)
            if KIND == "dw":
                a_tile = a_tile.reshape([BL, BM]).permute((1, 0))
            if B_ROWS:
                b_tile = b_bufs.index(s).reshape([BN, BL]).permute((1, 0))
            else:
                b_tile = b_bufs.index(s).reshape([BL, BN])
            acc = warpgroup_mma(a_tile, b_tile, acc, is_async=True, use_acc=k > 0)
            acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))  # wait returns a plain tensor
            mbarrier.arrive(empty.index((it + S - 1) % S), count=1, pred=k > 0)  # the step before is done
            it += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((it + S - 1) % S), count=1, pred=n_steps > 0)
        if KIND == "up":
            gate, up = halves(acc)
            gates = slices(gate, SUB)
            ups = slices(up, SUB)
            W: gl.constexpr = BN // 2 // SUB
            ROUNDS: gl.constexpr = OUTS // 3
            for j in gl.static_range(SUB):
                col = pn * (BN // 2) + j * W
                base = j % ROUNDS * 3
                gate = gates[j]
                up = ups[j]
                if bias is not None:
                    cols = col + gl.arange(0, W, layout=gl.SliceLayout(0, gate.type.layout))
                    at = bias + e.to(gl.int64) * 2 * bias_width + cols
                    here = cols < bias_width
                    gate += gl.expand_dims(gl.load(at, mask=here, other=0.0).to(gl.float32), 0)
                    up += gl.expand_dims(gl.load(at + bias_width, mask=here, other=0.0).to(gl.float32), 0)
                if KEEP:
                    tma.store_wait(pendings=OUTS - 3)  # the stores that last used these buffers have read them
                    out.index(base).reshape([BM, W]).store(gate.to(out.dtype))
                    out.index(base + 1).reshape([BM, W]).store(up.to(out.dtype))
                else:
                    tma.store_wait(pendings=ROUNDS - 1)
                out.index(base + 2).reshape([BM, W]).store(activate(gate, up, True, ACT).to(out.dtype))
                fence_async_shared()
                if KEEP:
                    store_tile(c, out.index(base), e, hi, row, col, KIND)
                    store_tile(c2, out.index(base + 1), e, hi, row, col, KIND)
                store_tile(c3, out.index(base + 2), e, hi, row, col, KIND)
        elif KIND == "dh":
            total = gl.zeros((BM,), gl.float32, layout=gl.SliceLayout(1, mma))
            parts = slices(acc, SUB)
            BS: gl.constexpr = BN // SUB
            for j in gl.static_range(SUB):
                s = i % HS
                mbarrier.wait(h_full.index(s), i // HS & 1)
                gate = h_bufs.index(2 * s)
                up = h_bufs.index(2 * s + 1)
                part = backward_slice(
                    parts[j], w, gate, up, out.index(0).reshape([BM, BS]), h_empty.index((i + HS - 1) % HS), j > 0, ACT
                )
                total += gl.convert_layout(part, gl.SliceLayout(1, mma))
                store_tile(c, gate.reshape([1, 1, BM, BS]), e, hi, row, pn * BN + j * BS, KIND)
                store_tile(c2, up.reshape([1, 1, BM, BS]), e, hi, row, pn * BN + j * BS, KIND)
                store_tile(c3, out.index(0), e, hi, row, pn * BN + j * BS, KIND)
                i += 1
            gl.store(ds + pn.to(gl.int64) * N + r, total, mask=r < hi)
            tma.store_wait(pendings=0)
            mbarrier.arrive(h_empty.index((i + HS - 1) % HS), count=1)
        else:
            parts = slices(acc, SUB)
            for j in gl.static_range(SUB):
                tma.store_wait(pendings=OUTS - 1)
                buf = out.index(j % OUTS)
                buf.reshape([BM, BN // SUB]).store(parts[j].to(out.dtype))
                fence_async_shared()
                store_tile(c, buf, e, hi, row, pn * BN + j * (BN // SUB), KIND)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["capacity", "N", "E", "GROUP"])
def specialised(
    a, b, bias, bias_width, h_gate, h_up, c, c2, c3, weights, ds, order, tiles, capacity, offsets,
    N, E, num_m, num_n, steps, GROUP, stride,
    BM: gl.constexpr, BN: gl.constexpr, BL: gl.constexpr, S: gl.constexpr, SUB: gl.constexpr, OUTS: gl.constexpr,
    HS: gl.constexpr, K: gl.constexpr,
    KIND: gl.constexpr, ACT: gl.constexpr, B_ROWS: gl.constexpr, KEEP: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """KIND "rows": C = A @ B[e]. "up": c, c2, c3 = gate, up, act. "dh": c, c2, c3 = d_gate, d_up, s * act, and ds partials.
    "dw": C[e] = A[rows]^T @ B[rows].

    GATHER names the operand ("a", "b") that is [T, D] in memory, with row stride `stride`, read through the routing order.
    KEEP false: "up" stores act alone. ACT: the activation, see `activate`. bias [E, 2 bias_width] or None is added to H.
    """
    A_BOX: gl.constexpr = [1, 1, BL, BM] if KIND == "dw" else [BM, BL]
    B_DW: gl.constexpr = [1, 1, BL, BN] if KIND == "dw" else [1, BL, BN]
    B_BOX: gl.constexpr = [2, BN // 2, BL] if KIND == "up" else [1, BN, BL] if B_ROWS else B_DW
    ELEMENT: gl.constexpr = c3.dtype
    a_bufs = gl.allocate_shared_memory(ELEMENT, [S] + A_BOX, gl.NVMMASharedLayout.get_default_for(A_BOX, ELEMENT))
    b_bufs = gl.allocate_shared_memory(ELEMENT, [S] + B_BOX, gl.NVMMASharedLayout.get_default_for(B_BOX, ELEMENT))
    out = gl.allocate_shared_memory(ELEMENT, [OUTS] + c3.block_type.shape, c3.layout)
    h_bufs = out
    if KIND == "dh":
        h_bufs = gl.allocate_shared_memory(ELEMENT, [2 * HS, BM, BN // SUB], h_gate.layout)
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    h_full = gl.allocate_shared_memory(gl.int64, [HS, 1], mbarrier.MBarrierLayout())
    h_empty = gl.allocate_shared_memory(gl.int64, [HS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1 if GATHER == "" else 129)  # one arrival a cp.async thread
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(HS):
        mbarrier.init(h_full.index(i), count=1)
        mbarrier.init(h_empty.index(i), count=1)
    LANES_W: gl.constexpr = BL if KIND != "dw" else BM if GATHER == "a" else BN
    LANES: gl.constexpr = LANES_W // 8 if LANES_W < 256 else 32
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    WARPS: gl.constexpr = 1 if GATHER == "" else 4
    REGS: gl.constexpr = 24 if GATHER == "" else 56 if KIND != "dw" else 88
    gl.warp_specialize([
        (consume_tiles, (c, c2, c3, bias, bias_width, weights, ds, order, tiles, capacity, offsets, N, E, num_m, num_n,
                         steps, GROUP, a_bufs, b_bufs, full, empty, h_bufs, h_full, h_empty, out,
                         BM, BN, BL, S, SUB, OUTS, HS, KIND, ACT, B_ROWS, KEEP, GATHER)),
        (load_tiles, (a, b, h_gate, h_up, order, tiles, capacity, offsets, E, num_m, num_n, steps, GROUP, stride,
                      a_bufs, b_bufs, full, empty, h_bufs, h_full, h_empty,
                      BM, BN, BL, S, SUB, HS, K, KIND, B_ROWS, GATHER, LAYOUT)),
    ], [WARPS], [REGS])  # fmt: skip
