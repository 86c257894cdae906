"""Which parameters Muon trains, and which rows of a fused one are a separate matrix.

It handles names and shapes, never the model; model/muon.py reads the rows from the modules.

next: optim/muon.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from tmoe.ops.newton_schulz import flops

NEVER = re.compile(  # AdamW trains these, whatever the pattern
    r"embed|(^|\.)(lm_)?head\.|bias$"  # tables of tokens, vectors
    r"|router|shared_gate|(^|\.)gate\.weight$"  # routers, which Hugging Face calls gate; gates of one row
    r"|\.(a|b|(gate_up|down)_[ab])$|\.lora_[AB]\."  # adapters, tmoe's and PEFT's
    r"|(^|\.)rates\."  # of recurrent layers: a convolution's taps are not a matrix
)


class Rows(NamedTuple):
    """Rows of a fused weight that are one matrix, or one matrix for each head.

    They are runs of equal height, at equal distances.
    """

    first: int
    """the first row of the section that the runs divide equally"""
    step: int
    """rows from the beginning of a run's section to that of the next"""
    runs: int = 1
    skip: int = 0
    """rows of a section before its run"""
    height: int | None = None
    """rows of a run; None: `step`"""
    apart: bool = False
    """whether each run is a separate matrix"""

    def of(self, weight: Tensor) -> Tensor:
        """A view of these rows of [..., rows, columns]: [..., runs, height, columns]."""
        section = weight.narrow(-2, self.first, self.runs * self.step).unflatten(-2, (self.runs, self.step))
        return section.narrow(-2, self.skip, self.tall)

    def matrices(self, weight: Tensor) -> Tensor:
        """The matrices [..., out, in] of these rows; a copy if the runs do not follow one another."""
        found = self.of(weight)
        return found if self.apart else found.flatten(-3, -2)

    @property
    def tall(self) -> int:
        """Rows of a run."""
        return self.step if self.height is None else self.height

    def shape(self, columns: int) -> tuple[int, int, int]:
        """Number of matrices, their rows and their columns."""
        return (self.runs, self.tall, columns) if self.apart else (1, self.runs * self.tall, columns)


Parts = Sequence[Rows]  # of one weight; they cover all of its rows


def whole(rows: int) -> Parts:
    """The parts of a weight that is one matrix."""
    return (Rows(0, rows),)


def merged(parts: Parts) -> Parts:
    """The same matrices; consecutive ones of equal height are one part, so that a view is their batch."""
    found: list[Rows] = []
    for part in parts:
        if part.tall == part.step and (part.apart or part.runs == 1):
            part = part._replace(height=None, apart=True)
            last = found[-1] if found else None
            if last and last == (part.first - last.runs * part.step, part.step, last.runs, 0, None, True):
                found[-1] = last._replace(runs=last.runs + part.runs)
                continue
        found.append(part)
    return found


def fits_muon(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a matrix, or a stack of matrices, that Muon can train."""
    return len(shape) >= 2 and min(shape[-2:]) > 1 and NEVER.search(name) is None


def chosen(pattern: str | None, named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of the trained parameters that Muon trains: those with a match of the pattern that fit."""
    if pattern is None:
        return []
    return [
        name
        for name, p in named
        if p.requires_grad and re.search(pattern, name) and fits_muon(name, tuple(p.shape))
    ]


def work(shapes: Mapping[str, Sequence[int]], parts: Mapping[str, Parts], iterations: int) -> tuple[int, int]:
    """Number of matrices of these parameters, and FLOPs of Newton-Schulz for all of them.

    shapes: by name. parts: of fused parameters by name; others are one matrix, or a stack of matrices.
    """
    count = total = 0
    for name, shape in shapes.items():
        *stack, rows, columns = shape
        for part in parts.get(name, whole(rows)):
            each, out, inner = part.shape(columns)
            count += prod(stack) * each
            total += prod(stack) * each * flops(out, inner, iterations)
    return count, total
