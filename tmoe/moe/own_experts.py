"""Experts of your own under tmoe's routing and expert parallelism: a module or a function of sorted rows.

docs/experts.md has the contract and an example.

next: moe/exchange/dispatch.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tmoe.config.model import MoEConfig
from tmoe.moe.exchange.dispatch import Rows
from tmoe.moe.exchange.sorted_rows import over_sorted_rows
from tmoe.moe.experts import Experts
from tmoe.ops.argument_checks import require
from tmoe.parallel.mesh import local_part


class OwnLocal(NamedTuple):
    """This rank's experts with gathered parameters. Called on Rows, they return y [R, D]."""

    run: Callable[[Tensor, Tensor], Tensor]
    parameters: dict[str, Tensor]  # [L, ...], the parameters of `run` if it is a module
    held: int  # L
    weigh: str

    def to(self, dtype: torch.dtype) -> OwnLocal:
        """The same experts in another dtype. Gradients reach the original parameters in their dtype."""
        cast = {name: p.to(dtype) if p.is_floating_point() else p for name, p in self.parameters.items()}
        return OwnLocal(self.run, cast, self.held, self.weigh)

    def __call__(self, rows: Rows) -> Tensor:
        def run(x_ND: Tensor, pairs: Any) -> Tensor:
            if isinstance(self.run, nn.Module):
                return functional_call(self.run, self.parameters, (x_ND, pairs.ends_L))
            return self.run(x_ND, pairs.ends_L)

        return over_sorted_rows(rows, self.held, run, self.weigh)


class OwnExperts(Experts):
    """A scope around experts that the user wrote; Experts is the scope of tmoe's experts.

    own: called as own(x_ND, ends_L) -> y_ND. If it is a module, its parameters are named `own.*` in this
        module. Each is [E, ...], and a call gets this rank's part [L, ...]. Buffers are complete on every
        rank.
    """

    def __init__(self, own: Callable[[Tensor, Tensor], Tensor], cfg: MoEConfig):
        nn.Module.__init__(self)  # not the constructor of Experts, which creates weights
        require(callable(own), "experts", repr(own)[:80], "a module or a function (x_ND, ends_L) -> y_ND")
        self.own = own
        self.experts: int = cfg.experts
        self.held: int = cfg.experts  # experts of this rank; set by model/parallelize.py
        self.weigh = cfg.weigh
        self.slice = None
        self.deferred = False
        self.scales = {}  # tmoe adds no adapters to them
        self.require_stacked()

    def require_stacked(self) -> None:
        """Raises ValueError for a parameter that is not [E, ...]: sharding would split it wrongly."""
        for name, p in self.named_parameters():
            ok = p.dim() > 0 and p.shape[0] == self.experts
            shape = f"shape {tuple(p.shape)}"
            require(ok, f"experts: parameter {name.removeprefix('own.')}", shape, f"[E={self.experts}, ...]")

    @property
    def symm_lacks(self) -> str:
        return "experts of your own"

    def forward(self, fn: Callable, *args: Any) -> Any:
        named = self.own.named_parameters() if isinstance(self.own, nn.Module) else ()
        parameters = {name: local_part(p) for name, p in named}
        return fn(*args, OwnLocal(self.own, parameters, self.held, self.weigh))
