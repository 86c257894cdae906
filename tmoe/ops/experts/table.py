"""Chooses the configuration of a kernel: from the tuned table, or by rules for shapes that it lacks.

Training runs no benchmarks. benchmarks/tune.py fills `table.json` offline, with keys of architecture, kernel,
D, F and rows per expert. A shape that is not in the table uses the entry that is nearest in the logarithms of
these numbers, which is the same entry on all ranks of a job. Kernels without tensor descriptors (other GPUs,
other dtypes, odd widths) use fixed portable tiles.
"""

import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch


class KernelConfig(NamedTuple):
    """Tile sizes and launch settings of one kernel."""

    BM: int  # rows of a tile of the result (routed rows, or P in dw)
    BN: int  # columns of a tile
    BL: int  # step along the length of the sum
    GROUP: int  # row tiles that share a sweep over the columns (L2)
    SUB: int  # column slices of the epilogue
    warps: int
    stages: int
    ctas: int  # programs on an SM
    gather: bool  # read routed rows inside the kernel, instead of from a gathered copy
    outs: int = 0  # staging buffers of the kernel in hopper.py (up, dh: SUB); 0: the kernel in kernels.py


class Entry(NamedTuple):
    """A line of the table."""

    kernel: str
    D: int
    F: int
    rows: int  # per expert
    config: KernelConfig


KERNELS = ("up", "down", "dh", "dx", "dw_down", "dw_up")
PATH = Path(__file__).with_name("table.json")


@functools.cache
def entries(arch: str) -> list[Entry]:
    """All entries of this architecture."""
    table = json.loads(PATH.read_text()).get(arch, [])
    return [Entry(e["kernel"], e["D"], e["F"], e["rows"], KernelConfig(*e["config"])) for e in table]


@functools.cache
def tuned(kernel: str, arch: str, D: int, F: int, bucket: float) -> KernelConfig:
    """The entry nearest to the shape. bucket: log2 of the rows per expert.

    Rows per expert have the largest weight, since they determine the height of tiles.
    """
    key = (math.log2(D), math.log2(F), bucket)

    def distance(entry: Entry) -> float:
        shape = entry.D, entry.F, entry.rows
        return sum(w * abs(math.log2(v) - k) for w, v, k in zip((0.5, 0.5, 1), shape, key, strict=True))

    measured = [e for e in entries(arch) if e.kernel == kernel]
    return min(measured, key=distance).config if measured else DESCRIPTOR[kernel]


def pick(
    kernel: str, arch: str, dtype: torch.dtype, D: int, F: int, rows_per_expert: float, tma: bool
) -> KernelConfig:
    """The configuration of a kernel for an architecture ("cuda:90"), element type and shape."""
    if tma:
        return tuned(kernel, arch, D, F, round(2 * math.log2(max(rows_per_expert, 1))) / 2)  # steps of 1/2
    return portable(kernel, arch, dtype, D % 64 == 0 and F % 64 == 0)


class Few(NamedTuple):
    """Sizes of the kernel of few_rows.py, whose tiles have 256 columns and steps of 64."""

    BM: int  # rows of a tile
    row_stages: int
    weight_stages: int
    SUB: int  # column slices of the epilogues
    flight: int  # most stages of weights that are loaded at the same time


def few(arch: str, rows_per_expert: float, tma: bool) -> Few | None:
    """The sizes of the kernel of few_rows.py; None if it is slower (too many rows an expert) or cannot run.

    Measured on an H200, the forward of a layer alone, time of one launch divided by that of two, means over
    shapes: 0.98 at 4 to 32 rows an expert, 0.97 at 64, 0.98 at 96, 0.90 at 128, 0.94 at 192. With two stages
    in flight in place of four, and a guess: 0.98 at 64, with a fifth stage of rows; at 32, 1.00 if tokens are
    spread evenly and 1.02 if half of the experts have none; 1.00 at 128, 1.01 at 4.
    """
    if arch != "cuda:90" or not tma or rows_per_expert > 192:
        return None
    if rows_per_expert <= 48:
        return Few(64, 8, 4, 4, 4)
    return Few(128, 5, 4, 8, 2 if rows_per_expert <= 96 else 4)


# Configurations for Hopper, if the table has no entry for the kernel.
DESCRIPTOR = {
    "up": KernelConfig(128, 256, 64, 16, 4, 8, 3, 1, True, 4),
    "down": KernelConfig(128, 256, 64, 16, 2, 8, 3, 1, False, 2),
    "dh": KernelConfig(128, 256, 64, 16, 4, 8, 3, 1, True, 4),
    "dx": KernelConfig(128, 256, 64, 16, 2, 8, 3, 1, False, 2),
    "dw_down": KernelConfig(128, 256, 64, 16, 2, 8, 4, 1, True, 1),
    "dw_up": KernelConfig(256, 128, 64, 16, 2, 8, 4, 1, True, 1),
    "dw_add": KernelConfig(128, 128, 64, 16, 2, 8, 3, 1, True),  # both dw kernels, if they add to C
}


def portable(kernel: str, arch: str, dtype: torch.dtype, even: bool) -> KernelConfig:
    """Tiles of the kernels without descriptors.

    Ampere's cp.async needs three stages, CDNA two. float32 is multiplied without matrix units, in small
    tiles. If the widths are not multiples of a tile, masks need registers, so tiles are smaller, and
    epilogues that both read and write run in two halves. No kernel spills registers; tests check that.
    """
    sub = 2 if arch.startswith("cuda") and (kernel == "dh" or (kernel == "dw_add" and even)) else 1
    if dtype == torch.float32:
        narrow = kernel.startswith("dw") or (not even and kernel in ("dh", "down", "dx"))
        return KernelConfig(64, 32 if narrow else 64, 16, 8, sub, 4, 2, 2, True)
    columns = 64 if kernel == "dh" or not even else 128
    if arch.startswith("hip"):
        return KernelConfig(128, columns, 32, 8, 1, 8, 2, 1, True)
    return KernelConfig(64, columns if even else columns // 2, 32, 8, sub, 4, 3 if even else 2, 2, True)
