"""Routing metadata, one packed int32 tensor: which sorted row belongs to which slot of ids.

Row r of expert e is slot order[r] = t * K + k; row_of[t * K + k] = r, or -1 if the slot has no expert on this
rank. The other tables describe one window of P rows (offsets[e] to offsets[e + 1] are expert e's rows in the
window), so memory is proportional to P, not N. Within an expert, rows keep the order of their slots (a stable
sort), so every sum has one fixed order.

On the GPU three kernels compute the metadata without sorting all slots, without atomics and without the host:
a histogram of each block of slots, a scan along the blocks of each expert, and the stable rank of each slot
inside its block. If slots are few, a single kernel does all steps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tmoe.ops.launch.kernel_launch import cdiv, early, empty, launch

# heights of row tiles that the kernels use; each has a table of (expert, first row)
TILES = (64, 128)
BLOCK = 512  # slots that a program counts and ranks
FEW = 8192  # up to this number of slots, one launch does all steps


def _pad(n: int) -> int:
    """Entries of a section, rounded up to 16 bytes, so that specialisation on pointers never depends on T."""
    return (n + 3) // 4 * 4


class Metadata:
    """Views into the packed tensor, for a window of P of the N sorted rows (all rows without a bound).

    Tables for the window:
      offsets [E+1]; by_size [E], experts by decreasing row count (long loops first);
      ready [E] and counter [1], zeros until the kernel of few_rows.py counts in them;
      tiles[BM], a table of BM-row tiles: count [4, only the first used], then expert [capacity], then first
          row [capacity].
    Tables for all rows:
      ends [E]; order [N]; row_of [N].
    The window's first row is `base`; `order` begins at that row.
    """

    def __init__(self, packed: Tensor, N: int, E: int, P: int | None = None) -> None:
        """packed: int32 of at least size(N, E, P) entries. P None: N."""
        P = N if P is None else P
        self.packed = packed
        self.N, self.E, self.P = N, E, P
        self.base = 0

        sections = self.sections(N, E, P)
        starts = [sum(sections[:i]) for i in range(len(sections))]
        self.offsets = packed[: E + 1]
        self.by_size = packed[starts[1] : starts[1] + E]
        self.ready = packed[starts[2] : starts[2] + E]
        self.counter = packed[starts[2] + E : starts[2] + E + 1]
        self.tiles = {bm: packed[starts[3 + i] :] for i, bm in enumerate(TILES)}
        self.ends = packed[starts[5] : starts[5] + E]
        self.order = packed[starts[6] : starts[6] + N]
        self.row_of = packed[starts[7] : starts[7] + N]

    @staticmethod
    def sections(N: int, E: int, P: int) -> list[int]:
        """Entries of each section.

        A table of BM-row tiles has at most P // BM + E entries, a bound that needs no data from the device.
        """
        tables = [4 + 2 * Metadata.capacity(P, E, bm) for bm in TILES]
        return [_pad(E + 1), _pad(E), _pad(E + 1), *tables, _pad(E), _pad(N), _pad(N)]

    @staticmethod
    def capacity(P: int, E: int, bm: int) -> int:
        """The number of tiles of bm rows for which a table has room."""
        return _pad(P // bm + E)

    def capacities(self) -> list[int]:
        """`capacity` of each height in TILES."""
        return [self.capacity(self.P, self.E, bm) for bm in TILES]

    @staticmethod
    def size(N: int, E: int, P: int | None = None) -> int:
        """Entries of the packed tensor."""
        return sum(Metadata.sections(N, E, N if P is None else P))

    @classmethod
    def fake(cls, N: int, E: int, P: int | None, like: Tensor) -> Tensor:
        """A tensor with the size of the packed tensor, on the device of `like`, for fake implementations."""
        return like.new_empty(cls.size(N, E, P), dtype=torch.int32)

    def window(self, base: int) -> "Metadata":
        """The metadata of the P rows from base on."""
        meta = self.over(base, empty((self.size(0, self.E, self.P),), torch.int32, self.packed.device))
        tabulate_from(self.ends, meta)
        return meta

    def over(self, base: int, packed: Tensor) -> "Metadata":
        """The metadata of the P rows from base on, whose tables are in `packed` already."""
        meta = Metadata(packed, 0, self.E, self.P)
        meta.base = base
        meta.order = self.order[base:]
        meta.row_of = self.row_of
        return meta


@triton.jit(do_not_specialize=["N", "NB"])
def histogram(ids, counts, N, NB, E: tl.constexpr, BINS: tl.constexpr, B: tl.constexpr):
    """counts[e, b] = the number of slots of block b that are routed to expert e."""
    b = tl.program_id(0)
    i = b * B + tl.arange(0, B)
    x = tl.load(ids + i, mask=i < N, other=-1)
    valid = (x >= 0) & (x < E)
    counted = tl.histogram(tl.where(valid, x, E).to(tl.int32), BINS)  # bin E counts slots without a row
    e = tl.arange(0, BINS)
    tl.store(counts + e * NB + b, counted, mask=e < E)


@triton.jit(do_not_specialize=["NB"])
def scan(counts, totals, NB, CHUNK: tl.constexpr):
    """Replaces counts[e, :] by its exclusive prefix sum, and stores its sum in totals[e]."""
    e = tl.program_id(0)
    run = tl.zeros((), tl.int32)
    for s in range(tl.cdiv(NB, CHUNK)):
        j = s * CHUNK + tl.arange(0, CHUNK)
        c = tl.load(counts + e * NB + j, mask=j < NB, other=0)
        tl.store(counts + e * NB + j, run + tl.cumsum(c, 0) - c, mask=j < NB)
        run += tl.sum(c)
    tl.store(totals + e, run)


@triton.jit
def write_tiles(
    table, capacity, e, first, lo, count, BM: tl.constexpr, LAST: tl.constexpr, CHUNK: tl.constexpr
):
    """Writes this expert's part of the table of BM-row tiles, from tile `first` on.

    The program of the last expert also writes the number of all tiles.
    """
    tiles = (count + BM - 1) // BM
    for s in range(tl.cdiv(tiles, CHUNK)):
        q = s * CHUNK + tl.arange(0, CHUNK)
        tl.store(table + 4 + first + q, e + 0 * q, mask=q < tiles)
        tl.store(table + 4 + capacity + first + q, lo + q * BM, mask=q < tiles)
    if e == LAST:
        tl.store(table, first + tiles)


@triton.jit
def write_expert(
    p, lo, count, tot, ee, offsets, by_size, ready, tiles0, tiles1, cap0, cap1,
    E: tl.constexpr, BM0: tl.constexpr, BM1: tl.constexpr,
):  # fmt: skip
    """Writes the entries of every table for expert p, which has `count` rows from lo on.

    tot, ee: the row counts of all experts, and their numbers.
    A sum over all experts needs a round of barriers. So one sum computes the first tiles for both tables, as
    the halves of 64 bits.
    """
    tl.store(offsets + p, lo)
    tl.store(ready + p, 0)
    if p == E - 1:
        tl.store(offsets + E, lo + count)
        tl.store(ready + E, 0)  # the counter
    larger = (tot > count) | ((tot == count) & (ee < p))
    tl.store(by_size + tl.sum((larger & (ee < E)).to(tl.int32)), p)
    both = (((tot + BM1 - 1) // BM1).to(tl.int64) << 32) | ((tot + BM0 - 1) // BM0)
    first = tl.sum(tl.where(ee < p, both, 0))
    write_tiles(tiles0, cap0, p, first.to(tl.int32), lo, count, BM0, E - 1, 64)
    write_tiles(tiles1, cap1, p, (first >> 32).to(tl.int32), lo, count, BM1, E - 1, 64)


@triton.jit
def clip(n, base, P):
    """The number of the first n rows that are in the window of P rows from base on."""
    return tl.minimum(tl.maximum(n - base, 0), P)


@triton.jit(do_not_specialize=["base", "P", "cap0", "cap1"])
def tabulate(
    ends, offsets, by_size, ready, tiles0, tiles1, cap0, cap1, base, P,
    E: tl.constexpr, EP: tl.constexpr, BM0: tl.constexpr, BM1: tl.constexpr,
):  # fmt: skip
    """Writes the tables for sorted rows: program e writes expert e's entries, computed from all ends."""
    ee = tl.arange(0, EP)
    hi = tl.load(ends + ee, mask=ee < E, other=0)
    lo = tl.load(ends + ee - 1, mask=(ee > 0) & (ee < E), other=0)
    sizes = clip(hi, base, P) - clip(lo, base, P)
    p = tl.program_id(0)
    before = clip(tl.load(ends + p - 1, mask=p > 0, other=0), base, P)
    count = clip(tl.load(ends + p), base, P) - before
    write_expert(
        p, before, count, sizes, ee, offsets, by_size, ready, tiles0, tiles1, cap0, cap1, E, BM0, BM1
    )


@triton.jit(do_not_specialize=["N", "NB", "P", "cap0", "cap1"])
def place(
    ids, base, totals, ends, offsets, by_size, ready, order, row_of, tiles0, tiles1, cap0, cap1, N, NB, P,
    E: tl.constexpr, EP: tl.constexpr, B: tl.constexpr, BM0: tl.constexpr, BM1: tl.constexpr,
):  # fmt: skip
    """Program p writes expert p's table entries (p < E) and places the slots of block p (p < NB).

    A block's slots are sorted by (expert, slot) in registers, so neighbouring rows are written together. An
    earlier version counted the preceding slots of the same expert, with one column an expert: that took 30 of
    routing's 40 us for 262,144 slots of 128 experts. With the sort all of routing takes 18 us.
    """
    p = tl.program_id(0)
    ee = tl.arange(0, EP)
    tot = tl.load(totals + ee, mask=ee < E, other=0)
    end = tl.cumsum(tot, 0)
    if p < E:
        hi = tl.sum(tl.where(ee == p, end, 0))
        tl.store(ends + p, hi)
        here = clip(end, 0, P) - clip(end - tot, 0, P)
        lo = clip(hi - tl.load(totals + p), 0, P)
        write_expert(p, lo, clip(hi, 0, P) - lo, here, ee, offsets, by_size, ready, tiles0, tiles1,
                     cap0, cap1, E, BM0, BM1)  # fmt: skip
    if p < NB:
        before = tl.load(base + ee * NB + p, mask=ee < E, other=0)
        behind = tl.load(base + ee * NB + p + 1, mask=(ee < E) & (p + 1 < NB), other=0)
        count = tl.where(p + 1 < NB, behind, tot) - before
        # the difference between a slot's row and its place in the sorted block
        shift = end - tot + before - (tl.cumsum(count, 0) - count)
        j = tl.arange(0, B)
        x = tl.load(ids + p * B + j, mask=p * B + j < N, other=-1)
        here = (x >= 0) & (x < E)
        key = tl.sort(tl.where(here, x, E).to(tl.int32) * B + j)  # slots without a row are last
        x = key // B
        i = p * B + key % B
        row = tl.gather(shift, tl.minimum(x, E - 1), 0) + j
        tl.store(order + row, i, mask=x < E)
        tl.store(row_of + i, tl.where(x < E, row, -1), mask=i < N)


@triton.jit(do_not_specialize=["units", "P", "cap0", "cap1"])
def place_few(
    ids, ends, offsets, by_size, ready, order, row_of, tiles0, tiles1, cap0, cap1, units, P,
    UNIT: tl.constexpr, NP: tl.constexpr, E: tl.constexpr, BINS: tl.constexpr, BM0: tl.constexpr,
    BM1: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All steps in one launch, for at most NP slots: program p reads every slot and places those of expert p.

    The number of slots is `units` times UNIT. With a UNIT of 16 the compiler knows that it may load 16 bytes
    at a time.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # the programs of few_rows.py, which prefetch weights while they wait
    N = units * UNIT
    p = tl.program_id(0)
    ee = tl.arange(0, BINS)
    # four neighbouring slots a thread, so that a scan exchanges values with other threads a quarter as often
    i = tl.arange(0, NP // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    x = tl.load(ids + i, mask=i < N, other=-1)
    valid = (x >= 0) & (x < E)
    x = tl.where(valid, x, E).to(tl.int32)
    one_hot = (x == p).to(tl.int32)
    count = tl.sum(one_hot, 1)
    both = tl.sum(tl.sum((x < p).to(tl.int32), 1) | (count << 16))  # each half is at most FEW
    lo = both & 0xFFFF
    hi = lo + (both >> 16)
    row = (lo - 1 + tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(one_hot, 1)
    tl.store(order + row, i, mask=one_hot > 0)
    tl.store(row_of + i, row, mask=one_hot > 0)
    if p == 0:
        tl.store(row_of + i, tl.full((NP // 4, 4), -1, tl.int32), mask=(i < N) & ~valid)
    tl.store(ends + p, hi)
    slots = tl.ravel(x, can_reorder=True)
    tot = tl.histogram(slots, BINS, mask=slots < E)
    if P < N:
        end = tl.cumsum(tot, 0)
        tot = clip(end, 0, P) - clip(end - tot, 0, P)
    first = clip(lo, 0, P)
    write_expert(p, first, clip(hi, 0, P) - first, tot, ee, offsets, by_size, ready, tiles0, tiles1,
                 cap0, cap1, E, BM0, BM1)  # fmt: skip


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def empty_metadata(N: int, E: int, P: int | None, device: torch.device) -> Metadata:
    """Metadata with uninitialised tables."""
    return Metadata(empty((Metadata.size(N, E, P),), torch.int32, device), N, E, P)


def route(ids_TK: Tensor, E: int, P: int | None = None) -> Metadata:
    """Metadata of ids [T, K], on its device, without waiting on the host.

    ids_TK: int32 or int64; a slot with any id outside 0..E-1 gets no row.
    E: number of experts.
    P: rows of the window that the tables describe; None: all rows.
    """
    N = ids_TK.numel()
    meta = empty_metadata(N, E, P, ids_TK.device)
    tables = meta.ends, meta.offsets, meta.by_size, meta.ready, meta.order, meta.row_of, *meta.tiles.values()
    tables += tuple(meta.capacities())
    if 0 < N <= FEW:
        ahead = early(ids_TK.device)
        unit = 1 if N % 16 else 16
        launch(
            place_few, (E,), ids_TK, *tables, N // unit, meta.P, unit, max(1024, power_of_2(N)), E,
            max(2, power_of_2(E)), *TILES, bool(ahead), num_warps=8, **ahead,
        )  # fmt: skip
        return meta
    NB = cdiv(N, BLOCK)
    scratch = empty((_pad(E) + E * NB,), torch.int32, ids_TK.device)
    totals = scratch[:E]
    counts = scratch[_pad(E) :]
    if NB:
        launch(histogram, (NB,), ids_TK, counts, N, NB, E, power_of_2(E + 1), BLOCK, num_warps=4)
    launch(scan, (E,), counts, totals, NB, 256, num_warps=4)
    launch(
        place, (max(NB, E),), ids_TK, counts, totals, *tables, N, NB, meta.P, E, power_of_2(E), BLOCK,
        *TILES, num_warps=4,
    )  # fmt: skip
    return meta


def tabulate_from(ends_E: Tensor, meta: Metadata) -> None:
    """Fill meta's tables from the cumulative ends of all groups of rows."""
    E = meta.E
    launch(
        tabulate, (E,), ends_E, meta.offsets, meta.by_size, meta.ready, *meta.tiles.values(),
        *meta.capacities(), meta.base, meta.P,
        E, power_of_2(E), *TILES, num_warps=4,
    )  # fmt: skip


def group(ends_E: Tensor, N: int) -> Metadata:
    """Metadata of N sorted rows, from the cumulative ends of their groups.

    order and row_of are not filled.
    """
    meta = empty_metadata(N, ends_E.shape[0], N, ends_E.device)
    tabulate_from(ends_E, meta)
    return meta
