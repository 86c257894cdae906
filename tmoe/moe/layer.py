"""The Mixture-of-Experts layer: route, dispatch, experts, combine.

next: moe/router.py
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tmoe.config.check import spelt
from tmoe.config.model import MoEConfig
from tmoe.moe.balance import Balancer, Load, Totals, measure, stack
from tmoe.moe.exchange.adaptive import LayerCost
from tmoe.moe.exchange.dispatch import Dispatcher, LocalDispatcher
from tmoe.moe.exchange.padded import PaddedDispatcher, PaddedRouting
from tmoe.moe.experts import Experts, LocalExperts
from tmoe.moe.losses import with_fields
from tmoe.moe.own_experts import OwnExperts, OwnLocal
from tmoe.moe.router import Router, Routing, without_identity
from tmoe.moe.select.capacity import capacity, limited
from tmoe.moe.select.quantile import quantiles
from tmoe.ops.argument_checks import autocasts, require
from tmoe.ops.experts.swiglu import activate
from tmoe.parallel.init_weights import initialise


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x): the dense feed-forward, and the shared experts."""

    halves = 2  # of gate_up's rows: gate and up

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        # whether a forward without gradients uses the fused activation, which rounds once instead of twice
        self.fused = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.gate_up(x)
        plain = torch.is_grad_enabled() or torch.compiler.is_compiling() or h.dtype == torch.float64
        if h.is_cuda and self.fused and not plain:  # rounded once, as in the compiled graph
            act, _ = activate(h.flatten(0, -2).contiguous(), h.shape[-1] // self.halves)
            return self.down(act.view(*h.shape[:-1], -1))
        return self.down(self.act(h))

    @staticmethod
    def act(h: Tensor) -> Tensor:
        """The activation of gate and up, in plain PyTorch."""
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up

    @property
    def work(self) -> int:
        """Operations of a row's products, as the width of a SwiGLU of the model's width that has as many."""
        return (self.gate_up.out_features + self.down.in_features) // 3

    @property
    def plain(self) -> bool:
        """Whether a call of this module does nothing but multiply by its two matrices.

        False with adapters, parametrizations or biases, or with a hook that must run at each call. (A
        compiled graph does not call a hook that was added after the compilation.)
        """
        parts = (self.gate_up, self.down)
        if type(self) not in (SwiGLU, SquaredRelu):
            return False
        if not all(type(part) is nn.Linear and part.bias is None for part in parts):
            return False

        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        modules = (self, *parts)
        hooked = any(len(getattr(module, name)) for module in modules for name in hooks)
        return not hooked and not any("forward" in module.__dict__ for module in modules)

    def matrices(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """gate_up [2F, D] (up alone without a gate) and down [D, F], for an op that multiplies x by them.

        None where a call of this module would cast x or the matrices.
        """
        matrices = (self.gate_up.weight, self.down.weight)
        cast = autocasts(x) or any(w.dtype != x.dtype for w in matrices)
        return None if cast else matrices


class SquaredRelu(SwiGLU):
    """down(relu(up x)^2): the dense feed-forward and the shared experts without a gate."""

    halves = 1

    def __init__(self, dim: int, hidden: int):
        nn.Module.__init__(self)
        self.gate_up = nn.Linear(dim, hidden, bias=False)  # up alone, by the name of both
        self.down = nn.Linear(hidden, dim, bias=False)
        self.fused = True

    @staticmethod
    def act(h: Tensor) -> Tensor:
        return F.relu(h).square()


def dense_layer(dim: int, hidden: int, activation: str) -> SwiGLU:
    """A dense feed-forward with the activation `MoEConfig.shared_activation`."""
    return (SquaredRelu if activation == "relu2" else SwiGLU)(dim, hidden)


def check_marks(name: str, marks: Tensor, tokens: Tensor, shape: torch.Size, *dtypes: torch.dtype) -> None:
    """Raises ValueError unless `marks` holds one mark for each token.

    They must have this shape and one of these dtypes, and be on the device of `tokens`. Marks of another
    shape might broadcast, or flatten in another order.
    """
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
    """Warns, once per process and on one rank, of routers that the task's loss does not train.

    This is a warning and not an error, because the weights of the model may still be loaded.
    """
    if cfg.untrained and not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(spelt(cfg.untrained), stacklevel=1)


def warn_if_acausal(cfg: MoEConfig) -> None:
    """Warns, once per process and on one rank, of a selection that lets a causal model see later tokens."""
    if cfg.acausal and not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(spelt(cfg.acausal), stacklevel=1)


class CallOptions(NamedTuple):
    """The settings of one call of a layer that differ from its MoEConfig; None: the value of the MoEConfig.

    top_k: the number in digits, because dynamo turns a number that changes from call to call into a symbol.
    most: the most pairs that an expert accepts: a 0-dim tensor, so that all values share one compiled graph,
        or an int where sizes depend on it.
    way: a key of MoE.ways.
    ids_TK: the experts to use instead of the router's choice.
    """

    top_k: str | None = None
    most: Tensor | int | None = None
    way: str | None = None
    ids_TK: Tensor | None = None


class MoE(nn.Module):
    """y = sum over a token's K experts of weight * expert(x), plus the shared experts, which see every token.

    `MoE(dim, cfg)(x)` takes x [B, S, D] or [T, D] and returns y of the same shape and dtype. Under autocast
    it computes in autocast's dtype. Inside a Transformer, a Block calls `route` directly.

    After a call the router's load is in `self.load` (None before), and `balancing_loss` computes a loss from
    it. A load with gradients keeps the call's graph alive until the next call. Set it to None if you do not
    want such a loss.

    Recompute the layer only with `checkpoint(..., use_reentrant=False)`. With True the layer is called
    without gradients, so the balancing loss of that load has no gradient, and no error is raised.
    torch.compile accepts no checkpoint in which a module sets `load`: compile inside the checkpoint, or
    checkpoint `route`.

    With `choice_bias`, sum the counts of the load over the step and the ranks, and pass them to
    `self.router.update_bias`.
    """

    def __init__(
        self,
        dim: int,
        cfg: MoEConfig,
        *,
        init: bool = True,
        experts: Callable[[Tensor, Tensor], Tensor] | None = None,
    ):
        """Builds the router, the experts and the shared experts.

        init: draw the weights; False where the code that builds the model draws or loads them.

        experts: your own experts, a module or a function of sorted rows and the ends of their groups
            (docs/experts.md); their parameters keep their values. None: tmoe's experts, as cfg configures
            them.

        Raises ConfigError where the weights are drawn and the task's loss would not train the router
        (`MoEConfig.untrained`).
        """
        super().__init__()
        require(type(dim) is int and dim > 0, "dim", repr(dim), "a whole number from 1 on")
        require(isinstance(cfg, MoEConfig), "cfg", repr(cfg)[:80], "a MoEConfig")
        if init:
            cfg.require_trained()
        self.dim = dim
        self.router = Router(dim, cfg)
        latent = cfg.latent_dim
        if experts is None:
            self.experts: Experts = Experts(latent or dim, cfg)
        self.to_latent = nn.Linear(dim, latent, bias=False) if latent else None
        self.from_latent = nn.Linear(latent, dim, bias=False) if latent else None
        self.shared = dense_layer(dim, cfg.shared_dim, cfg.shared_activation) if cfg.shared_dim else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if cfg.shared_gate else None
        self.dispatcher: Dispatcher = PaddedDispatcher(cfg.experts) if cfg.pad else LocalDispatcher()
        self.dispatcher.mean_K = cfg.top_k if cfg.slots > cfg.top_k else 0
        # model/parallelize.py: the dispatchers of adaptive_r, by str(r), and the cost of each
        self.ways: dict[str, Dispatcher] = {}
        self.cost: LayerCost | None = None
        self.load: Any = None  # a Load
        # moe/trace.py: whether the load holds the choices; the choices that the router must use
        self.traced = False
        self.further = False  # True in blocks that predict further tokens, which no trace or replay includes
        self.given_TK: Tensor | None = None
        if init:
            initialise(self)
        if experts is not None:  # after the weights were drawn: own experts keep their values
            self.experts = OwnExperts(experts, cfg)

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy or a pickle, without `load`, which belongs to one call and its graph."""
        return self.__dict__ | {"load": None}

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        *,
        top_k: int | None = None,
        capacity_factor: float | None = None,
        adaptive_r: int | Literal["auto"] | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """y, of x's shape and dtype; sets `self.load`.

        Args:
            padding: bool of x's leading shape, True at tokens that are sent to no expert. They skip the
                shared experts too (so y is 0), and count in no loss.
            top_k, capacity_factor: values for this call, instead of the MoEConfig's; a factor of 0 drops
                nothing. All ranks must give the same values. Where `route` is compiled, the first use of each
                top_k compiles a graph, and so does the first use of a factor (of each factor, where the layer
                pads).
            adaptive_r: what the ranks exchange in this call, with equal results. 0: the expert group's
                weights. 1: tokens. A divisor of etp: tokens, with each expert divided among r ranks
                (moe/exchange/adaptive.py). "auto": the cheapest for the number of tokens, which must then be
                the same on all ranks. All ranks must give the same value; the first use of each value
                compiles a graph.
            ids: integers of x's leading shape plus a dimension K, -1 for no expert: the experts to use
                instead of the router's choice. Their weights are this call's scores (Router.forward).
        """
        if not isinstance(x, Tensor):
            require(False, "x", repr(x)[:80], f"a tensor [..., T, dim={self.dim}]")
        if x.dim() < 2 or x.shape[-1] != self.dim:
            require(False, "x", f"shape {tuple(x.shape)}", f"[..., T, dim={self.dim}]")
        if padding is not None:
            check_marks("padding", padding, x, x.shape[:-1], torch.bool)
        call = self.call(x, top_k, capacity_factor, adaptive_r, ids)
        route = self.route if call is None else partial(self.route, call=call)
        y_TD, self.load = self.experts(route, x, padding)
        # The view is made outside the scope of the experts. If FSDP2 got a view, an in-place op on it would
        # remove FSDP2's hook.
        return y_TD.view_as(x)

    def call(
        self,
        x: Tensor,
        top_k: int | None = None,
        capacity_factor: float | None = None,
        adaptive_r: int | str | None = None,
        ids: Tensor | None = None,
    ) -> CallOptions | None:
        """The checked settings of one call on x; None if the call sets nothing."""
        if ids is not None:
            ok = isinstance(ids, Tensor) and ids.shape[:-1] == x.shape[:-1]
            got = f"shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)[:80]
            require(ok, "ids", got, f"[{', '.join(map(str, x.shape[:-1]))}, K], as x")
            ids = ids.flatten(0, -2)
        if top_k is None and capacity_factor is None and adaptive_r is None:
            return None if ids is None else CallOptions(ids_TK=ids)
        cfg, tokens = self.router.cfg, x[..., 0].numel()
        digits, K = None, cfg.top_k
        if top_k is not None:
            most = cfg.reach(self.router.devices)
            # by comparison, because dynamo's symbols support few other operations
            K = next((k for k in range(1, most + 1) if k == top_k), 0)
            if not K or type(top_k) is not int:
                require(False, "top_k", repr(top_k), f"a whole number from 1 to {most}")
            digits = str(K)
        dispatcher = None
        if adaptive_r is not None:
            dispatcher = self.way(adaptive_r, tokens, K, x.element_size())
        if capacity_factor is None:
            return CallOptions(digits, None, dispatcher, ids)
        ok = isinstance(capacity_factor, (int, float)) and -math.inf < capacity_factor < math.inf
        if not ok:
            require(False, "capacity_factor", repr(capacity_factor), "a finite number; 0 drops nothing")
        most = capacity(tokens, K, cfg, capacity_factor)
        return CallOptions(
            digits, most if cfg.pad else torch.full((), most, device=x.device), dispatcher, ids
        )

    def way(self, adaptive_r: int | str, tokens: int, top_k: int, element: int) -> str | None:
        """The key in `ways` for a call with this number of tokens; None: on one rank all ways are equal.

        element: bytes of one element of x.
        """
        # without an exchange, adaptive_r 0 and 1 are the same
        also = {0} if self.cost is None or self.cost.ep == 1 else set()
        valid = sorted({1} | also | {int(r) for r in self.ways})
        ok = adaptive_r == "auto" or (type(adaptive_r) is int and adaptive_r in valid)
        if not ok:
            require(False, "adaptive_r", repr(adaptive_r), f"'auto' or one of {valid}")
        if self.cost is None:
            return None
        if adaptive_r == "auto":
            cost = replace(self.cost, top_k=top_k, element=element, backward=torch.is_grad_enabled())
            adaptive_r = cost.cheapest(list(map(int, self.ways)), tokens)
        return str(adaptive_r) if str(adaptive_r) in self.ways else "1"

    def route(
        self,
        x: Tensor,
        padding: Tensor | None,
        experts: LocalExperts | OwnLocal,
        call: CallOptions | None = None,
        members: Tensor | None = None,
    ) -> tuple[Tensor, Load]:
        """The layer's computation, given this rank's experts: y [T, D], and the load of each row.

        members: fp32 [B, S, n], 1 where a token belongs to the n-th sequence of its row; given where rows
        hold several sequences.
        """
        cfg = self.router.cfg
        y_TD, chosen, taken = self.mix(x, padding, experts, call)
        padding_T = None if padding is None else padding.flatten()
        sequences = x.shape[0] if x.dim() == 3 else 1
        load = measure(chosen, sequences, padding_T, cfg.score, taken, cfg, members)
        if cfg.selection == "quantile":
            assert chosen.noted_TX is not None
            given = call is not None and call.ids_TK is not None
            K = cfg.top_k if given else chosen.ids_TK.shape[1]
            noted_BE = quantiles(chosen.logits_TE, chosen.noted_TX, K, sequences, padding_T)
            load = with_fields(load, noted_BX=noted_BE)
        return y_TD, with_fields(load, ids_TK=chosen.ids_TK) if self.traced else load

    def mix(
        self,
        x: Tensor,
        padding: Tensor | None,
        experts: LocalExperts | OwnLocal,
        call: CallOptions | None = None,
    ) -> tuple[Tensor, Routing, Routing]:
        """y [T, D], the tokens' routing, and that routing without the pairs that full experts dropped."""
        cfg, call = self.router.cfg, call or CallOptions()
        dispatcher = self.dispatcher if call.way is None else self.ways[call.way]
        if dispatcher.ranks == 1 and experts.held != cfg.experts:
            valid = f"all {cfg.experts}, or experts sharded by parallelize"
            require(False, "experts", f"{experts.held} of them on this rank", valid)
        x_TD = x.flatten(0, -2)
        padding_T = None if padding is None else padding.flatten()
        if padding_T is not None:
            # attention over no tokens gives NaN at padding, which would spread to every gradient
            x_TD = x_TD.masked_fill(padding_T[:, None], 0)

        chosen = self.router(
            x_TD,
            padding_T,
            None if call.top_k is None else int(call.top_k),
            self.given_TK if call.ids_TK is None else call.ids_TK,
        )
        most = call.most
        if most is None and cfg.capacity_factor is not None:
            T, K = chosen.ids_TK.shape
            most = capacity(T, K, cfg)
        taken = chosen if most is None else limited(chosen, most, cfg)
        routed, kept_T = without_identity(taken, cfg)
        routing: Any = routed
        if cfg.pad:
            assert isinstance(most, int)
            routing = PaddedRouting(taken.weights_TK, taken.ids_TK, most)
        own_TD = x_TD  # the output of identity experts
        if autocasts(x) and x.dtype != torch.float64:  # as F.linear does; the experts' op needs one dtype
            dtype = torch.get_autocast_dtype(x.device.type)
            x_TD = x_TD.to(dtype)
            experts = experts.to(dtype)

        y_TD = self.mixed(x_TD, routing, experts, dispatcher).to(x.dtype)
        if kept_T is not None:
            y_TD = y_TD + (kept_T[:, None] * own_TD).to(x.dtype)
        return y_TD, chosen, taken

    def mixed(self, x_TD: Tensor, routing: Any, experts: Any, dispatcher: Any) -> Tensor:
        """The routed experts' sum, computed in the latent space if there is one, plus the shared expert's."""
        shared_TD = None
        if self.to_latent is not None:
            y_TD = self.from_latent(dispatcher(self.to_latent(x_TD), routing, experts))
            shared_TD = None if self.shared is None else self.shared(x_TD)
        elif self.shared is None:
            y_TD = dispatcher(x_TD, routing, experts)  # dispatch, experts, combine
        else:
            y_TD, shared_TD = dispatcher.run_with_shared(x_TD, routing, experts, self.shared)
        if shared_TD is None:
            return y_TD
        if self.shared_gate is not None:
            shared_TD = shared_TD * self.shared_gate(x_TD).sigmoid()
        return y_TD + shared_TD


def balancing_loss(
    model: nn.Module, tokens: float | Tensor | None = None, sequences: float | Tensor | None = None
) -> Tensor:
    """This rank's share of the balancing losses and z-losses of the last call of all MoE layers in `model`.

    Add it to your loss, once per call. The shares of all ranks and micro-batches add up to the losses of the
    step, as each layer's MoEConfig sets them (`balance`, `balance_coeff`, `z_coeff`; "global" counts experts
    over all ranks of one micro-batch). Gradients must be summed over ranks, as `parallelize` does. The loss
    is fp32, 0-dim.

    Args:
        tokens, sequences: how many the layers get in the whole step, over all ranks and micro-batches,
            without padding; a call with [T, D] is one sequence. None: the step is this call alone, and the
            counts are summed over ranks (a collective).

    Raises ValueError where `model` has no MoE layer, or where a layer's last call left no load, or a load
    without gradients.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    got = f"a {type(model).__name__} without MoE layers"
    require(len(layers) > 0, "balancing_loss: model", got, "a module with MoE layers")
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
    """Raises ValueError unless the last call of a layer left a load from which a loss can be computed."""
    where = f"balancing_loss: {name or 'model'}"
    valid = "a layer that was called before (a Transformer adds these losses itself: model(tokens, targets))"
    require(moe.load is not None, where, "no load", valid)

    trains = torch.is_grad_enabled() and moe.router.weight.requires_grad
    differentiable = moe.load.probs_BE.requires_grad or not trains
    valid = "a call with gradients (checkpoint it with use_reentrant=False)"
    require(differentiable, where, "a load without gradients", valid)


def step_totals(
    loads: list[Load], tokens: float | Tensor | None, sequences: float | Tensor | None
) -> list[Totals]:
    """The divisors of each layer's losses: the given counts, else the counts of this call over all ranks."""
    both = (tokens is None) == (sequences is None)
    got = f"tokens={tokens}, sequences={sequences}"
    require(both, "balancing_loss", got, "both of the whole step, or none")

    if tokens is None or sequences is None:
        tokens_Y = torch.stack([load.tokens_B.sum() for load in loads])
        sequences_Y = torch.stack([load.tokens_B.new_full((), len(load.tokens_B)) for load in loads])
        counts_2Y = torch.stack([tokens_Y, sequences_Y])
        return [Totals(count, count, rows) for count, rows in sum_over_ranks(counts_2Y).T]

    valid = "a number above 0, of the whole step over all ranks"
    for name, count in (("tokens", tokens), ("sequences", sequences)):
        ok = isinstance(count, Tensor) or count > 0
        require(ok, f"balancing_loss: {name}", f"{count}", valid)
    like = loads[0].tokens_B
    counts = [torch.as_tensor(count, dtype=like.dtype, device=like.device) for count in (tokens, sequences)]
    return [Totals(counts[0], *counts)] * len(loads)


def sum_over_ranks(t: Tensor) -> Tensor:
    """Sum over the default process group; no gradient flows through it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return t
    t = t.detach().clone()
    dist.all_reduce(t)
    return t
