"""A sum of a matrix's gradients, as a working copy owns it: ops find it by the matrix's address."""

import torch
from torch import Tensor

from tmoe.ops.gradient_sums import Target, offer


class Sum:
    """The sum holds NaN until a gradient is written. count: gradients so far."""

    def __init__(self, matrix: Tensor, dtype: torch.dtype = torch.float32):
        self.tensor = matrix
        self.total = torch.full_like(matrix, float("nan"), dtype=dtype)
        self.count = 0
        self.watched = False
        offer(self)

    def open(self, last=None) -> Target:
        return Target(self.total, self.count > 0)

    def close(self, target: Target, grad: Tensor, last=None) -> None:
        assert grad is self.total
        self.count += 1
