"""Products of matrices as bf16 tensor cores compute them: operands are rounded, sums are not."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def rounded(t: torch.Tensor) -> torch.Tensor:
    """The nearest values of bf16, in t's type."""
    return t.to(torch.bfloat16).to(t.dtype)


class RoundedProducts(TorchDispatchMode):
    """Rounds both operands of each product; a triangular solve is a product with the rounded inverse.

    All else stays as it is. A computation in fp32 is then the twin of kernels with products of bf16.
    """

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (aten.mm.default, aten.bmm.default):
            self.products += 1
            return func(*map(rounded, args), **kwargs)
        if func is aten.linalg_solve_triangular.default:
            self.products += 1
            matrix, right = args
            unit = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
            inverse = func(matrix, unit.expand_as(matrix).contiguous(), **kwargs)
            return torch.matmul(rounded(inverse), rounded(right))
        return func(*args, **kwargs)
