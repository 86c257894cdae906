"""Products with quantised weights as ops: of one matrix, and of a layer of experts.

A weight is a `Matrix`: the tensors that `quantise` of tmoe/base/quantised.py returns, with kind and shape.
The ops are for inference and have no derivative. Shapes of results depend on shapes of arguments alone, and
no op waits for the host, so they can be captured in a CUDA graph.

On a GPU a kernel reads the codes if rows are few. Else the weight's values are computed in the type of x,
for this call, and are multiplied as an unquantised weight. On a CPU values are computed an expert at a time.

next: quantised/gpu.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe.base.activations import activation as named
from tmoe.base.quantised import dequantise, stored
from tmoe.ops.argument_checks import check_device, require
from tmoe.ops.experts import cpu
from tmoe.ops.quantised import gpu
from tmoe.ops.quantised.gpu import KINDS, Matrix
from tmoe.ops.register import register


def quantised_values(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The values of a quantised weight, rounded to `dtype`."""
    check("weight", matrix, matrix.shape)
    return torch.ops.tmoe.quantised_values(matrix.parts, matrix.kind, matrix.shape, dtype)


def quantised_linear(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """F.linear with a quantised weight.

    Args:
        x: [..., L]; float32, bfloat16 or float16.
        matrix: [W, L].
        bias: [W] in the type of x, or None.

    Returns [..., W] in the type of x. Sums are in fp32; scales multiply the sums if rows are few, and else
    the weight's values, which are rounded to the type of x. Raises ValueError for shapes, types and devices
    that do not fit together.
    """
    W = matrix.shape[0]
    check("weight", matrix, (W, x.shape[-1]))
    ok = bias is None or (bias.shape == (W,) and bias.dtype == x.dtype)
    require(ok, "bias", None if bias is None else (bias.dtype, tuple(bias.shape)), f"{x.dtype} [W]")
    y = torch.ops.tmoe.quantised_linear(x.reshape(-1, x.shape[-1]), matrix.parts, bias, matrix.kind, W)
    return y.view(*x.shape[:-1], W)


def quantised_moe_mlp(
    x_TD: Tensor,
    gate_up: Matrix,
    down: Matrix,
    weights_TK: Tensor,
    ids_TK: Tensor,
    gate_up_bias_E2F: Tensor | None = None,
    activation: str = "swiglu",
    pairs: int | None = None,
) -> Tensor:
    """`moe_mlp` with quantised matrices: gate_up [E, 2F, D] and down [E, D, F], of one kind.

    The other arguments, the result and the errors are those of `tmoe.ops.moe_mlp`; it has no derivative.
    """
    T, D = x_TD.shape
    E, H, _ = gate_up.shape
    check("gate_up", gate_up, (E, H, D))
    check("down", down, (E, D, down.shape[2]))
    require(down.kind == gate_up.kind, "down", down.kind, gate_up.kind)
    require(ids_TK.shape == weights_TK.shape and len(ids_TK) == T, "ids", tuple(ids_TK.shape), f"[{T}, K]")
    most = ids_TK.numel() if pairs is None else min((pairs + 127) // 128 * 128, ids_TK.numel())
    matrices = gate_up.parts, down.parts, gate_up.kind, (E, H, down.shape[2])
    how = gate_up_bias_E2F, activation, most
    return torch.ops.tmoe.quantised_moe_mlp(x_TD, *matrices, weights_TK, ids_TK, *how)


def check(name: str, matrix: Matrix, shape: tuple[int, ...]) -> None:
    """ValueError unless the parts are those of a weight of this shape."""
    require(matrix.kind in KINDS, "kind", repr(matrix.kind), " or ".join(KINDS))
    require(tuple(matrix.shape) == tuple(shape), name, f"shape {tuple(matrix.shape)}", tuple(shape))
    want = stored(matrix.kind, tuple(shape))
    require(len(matrix.parts) == len(want), f"{name}.parts", len(matrix.parts), [part for part, *_ in want])
    for (part, size, dtype), t in zip(want, matrix.parts, strict=True):
        got = t.dtype, tuple(t.shape)
        require(got == (dtype, size) and t.is_contiguous(), f"{name}.{part}", got, (dtype, size))


class Expert:
    """The matrices of experts in a type, each computed when it is asked for by its number."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype):
        self.matrix, self.dtype = matrix, dtype

    def __getitem__(self, e: int) -> Tensor:
        kind, (_, *shape), parts = self.matrix
        if kind != "nf4":
            return dequantise(tuple(t[e] for t in parts), kind, tuple(shape), self.dtype)
        return gpu.expert_of_nf4(self.matrix, e, self.dtype)


def matrices_of(
    x: Tensor, parts: Sequence[Sequence[Tensor]], kind: str, sizes: Sequence[int]
) -> list[Matrix]:
    """gate_up and down of experts. sizes: E, rows of gate_up, F."""
    E, H, width = sizes
    D = x.shape[1]
    shapes = (E, H, D), (E, D, width)
    return [Matrix(kind, shape, tuple(part)) for shape, part in zip(shapes, parts, strict=True)]


def _linear_cpu(x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, kind: str, W: int) -> Tensor:
    return F.linear(x, dequantise(tuple(parts), kind, (W, x.shape[1]), x.dtype), bias)


def _linear_gpu(x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, kind: str, W: int) -> Tensor:
    if len(x) == 0:
        return x.new_empty(0, W)
    matrix = Matrix(kind, (W, x.shape[1]), tuple(parts))
    with torch.cuda.device(x.device):
        if len(x) <= gpu.FEW and gpu.reads(matrix):
            return gpu.linear(x, matrix, bias)
        return F.linear(x, gpu.values(matrix, x.dtype), bias)


def _linear_fake(x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, kind: str, W: int) -> Tensor:
    check_device(x, codes=parts[0], scales=parts[1])
    return x.new_empty(x.shape[0], W)


def _moe_cpu(
    x: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor], kind: str, sizes: Sequence[int], *rest: Any
) -> Tensor:
    weights, ids, bias, activation, _ = rest
    _check_width(sizes, activation)
    order, ends = cpu.route(ids, sizes[0])
    lazy: list[Any] = [Expert(matrix, x.dtype) for matrix in matrices_of(x, (gate_up, down), kind, sizes)]
    experts = cpu.ExpertWeights(lazy[0], lazy[1], bias, activation)
    return cpu.moe_mlp_forward(x, experts, weights, order, ends, x.new_empty(len(order), sizes[1]))


def _moe_gpu(
    x: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor], kind: str, sizes: Sequence[int], *rest: Any
) -> Tensor:
    weights, ids, *how = rest
    _check_width(sizes, how[1])
    up, dn = matrices_of(x, (gate_up, down), kind, sizes)
    with torch.cuda.device(x.device):
        return gpu.moe_mlp(x, up, dn, (weights, ids), *how)


def _check_width(sizes: Sequence[int], activation: str) -> None:
    """ValueError unless gate_up has the rows that the activation needs."""
    _, H, width = sizes
    rows = named(activation).halves * width
    require(rows == H, "gate_up", f"{H} rows", f"{rows}, for {activation} and {width} columns of down")


def _moe_fake(x: Tensor, gate_up: Sequence[Tensor], down: Sequence[Tensor], *rest: Any) -> Tensor:
    check_device(x, codes=gate_up[0], weights=rest[2], ids=rest[3])
    return x.new_empty(x.shape)


def _values_cpu(parts: Sequence[Tensor], kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return dequantise(tuple(parts), kind, tuple(shape), dtype)


def _values_gpu(parts: Sequence[Tensor], kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    with torch.cuda.device(parts[0].device):
        return gpu.values(Matrix(kind, tuple(shape), tuple(parts)), dtype)


def _values_fake(parts: Sequence[Tensor], kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(shape, dtype=dtype)


register(
    "quantised_values",
    "(Tensor[] parts, str kind, SymInt[] shape, ScalarType dtype) -> Tensor",
    cpu=_values_cpu,
    cuda=_values_gpu,
    fake=_values_fake,
)
register(
    "quantised_linear",
    "(Tensor x, Tensor[] parts, Tensor? bias, str kind, SymInt W) -> Tensor",
    cpu=_linear_cpu,
    cuda=_linear_gpu,
    fake=_linear_fake,
)
register(
    "quantised_moe_mlp",
    "(Tensor x, Tensor[] gate_up, Tensor[] down, str kind, SymInt[] sizes, Tensor weights, Tensor ids, "
    "Tensor? bias, str activation, SymInt pairs) -> Tensor",
    cpu=_moe_cpu,
    cuda=_moe_gpu,
    fake=_moe_fake,
)
