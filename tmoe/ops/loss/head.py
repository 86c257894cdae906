"""Products with an output head, as the loss and log-probs compute them chunk by chunk."""

import torch
from torch import Tensor

from tmoe.ops.gradient_sums import NEW, GradientSum
from tmoe.ops.loss.cross_entropy import aligned, scaled


def widened(weight_VD: Tensor) -> Tensor:
    """The weight, on a GPU padded with rows of zeros so that rows of logits are aligned.

    The columns of the padding take no part in any softmax.
    """
    V, D = weight_VD.shape
    more = aligned(V, weight_VD.element_size()) - V if weight_VD.is_cuda else 0
    return torch.cat([weight_VD, weight_VD.new_zeros(more, D)]) if more else weight_VD


def wide_products(t: Tensor) -> bool:
    """Whether a product of 16-bit operands can return unrounded fp32, which only cuBLAS supports."""
    return t.is_cuda and t.element_size() == 2 and not torch.version.hip


def summed_type(dtype: torch.dtype) -> torch.dtype:
    """The type of sums over tokens: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b in fp32 (fp64 for fp64), in place; total None: a b.

    On a GPU the product of 16-bit operands is not rounded before it is added.
    """
    if wide_products(a):
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    if total is not None and a.dtype == total.dtype:
        return total.addmm_(a, b)
    product = (a @ b).to(summed_type(a.dtype))
    return product if total is None else total.add_(product)


def to_autograd(owner: GradientSum | None, grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The gradient grad * factor of the head, in dtype; None once it is in the head's sum, unrounded.

    owner: owner of that sum, None if there is none. A step's only gradient is returned.
    The factor is known only in backward, so the sum is read and written once more after the products, with
    `grad`. That is still without a copy in the head's type.
    """
    target = NEW if owner is None else owner.open()
    if owner is None or target.plain:
        return times(grad, factor, dtype)
    if target.tensor is None:
        total = times(grad, factor, target.dtype or dtype)
    elif target.add:
        total = target.tensor.addcmul_(grad.to(target.tensor.dtype), factor.to(target.tensor.dtype))
    else:
        total = target.tensor.copy_(times(grad, factor, target.tensor.dtype))
    owner.close(target, total)
    return None


def times(grad: Tensor, factor: Tensor, dtype: torch.dtype, in_place: bool = False) -> Tensor:
    """grad * factor (0-dim fp32), rounded once to dtype. in_place: grad may be overwritten.

    A factor in bf16 would have an error of up to 0.2%, the same for all tokens of a step.
    """
    if grad.is_cuda:
        return scaled(grad, factor, dtype, in_place)
    return (grad.to(summed_type(grad.dtype)) * factor).to(dtype)
