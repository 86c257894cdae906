"""Says from measurements whether experts with fp8 products make a step faster than bf16 does.

benchmarks/fp8_experts.py measures layers and writes the entries of fp8_table.json. While an architecture has
no entry near a shape, the answer is no: fp8 must not be slower than bf16 anywhere.
"""

import functools
import json
import math
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).with_name("fp8_table.json")
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
