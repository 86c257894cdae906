"""Finds the sum to which an op adds the gradient of a matrix itself, instead of returning it to autograd.

A step of several micro-batches sums the gradients of a weight in fp32. If autograd gets each gradient, it is
written in the weight's type, read again and added: 12 bytes an element in bf16, and a rounding for each
micro-batch. An op that knows the sum adds the unrounded product to it: 8 bytes, and no rounding.

The op gets the matrix without `requires_grad`, and its backward finds the sum by the matrix's address: an
argument for each layer would be a constant of the layer's graph, so layers would not share one graph.

next: experts/op.py
"""

import weakref
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Target(NamedTuple):
    """Where an op leaves the gradient of a matrix."""

    tensor: Tensor | None = None
    """contiguous, in the matrix's shape; None: the op allocates it"""
    add: bool = False
    """True: add to the values of `tensor`; False: overwrite them"""
    dtype: torch.dtype | None = None
    """of a tensor that the op allocates; None: the matrix's"""

    @property
    def plain(self) -> bool:
        """Whether the gradient is one that autograd would get: a new tensor in the matrix's type."""
        return self.tensor is None and self.dtype is None

    def allocated(self, matrix: Tensor) -> "Target":
        """The target with a tensor, unless it is plain."""
        if self.tensor is not None or self.dtype is None:
            return self
        return Target(torch.empty_like(matrix, dtype=self.dtype, memory_format=torch.contiguous_format))


class GradientSum(Protocol):
    """The sum of a matrix's gradients over the micro-batches of a step (tmoe/parallel/copies.py)."""

    @property
    def watched(self) -> bool:
        """Whether the parameter has hooks, which `close` calls."""
        ...

    @property
    def tensor(self) -> Tensor:
        """The matrix."""
        ...

    def open(self, last: bool | None = None) -> Target:
        """The target of the next gradient.

        last: the step's last gradient of this matrix; None: what the sum knows of the micro-batch.
        """
        ...

    def close(self, target: Target, grad: Tensor, last: bool | None = None) -> None:
        """Ends what `open` began. grad: the target's tensor, or the tensor that the op allocated."""
        ...


NEW = Target()
_sums: dict[int, weakref.ref] = {}  # by the address of the matrix


def _address(t: Tensor) -> int:
    """The address of a tensor with memory; 0 for others (meta tensors, fakes of a compiler)."""
    return t.data_ptr() if type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta else 0


def offer(owner: GradientSum) -> None:
    """Makes `owner` the sum of its matrix. An owner that is deleted takes its offer with it."""
    if address := _address(owner.tensor):
        _sums[address] = weakref.ref(owner)


def find(matrix: Tensor) -> GradientSum | None:
    """The sum of this matrix, None if it has none. A part of a matrix has none."""
    found = _sums.get(_address(matrix))
    owner = None if found is None else found()
    if owner is None:
        return None
    whole = owner.tensor
    same = whole.data_ptr() == matrix.data_ptr() and whole.dtype == matrix.dtype
    return owner if same and (whole.shape, whole.stride()) == (matrix.shape, matrix.stride()) else None


def find_table(matrix: Tensor) -> GradientSum | None:
    """The sum of a table that embedding and head may share, None if it has none or is watched.

    Both ops would call a tied table's hooks. A hook is called once a backward, and autograd does so.
    """
    owner = find(matrix)
    return None if owner is None or owner.watched else owner


def sum_of(matrix: Tensor) -> GradientSum:
    """The sum of this matrix. RuntimeError if it has none: its gradient would be lost."""
    owner = find(matrix)
    if owner is None:
        raise RuntimeError(
            f"a matrix of shape {tuple(matrix.shape)} has no sum of gradients: its working copy "
            "(tmoe/parallel/copies.py) was deleted or replaced between forward and backward"
        )
    return owner
