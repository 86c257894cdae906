"""linear_summed: a product by a dense matrix, in whose backward a product adds to the gradient's sum.

next: ops/gradient_sums.py
"""

import torch
from torch import Tensor

from tmoe.ops.argument_checks import check_tensors, require
from tmoe.ops.experts.cpu import product_into
from tmoe.ops.gradient_sums import sum_of
from tmoe.ops.loss.head import add_product, wide_products
from tmoe.ops.register import Backward, register_differentiable


def linear_summed(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """x W^T [T, F], with a backward that adds the gradient of W to its sum (gradient_sums.py).

    Args:
        x_TD: [T, D], any float type; needs a gradient, or there is no backward.
        weight_FD: [F, D], dtype of x; must not need a gradient from autograd, and must have an owner of its
            sum (`offer`), which backward finds by the matrix's address. Into a wider sum the product is added
            unrounded.

    Raises ValueError for arguments that do not fit; in backward RuntimeError for a matrix without a sum.
    """
    check_tensors(x=x_TD, weight=weight_FD)
    fits = x_TD.dim() == weight_FD.dim() == 2 and x_TD.shape[1] == weight_FD.shape[1]
    require(fits, "weight", f"shape {tuple(weight_FD.shape)}", f"[F, D] for x of {tuple(x_TD.shape)}")
    if weight_FD.requires_grad:
        require(False, "weight", "a tensor that needs a gradient", "one without, since its sum gets it")
    return torch.ops.tmoe.linear_summed(x_TD, weight_FD)


def _forward(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(x, weight.t())


def _forward_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _backward(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x; the sum gets that of the matrix."""
    owner = sum_of(weight)
    target = owner.open()
    with torch.autocast(x.device.type, enabled=False):  # autocast may be on where backward is called
        dx = torch.mm(dy, weight)
        if target.plain:
            grad = torch.mm(dy.t(), x)
        elif wide_products(x) and torch.float32 in (target.dtype, getattr(target.tensor, "dtype", None)):
            grad = add_product(target.tensor if target.add else None, dy.t(), x)
        else:
            grad = target.allocated(weight).tensor
            assert grad is not None
            product_into(dy.t(), x, grad, target.add)
    owner.close(target, grad)
    return dx


register_differentiable(
    "linear_summed",
    "(Tensor x, Tensor weight) -> Tensor",
    returns="y",
    cpu=_forward,
    cuda=_forward,
    fake=_forward_fake,
    backward=Backward(
        "(Tensor dy, Tensor x, Tensor weight) -> Tensor", gradients="x", cpu=_backward, cuda=_backward
    ),
)
