"""Makes the dense matrices of a block add their gradients to sums, where a rank holds the matrices whole.

next: ops/linear.py
"""

import torch
from torch import Tensor, nn

from tmoe.ops.argument_checks import autocasts
from tmoe.ops.linear import linear_summed


class SummedLinear(nn.Linear):
    """nn.Linear, whose weight's gradient is added to the weight's sum (tmoe/ops/gradient_sums.py).

    Its results and its other gradients are those of nn.Linear. autograd gets the weight's gradient if x needs
    none, because the op would then have no backward, and where x or the weight would be cast.
    """

    def forward(self, x: Tensor) -> Tensor:
        """y [..., out] of x [..., in]."""
        weight = self.weight
        summed = torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
        if not summed or x.dtype != weight.dtype or autocasts(x):
            return super().forward(x)
        y = linear_summed(x.flatten(0, -2), weight.detach()).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


def sum_linears(block: nn.Module) -> None:
    """Turns each plain nn.Linear of a block into a SummedLinear. Working copies must own the sums."""
    for module in block.modules():
        if type(module) is nn.Linear:
            module.__class__ = SummedLinear
