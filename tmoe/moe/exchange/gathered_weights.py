"""The experts' op over the weights of a whole expert group, which are gathered for the op and not kept.

    forward    all-gather of the group's experts, then moe_mlp over all E of them
    backward   the same all-gather, moe_mlp's gradients, and an all-to-all that sends the parts of an
               expert's gradient to its owner, which adds them up in fp32 and in rank order

All E experts of a layer are in memory while its op runs, and in backward their gradients too. Kept for
backward are the tensors that moe_mlp keeps, and this rank's own experts.

next: moe/exchange/adaptive.py
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.ops.experts.adapted import Adapters
from tmoe.ops.experts.cpu import ExpertWeights
from tmoe.ops.experts.op import NO_CODES
from tmoe.ops.register import Backward, register_differentiable
from tmoe.ops.sum_parts import sum_parts
from tmoe.parallel import token_exchange
from tmoe.parallel.collectives import group_of

# the name in torch 2.13, and the name in 2.11
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def moe_mlp_gathered(
    x_TD: Tensor,
    gate_up_L2FD: Tensor,
    down_LDF: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    gate_up_bias_L2F: Tensor | None,
    activation: str,
    group: str,
) -> Tensor:
    """`moe_mlp` over the experts of all ranks of a group, in rank order; ids number all these experts.

    Gradients of this rank's experts are the sums over the group. If neither gate_up nor down needs a
    gradient, backward neither computes nor sends theirs. A collective of the group, forward and backward. The
    ranks may have unequal numbers of tokens, or none. All ranks must train the same matrices.
    """
    tensors = (x_TD, gate_up_L2FD, down_LDF, weights_TK, ids_TK, gate_up_bias_L2F)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    trained = gate_up_L2FD.requires_grad or down_LDF.requires_grad or not torch.is_grad_enabled()
    op = torch.ops.tmoe.moe_mlp_gathered if trained else torch.ops.tmoe.moe_mlp_gathered_frozen
    return op(*tensors, activation, keep, group)[0]


class _PendingGather(NamedTuple):
    """A running collective with its input and output. Holding this object keeps both tensors alive."""

    work: Any
    sent: Tensor
    out: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.out


def _gathered(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The [L, ...] of all ranks as one [E, ...]; all tensors are sent at once."""
    coming = []
    for t in tensors:
        t = t.contiguous()
        out = t.new_empty(group.size() * t.shape[0], *t.shape[1:])
        coming.append(_PendingGather(_all_gather(out, t, group=group, async_op=True), t, out))
    return [travel.wait() for travel in coming]


def _owned(grads: Iterable[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """This rank's part [L, ...] of the sum over ranks of each [E, ...], added in fp32 (fp64 for fp64)."""
    coming = []
    for grad in grads:
        grad = grad.contiguous()
        parts = torch.empty_like(grad)
        work = dist.all_to_all_single(parts, grad, group=group, async_op=True)
        coming.append(_PendingGather(work, grad, parts))
    sums = []
    for travel in coming:
        parts = travel.wait().unflatten(0, (group.size(), -1))
        wide = torch.promote_types(parts.dtype, torch.float32)
        total = sum_parts(parts) if parts.is_cuda else parts.sum(0, dtype=wide)
        sums.append(total.to(parts.dtype))
    return sums


def _whole(experts: tuple[Tensor | None, ...], group: str) -> list[Tensor | None]:
    """gate_up, down and the bias (or None) of all ranks."""
    whole = _gathered([t for t in experts if t is not None], group_of(group))
    return [*whole, *[None] * (len(experts) - len(whole))]


class GatheredCall(NamedTuple):
    """The arguments of the op moe_mlp_gathered."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    weights: Tensor
    ids: Tensor
    bias: Tensor | None
    activation: str
    keep: bool
    group: str


class GatheredBackward(NamedTuple):
    """The arguments of the op moe_mlp_gathered_backward."""

    dy: Tensor
    x: Tensor
    gate_up: Tensor
    down: Tensor
    weights: Tensor
    h: Tensor
    packed: Tensor
    bias: Tensor | None
    activation: str
    group: str


def _mlp(call: GatheredCall, experts: list[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """Calls the op moe_mlp with the experts [gate_up, down, bias]."""
    gate_up, down, bias = experts
    x, weights, ids = call.x, call.weights, call.ids
    return torch.ops.tmoe.moe_mlp(
        x, gate_up, down, weights, ids, bias, None, None, call.activation, ids.numel(), call.keep
    )


def _forward(call: GatheredCall) -> tuple[Tensor, Tensor, Tensor]:
    return _mlp(call, _whole((call.gate_up, call.down, call.bias), call.group))


def _forward_fake(call: GatheredCall) -> tuple[Tensor, Tensor, Tensor]:
    n = group_of(call.group).size()
    shards = call.gate_up, call.down, call.bias
    return _mlp(call, [t if t is None else t.new_empty(n * t.shape[0], *t.shape[1:]) for t in shards])


def _backward(call: GatheredBackward) -> tuple[Tensor | None, ...]:
    dy, x, gate_up, down, weights, h, packed, bias, activation, group = call
    gate_up, down, bias = _whole((gate_up, down, bias), group)
    dx, *of_matrices, d_weights, d_bias = torch.ops.tmoe.moe_mlp_backward(
        dy, x, gate_up, down, weights, h, packed, bias, None, None, activation, weights.numel()
    )
    gradients = _owned(of_matrices if bias is None else (*of_matrices, d_bias), group_of(group))
    return dx, gradients[0], gradients[1], d_weights, None if bias is None else gradients[2]


def _backward_frozen(call: GatheredBackward) -> tuple[Tensor | None, ...]:
    """The gradients of x, weights and the bias (None without one)."""
    dy, x, gate_up, down, weights, h, packed, bias, activation, group = call
    gate_up, down, bias = _whole((gate_up, down, bias), group)
    dx, d_weights, d_bias = torch.ops.tmoe.moe_mlp_frozen_backward(
        dy, x, gate_up, down, weights, h, packed, bias, None, None, activation, weights.numel()
    )
    return dx, d_weights, None if bias is None else _owned([d_bias], group_of(group))[0]


_FORWARD: dict[str, Any] = dict(
    schema=GatheredCall, returns="y", keeps="h packed", cpu=_forward, cuda=_forward, fake=_forward_fake
)
register_differentiable(
    "moe_mlp_gathered",
    **_FORWARD,
    backward=Backward(
        GatheredBackward,
        gradients="x gate_up down weights bias",
        cpu=_backward,
        cuda=_backward,
    ),
)
# neither gate_up nor down needs a gradient
register_differentiable(
    "moe_mlp_gathered_frozen",
    **_FORWARD,
    backward=Backward(
        GatheredBackward, gradients="x weights bias", cpu=_backward_frozen, cuda=_backward_frozen
    ),
)


# ---- with adapters ----


def whole_adapters(adapters: Adapters, group: str) -> Adapters:
    """The adapters of all ranks' experts, in rank order; gradients are summed in fp32 over the ranks."""

    def whole(t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        wide = t.to(torch.promote_types(t.dtype, torch.float32))
        return token_exchange.gather(wide[None], group)[0].to(t.dtype)

    return Adapters(*map(whole, adapters))


def moe_mlp_gathered_adapted(
    x_TD: Tensor,
    experts: ExpertWeights,
    adapters: Adapters,
    weights_TK: Tensor,
    ids_TK: Tensor,
    group: str,
    scales: tuple[float, float],
) -> Tensor:
    """`moe_mlp_adapted` over the experts of all ranks of a group; adapters: `whole_adapters`'.

    The matrices are gathered in forward and again in backward, as `moe_mlp_gathered` does; the adapters,
    which are small, are kept.
    """
    gate_up, down, bias, activation = experts
    tensors = (x_TD, gate_up, down, weights_TK, ids_TK, bias, *adapters)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return torch.ops.tmoe.moe_mlp_gathered_adapted(*tensors, activation, keep, *scales, group)[0]


class GatheredAdaptedCall(NamedTuple):
    """The arguments of the op moe_mlp_gathered_adapted."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    weights: Tensor
    ids: Tensor
    bias: Tensor | None
    gate_up_a: Tensor | None
    gate_up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None
    activation: str
    keep: bool
    up_scale: float
    down_scale: float
    group: str


class GatheredAdaptedBackward(NamedTuple):
    """The arguments of the op moe_mlp_gathered_adapted_backward."""

    dy: Tensor
    x: Tensor
    gate_up: Tensor
    down: Tensor
    weights: Tensor
    h: Tensor
    u_up: Tensor
    u_down: Tensor
    packed: Tensor
    bias: Tensor | None
    gate_up_a: Tensor | None
    gate_up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None
    activation: str
    up_scale: float
    down_scale: float
    group: str


def _adapted(call: GatheredAdaptedCall, experts: list[Tensor | None]) -> tuple[Tensor, ...]:
    """The op moe_mlp_adapted with these gate_up, down and bias."""
    gate_up, down, bias = experts
    x, weights, ids = call.x, call.weights, call.ids
    how = call.activation, ids.numel(), call.keep, call.up_scale, call.down_scale
    return torch.ops.tmoe.moe_mlp_adapted(x, gate_up, down, weights, ids, bias, *call[6:10], *NO_CODES, *how)


def _adapted_forward(call: GatheredAdaptedCall) -> tuple[Tensor, ...]:
    return _adapted(call, _whole((call.gate_up, call.down, call.bias), call.group))


def _adapted_fake(call: GatheredAdaptedCall) -> tuple[Tensor, ...]:
    n = group_of(call.group).size()
    own = call.gate_up, call.down, call.bias
    return _adapted(call, [t if t is None else t.new_empty(n * t.shape[0], *t.shape[1:]) for t in own])


def _adapted_backward(call: GatheredAdaptedBackward) -> tuple[Tensor | None, ...]:
    """The gradients of x, weights, the bias and the adapters (None for what is not there)."""
    gate_up, down, bias = _whole((call.gate_up, call.down, call.bias), call.group)
    factors = call[10:14]
    kept = call.h, call.u_up, call.u_down, call.packed, bias, *factors, *NO_CODES
    how = call.activation, call.weights.numel(), call.up_scale, call.down_scale
    dx, d_weights, d_bias, *grads = torch.ops.tmoe.moe_mlp_adapted_backward(
        call.dy, call.x, gate_up, down, call.weights, *kept, *how
    )
    d_bias = None if bias is None else _owned([d_bias], group_of(call.group))[0]
    present = (t if given is not None else None for t, given in zip(grads, factors, strict=True))
    return dx, d_weights, d_bias, *present


register_differentiable(
    "moe_mlp_gathered_adapted",
    GatheredAdaptedCall,
    returns="y",
    keeps="h u_up u_down packed",
    cpu=_adapted_forward,
    cuda=_adapted_forward,
    fake=_adapted_fake,
    backward=Backward(
        GatheredAdaptedBackward,
        gradients="x weights bias gate_up_a gate_up_b down_a down_b",
        cpu=_adapted_backward,
        cuda=_adapted_backward,
    ),
)
