"""Exchanges rows between the GPUs of one node: kernels that write to, or read from, the peers' memory.

Every rank owns the same sections of memory (x, ids, weights, y, ...). A kernel gets, for each section, the
addresses of all ranks' sections as int64 [WORLD]; it does not depend on how these sections were mapped into
its address space. In every section rank p's token t has slot p * capacity + t on every rank that receives it.
So no rank needs to know how many rows another rank sends, no count is exchanged, no rows are sorted, and
equal inputs give equal bits. Slots without a token have ids -1, and their rows are never read.

    push    copies this rank's rows to their slots on each rank that holds one of their experts (a row is
            read once); then a barrier of all ranks
    pull    a barrier of all ranks; then y[t] = the sum of this rank's token's slots on those ranks, in
            float32, in rank order

Rows may be packed for the transfer, as float8 e4m3 with a float32 scale a row: half the bytes of bfloat16.

The barrier: on every rank there is a cell for each rank. After its stores, each program of a push adds one to
its rank's cell on every rank; in a pull, one program does so before it reads. A waiting program waits until
every cell has grown by the number of programs that add to it. The value that the cells have reached is kept
on the device, so a captured graph can be replayed and the host never waits. An exchange needs no further
launch: the last program of a push waits, and so does every program of a pull.

Memory order: a barrier of a program's threads orders its stores before its release, at system scope, on the
peers' cells.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from tmoe.ops.experts.fp8_kernels import po2, size
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, launch
from tmoe.ops.launch.shapes import LayerShapes
from tmoe.ops.register import collect

# cells for the ranks' arrivals in a state, more than an NVLink node has ranks; MET and PASSED follow them
RANKS = 32
MET = tl.constexpr(RANKS)  # value of every cell at the end of the last barrier
PASSED = tl.constexpr(RANKS + 1)  # number of programs of the running pull that have read MET
STATE = 2 * RANKS  # length of a state in int32, zero before its first use
# tokens that a program copies at a time, or fewer if they would not fill the GPU; fastest on H200s
TOKENS = 16
TILE = 16384  # elements of a program's tile at most
WARPS = 8


@triton.jit
def section(addresses, q, dtype):
    """A pointer to rank q's section, which is 16-byte aligned."""
    return tl.multiple_of(tl.load(addresses + q).to(tl.pointer_type(dtype), bitcast=True), 16)


@triton.jit
def arrive(states, rank, WORLD: tl.constexpr, WP: tl.constexpr):
    """Signal to every rank, including this rank, that all stores of this program are visible."""
    tl.debug_barrier()  # of all threads of the program
    q = tl.arange(0, WP)
    cells = tl.load(states + q, mask=q < WORLD, other=0).to(tl.pointer_type(tl.int32), bitcast=True) + rank
    tl.atomic_add(cells, 1, mask=q < WORLD, sem="release", scope="sys")


@triton.jit
def wait(own, arrivals, WORLD: tl.constexpr, WP: tl.constexpr):
    """Wait until every rank has arrived `arrivals` times since the last barrier; returns the new MET.

    Counts may wrap around.
    """
    q = tl.arange(0, WP)
    meeting = tl.load(own + MET) + arrivals
    while tl.min(tl.load(own + q, mask=q < WORLD, other=meeting, volatile=True) - meeting) < 0:
        pass
    tl.atomic_add(own + q, 0, mask=q < WORLD, sem="acquire", scope="sys")
    tl.debug_barrier()  # all threads may read the data that one thread has acquired
    return meeting


@triton.jit
def pass_together(own, WORLD: tl.constexpr, WP: tl.constexpr):
    """The barrier of a pull, in which every program of a launch waits.

    Returns the new MET, and the number of programs that passed the barrier before this program. PASSED is
    incremented by the operation that acquires, so both need one access to memory; a count at the end of a
    program needed a further access (0.5 to 0.8 us).
    """
    q = tl.arange(0, WP)
    meeting = tl.load(own + MET) + 1
    while tl.min(tl.load(own + q, mask=q < WORLD, other=meeting, volatile=True) - meeting) < 0:
        pass
    tl.debug_barrier()  # no thread reads MET after this
    q = tl.arange(0, 2 * WP)
    last = q == WORLD  # the element for the cell PASSED
    cells = own + tl.where(last, PASSED, q)
    before = tl.atomic_add(cells, last.to(tl.int32), mask=q <= WORLD, sem="acquire", scope="sys")
    tl.debug_barrier()
    return meeting, tl.sum(tl.where(last, before, 0))


@triton.jit
def owners(ids, t, T, L, K: tl.constexpr, KP: tl.constexpr):
    """Expert ids of tokens t, and the ranks that hold these experts, [tokens, KP]; -1 where there is none."""
    k = tl.arange(0, KP)
    slots = t.to(tl.int64)[:, None] * K + k[None, :]
    expert = tl.load(ids + slots, mask=(t < T)[:, None] & (k < K)[None, :], other=-1)
    return expert, tl.where(expert >= 0, expert // L, -1)


@triton.jit(do_not_specialize=["T", "capacity", "rank", "L"])
def push_kernel(
    x, scales, ids, weights, to_x, to_scales, to_ids, to_weights, states, T, capacity, rank, L, D,
    K: tl.constexpr, KP: tl.constexpr, WORLD: tl.constexpr, WP: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, SCALED: tl.constexpr, ROUTES: tl.constexpr, MEET: tl.constexpr,
):  # fmt: skip
    """Copy rows of x [T, D] to their slots.

    SCALED: also the scale of each row.
    ROUTES: also each slot's K ids, local to the receiver, and weights.
    MEET: then run the barrier.
    """
    k = tl.arange(0, KP)
    for block in range(tl.program_id(0), tl.cdiv(capacity, BT), tl.num_programs(0)):
        t = block * BT + tl.arange(0, BT)
        expert, owner = owners(ids, t, T, L, K, KP)
        row = (rank * capacity + t).to(tl.int64)
        mask = (t < capacity)[:, None] & (k < K)[None, :]
        w = 0.0
        if ROUTES:
            w = tl.load(
                weights + t.to(tl.int64)[:, None] * K + k[None, :], mask=(t < T)[:, None] & mask, other=0.0
            )
        if SCALED:
            scale = tl.load(scales + t, mask=t < T, other=0.0)
            for i in tl.static_range(WORLD):
                q = (rank + 1 + i) % WORLD
                goes = tl.max((owner == q).to(tl.int32), 1) > 0
                tl.store(section(to_scales, q, tl.float32) + row, scale, mask=goes)
        for col in range(0, D, BD):
            cols = col + tl.arange(0, BD)
            inside = (cols < D)[None, :]
            tile = tl.load(x + t.to(tl.int64)[:, None] * D + cols[None, :], mask=(t < T)[:, None] & inside)
            for i in tl.static_range(WORLD):
                q = (rank + 1 + i) % WORLD  # from the next rank on, so that the ranks' first targets differ
                goes = tl.max((owner == q).to(tl.int32), 1) > 0
                to = section(to_x, q, x.dtype.element_ty) + row[:, None] * D + cols[None, :]
                tl.store(to, tile, mask=goes[:, None] & inside)
        if ROUTES:
            at = row[:, None] * K + k[None, :]
            for i in tl.static_range(WORLD):
                q = (rank + 1 + i) % WORLD
                tl.store(
                    section(to_ids, q, tl.int32) + at, tl.where(owner == q, expert - q * L, -1), mask=mask
                )
                tl.store(section(to_weights, q, tl.float32) + at, w.to(tl.float32), mask=mask)
    if MEET:
        arrive(states, rank, WORLD, WP)
        if tl.program_id(0) == tl.num_programs(0) - 1:
            own = section(states, rank, tl.int32)
            tl.store(own + MET, wait(own, tl.num_programs(0), WORLD, WP))


@triton.jit(do_not_specialize=["T", "capacity", "rank", "L"])
def pull_kernel(
    y, d_weights, ids, from_y, from_scales, from_weights, states, T, capacity, rank, L, D,
    K: tl.constexpr, KP: tl.constexpr, WORLD: tl.constexpr, WP: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, SCALED: tl.constexpr, WEIGHTS: tl.constexpr, MEET: tl.constexpr,
):  # fmt: skip
    """y [T, D] = sums of this rank's tokens' slots over ranks.

    SCALED: the slots are packed.
    WEIGHTS: also copy d_weights [T, K], from the slot's owner.
    MEET: run the barrier first.
    """
    own = section(states, rank, tl.int32)
    k = tl.arange(0, KP)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    _, owner = owners(ids, t, T, L, K, KP)
    meeting, before = 0, 0
    if MEET:
        if tl.program_id(0) == 0:
            arrive(states, rank, WORLD, WP)
        meeting, before = pass_together(own, WORLD, WP)
    for _ in range(tl.program_id(0), tl.cdiv(T, BT), tl.num_programs(0)):
        # load the owners of the next tokens while these rows are read
        _, ahead = owners(ids, t + tl.num_programs(0) * BT, T, L, K, KP)
        row = (rank * capacity + t).to(tl.int64)
        for col in range(0, D, BD):
            cols = col + tl.arange(0, BD)
            inside = (cols < D)[None, :]
            acc = tl.zeros((BT, BD), tl.float32)
            for q in tl.static_range(WORLD):
                comes = tl.max((owner == q).to(tl.int32), 1) > 0
                there = comes[:, None] & inside
                if SCALED:
                    scale = tl.load(section(from_scales, q, tl.float32) + row, mask=comes, other=0.0)
                    at = section(from_y, q, tl.float8e4nv) + row[:, None] * D + cols[None, :]
                    acc += tl.load(at, mask=there, other=0.0).to(tl.float32) * scale[:, None]
                else:
                    at = section(from_y, q, y.dtype.element_ty) + row[:, None] * D + cols[None, :]
                    acc += tl.load(at, mask=there, other=0.0).to(tl.float32)
            at = y + t.to(tl.int64)[:, None] * D + cols[None, :]
            tl.store(at, acc.to(y.dtype.element_ty), mask=(t < T)[:, None] & inside)
        if WEIGHTS:
            mask = (t < T)[:, None] & (k < K)[None, :]
            peer_weights = tl.load(from_weights + owner, mask=owner >= 0, other=0).to(
                tl.pointer_type(tl.float32), bitcast=True
            )
            dw = tl.load(peer_weights + row[:, None] * K + k[None, :], mask=owner >= 0, other=0.0)
            at = d_weights + t.to(tl.int64)[:, None] * K + k[None, :]
            tl.store(at, dw.to(d_weights.dtype.element_ty), mask=mask)
        t += tl.num_programs(0) * BT
        owner = ahead
    if MEET:
        if before == tl.num_programs(0) - 1:  # every program has read MET
            tl.store(own + PASSED, 0)
            tl.store(own + MET, meeting)


@triton.jit
def filled(ids, t, n, K: tl.constexpr, KP: tl.constexpr):
    """Mask of the slots t that exist; with ids, of those that hold a token."""
    there = t < n
    if ids is not None:
        k = tl.arange(0, KP)
        mask = there[:, None] & (k < K)[None, :]
        there = tl.max(tl.load(ids + t.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=-1), 1) >= 0
    return there


@triton.jit(do_not_specialize=["n"])
def pack_kernel(
    x, ids, packed, scales, n, D, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """Pack rows: x [n, D] = packed * scales, with packed in float8 e4m3.

    A scale is the power of two from the row's largest magnitude / 448 upwards: packed times scale is exact in
    bfloat16, and experts in fp8 multiply by packed rows (ops/experts/fp8_codes.py).
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    there = filled(ids, t, n, K, KP)
    rows = t.to(tl.int64)[:, None] * D
    top = tl.zeros((BT,), tl.float32)
    for col in range(0, D, BD):
        cols = col + tl.arange(0, BD)[None, :]
        tile = tl.load(x + rows + cols, mask=there[:, None] & (cols < D), other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.max(size(tile), 1))
    scale, inverse = po2(top)
    tl.store(scales + t, scale, mask=there)
    for col in range(0, D, BD):
        cols = col + tl.arange(0, BD)[None, :]
        tile = tl.load(x + rows + cols, mask=there[:, None] & (cols < D), other=0.0).to(tl.float32)
        tl.store(
            packed + rows + cols,
            (tile * inverse[:, None]).to(tl.float8e4nv),
            mask=there[:, None] & (cols < D),
        )


@triton.jit(do_not_specialize=["n"])
def unpack_kernel(
    x, ids, packed, scales, n, D, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """The inverse of pack_kernel, for the slots that hold a token."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    there = filled(ids, t, n, K, KP)
    rows = t.to(tl.int64)[:, None] * D
    scale = tl.load(scales + t, mask=there, other=0.0)
    for col in range(0, D, BD):
        cols = col + tl.arange(0, BD)[None, :]
        mask = there[:, None] & (cols < D)
        tile = tl.load(packed + rows + cols, mask=mask, other=0.0).to(tl.float32) * scale[:, None]
        tl.store(x + rows + cols, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rank"])
def meet_kernel(
    states, rank, WORLD: tl.constexpr, WP: tl.constexpr, ARRIVE: tl.constexpr, WAIT: tl.constexpr
):
    """The barrier alone, or one half of it (ARRIVE, WAIT), in one program."""
    own = section(states, rank, tl.int32)
    if ARRIVE:
        arrive(states, rank, WORLD, WP)
    if WAIT:
        tl.store(own + MET, wait(own, 1, WORLD, WP))


def _tiling(tokens: int, programs: int, D: int, K: int, world: int) -> tuple[tuple[int], tuple[int, ...]]:
    """The grid, equal on all ranks, and the size arguments of the push and pull kernels."""
    # Each program gets TOKENS rows, but at least one program runs on each multiprocessor (`programs` / 2). A
    # second program a multiprocessor, with 8 rows each, cost 1 us of 17, or 2 of 38.
    programs = min(programs, max(programs // 2, cdiv(tokens, TOKENS)))
    rows = TOKENS
    while rows > 2 and cdiv(tokens, rows) < programs:
        rows //= 2
    sizes = D, K, power_of_2(K), world, power_of_2(world), rows, min(TILE // rows, power_of_2(D))
    return (max(1, min(programs, cdiv(tokens, rows))),), sizes


def push(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor | None,
    to_x: Tensor,
    to_ids: Tensor,
    to_weights: Tensor,
    states: Tensor,
    rank: int,
    capacity: int,
    local_experts: int,
    programs: int,
    meet: bool = True,
    scales_T: Tensor | None = None,
    to_scales: Tensor | None = None,
) -> None:
    """Copies rows x_TD to their slots on the ranks that hold their experts.

    With weights_TK it also copies ids and weights.

    Args:
        x_TD: [T, D] of any float type, T <= capacity; contiguous, like all tensors.
        ids_TK: int32 expert ids of the whole group, -1 for none; rank q holds the local_experts experts from
            q * local_experts on.
        weights_TK: float [T, K], or None: the receivers have ids and weights already.
        to_x: int64 [WORLD], addresses on this device of each rank's rows [WORLD * capacity, D].
        to_ids: as to_x, of each rank's ids (int32 [WORLD * capacity, K]).
        to_weights: as to_x, of each rank's weights (float32 [WORLD * capacity, K]).
        states: as to_x, of each rank's state (int32 [STATE]).
        rank: this rank's number in the group.
        capacity: slots for each rank's tokens.
        local_experts: number of experts of a rank.
        programs: most programs of the launch, of which half run if rows are few; the same on all ranks.
        meet: whether the kernel ends only when all ranks' rows have arrived everywhere.
        scales_T: scales of packed rows, or None.
        to_scales: as to_x, of each rank's scales [WORLD * capacity].
    """
    T, D = x_TD.shape
    grid, sizes = _tiling(capacity, programs, D, ids_TK.shape[1], to_x.shape[0])
    launch(
        push_kernel, grid,
        x_TD, scales_T, ids_TK, weights_TK, to_x, to_scales, to_ids, to_weights, states, T, capacity, rank,
        local_experts, *sizes, scales_T is not None, weights_TK is not None, meet, num_warps=WARPS,
    )  # fmt: skip


def pull(
    y_TD: Tensor,
    d_weights_TK: Tensor | None,
    ids_TK: Tensor,
    from_y: Tensor,
    from_weights: Tensor,
    states: Tensor,
    rank: int,
    capacity: int,
    local_experts: int,
    programs: int,
    meet: bool = True,
    from_scales: Tensor | None = None,
) -> None:
    """y_TD = sums over ranks of this rank's tokens' slots, in rank order, in float32.

    Args:
        d_weights_TK: gradients of weights, copied from the slots' owners; or None.
        meet: whether all ranks run the barrier before any rank reads.
        from_scales: addresses of the scales, if y is packed.
        The other arguments are those of push.
    """
    T, D = y_TD.shape
    grid, sizes = _tiling(T, programs, D, ids_TK.shape[1], from_y.shape[0])
    launch(
        pull_kernel, grid,
        y_TD, d_weights_TK, ids_TK, from_y, from_scales, from_weights, states, T, capacity, rank,
        local_experts,
        *sizes, from_scales is not None, d_weights_TK is not None, meet, num_warps=WARPS,
    )  # fmt: skip


def _pack(kernel: JITFunction, x: Tensor, ids_RK: Tensor | None, packed: Tensor, scales: Tensor) -> None:
    """Launch pack_kernel or unpack_kernel over the rows of x."""
    n, D = x.shape
    K = 1 if ids_RK is None else ids_RK.shape[1]
    block = min(4096, power_of_2(D))
    rows = max(1, TILE // 2 // block)
    launch(
        kernel, (max(1, cdiv(n, rows)),), x, ids_RK, packed, scales,
        n, D, K, power_of_2(K), rows, block, num_warps=WARPS,
    )  # fmt: skip


def pack(x: Tensor, ids_RK: Tensor | None, packed: Tensor, scales: Tensor) -> None:
    """Writes rows of x [n, D] as packed (float8 e4m3) times scales (float32 [n]).

    With ids it writes only the slots that hold a token.
    """
    _pack(pack_kernel, x, ids_RK, packed, scales)


def unpack(x: Tensor, ids_RK: Tensor | None, packed: Tensor, scales: Tensor) -> None:
    """The inverse of pack: writes x for the slots that hold a token."""
    _pack(unpack_kernel, x, ids_RK, packed, scales)


def meet(states: Tensor, rank: int, arrive: bool = True, wait: bool = True) -> None:
    """A barrier of all ranks' streams, or one half of it.

    arrive: signal to the peers that this stream's copies are complete. Without `wait` the stream does not
        wait for the peers; a later launch does.
    wait: wait for all ranks' signals.
    """
    world = states.shape[0]
    launch(meet_kernel, (1,), states, rank, world, power_of_2(world), arrive, wait, num_warps=1)


def trace(
    T: int, D: int, K: int, world: int, dtype: torch.dtype, fp8: bool = False, trained: bool = True
) -> None:
    """Launch every kernel on meta tensors, inside compile_only, as on a Hopper GPU.

    trained: False: only the kernels of a forward.
    """
    x = torch.empty(T, D, dtype=dtype, device="meta")
    ids = torch.empty(T, K, dtype=torch.int32, device="meta")
    weights = torch.empty(T, K, device="meta")
    at = torch.empty(world, dtype=torch.int64, device="meta")
    programs = 264
    push(x, ids, weights, at, at, at, at, 0, T, 1, programs)
    push(x, ids, weights, at, at, at, at, 0, T, 1, programs, meet=False)
    pull(x, None, ids, at, at, at, 0, T, 1, programs)
    if trained:
        push(x, ids, None, at, at, at, at, 0, T, 1, programs)
        for meets in (True, False):
            pull(x, weights, ids, at, at, at, 0, T, 1, programs, meets)
    for arrives, waits in ((True, True), (True, False), (False, True)):
        meet(at, 0, arrives, waits)
    if fp8:
        packed = torch.empty(T, D, dtype=torch.float8_e4m3fn, device="meta")
        scales = torch.empty(T, device="meta")
        pack(x, None, packed, scales)
        pack(x, ids, packed, scales)
        unpack(x, ids, packed, scales)
        push(packed, ids, weights, at, at, at, at, 0, T, 1, programs, True, scales, at)
        push(packed, ids, weights, at, at, at, at, 0, T, 1, programs, False, scales, at)
        pull(x, None, ids, at, at, at, 0, T, 1, programs, True, at)
        if trained:
            push(packed, ids, None, at, at, at, at, 0, T, 1, programs, True, scales, at)
            for meets in (True, False):
                pull(x, weights, ids, at, at, at, 0, T, 1, programs, meets, at)


def trace_routes(T: int, K: int, world: int, dtype: torch.dtype) -> None:
    """Launch the push of ids and weights alone, as `trace` does. Copy engines then copy the rows."""
    x = torch.empty(T, 0, dtype=dtype, device="meta")
    ids = torch.empty(T, K, dtype=torch.int32, device="meta")
    weights = torch.empty(T, K, device="meta")
    at = torch.empty(world, dtype=torch.int64, device="meta")
    push(x, ids, weights, at, at, at, at, 0, T, 1, 264, meet=False)


def _of_layer(layer: LayerShapes) -> Iterable[tuple]:
    if layer.exchange is None:
        return
    ranks, slots, fp8, alone, shared_dim, _ = layer.exchange
    if alone:
        yield trace, layer.tokens, layer.width, slots, ranks, layer.dtype, fp8, layer.trained
    if shared_dim:
        yield trace_routes, layer.tokens, slots, ranks, layer.dtype


collect("exchange", {LayerShapes: _of_layer})
