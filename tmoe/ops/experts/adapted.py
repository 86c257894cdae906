"""moe_mlp_adapted: a layer of frozen experts with low-rank adapters inside, as one differentiable op.

    H = x W1^T + s (x A1^T) B1^T            y = act(H) W2^T + s (act(H) A2^T) B2^T

The matrices are never merged: W + s B A, rounded to bf16, would lose the steps of a small B.

next: ops/experts/adapted_cpu.py
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.ops.argument_checks import check_device, check_tensors, require
from tmoe.ops.experts import adapted_cpu, adapted_fp8_cpu, adapted_fp8_gpu, adapted_gpu, cpu
from tmoe.ops.experts.adapted_cpu import Adapters, Kept
from tmoe.ops.experts.cpu import ExpertWeights
from tmoe.ops.experts.op import NO_CODES, _rows, check_arguments, packed_codes, room_for_h
from tmoe.ops.experts.pair_order import Metadata
from tmoe.ops.launch.eager import unwatched
from tmoe.ops.launch.replay import remembered
from tmoe.ops.launch.shapes import LayerShapes
from tmoe.ops.register import Backward, register_differentiable

NAMES = Adapters._fields


def moe_mlp_adapted(
    x_TD: Tensor,
    experts: ExpertWeights,
    adapters: Adapters,
    weights_TK: Tensor,
    ids_TK: Tensor,
    pairs: int | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    codes: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`moe_mlp` with gate_up + s gate_up_b gate_up_a and down + s down_b down_a in place of the matrices.

    Args:
        experts: the matrices, which must not need gradients, the bias or None, and the activation, all as for
            `moe_mlp`.
        adapters: dtype of x. A matrix without an adapter has None twice.
        scales: s of gate_up's adapter and of down's.
        x_TD, weights_TK, ids_TK, pairs: as for `moe_mlp`.
        codes: None, or the codes of gate_up and down, as for `moe_mlp`: the products with these matrices are
            then in fp8, and the values of the matrices are not read. Products with the adapters' factors are
            in the dtype of x, and are added before any cast.

    Returns y_TD [T, D]. If both b are zero, y and dx have moe_mlp's values. Differentiable in x, weights,
    the bias and the adapters. Between forward and backward it keeps the tensors that moe_mlp keeps, and for
    each adapter a tensor [min(pairs, T*K), r], with r rounded up to 8 on a GPU. Raises ValueError for
    shapes, dtypes or devices that do not fit together.

    Formulas: Hu et al. 2021 (arXiv 2106.09685), an adapter for each expert.
    """
    gate_up, down, bias, activation = experts
    tensors = (x_TD, gate_up, down, weights_TK, ids_TK, bias)
    optional = {"gate_up_bias": bias} | adapters._asdict()
    given = {name: t for name, t in optional.items() if t is not None}
    check_tensors(x=x_TD, gate_up=gate_up, down=down, weights=weights_TK, ids=ids_TK, **given)
    for name, t in (("gate_up", gate_up), ("down", down)):
        if t.requires_grad and torch.is_grad_enabled():
            require(False, name, "a tensor that needs a gradient", "a frozen one, under its adapter")
    check_adapters(x_TD, gate_up, down, adapters)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*tensors, *adapters))
    pairs = ids_TK.numel() if pairs is None else min((pairs + 127) // 128 * 128, ids_TK.numel())
    call = (*tensors, *adapters, *(codes or NO_CODES), activation, pairs, keep, *map(float, scales))
    if x_TD.is_cuda and unwatched(*tensors, *adapters):
        return _Straight.apply(*call)
    return torch.ops.tmoe.moe_mlp_adapted(*call)[0]


def check_adapters(x_TD: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, adapters: Adapters) -> None:
    """Raise ValueError unless each adapter fits its matrix."""
    for name, matrix in (("gate_up", gate_up_E2FD), ("down", down_EDF)):
        a, b = getattr(adapters, f"{name}_a"), getattr(adapters, f"{name}_b")
        if a is None or b is None:
            if a is not b:
                require(False, f"{name}_a, {name}_b", "one of them alone", "both or none")
            continue
        E, rows, columns = matrix.shape
        r = a.shape[1] if a.dim() == 3 else 0
        for part, t, shape in (("a", a, (E, r, columns)), ("b", b, (E, rows, r))):
            if not r or tuple(t.shape) != shape:
                letters = "[E, r, columns]" if part == "a" else "[E, rows, r]"
                valid = f"{shape} = {letters} of {name}'s {tuple(matrix.shape)}, r from 1 on"
                require(False, f"{name}_{part}", f"shape {tuple(t.shape)}", valid)
            if t.dtype != x_TD.dtype:
                require(False, f"{name}_{part}", t.dtype, f"x's {x_TD.dtype}")


class AdaptedCall(NamedTuple):
    """The arguments of the op moe_mlp_adapted."""

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
    up_codes: Tensor | None
    down_codes: Tensor | None
    activation: str
    pairs: int
    keep: bool  # the tensors of `Kept` and the metadata, for a backward
    up_scale: float
    down_scale: float

    @property
    def adapters(self) -> Adapters:
        return Adapters(self.gate_up_a, self.gate_up_b, self.down_a, self.down_b)

    @property
    def experts(self) -> ExpertWeights:
        return ExpertWeights(self.gate_up, self.down, self.bias, self.activation)


class AdaptedBackward(NamedTuple):
    """The arguments of the op moe_mlp_adapted_backward."""

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
    up_codes: Tensor | None
    down_codes: Tensor | None
    activation: str
    pairs: int
    up_scale: float
    down_scale: float

    @property
    def adapters(self) -> Adapters:
        return Adapters(self.gate_up_a, self.gate_up_b, self.down_a, self.down_b)

    @property
    def experts(self) -> ExpertWeights:
        return ExpertWeights(self.gate_up, self.down, self.bias, self.activation)


def _forward_cpu(call: AdaptedCall) -> tuple[Tensor, ...]:
    """y, the tensors of `Kept` (empty unless keep) and the packed metadata."""
    x, ids = call.x, call.ids
    check_arguments(call)
    N, E = ids.numel(), call.gate_up.shape[0]
    rows = adapted_cpu.AdaptedRows(*cpu.route(ids, E))
    kept = Kept(room_for_h(call, N), *(x.new_empty(N, width) for width in call.adapters.ranks))
    how = call.adapters, call.weights, rows, kept, (call.up_scale, call.down_scale)
    codes = packed_codes(call)
    if codes is None:
        y = adapted_cpu.forward(x, call.experts, *how)
    else:
        with torch.autocast("cpu", enabled=False):
            y = adapted_fp8_cpu.forward(x, adapted_fp8_cpu.Base(call.experts, codes), *how)
    meta = Metadata(ids.new_zeros(Metadata.size(N, E), dtype=torch.int32), N, E)
    meta.ends[:] = torch.tensor(rows.ends, dtype=torch.int32)
    meta.order[: rows.order.numel()] = rows.order
    if not call.keep:
        kept = Kept(room_for_h(call, N, False), *(t.new_empty(0, t.shape[1]) for t in kept[1:]))
    return y, *kept, meta.packed


def _forward_gpu(call: AdaptedCall) -> tuple[Tensor, ...]:
    check_arguments(call)
    if packed_codes(call) is None:
        return remembered(adapted_gpu.forward, call[:10], *call[12:])
    return remembered(adapted_fp8_gpu.forward, call[:12], *call[12:])


def _forward_fake(call: AdaptedCall) -> tuple[Tensor, ...]:
    x, ids = call.x, call.ids
    others = {"bias": call.bias} | call.adapters._asdict()
    given = {name: t for name, t in others.items() if t is not None}
    check_device(x, gate_up=call.gate_up, down=call.down, weights=call.weights, ids=ids, **given)
    rows = _rows(x, ids, call.pairs)
    ranks = (adapted_gpu.wide(r) if x.is_cuda else r for r in call.adapters.ranks)
    h = room_for_h(call, rows, call.keep)
    kept = (x.new_empty(rows if call.keep else 0, rank) for rank in ranks)
    return x.new_empty(x.shape), h, *kept, Metadata.fake(ids.numel(), call.gate_up.shape[0], rows, x)


def _backward_cpu(call: AdaptedBackward) -> tuple[Tensor | None, ...]:
    """The gradients of x, weights, the bias and the adapters (None for an argument that is None)."""
    meta = Metadata(call.packed, call.weights.numel(), call.gate_up.shape[0])
    ends = meta.ends.tolist()
    rows = adapted_cpu.AdaptedRows(meta.order[: ends[-1]].to(torch.int64), ends)
    kept, scales = Kept(call.h, call.u_up, call.u_down), (call.up_scale, call.down_scale)
    how = call.adapters, call.weights, rows, kept, scales
    codes = packed_codes(call)
    with torch.autocast("cpu", enabled=False):  # which may be on where backward is called
        if codes is None:
            return adapted_cpu.backward(call.dy, call.x, call.experts, *how)
        base = adapted_fp8_cpu.Base(call.experts, codes)
        return adapted_fp8_cpu.backward(call.dy, call.x, base, *how)


def _backward_gpu(call: AdaptedBackward) -> tuple[Tensor | None, ...]:
    """The results of `_backward_cpu`."""
    if packed_codes(call) is None:
        return remembered(adapted_gpu.backward, call[:14], *call[16:])
    return remembered(adapted_fp8_gpu.backward, call[:16], *call[16:])


GRADIENTS = f"x weights bias {' '.join(NAMES)}"
_FORWARD: dict[str, Any] = dict(
    schema=AdaptedCall,
    returns="y",
    keeps="h u_up u_down packed",
    cpu=_forward_cpu,
    cuda=_forward_gpu,
    fake=_forward_fake,
)


def _of_layer(layer: LayerShapes) -> Iterable[tuple]:
    how = layer.activation, layer.biased, layer.trained
    for rows, slots, pairs in layer.passes:
        sizes = rows, layer.width, layer.ffn_dim, layer.experts, slots
        for ranks in layer.adapters:
            yield adapted_gpu.trace, sizes, ranks, layer.dtype, pairs, *how
            if layer.fp8:
                yield adapted_fp8_gpu.trace, sizes, ranks, layer.dtype, pairs, *how


_Straight = register_differentiable(
    "moe_mlp_adapted",
    **_FORWARD,
    backward=Backward(AdaptedBackward, gradients=GRADIENTS, cpu=_backward_cpu, cuda=_backward_gpu),
    traces={LayerShapes: _of_layer},
)
