"""Says from measurements whether experts with fp8 products make a step faster than bf16 does, and how.

benchmarks/fp8_experts.py measures layers and writes the entries of fp8_table.json. While an architecture has
no entry near a shape, the answer is no: fp8 must not be slower than bf16 anywhere. It also measures the
kernels of each product and writes the fastest configurations into fp8_configs.json.
"""

import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

from tmoe.ops.experts.table import Entry, KernelConfig

PATH = Path(__file__).with_name("fp8_table.json")
CONFIGS = Path(__file__).with_name("fp8_configs.json")
NEAR = 1.5  # factor of D or F, and of fewer rows, from which on an entry says nothing of a shape


class Measured(NamedTuple):
    """Times of a layer's forward and backward on one GPU, in ms, in one run."""

    D: int
    F: int
    rows: int  # of an expert
    bf16: float
    fp8: float  # with the casts of x and dy, without those of matrices
    cast: float  # of the layer's matrices, with their transposed copies


@functools.cache
def entries(arch: str) -> list[Measured]:
    """All entries of an architecture, for example "cuda:90"."""
    return [Measured(**entry) for entry in json.loads(PATH.read_text()).get(arch, [])]


def nearest(measured: list[Measured], D: int, F: int, rows: float) -> Measured | None:
    """The entry nearest to a shape in the logarithms of its numbers; None if there is none near it.

    With more rows than measured, casts of matrices weigh less, so any larger number of rows is near.
    """

    def apart(entry: Measured) -> list[float]:
        return [abs(math.log(a / b)) for a, b in zip(entry[:3], (D, F, rows), strict=True)]

    near = [e for e in measured if max(apart(e)[:2]) <= math.log(NEAR) and rows * NEAR >= e.rows]
    return min(near, key=lambda entry: sum(apart(entry)), default=None)


def pays(entry: Measured, passes: int, casts: int) -> bool:
    """Whether a step is faster in fp8. passes: micro-batches; casts: how often each matrix is cast."""
    return passes * entry.fp8 + casts * entry.cast < passes * entry.bf16


# Sets the table of configurations aside, kernel by kernel: for measurements and tests.
forced: dict[str, KernelConfig] = {}


@functools.cache
def configurations(arch: str) -> list[Entry]:
    """All measured configurations of an architecture; `outs` is 0 for the kernels of fp8_kernels.py."""
    table = json.loads(CONFIGS.read_text()).get(arch, [])
    return [Entry(e["kernel"], e["D"], e["F"], e["rows"], KernelConfig(*e["config"])) for e in table]


def fastest(kernel: str, arch: str, D: int, F: int, rows: float) -> KernelConfig | None:
    """The configuration that was fastest on the nearest measured shape; None if there is no measurement.

    kernel: "up", "down", "dh", "dx", "dw_up" or "dw_down". rows: of an expert.
    """
    if kernel in forced:
        return forced[kernel]

    def apart(entry: Entry) -> float:
        shape = entry.D, entry.F, entry.rows
        return sum(abs(math.log(a / max(b, 1))) for a, b in zip(shape, (D, F, rows), strict=True))

    measured = [e for e in configurations(arch) if e.kernel == kernel]
    return min(measured, key=apart).config if measured else None


def codes_of_gradients() -> bool:
    """Whether `forced` has gradients of matrices in fp8: the table of a CPU, which has no measurements."""
    return all(kernel in forced and forced[kernel].outs > 0 for kernel in ("dw_down", "dw_up"))
