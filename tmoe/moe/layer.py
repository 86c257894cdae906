"""The Mixture-of-Experts layer: route, dispatch, experts, combine.

next: moe/router.py
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tmoe.config.model import MoEConfig
from tmoe.init import initialise
from tmoe.moe.balance import Balancer, Load, Totals, measure, stack
from tmoe.moe.dispatch import Dispatcher, LocalDispatcher
from tmoe.moe.experts import Experts, LocalExperts
from tmoe.moe.router import Router
from tmoe.ops.check import autocasts, require


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
        if type(self) is not SwiGLU or not all(
            type(part) is nn.Linear and part.bias is None for part in parts
        ):
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
        got = (
            f"{marks.dtype} {tuple(marks.shape)} on {marks.device}"
            if isinstance(marks, Tensor)
            else repr(marks)[:80]
        )
        valid = f"{' or '.join(map(str, dtypes))} {tuple(shape)} on {tokens.device}, one for each token"
        require(False, name, got, valid)


def warn_if_untrained(cfg: MoEConfig) -> None:
    """Warn, once a process and on one rank, of routers that the task's loss does not train: a model whose weights may be loaded."""
    if cfg.untrained and not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(cfg.untrained, stacklevel=1)


class MoE(nn.Module):
    """y = sum over a token's K experts of weight * expert(x), plus the shared experts that every token passes.

    `MoE(dim, cfg)(x)` takes x [B, S, D] or [T, D] and returns y of the same shape and type; under autocast it computes in that's. The
    router's load is in `self.load` after a call (None before), and `balancing_loss` makes a loss of it: with gradients it holds on to the
    call's graph until the next one, so set it to None where you want no such loss. Recompute the layer with `checkpoint(..., use_reentrant=False)` only: True
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
        return y_TD.view_as(
            x
        )  # a view out here: FSDP2's hook would be lost to an in-place op on one it was given

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
            y_TD = y_TD + (
                shared_TD if self.shared_gate is None else shared_TD * self.shared_gate(x_TD).sigmoid()
            )
        return y_TD.to(x.dtype), measure(
            routing, x.shape[0] if x.dim() == 3 else 1, padding_T, self.router.cfg.score
        )


def balancing_loss(
    model: nn.Module, tokens: float | Tensor | None = None, sequences: float | Tensor | None = None
) -> Tensor:
    """This rank's share of the balancing and z-losses of all MoE layers in `model`, of their last call: add it to your loss, once a call.

    Shares of all ranks and micro-batches add up to the losses of the step, as each layer's MoEConfig sets them (`balance`,
    `balance_coeff`, `z_coeff`; "global" counts experts over all ranks of one micro-batch). Gradients must be summed over ranks, as
    `parallelize` has them. The loss is fp32, 0-dim.

    Args:
        tokens, sequences: how many the layers get in the whole step, over all ranks and micro-batches, without padding; a call with [T, D]
            is one sequence. None: the step is this call alone, and the ranks count together (a collective).

    Raises ValueError where `model` holds no MoE layer, or one whose last call left no load or one without gradients.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    require(
        len(layers) > 0,
        "balancing_loss: model",
        f"a {type(model).__name__} without MoE layers",
        "a module with some",
    )
    for name, moe in layers.items():
        check_load(name, moe)
    totals_Y = step_totals([moe.load for moe in layers.values()], tokens, sequences)
    shares = []
    for moe, totals in zip(layers.values(), totals_Y, strict=True):
        balancer = Balancer(moe.router.cfg)
        balancer.all_reduce = sum_over_ranks
        shares.append(balancer.loss(stack([moe.load]), totals))
    return torch.stack(shares).sum()


def check_load(name: str, moe: MoE) -> None:
    """ValueError unless a layer's last call left a load that a loss can be made of."""
    valid = "a layer that was called before (a Transformer adds these losses itself: model(tokens, targets))"
    require(moe.load is not None, f"balancing_loss: {name or 'model'}", "no load", valid)
    trains = torch.is_grad_enabled() and moe.router.weight.requires_grad
    valid = "a call with gradients (checkpoint it with use_reentrant=False)"
    require(
        moe.load.probs_BE.requires_grad or not trains,
        f"balancing_loss: {name or 'model'}",
        "a load without gradients",
        valid,
    )


def step_totals(
    loads: list[Load], tokens: float | Tensor | None, sequences: float | Tensor | None
) -> list[Totals]:
    """What each layer's losses are divided by: the given counts, else those of this call over all ranks."""
    both = (tokens is None) == (sequences is None)
    require(
        both, "balancing_loss", f"tokens={tokens}, sequences={sequences}", "both of the whole step, or none"
    )
    if tokens is None or sequences is None:
        counts_2Y = torch.stack(
            [
                torch.stack([load.tokens_B.sum() for load in loads]),
                torch.stack([load.tokens_B.new_full((), len(load.tokens_B)) for load in loads]),
            ]
        )
        return [Totals(count, count, rows) for count, rows in sum_over_ranks(counts_2Y).T]
    for name, count in (("tokens", tokens), ("sequences", sequences)):
        ok = isinstance(count, Tensor) or count > 0
        require(
            ok, f"balancing_loss: {name}", f"{count}", "a number above 0, of the whole step over all ranks"
        )
    here = loads[0].tokens_B
    counts = [torch.as_tensor(count, dtype=here.dtype, device=here.device) for count in (tokens, sequences)]
    return [Totals(counts[0], *counts)] * len(loads)


def sum_over_ranks(t: Tensor) -> Tensor:
    """Sum over the default process group; no gradient flows through it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return t
    t = t.detach().clone()
    dist.all_reduce(t)
    return t
