"""Which configuration a kernel launches with: the tuned table, and the rule between its entries.

Nothing is benchmarked in training. `table.json` is filled offline by benchmarks/tune.py, keyed by
architecture, kernel, D, F and rows per expert. A shape that it lacks takes the entry nearest in the
logarithms of these numbers, which is the same one on all ranks of a job. Kernels without tensor descriptors
(other GPUs, other dtypes, odd widths) take fixed portable tiles.
"""

import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch


class Config(NamedTuple):
    """How one kernel is cut and launched."""

    BM: int  # tile rows (of C; routed rows, or P in dw)
    BN: int  # tile columns
    BL: int  # step along the summed length
    GROUP: int  # row tiles that share a sweep over the columns (L2)
    SUB: int  # column slices of the epilogue
    warps: int
    stages: int
    ctas: int  # programs an SM
    gather: bool  # read routed rows inside the kernel, instead of from a gathered copy
    outs: int = 0  # staging buffers of hopper.py's kernel (up, dh: SUB of them); 0: kernels.py's kernel


class Entry(NamedTuple):
    """A line of the table."""

    kernel: str
    D: int
    F: int
    rows: int  # per expert
    config: Config


KERNELS = ("up", "down", "dh", "dx", "dw_down", "dw_up")
PATH = Path(__file__).with_name("table.json")


@functools.cache
def entries(arch: str) -> list[Entry]:
    """All entries of this architecture."""
    table = json.loads(PATH.read_text()).get(arch, [])
    return [Entry(e["kernel"], e["D"], e["F"], e["rows"], Config(*e["config"])) for e in table]


@functools.cache
def tuned(kernel: str, arch: str, D: int, F: int, bucket: float) -> Config:
    """The entry nearest to the shape; bucket is log2 of the rows per expert.

    Rows per expert count most, since they decide the tile height.
    """
    key = (math.log2(D), math.log2(F), bucket)

    def distance(entry: Entry) -> float:
        shape = entry.D, entry.F, entry.rows
        return sum(w * abs(math.log2(v) - k) for w, v, k in zip((0.5, 0.5, 1), shape, key, strict=True))

    mine = [e for e in entries(arch) if e.kernel == kernel]
    return min(mine, key=distance).config if mine else DESCRIPTOR[kernel]


def pick(
    kernel: str, arch: str, dtype: torch.dtype, D: int, F: int, rows_per_expert: float, tma: bool
) -> Config:
    """The configuration of a kernel for an architecture ("cuda:90"), element type and shape."""
    if tma:
        return tuned(kernel, arch, D, F, round(2 * math.log2(max(rows_per_expert, 1))) / 2)  # half octaves
    return portable(kernel, arch, dtype, D % 64 == 0 and F % 64 == 0)


class Few(NamedTuple):
    """How the kernel of few_rows.py is cut, in columns of 256 and steps of 64."""

    BM: int  # tile rows
    row_stages: int
    weight_stages: int
    SUB: int  # column slices of the epilogues
    flight: int  # stages of weights that may be on their way at once


def few(arch: str, rows_per_expert: float, tma: bool) -> Few | None:
    """The cut of few_rows.py's kernel, or None where it does not pay (too many rows an expert) or cannot run.

    Measured on an H200, forward of a layer alone, one launch against two, means over shapes: 0.98 of the time
    at 4 to 32 rows an expert, 0.97 at 64, 0.98 at 96, 0.90 at 128, 0.94 at 192. Two stages on their way in
    place of four, and a guess: 0.98 at 64, with a fifth stage of rows; at 32, 1.00 where tokens spread evenly
    and 1.02 where half of the experts have none; 1.00 at 128, 1.01 at 4.
    """
    if arch != "cuda:90" or not tma or rows_per_expert > 192:
        return None
    if rows_per_expert <= 48:
        return Few(64, 8, 4, 4, 4)
    return Few(128, 5, 4, 8, 2 if rows_per_expert <= 96 else 4)


# Hopper, where the table has no entry for the kernel.
DESCRIPTOR = {
    "up": Config(128, 256, 64, 16, 4, 8, 3, 1, True, 4),
    "down": Config(128, 256, 64, 16, 2, 8, 3, 1, False, 2),
    "dh": Config(128, 256, 64, 16, 4, 8, 3, 1, True, 4),
    "dx": Config(128, 256, 64, 16, 2, 8, 3, 1, False, 2),
    "dw_down": Config(128, 256, 64, 16, 2, 8, 4, 1, True, 1),
    "dw_up": Config(256, 128, 64, 16, 2, 8, 4, 1, True, 1),
    "dw_add": Config(128, 128, 64, 16, 2, 8, 3, 1, True),  # either dw, adding to what is there
}


def portable(kernel: str, arch: str, dtype: torch.dtype, even: bool) -> Config:
    """Tiles of the kernels without descriptors.

    Ampere's cp.async wants three stages, CDNA two; float32 multiplies without matrix units, in small tiles.
    Where the widths fit no whole tiles the masks take registers, so tiles are smaller still, and the
    epilogues that both read and write go by halves (no spills: tests hold it to that).
    """
    sub = 2 if arch.startswith("cuda") and (kernel == "dh" or (kernel == "dw_add" and even)) else 1
    if dtype == torch.float32:
        narrow = kernel.startswith("dw") or (not even and kernel in ("dh", "down", "dx"))
        return Config(64, 32 if narrow else 64, 16, 8, sub, 4, 2, 2, True)
    columns = 64 if kernel == "dh" or not even else 128
    if arch.startswith("hip"):
        return Config(128, columns, 32, 8, 1, 8, 2, 1, True)
    return Config(64, columns if even else columns // 2, 32, 8, sub, 4, 3 if even else 2, 2, True)
