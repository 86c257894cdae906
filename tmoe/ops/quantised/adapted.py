"""Frozen matrices in NF4 under low-rank adapters (QLoRA), as differentiable ops.

`nf4_linear` is one matrix; its adapter is a separate product. `moe_mlp_nf4` is `moe_mlp_adapted` with the
experts' matrices in NF4. Forward and backward each compute the values of the matrices in the type of x, for
this call, so that a layer is the most that is unquantised at a time, and backward keeps the codes alone.
Source: Dettmers et al. 2023 (arXiv 2305.14314), section 3.

Without a backward and for few rows on a GPU, as in decoding, kernels read the codes; the adapters' products
are added between them.

next: ops/experts/adapted.py
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe.base.activations import activation as named
from tmoe.base.quantised import dequantise
from tmoe.ops.argument_checks import check_device, require
from tmoe.ops.experts import adapted, adapted_gpu
from tmoe.ops.experts.adapted_cpu import Adapters
from tmoe.ops.experts.op import NO_CODES, _rows
from tmoe.ops.experts.pair_order import Metadata, route
from tmoe.ops.launch.kernel_launch import empty
from tmoe.ops.launch.replay import remembered
from tmoe.ops.quantised import gpu
from tmoe.ops.quantised.gpu import Matrix
from tmoe.ops.quantised.op import check
from tmoe.ops.register import Backward, register_differentiable


def nf4_linear(x: Tensor, matrix: Matrix) -> Tensor:
    """x [..., L] times a frozen matrix [W, L] in NF4; differentiable in x.

    Raises ValueError for a matrix that is not NF4 or does not fit.
    """
    W = matrix.shape[0]
    require(matrix.kind == "nf4", "kind", matrix.kind, "nf4")
    check("weight", matrix, (W, x.shape[-1]))
    y = torch.ops.tmoe.nf4_linear(x.reshape(-1, x.shape[-1]), *matrix.parts, W)
    return y.view(*x.shape[:-1], W)


class Nf4Weights(NamedTuple):
    """`ExpertWeights` with matrices in NF4."""

    gate_up: Matrix  # [E, 2F, D]
    down: Matrix  # [E, D, F]
    bias: Tensor | None  # of gate_up [E, 2F]
    activation: str


def moe_mlp_nf4(
    x_TD: Tensor,
    experts: Nf4Weights,
    adapters: Adapters | None,
    weights_TK: Tensor,
    ids_TK: Tensor,
    pairs: int | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """`moe_mlp_adapted` with frozen matrices in NF4.

    adapters: None: none, or they are off. The other arguments, the result, what is differentiable and the
    errors are those of `moe_mlp_adapted`.
    """
    gate_up, down, bias_E2F, activation = experts
    E, H, D = gate_up.shape
    for name, matrix, shape in (
        ("gate_up", gate_up, (E, H, x_TD.shape[1])),
        ("down", down, (E, D, down.shape[2])),
    ):
        require(matrix.kind == "nf4", f"{name}: kind", matrix.kind, "nf4")
        check(name, matrix, shape)
    factors = adapters or Adapters(None, None, None, None)
    tensors = x_TD, *gate_up.parts, *down.parts, weights_TK, ids_TK, bias_E2F, *factors
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    most = ids_TK.numel() if pairs is None else min((pairs + 127) // 128 * 128, ids_TK.numel())
    sizes = E, H, down.shape[2]
    return torch.ops.tmoe.moe_mlp_nf4(*tensors, *sizes, activation, most, keep, *map(float, scales))[0]


# ---- one matrix ----


def _values(x: Tensor, parts: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    """The values of a matrix in the type of x."""
    if x.is_cuda:
        return gpu.values(Matrix("nf4", shape, parts), x.dtype)
    return dequantise(parts, "nf4", shape, x.dtype)


class LinearCall(NamedTuple):
    """The arguments of the op nf4_linear."""

    x: Tensor
    codes: Tensor
    maxima: Tensor
    most: Tensor
    offset: Tensor
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.x.shape[1]


class LinearBackward(NamedTuple):
    """The arguments of the op nf4_linear_backward."""

    dy: Tensor
    x: Tensor
    codes: Tensor
    maxima: Tensor
    most: Tensor
    offset: Tensor
    rows: int


def _linear(call: LinearCall) -> tuple[Tensor]:
    x, *parts, _ = call
    matrix = Matrix("nf4", call.shape, tuple(parts))
    if x.is_cuda and 0 < len(x) <= gpu.FEW and gpu.reads(matrix):
        return (gpu.linear(x, matrix, None),)
    return (F.linear(x, _values(x, matrix.parts, call.shape)),)


def _linear_backward(call: LinearBackward) -> tuple[Tensor]:
    dy, x, *parts, rows = call
    return (dy @ _values(x, tuple(parts), (rows, x.shape[1])),)


def _linear_fake(call: LinearCall) -> tuple[Tensor]:
    check_device(call.x, codes=call.codes)
    return (call.x.new_empty(len(call.x), call.rows),)


register_differentiable(
    "nf4_linear",
    LinearCall,
    returns="y",
    cpu=lambda call: _linear(call)[0],
    cuda=lambda call: _linear(call)[0],
    fake=lambda call: _linear_fake(call)[0],
    backward=Backward(
        LinearBackward,
        gradients="x",
        cpu=lambda call: _linear_backward(call)[0],
        cuda=lambda call: _linear_backward(call)[0],
    ),
)


# ---- experts ----


class Nf4Call(NamedTuple):
    """The arguments of the op moe_mlp_nf4."""

    x: Tensor
    up_codes: Tensor
    up_maxima: Tensor
    up_most: Tensor
    up_offset: Tensor
    down_codes: Tensor
    down_maxima: Tensor
    down_most: Tensor
    down_offset: Tensor
    weights: Tensor
    ids: Tensor
    bias: Tensor | None
    gate_up_a: Tensor | None
    gate_up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None
    experts: int
    rows: int
    width: int
    activation: str
    pairs: int
    keep: bool  # as in AdaptedCall
    up_scale: float
    down_scale: float


class Nf4Backward(NamedTuple):
    """The arguments of the op moe_mlp_nf4_backward."""

    dy: Tensor
    x: Tensor
    up_codes: Tensor
    up_maxima: Tensor
    up_most: Tensor
    up_offset: Tensor
    down_codes: Tensor
    down_maxima: Tensor
    down_most: Tensor
    down_offset: Tensor
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
    experts: int
    rows: int
    width: int
    activation: str
    pairs: int
    up_scale: float
    down_scale: float


def _matrices(call: Nf4Call | Nf4Backward) -> tuple[Matrix, Matrix]:
    """gate_up and down."""
    D = call.x.shape[1]
    up = call.up_codes, call.up_maxima, call.up_most, call.up_offset
    down = call.down_codes, call.down_maxima, call.down_most, call.down_offset
    shapes = (call.experts, call.rows, D), (call.experts, D, call.width)
    return Matrix("nf4", shapes[0], up), Matrix("nf4", shapes[1], down)


def _ranks(call: Nf4Call) -> tuple[int, ...]:
    """Columns of u_up and u_down."""
    ranks = Adapters(call.gate_up_a, call.gate_up_b, call.down_a, call.down_b).ranks
    return tuple(map(adapted_gpu.wide, ranks)) if call.x.is_cuda else ranks


def _plain(call: Nf4Call) -> adapted.AdaptedCall:
    """The call with the values of the matrices."""
    up, down = (_values(call.x, matrix.parts, matrix.shape) for matrix in _matrices(call))
    factors = Adapters(call.gate_up_a, call.gate_up_b, call.down_a, call.down_b)
    adapted.check_adapters(call.x, up, down, factors)
    how = call.activation, call.pairs, call.keep, call.up_scale, call.down_scale
    return adapted.AdaptedCall(call.x, up, down, call.weights, call.ids, call.bias, *factors, *NO_CODES, *how)


def _plain_backward(call: Nf4Backward) -> adapted.AdaptedBackward:
    up, down = (_values(call.x, matrix.parts, matrix.shape) for matrix in _matrices(call))
    kept = call.weights, call.h, call.u_up, call.u_down, call.packed, call.bias
    factors = call.gate_up_a, call.gate_up_b, call.down_a, call.down_b
    how = call.activation, call.pairs, call.up_scale, call.down_scale
    return adapted.AdaptedBackward(call.dy, call.x, up, down, *kept, *factors, *NO_CODES, *how)


def _forward_cpu(call: Nf4Call) -> tuple[Tensor, ...]:
    return adapted._forward_cpu(_plain(call))


def _forward_gpu(call: Nf4Call) -> tuple[Tensor, ...]:
    N = call.ids.numel()
    few = 0 < N <= gpu.FEW_AN_EXPERT * call.experts and call.pairs >= N
    if few and not call.keep and all(map(gpu.reads, _matrices(call))):
        return few_rows(call)
    plain = _plain(call)
    return remembered(adapted_gpu.forward, plain[:10], *plain[10:])


def _forward_fake(call: Nf4Call) -> tuple[Tensor, ...]:
    x, ids = call.x, call.ids
    check_device(x, codes=call.up_codes, weights=call.weights, ids=ids)
    rows = _rows(x, ids, call.pairs)
    widths = call.rows, *_ranks(call)
    kept = (x.new_empty(rows if call.keep else 0, width) for width in widths)
    return x.new_empty(x.shape), *kept, Metadata.fake(ids.numel(), call.experts, rows, x)


def _backward_cpu(call: Nf4Backward) -> tuple[Tensor | None, ...]:
    return adapted._backward_cpu(_plain_backward(call))


def _backward_gpu(call: Nf4Backward) -> tuple[Tensor | None, ...]:
    plain = _plain_backward(call)
    return remembered(adapted_gpu.backward, plain[:14], *plain[14:])


def few_rows(call: Nf4Call) -> tuple[Tensor, ...]:
    """The results of `_forward_gpu` without a backward, by kernels that read the codes.

    H is stored before the activation if gate_up has an adapter, whose product is added to it.
    """
    x, weights, ids = (t.contiguous() for t in (call.x, call.weights, call.ids))
    up_a, up_b, down_a, down_b = (
        t if t is None else t.contiguous() for t in (call.gate_up_a, call.gate_up_b, call.down_a, call.down_b)
    )
    (T, D), K, F = x.shape, ids.shape[1], call.width
    meta = route(ids, call.experts)
    shape = call.experts, D, F
    layer = adapted_gpu.AdaptedLaunches(x, shape, K, meta, weights, (), call.activation)
    up, down = _matrices(call)
    mean = T * K / call.experts * 2
    tiles = [gpu.tile_of("nf4", mean, L, layer.arch, x.dtype) for L in (D, F)]
    if up_a is None or up_b is None:
        act = gpu.few_rows(x, up, call.bias, tiles[0], call.activation, layer, gather=True)
    else:
        h = gpu.few_rows(x, up, call.bias, tiles[0], None, layer, gather=True)
        h += product(layer, *layer.narrow(x, up_a, call.up_scale, True, up_b))
        act = named(call.activation).of(h)
    rows = gpu.few_rows(act, down, None, tiles[1], None, layer)
    if down_a is not None and down_b is not None:
        rows += product(layer, *layer.narrow(act, down_a, call.down_scale, False, down_b))
    y, _ = layer.combine(rows, weights)
    none = (empty((0, width), x.dtype, x.device) for width in (call.rows, *_ranks(call)))
    return y, *none, meta.packed


def product(layer: adapted_gpu.AdaptedLaunches, u: Tensor, b: Tensor | None) -> Tensor:
    """u [N, r] times each expert's b [E, W, r], transposed, as `narrow` returns both; read by pointers."""
    assert b is not None
    layer = copy.copy(layer)
    layer.tma = False
    return layer.rows("down", u, b, True)


_FORWARD: dict[str, Any] = dict(
    schema=Nf4Call,
    returns="y",
    keeps="h u_up u_down packed",
    cpu=_forward_cpu,
    cuda=_forward_gpu,
    fake=_forward_fake,
)
register_differentiable(
    "moe_mlp_nf4",
    **_FORWARD,
    backward=Backward(Nf4Backward, gradients=adapted.GRADIENTS, cpu=_backward_cpu, cuda=_backward_gpu),
)
