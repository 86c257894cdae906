"""What backwards of moe_mlp_deferred leave to do: the gradients of experts' matrices, and what these need.

next: op.py
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor


class Left(NamedTuple):
    """The gradients of one layer's matrices, which one backward has left to do."""

    gate_up: Tensor
    down: Tensor
    kept: tuple[Tensor, ...]
    """what they need beside the matrices, in memory of its own"""
    work: Callable[..., tuple[Tensor, Tensor]]

    @property
    def bytes(self) -> int:
        """Of what is kept."""
        return sum(t.nbytes for t in self.kept)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """d_gate_up and d_down, in the matrices' shapes and dtype."""
        return self.work(self.gate_up, self.down, *self.kept)


# Of the `collecting` under way. Of the process, not of a thread: on a GPU a backward runs in autograd's own.
_lists: list[list[Left]] = []


@contextmanager
def collecting() -> Iterator[list[Left]]:
    """A list of all that backwards inside leave to do, in their order."""
    left: list[Left] = []
    _lists.append(left)
    try:
        yield left
    finally:
        _lists.pop()


def require_collecting() -> None:
    """RuntimeError unless somebody collects what backwards leave to do: it would be lost."""
    if not _lists:
        raise RuntimeError(
            "the gradients of these experts' matrices are put off, and nobody collects them: "
            "of a pipeline with --parallel.schedule=v call forward_backward, not backward"
        )


def leave(left: Left) -> None:
    """Leaves work to the innermost `collecting`."""
    require_collecting()
    _lists[-1].append(left)
