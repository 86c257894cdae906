"""Operands of the router's product, the exact results, and the allowed errors.

x [T, D] bf16, W [E, D] of any dtype; logits [T, E] in fp32.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tmoe.ops.router.product import HI, LO, MID, router_product

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ORDERS = [(MID, HI), (MID, HI, HI), (LO, MID, HI, HI), (HI, HI), (HI, HI, MID), (LO, MID, HI), (MID,)]
TYPES = pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=lambda d: str(d)[6:])
ROUNDING = {bf16: 2**-8, fp16: 2**-11, fp32: 0.0}  # relative rounding error of a result
SUM = 3e-7  # error of an fp32 sum, relative to the norms of the factors


# ---- operands ----


def every_exponent(n: int = 2**16) -> Tensor:
    """fp32 numbers of random bits, followed by numbers at the limits of the ranges of fp32 and bf16."""
    a = torch.randint(-(2**31), 2**31, (n,)).to(torch.int32).view(fp32)
    top = torch.finfo(fp32)
    bottom = torch.finfo(bf16)
    ends = [
        0.0,
        -0.0,
        top.max,
        -top.max,
        bottom.max,
        top.tiny,
        top.smallest_normal,
        2.0**-110,
        2.0**-149,
        3 * 2.0**-149,
    ]
    return torch.cat([a[a.isfinite()], torch.tensor(ends), torch.tensor(ends) * (1 - 2.0**-24)])


def operands(T: int, D: int, E: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """x and W (leaves), and a gradient whose rows add up to nearly zero, like the gradient of a softmax."""
    x = torch.randn(T, D, device=device).bfloat16().requires_grad_()
    w = (0.02 * torch.randn(E, D, device=device)).to(dtype).requires_grad_()
    g = torch.randn(T, E, device=device) * torch.rand(T, 1, device=device).square()
    return x, w, g - g.mean(-1, keepdim=True)


# ---- results ----


def step(x: Tensor, w: Tensor, g: Tensor, fn: Callable = router_product) -> tuple[Tensor, ...]:
    """(logits, dx, dW) of fn(x, w), for the gradient g of the logits."""
    y = fn(x, w)
    return y, *torch.autograd.grad(y, (x, w), g)


def truth(x: Tensor, w: Tensor, g: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(logits, dx, dW) in fp64, each with the product of the norms of the factors."""
    x, w, g = (t.detach().double() for t in (x, w, g))
    return [
        (x @ w.t(), x.norm(dim=1)[:, None] * w.norm(dim=1)),
        (g @ w, g.norm(dim=1)[:, None] * w.norm(dim=0)),
        (g.t() @ x, g.norm(dim=0)[:, None] * x.norm(dim=0)),
    ]


def assert_right(got: tuple[Tensor, ...], x: Tensor, w: Tensor, g: Tensor, summed: float = SUM) -> None:
    """Asserts that `got`, (logits, dx, dW), is within the rounding errors that each result may have.

    Logits, and the gradient of an fp32 weight, must be as exact as an fp32 product. A 16-bit gradient is
    rounded once; its pieces may add an error of 2^-16 (dx) or 2^-17 (dW) of the norms.
    summed: error of sums, as in SUM.
    """
    assert [t.dtype for t in got] == [fp32, bf16, w.dtype]
    for name, a, (want, scale) in zip(("logits", "dx", "dW"), got, truth(x, w, g), strict=True):
        pieces = {"logits": 0.0, "dx": 2.0**-16, "dW": 2.0**-17 if w.element_size() == 2 else 0.0}[name]
        bound = ROUNDING.get(a.dtype, 0.0) * want.abs() + (pieces + summed) * scale
        bound += 2.0**-25 if a.dtype == fp16 else 2.0**-134  # half the smallest number of the type
        error = (a.detach().double() - want).abs()
        assert (error <= bound).all(), (name, (error - bound).max().item(), (error / scale).max().item())
