"""Collects the gradients of experts' matrices that backwards of moe_mlp_deferred have not computed yet.

next: op.py
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from tmoe.ops.gradient_sums import NEW, Target


class DeferredGradients(NamedTuple):
    """The gradients of one layer's matrices, deferred by one backward, with the inputs to compute them."""

    gate_up: Tensor
    down: Tensor
    kept: tuple[Tensor, ...]
    """the other inputs of the gradients, in memory that no other tensor uses"""
    work: Callable[..., tuple[Tensor, Tensor]]

    @property
    def bytes(self) -> int:
        """Size of the kept tensors in bytes."""
        return sum(t.nbytes for t in self.kept)

    def gradients(self, into: tuple[Target, Target] = (NEW, NEW)) -> tuple[Tensor, Tensor]:
        """d_gate_up and d_down in their targets; in new tensors of the matrices' dtype if none are given."""
        up, down = into
        into = up.allocated(self.gate_up), down.allocated(self.down)
        return self.work(self.gate_up, self.down, *self.kept, into=into)


# One list for each active `collecting`. They are global to the process, because on a GPU a backward runs on
# autograd's thread.
_lists: list[list[DeferredGradients]] = []


@contextmanager
def collecting() -> Iterator[list[DeferredGradients]]:
    """A list of the gradients that backwards inside this context defer, in order."""
    left: list[DeferredGradients] = []
    _lists.append(left)
    try:
        yield left
    finally:
        _lists.pop()


def require_collecting() -> None:
    """RuntimeError unless a `collecting` is active, because deferred gradients would be lost."""
    if not _lists:
        raise RuntimeError(
            "the gradients of these experts' matrices are deferred, and no caller collects them: "
            "in a pipeline with --parallel.schedule=v call forward_backward, not backward"
        )


def leave(left: DeferredGradients) -> None:
    """Appends deferred gradients to the list of the innermost `collecting`."""
    require_collecting()
    _lists[-1].append(left)
