"""The Mixture-of-Experts layer: route, dispatch, experts, combine.

next: router.py
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tmoe.balance import Load, measure
from tmoe.config import MoEConfig
from tmoe.experts import Experts, LocalExperts
from tmoe.init import initialise
from tmoe.ops.check import autocasts, require
from tmoe.parallel.dispatch import Dispatcher, LocalDispatcher
from tmoe.router import Router


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x): the dense feed-forward, and the shared experts."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    @property
    def plain(self) -> bool:
        """Whether calling this module does nothing but multiply by its two matrices: no adapters, parametrizations or biases, no
        hook of its own that must hear of each call (one that is added once a graph is compiled, nobody hears in it)."""
        parts = self.gate_up, self.down
        if type(self) is not SwiGLU or not all(type(part) is nn.Linear and part.bias is None for part in parts):
            return False
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        everyone = self, *parts
        return not any(len(getattr(part, name)) for part in everyone for name in hooks) and not any(
            "forward" in part.__dict__ for part in everyone
        )

    def matrices(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """gate_up [2F, D] and down [D, F], for an op that multiplies x by them itself; None where calling this module would cast."""
        matrices = self.gate_up.weight, self.down.weight
        cast = autocasts(x) or any(w.dtype != x.dtype for w in matrices)
        return None if cast else matrices


def check_marks(name: str, marks: Tensor, tokens: Tensor, shape: torch.Size, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless a mark for each token is what it should be: another shape might broadcast, or flatten in another order."""
    ok = isinstance(marks, Tensor) and marks.dtype in dtypes and marks.shape == shape
    if not ok or marks.device != tokens.device:
        got = f"{marks.dtype} {tuple(marks.shape)} on {marks.device}" if isinstance(marks, Tensor) else repr(marks)[:80]
        valid = f"{' or '.join(map(str, dtypes))} {tuple(shape)} on {tokens.device}, one for each token"
        require(False, name, got, valid)


def warn_if_untrained(cfg: MoEConfig) -> None:
    """Warn, once a process and on one rank, of routers that the task's loss does not train: a model whose weights may be loaded."""
    if cfg.untrained and not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(cfg.untrained, stacklevel=1)


class MoE(nn.Module):
    """y = sum over a token's K experts of weight * expert(x), plus the shared experts that every token passes.

    `MoE(dim, cfg)(x)` takes x [B, S, D] or [T, D] and returns y of the same shape and type; under autocast it computes in that's. The
    router's load for the balancing losses is in `self.load` after a call (None before): with gradients it holds on to the call's graph until
    the next one, so set it to None where you want no such loss. Recompute the layer with `checkpoint(..., use_reentrant=False)` only: True
    calls it without gradients, and a balancing loss of that load has none, in silence. (torch.compile takes no checkpoint in which a
    module sets `load`: compile inside it, or checkpoint `route`.) With `choice_bias`, sum its counts over the step and the ranks and hand them
    to `self.router.update_bias`. Inside a Transformer, a Block calls `route` itself: see there.
    """

    def __init__(self, dim: int, cfg: MoEConfig, *, init: bool = True):
        """init: draw the weights (False: whoever builds the model does, or loads them). ConfigError where they are drawn and the task's
        loss would not train the router (`MoEConfig.untrained`)."""
        super().__init__()
        require(type(dim) is int and dim > 0, "dim", repr(dim), "a whole number from 1 on")
        require(isinstance(cfg, MoEConfig), "cfg", repr(cfg)[:80], "a MoEConfig")
        if init:
            cfg.require_trained()
        self.dim = dim
        self.router = Router(dim, cfg)
        self.experts = Experts(dim, cfg)
        self.shared = SwiGLU(dim, cfg.shared_dim) if cfg.shared_dim else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if cfg.shared_gate else None
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.load: Any = None  # a Load
        if init:
            initialise(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle, goes without `load`: it belongs to a call, and hangs on that call's graph."""
        return self.__dict__ | {"load": None}

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """padding: bool of x's leading shape, True at tokens that go to no expert, shared ones included (y is 0), and count in no loss."""
        if not isinstance(x, Tensor):
            require(False, "x", repr(x)[:80], f"a tensor [..., T, dim={self.dim}]")
        if x.dim() < 2 or x.shape[-1] != self.dim:
            require(False, "x", f"shape {tuple(x.shape)}", f"[..., T, dim={self.dim}]")
        if padding is not None:
            check_marks("padding", padding, x, x.shape[:-1], torch.bool)
        y_TD, self.load = self.experts(self.route, x, padding)
        return y_TD.view_as(x)  # a view out here: FSDP2's hook would be lost to an in-place op on one it was given

    def route(self, x: Tensor, padding: Tensor | None, experts: LocalExperts) -> tuple[Tensor, Load]:
        """The layer proper, given this rank's experts: y [T, D], and the load per sequence."""
        if isinstance(self.dispatcher, LocalDispatcher) and len(experts.gate_up) != self.router.cfg.experts:
            valid = f"all {self.router.cfg.experts}, or spread by parallelize"
            require(False, "experts", f"{len(experts.gate_up)} of them on this rank", valid)
        x_TD = x.flatten(0, -2)
        padding_T = None if padding is None else padding.flatten()
        if padding_T is not None:  # NaN there, as attention to nothing makes it, would be in every gradient
            x_TD = x_TD.masked_fill(padding_T[:, None], 0)
        routing = self.router(x_TD, padding_T)
        if autocasts(x) and x.dtype != torch.float64:  # as for F.linear; the experts' op takes one type
            dtype = torch.get_autocast_dtype(x.device.type)
            x_TD, experts = x_TD.to(dtype), experts.to(dtype)
        if self.shared is None:
            y_TD = self.dispatcher(x_TD, routing, experts)  # dispatch, experts, combine
        else:
            y_TD, shared_TD = self.dispatcher.beside(x_TD, routing, experts, self.shared)
            y_TD = y_TD + (shared_TD if self.shared_gate is None else shared_TD * self.shared_gate(x_TD).sigmoid())
        return y_TD.to(x.dtype), measure(routing, x.shape[0] if x.dim() == 3 else 1, padding_T, self.router.cfg.score)
