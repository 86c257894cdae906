"""Parameters that stay in fp32 while their module computes in bf16: rates of decay, for example.

The module `Precise` holds them. It is called around the code that uses them, as the experts' module is: hooks
that gather parameters then run outside of a compiled graph.

next: parallel/copies.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Precise(nn.Module):
    """Holds parameters in fp32, or wider, whatever the type of the model around them."""

    def forward(self, fn: Callable, *args: Any) -> Any:
        """fn(*args), with the parameters gathered."""
        return fn(*args)

    def _apply(self, fn: Callable, recurse: bool = True) -> Precise:
        """Keeps the values in fp32 under `.bfloat16()`; `.to(device)` and `.double()` work as usual."""
        before = {name: p.detach() for name, p in self._parameters.items() if p is not None}
        super()._apply(fn, recurse)
        for name, old in before.items():
            p = self._parameters[name]
            if p is not None and p.dtype.itemsize < 4 <= old.dtype.itemsize:
                p.data = old.to(p.device)
        return self


def type_in(owner: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """The type in which the parameters of a module compute, where those of the model compute in `dtype`."""
    return torch.promote_types(dtype, torch.float32) if isinstance(owner, Precise) else dtype
