"""The experts' weights, and the one fused op that applies them to routed rows.

next: ops/__init__.py
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tmoe.base.activations import activation
from tmoe.config.model import MoEConfig
from tmoe.moe.exchange.dispatch import Rows
from tmoe.moe.exchange.expert_tensor import Slice
from tmoe.moe.exchange.gathered_weights import moe_mlp_gathered, moe_mlp_gathered_adapted, whole_adapters
from tmoe.moe.exchange.sorted_rows import Sorted, over_sorted_rows
from tmoe.ops import gather_rows, moe_mlp
from tmoe.ops.argument_checks import require
from tmoe.ops.experts.adapted import Adapters, moe_mlp_adapted
from tmoe.ops.experts.cpu import ExpertWeights
from tmoe.ops.experts.fp8_codes import codes_of
from tmoe.ops.experts.op import moe_mlp_deferred, moe_mlp_summed
from tmoe.parallel import token_exchange
from tmoe.parallel.mesh import local_part


class LocalExperts(NamedTuple):
    """This rank's experts with gathered weights: y = down(activation(gate x, up x)).

    Without a gate (relu2, relu, gelu) gate_up is the up matrix alone, [L, F, D], and its bias is [L, F].

    Called on Rows, it returns y [R, D]: for each row, the weighted sum over its experts that are on this
    rank.
    """

    gate_up: Tensor  # [L, 2F, D], gate rows first
    down: Tensor  # [L, D, F]
    gate_up_bias: Tensor | None = None  # [L, 2F]
    down_bias: Tensor | None = None  # [L, D]
    activation: str = "swiglu"
    deferred: bool = False  # matrices are detached, gradients computed later: ops/experts/deferred.py
    group: str | None = (
        None  # the ranks whose experts are gathered for the op: moe/exchange/gathered_weights.py
    )
    weigh: str = "activation"  # where weights are applied: MoEConfig.weigh
    adapters: Adapters | None = None  # low-rank changes of the matrices
    scales: tuple[float, float] = (1.0, 1.0)  # of gate_up's adapter and of down's
    summed: bool = False  # the op may add the matrices' gradients to sums: ops/gradient_sums.py
    codes: tuple[Tensor, Tensor] | None = None  # of gate_up and down: products are in fp8

    def sums_for(self, x: Tensor) -> bool:
        """Whether the op of rows x adds the gradients of both matrices to their sums.

        Without a gradient of x the op would have no backward.
        """
        needed = (x, self.gate_up, self.down)
        return self.summed and torch.is_grad_enabled() and all(t.requires_grad for t in needed)

    @property
    def held(self) -> int:
        """L, the number of experts of this rank."""
        return len(self.gate_up)

    @property
    def matrices(self) -> ExpertWeights:
        """The argument `experts` of `moe_mlp_adapted`."""
        return ExpertWeights(self.gate_up, self.down, self.gate_up_bias, self.activation)

    def to(self, dtype: torch.dtype) -> "LocalExperts":
        """The same experts in another dtype. Gradients reach the original weights in the original dtype."""
        if self.deferred and dtype != self.gate_up.dtype:
            valid = f"{self.gate_up.dtype}, the dtype of experts whose weight gradients are deferred"
            require(False, "autocast", dtype, valid)
        gate_up_bias, down_bias = (
            t if t is None else t.to(dtype) for t in (self.gate_up_bias, self.down_bias)
        )
        weights = dict(gate_up=self.gate_up.to(dtype), down=self.down.to(dtype))
        biases = dict(gate_up_bias=gate_up_bias, down_bias=down_bias)
        adapters = self.adapters
        if adapters is not None:
            adapters = Adapters(*(t if t is None else t.to(dtype) for t in adapters))
        summed = self.summed and dtype == self.gate_up.dtype  # a sum belongs to the matrix that is cast
        return self._replace(**weights, **biases, adapters=adapters, summed=summed)

    def part(self, own: Slice) -> "LocalExperts":
        """This rank's slice of the width of each expert."""
        gate_up_bias, down_bias = self.gate_up_bias, self.down_bias
        halves = activation(self.activation).halves
        return LocalExperts(
            own.of_rows(self.gate_up, halves),
            own.of_columns(self.down),
            None if gate_up_bias is None else own.of_rows(gate_up_bias, halves),
            None if down_bias is None else own.once(down_bias),
            self.activation,
            weigh=self.weigh,
            adapters=None if self.adapters is None else sliced(self.adapters, own, halves),
            scales=self.scales,
        )

    def gathered(self, group: str) -> "LocalExperts":
        """The experts of all ranks of a group, in rank order. They are gathered while the op runs."""
        if self.deferred:
            valid = "1: a pipeline defers the gradients of this rank's own experts"
            require(False, "adaptive_r", 0, valid)
        return self._replace(group=group, codes=None)

    def each(self, x_ND: Tensor, pairs: Sorted, ids_RK: Tensor) -> Tensor:
        """The experts' results for sorted rows, without weights."""
        slots_N = pairs.slots_N.clamp(min=0).long()
        ids_N = torch.where(pairs.slots_N < 0, -1, ids_RK.flatten()[slots_N])
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        ones_N1 = torch.ones_like(ids_N, dtype=wide)[:, None]
        routed, how = (ones_N1, ids_N[:, None]), (self.gate_up_bias, self.activation)
        if self.adapters is None:
            y_ND = moe_mlp(x_ND, self.gate_up, self.down, *routed, *how, codes=self.codes)
        else:
            how = dict(scales=self.scales, codes=self.codes)
            y_ND = moe_mlp_adapted(x_ND, self.matrices, self.adapters, *routed, **how)
        return y_ND if self.down_bias is None else y_ND + gather_rows(self.down_bias, ids_N)

    def __call__(self, rows: Rows) -> Tensor:
        if self.weigh != "activation":
            run = lambda x_ND, pairs: self.each(x_ND, pairs, rows.ids_RK)  # noqa: E731
            return over_sorted_rows(rows, self.held, run, self.weigh)
        down_bias, adapters, how = self.down_bias, self.adapters, (self.gate_up_bias, self.activation)
        routed = rows.x_RD, self.gate_up, self.down, rows.weights_RK, rows.ids_RK
        if self.group is None:
            if adapters is not None:
                own = rows.weights_RK, rows.ids_RK, rows.pairs, self.scales, self.codes
                y_RD = moe_mlp_adapted(rows.x_RD, self.matrices, adapters, *own)
            else:
                y_RD = self.weighed(rows)
        else:
            if adapters is not None:
                whole = whole_adapters(adapters, self.group)
                own = rows.weights_RK, rows.ids_RK
                how = self.group, self.scales
                y_RD = moe_mlp_gathered_adapted(rows.x_RD, self.matrices, whole, *own, *how)
            else:
                y_RD = moe_mlp_gathered(*routed, *how, self.group)
            if down_bias is not None:  # in fp32, so that its gradients are summed in fp32
                whole = token_exchange.gather(down_bias[None].float(), self.group)[0]
                down_bias = whole.to(down_bias.dtype)
        if down_bias is None:
            return y_RD
        # each row's weight for each expert; column 0 collects the weights with id -1, and is cut off
        weights_RE = rows.weights_RK.new_zeros(y_RD.shape[0], down_bias.shape[0] + 1)
        weights_RE = weights_RE.scatter_add(1, rows.ids_RK.long() + 1, rows.weights_RK)[:, 1:]
        return y_RD + weights_RE.to(y_RD.dtype) @ down_bias

    def weighed(self, rows: Rows) -> Tensor:
        """moe_mlp of these rows, in the kind that computes the matrices' gradients where they are wanted."""
        op, matrices = moe_mlp_deferred if self.deferred else moe_mlp, (self.gate_up, self.down)
        if self.sums_for(rows.x_RD):
            op, matrices = moe_mlp_summed, (self.gate_up.detach(), self.down.detach())
        routed = rows.weights_RK, rows.ids_RK, self.gate_up_bias, self.activation
        return op(rows.x_RD, *matrices, *routed, rows.pairs, self.codes)


def sliced(adapters: Adapters, own: Slice, halves: int) -> Adapters:
    """A rank's slice of the width of each expert: gate_up's a and down's b act on it whole."""
    up_a, up_b, down_a, down_b = adapters
    up_b = None if up_b is None else own.of_rows(up_b, halves)
    return Adapters(up_a, up_b, None if down_a is None else own.of_columns(down_a), down_b)


class Experts(nn.Module):
    """Holds the weights of all experts: gate_up [E, 2F, D] and down [E, D, F].

    With cfg.bias there are also gate_up_bias [E, 2F] and down_bias [E, D]; without it, both are None. With an
    activation that has no gate, gate_up is the up matrix alone, [E, F, D], and its bias is [E, F]. `adapt`
    adds a low-rank adapter to a matrix: gate_up_a [E, r, D] and gate_up_b [E, 2F, r], down_a [E, r, F] and
    down_b [E, D, r]. Once parallelized, all of them are DTensors, sharded on ep, then on dp.

    Calling the module opens a scope: `experts(fn, *args)` runs fn(*args, local) with this rank's experts
    gathered. FSDP2 attaches its all-gather and reduce-scatter to that call. The call is outside the compiled
    graph, which is fn: inside a graph FSDP2's hooks fail, on torch 2.11 and on 2.13.
    """

    fp8 = False  # model/parallelize.py: products are in fp8, of codes made in each forward or once a step
    codes_alone = False  # model/parallelize.py: between forwards frozen matrices in fp8 have no values

    def __init__(self, dim: int, cfg: MoEConfig):
        super().__init__()
        rows = cfg.halves * cfg.ffn_dim
        self.gate_up = nn.Parameter(torch.empty(cfg.experts, rows, dim))
        self.down = nn.Parameter(torch.empty(cfg.experts, dim, cfg.ffn_dim))
        self.gate_up_bias = nn.Parameter(torch.empty(cfg.experts, rows)) if cfg.bias else None
        self.down_bias = nn.Parameter(torch.empty(cfg.experts, dim)) if cfg.bias else None
        self.activation = cfg.activation
        self.weigh = cfg.weigh
        self.deferred = False  # model/stages.py: a pipeline computes the matrices' gradients later
        self.summed = False  # model/parallelize.py: working copies own the sums of the matrices' gradients
        self.scales: dict[str, float] = {}  # scale of each matrix that has an adapter
        self.adapters_on = True

    def adapt(self, matrix: str, rank: int, scale: float) -> None:
        """Adds an adapter to a matrix, "gate_up" or "down": W + scale * b a for each expert.

        Its values are drawn by `init_weights`. The matrix itself must be frozen.
        """
        E, rows, columns = getattr(self, matrix).shape
        device = getattr(self, matrix).device
        setattr(self, f"{matrix}_a", nn.Parameter(torch.empty(E, rank, columns, device=device)))
        setattr(self, f"{matrix}_b", nn.Parameter(torch.empty(E, rows, rank, device=device)))
        self.scales[matrix] = scale

    def local_adapters(self) -> tuple[Adapters | None, tuple[float, float]]:
        """This rank's adapters (None without adapters, or if they are off), and their scales.

        No factor is read here: it may be a parameter without memory (model/compile_ahead.py).
        """
        scales = self.scales.get("gate_up", 1.0), self.scales.get("down", 1.0)
        if not self.scales or not self.adapters_on:
            return None, scales
        factors = [f"{matrix}_{part}" for matrix in ("gate_up", "down") for part in "ab"]
        held = (local_part(getattr(self, name)) if name[:-2] in self.scales else None for name in factors)
        return Adapters(*held), scales

    @property
    def symm_lacks(self) -> str:
        """The feature of these experts that the symm dispatcher does not support; "" if it supports all."""
        if self.weigh != "activation":
            return f"--model.moe.weigh={self.weigh}"
        if self.scales:
            return "adapters on experts"
        return "experts whose down projection has a bias" if self.down_bias is not None else ""

    def forward(self, fn: Callable, *args: Any) -> Any:
        gate_up_bias, down_bias = (
            None if bias is None else local_part(bias) for bias in (self.gate_up_bias, self.down_bias)
        )
        matrices = local_part(self.gate_up), local_part(self.down)
        # Detached here: if an input of a compiled graph requires a gradient and gets none, its hooks are
        # called with None. If x had no gradient, the op would have no backward, and could not store the
        # inputs of the deferred gradients.
        deferred = self.deferred and torch.is_grad_enabled() and args[0].requires_grad
        deferred = deferred and any(matrix.requires_grad for matrix in matrices)
        if deferred:
            matrices = matrices[0].detach(), matrices[1].detach()
        adapters, scales = self.local_adapters()
        how: dict[str, Any] = dict(weigh=self.weigh, adapters=adapters, scales=scales, summed=self.summed)
        if self.fp8:
            halves = activation(self.activation).halves
            how["codes"] = codes_of(self.gate_up, matrices[0], halves), codes_of(self.down, matrices[1], 1)
        local = LocalExperts(*matrices, gate_up_bias, down_bias, self.activation, deferred, **how)
        return fn(*args, local)
