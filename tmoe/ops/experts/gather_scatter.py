"""gather_rows and scatter_rows: select rows by number, and sum the rows that have the same number.

Each is the gradient of the other, to any order. A sum adds its rows in their order, in fp32, so it has the
same bits in every run, on a CPU and on a GPU. A plain index_add_ on a GPU adds in any order, and in bf16.

next: moe/exchange/sorted_rows.py
"""

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops import reference
from tmoe.ops.argument_checks import FLOATS, INTS, check_device, check_tensors, require
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, launch
from tmoe.ops.launch.shapes import LayerShapes
from tmoe.ops.register import register


def gather_rows(x_TD: Tensor, ids_N: Tensor) -> Tensor:
    """[N, D]: row n is x[ids[n]]; zeros where ids[n] is -1, or any other number outside of 0 to T - 1.

    A row may be selected any number of times, or never.

    Args:
        x_TD: any float type (fp64 on a CPU only). T and N may be 0.
        ids_N: int32 or int64.

    Differentiable in x. Raises ValueError for shapes or types that do not fit. Definition:
    `tmoe.ops.reference.gather_rows`.
    """
    check_rows("x", x_TD, "[T, D]", ids_N)
    return torch.ops.tmoe.gather_rows(x_TD, ids_N)


def scatter_rows(y_ND: Tensor, ids_N: Tensor, rows: int) -> Tensor:
    """[rows, D]: row t is the sum of all y[n] with ids[n] = t.

    A row y[n] with id -1, or with an id beyond the rows, is not added, and may have any values, even NaN.
    Sums are computed in fp32 (fp64 for fp64 rows), in the order of n, and rounded to y's type. On a GPU the
    time grows with the largest number of rows in one sum.

    Args:
        y_ND: any float type (fp64 on a CPU only).
        ids_N: int32 or int64.
        rows: number of rows of the result.

    Differentiable in y. Raises ValueError for shapes or types that do not fit. Definition:
    `tmoe.ops.reference.scatter_rows`.
    """
    check_rows("y", y_ND, "[N, D]", ids_N)
    if ids_N.shape[0] != y_ND.shape[0]:  # a message with a size in it would bind a graph to that size
        require(False, "ids", f"shape {tuple(ids_N.shape)}", f"[N={y_ND.shape[0]}]")
    whole = isinstance(rows, int | torch.SymInt) and not isinstance(rows, bool)
    if not whole or rows < 0:
        require(False, "rows", repr(rows)[:80], "a whole number from 0 on")
    return torch.ops.tmoe.scatter_rows(y_ND, ids_N, rows)


def check_rows(name: str, x: Tensor, letters: str, ids_N: Tensor) -> None:
    """Raise ValueError unless x has rows of a float type and ids are integers, on one device."""
    check_tensors(**{name: x, "ids": ids_N})
    require(x.dim() == 2, name, f"{x.dim()} dimensions", letters)
    valid = (*FLOATS, torch.float64) if x.device.type == "cpu" else FLOATS
    require(x.dtype in valid, name, x.dtype, f"one of {valid} on {x.device.type}")
    require(ids_N.dim() == 1, "ids", f"{ids_N.dim()} dimensions", "[N]")
    require(ids_N.dtype in INTS, "ids", ids_N.dtype, "int32 or int64")
    check_device(x, ids=ids_N)


@triton.jit(do_not_specialize=["T", "N"])
def gather_rows_kernel(x, ids, out, T, N, D, RB: tl.constexpr, CB: tl.constexpr):
    """Copies RB rows and CB columns in each program."""
    n = tl.program_id(0) * RB + tl.arange(0, RB)
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    i = tl.load(ids + n, n < N, -1).to(tl.int64)
    valid = (i >= 0) & (i < T)
    row = tl.load(x + i[:, None] * D + c[None, :], valid[:, None] & (c < D)[None, :], 0.0)
    tl.store(out + n.to(tl.int64)[:, None] * D + c[None, :], row, (n < N)[:, None] & (c < D)[None, :])


@triton.jit
def scatter_rows_kernel(y, order, starts, out, D, CB: tl.constexpr):
    """CB columns of one row of the result in each program: the sum over order[starts[t]:starts[t+1]]."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    total = tl.zeros((CB,), tl.float32)
    i = tl.load(starts + t)
    last = tl.load(starts + t + 1)
    while i < last:
        n = tl.load(order + i).to(tl.int64)
        total += tl.load(y + n * D + c, c < D, 0.0).to(tl.float32)
        i += 1
    tl.store(out + t * D + c, total.to(out.dtype.element_ty), c < D)


def gather_gpu(x: Tensor, ids: Tensor) -> Tensor:
    """The op on a GPU."""
    x, ids = x.contiguous(), ids.contiguous()
    (T, D), N = x.shape, ids.shape[0]
    out = x.new_empty(N, D)
    if N and D:
        CB = min(1024, power_of_2(D))
        RB = max(1, 4096 // CB)
        with torch.cuda.device_of(x):
            launch(gather_rows_kernel, (cdiv(N, RB), cdiv(D, CB)), x, ids, out, T, N, D, RB, CB, num_warps=4)
    return out


def scatter_gpu(y: Tensor, ids: Tensor, rows: int) -> Tensor:
    """The op on a GPU. Invalid ids are sorted before the first row's start, or after the last row's end."""
    y = y.contiguous()
    D = y.shape[1]
    out = y.new_empty(rows, D)
    if rows and D:
        ids, order = ids.sort(stable=True)
        starts = torch.searchsorted(ids, torch.arange(rows + 1, dtype=ids.dtype, device=ids.device))
        CB = min(1024, power_of_2(D))
        with torch.cuda.device_of(y):
            launch(scatter_rows_kernel, (rows, cdiv(D, CB)), y, order, starts, out, D, CB, num_warps=4)
    return out


def trace(T: int, N: int, D: int, dtype: torch.dtype) -> None:
    """Launch both kernels on meta tensors, inside compile_only."""
    ids = torch.empty(N, dtype=torch.int32, device="meta")
    scatter_gpu(gather_gpu(torch.empty(T, D, dtype=dtype, device="meta"), ids), ids, T)


def _gather_fake(x: Tensor, ids: Tensor) -> Tensor:
    return x.new_empty(ids.shape[0], x.shape[1])


def _gather_save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, ids = inputs
    ctx.rows = x.shape[0]
    ctx.save_for_backward(ids)


def _gather_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.ops.tmoe.scatter_rows(gradient, *ctx.saved_tensors, ctx.rows), None


def _scatter_fake(y: Tensor, ids: Tensor, rows: int) -> Tensor:
    return y.new_empty(rows, y.shape[1])


def _scatter_save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _scatter_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.tmoe.gather_rows(gradient, *ctx.saved_tensors), None, None


def _of_layer(layer: LayerShapes) -> Iterable[tuple]:
    if layer.moved is not None:
        rows, slots = layer.moved
        for moved in layer.passes:
            yield trace, rows, moved.rows, layer.width, layer.dtype
            yield trace, rows * slots, moved.rows, 1, torch.float32  # their weights


register(
    "gather_rows",
    "(Tensor x, Tensor ids) -> Tensor",
    cpu=reference.gather_rows,
    cuda=gather_gpu,
    fake=_gather_fake,
    save=_gather_save,
    differentiate=_gather_gradient,
    traces={LayerShapes: _of_layer},
)
register(
    "scatter_rows",
    "(Tensor y, Tensor ids, SymInt rows) -> Tensor",
    cpu=reference.scatter_rows,
    cuda=scatter_gpu,
    fake=_scatter_fake,
    save=_scatter_save,
    differentiate=_scatter_gradient,
)
