"""moe_mlp of a single token without gradients: products of a matrix and a vector, in two launches.

It takes as long as reading K experts. With the tiles of few_rows.py, of 256 columns, there would be too few
tiles for all multiprocessors, and routing and the sum over experts would need further launches. In this
module a program reads a few rows of an expert's matrix; in the second launch it loops over all K experts and
adds them up.
"""

import triton
import triton.language as tl
from torch import Tensor

from tmoe.base import activations
from tmoe.ops.experts.kernels import activate, halves_of
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, empty, launch

ROWS = 4  # rows of a matrix that a program reads


def one_token(
    x_1D: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights_1K: Tensor,
    ids_1K: Tensor,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    """y [1, D]. Arguments are as in moe_mlp, contiguous, and on a GPU."""
    E, D, F = down.shape
    K = ids_1K.shape[1]
    act_KF = empty((K, F), x_1D.dtype, x_1D.device)
    y_1D = empty((1, D), x_1D.dtype, x_1D.device)
    launch(
        up_one, (cdiv(F, ROWS), K), x_1D, gate_up, bias, ids_1K, act_KF, E, D, F, ROWS,
        min(512, power_of_2(D)), activations.full(activation), num_warps=4,
    )  # fmt: skip
    launch(
        down_one, (cdiv(D, ROWS),), act_KF, down, weights_1K, ids_1K, y_1D, E, D, F, ROWS,
        min(1024, power_of_2(F)), K, power_of_2(K), num_warps=4,
    )  # fmt: skip
    return y_1D


@triton.jit
def times_vector(
    matrix, vector, rows, here, L: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr
):  # fmt: skip
    """The product of rows of a matrix [., L] and a vector [L], in fp32."""
    l = tl.arange(0, BL)
    acc = tl.zeros((BR, BL), tl.float32)
    for first in range(0, L, BL):
        cols = first + l
        inside = cols < L
        v = tl.load(vector + cols, inside, 0.0).to(tl.float32)
        m = tl.load(matrix + rows[:, None] * L + cols[None, :], here[:, None] & inside[None, :], 0.0)
        acc += m.to(tl.float32) * v[None, :]
    return tl.sum(acc, 1)


@triton.jit(do_not_specialize=["E"])
def up_one(
    x, gate_up, bias, ids, act, E, D: tl.constexpr, F: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr,
    ACT: tl.constexpr,
):  # fmt: skip
    """act[k, f] for BR columns f of the k-th expert."""
    HALVES: tl.constexpr = halves_of(ACT)
    k = tl.program_id(1)
    e = tl.load(ids + k).to(tl.int64)
    if (e < 0) | (e >= E):
        return
    f = tl.program_id(0) * BR + tl.arange(0, BR)
    mask = f < F
    matrix = gate_up + e * HALVES * F * D
    gate = times_vector(matrix, x, f, mask, D, BR, BL)
    if bias is not None:
        gate += tl.load(bias + e * HALVES * F + f, mask, 0.0).to(tl.float32)
    gate = gate.to(act.dtype.element_ty)  # rounded like H in training
    up = gate
    if HALVES == 2:
        up = times_vector(matrix, x, F + f, mask, D, BR, BL)
        if bias is not None:
            up += tl.load(bias + e * HALVES * F + F + f, mask, 0.0).to(tl.float32)
        up = up.to(act.dtype.element_ty)
    a = activate(gate.to(tl.float32), up.to(tl.float32), False, ACT)
    tl.store(act + k * F + f, a.to(act.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["E"])
def down_one(
    act, down, weights, ids, y, E, D: tl.constexpr, F: tl.constexpr, BR: tl.constexpr, BL: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """y[d] for BR channels d: the sum over experts in the order of slots, each rounded first."""
    d = tl.program_id(0) * BR + tl.arange(0, BR)
    mask = d < D
    nth = tl.arange(0, KP)
    # loaded before the loop: a load that depends on another load is not prefetched
    all_ids = tl.load(ids + nth, nth < K, -1).to(tl.int32)
    all_weights = tl.load(weights + nth, nth < K, 0.0).to(tl.float32)
    total = tl.zeros((BR,), tl.float32)
    for k in tl.static_range(K):
        e = tl.sum(tl.where(nth == k, all_ids, 0))
        valid = (e >= 0) & (e < E)
        matrix = down + tl.where(valid, e, 0).to(tl.int64) * D * F
        part = times_vector(matrix, act + k * F, d, mask & valid, F, BR, BL)
        weight = tl.sum(tl.where(nth == k, all_weights, 0.0))
        total += tl.where(valid, weight * part.to(y.dtype.element_ty).to(tl.float32), 0.0)
    tl.store(y + d, total.to(y.dtype.element_ty), mask)
