"""Launches of the kernels of quantised weights: which tiles, how many programs.

next: quantised/kernels.py
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.base import activations
from tmoe.base.quantised import INT4_GROUP, NF4, NF4_BLOCK, dynamic, maxima_of, nf4_values
from tmoe.ops.experts.gpu import LayerLaunches
from tmoe.ops.experts.gpu import forward as moe_mlp_forward
from tmoe.ops.experts.pair_order import TILES, Metadata, power_of_2, route
from tmoe.ops.launch.kernel_launch import cdiv, device_facts, early, empty, launch, tf32
from tmoe.ops.quantised import kernels

try:
    from tmoe.ops.quantised import fragments
except (ImportError, AttributeError):  # a triton without these names of Gluon
    fragments = None

FEW = 128  # most rows of a product with one matrix that reads codes; with more the values are computed first
FEW_AN_EXPERT = 32  # the same on average for each expert
ROWS = TILES[0]  # rows of a row tile
DEEP = 4  # stages of a tile of fragments.few_rows_direct for int4 that loads three steps ahead
BLOCKS = 16  # of nf4 in a program of kernels.nf4_values: a thread loads 4 bytes and stores 8 numbers
KINDS = ("int8", "int4", "fp8", "nf4")


class Tile(NamedTuple):
    """Sizes of a launch of kernels.few_rows, or of fragments.few_rows_direct."""

    BN: int  # rows of the weight
    BM: int  # rows of x at a time
    BL: int  # step along the length of the sum; of int4 always a group
    warps: int
    stages: int
    direct: bool = False  # fragments.few_rows_direct, where BL counts bytes, and DEEP stages are its own
    parts: int = 1  # of the length, for a single matrix; different programs sum them


class Matrix(NamedTuple):
    """A quantised weight [..., W, L]."""

    kind: str
    shape: tuple[int, ...]
    parts: tuple[Tensor, ...]  # of `quantise`

    @property
    def codes(self) -> Tensor:
        """Bytes, C for each row."""
        return self.parts[0].view(torch.uint8)

    @property
    def scales(self) -> Tensor:
        """G for each row; of nf4 the maxima in 8 bits."""
        return self.parts[1]

    @property
    def a_row(self) -> tuple[int, int]:
        """C and G, the codes and scales of a row."""
        rows = math.prod(self.shape[:-1])
        return self.parts[0].numel() // rows, self.parts[1].numel() // rows


def reads(matrix: Matrix) -> bool:
    """Whether kernels read the codes: NF4's only where no block of 64 values runs across rows."""
    return matrix.kind != "nf4" or matrix.shape[-1] % NF4_BLOCK == 0


@functools.cache
def tables(device: torch.device) -> tuple[Tensor, ...]:
    """The values of NF4's codes [16] and of its maxima's codes [256], fp32."""
    return tuple(torch.tensor(t, dtype=torch.float32, device=device) for t in (NF4, dynamic()))


def arguments(matrix: Matrix) -> tuple[Any, ...]:
    """Arguments of the kernels: codes, scales, and of nf4 the scales' scales, the offset and both tables."""
    if matrix.kind != "nf4":
        return matrix.codes, matrix.scales, None, None, None, None
    return matrix.codes, *matrix.parts[1:], *tables(matrix.codes.device)


def expert_of_nf4(matrix: Matrix, e: int, dtype: torch.dtype) -> Tensor:
    """An expert's matrix, from blocks that may run across experts."""
    _, shape, (codes, maxima, most, offset) = matrix
    n = math.prod(shape[1:])
    first, last = e * n // NF4_BLOCK, math.ceil((e + 1) * n / NF4_BLOCK)
    top = maxima_of(maxima, most, offset)[first:last]
    part = codes[first * NF4_BLOCK // 2 : last * NF4_BLOCK // 2]
    values = nf4_values(part, top, min(last * NF4_BLOCK, math.prod(shape)) - first * NF4_BLOCK)
    begin = e * n - first * NF4_BLOCK
    return values[begin : begin + n].view(shape[1:]).to(dtype)


def tile_of(kind: str, rows: float, L: int, arch: str, dtype: torch.dtype) -> Tile:
    """The tile for this mean number of rows of x to each expert's matrix [W, L]. arch: "cuda:90".

    A step that divides L needs no masks, which take registers.
    """
    BM = min(ROWS, max(16, power_of_2(math.ceil(rows))))
    group = kind in ("int4", "nf4")  # its step is a group
    if dtype == torch.float32:
        if kind == "nf4":
            return Tile(32, 16, NF4_BLOCK, 2, 2)
        return Tile(64, 16, INT4_GROUP, 8, 2) if group else Tile(32, 16, 32, 4, 2)
    if arch.startswith("hip"):
        return Tile(64, min(BM, 32), INT4_GROUP if group else 64, 4, 2)
    if L % (INT4_GROUP if group else 64):
        return Tile(64, min(BM, 32), INT4_GROUP if group else 32, 4, 3)
    if arch == "cuda:90" and BM <= 32:
        return of_few_on_hopper(group, 8 if rows <= 8 else BM, L)
    stages = 4 if arch == "cuda:90" else 3
    return Tile(128 if BM <= 32 else 64, BM, 64 if L % 128 else 128, 4, stages)


def of_few_on_hopper(group: bool, BM: int, L: int) -> Tile:
    """The tile on Hopper for at most 32 rows of x; 64 divides L. group: whether a step is a group.

    With four warps triton takes wgmma, whose left operand it reads from shared memory byte by byte.
    """
    if BM == 8 and L >= 2048 and L % 256 == 0 and not group:
        return Tile(64, BM, 256, 2, 3)
    return Tile(64, BM, 64 if L % 128 else 128, 2, 5 if group else 4)


def in_parts(kind: str, rows: int, W: int, L: int, sms: int) -> Tile:
    """The tile on Hopper for rows of x to a single matrix [W, L], where 128 divides L.

    Up to 64 rows are one tile, so that each code is read and converted once. The length has two parts if
    tiles of 64 columns do not give each multiprocessor a program. More parts were slower, since a program
    needs some steps. The parts do not depend on the rows.
    """
    tile = tile_of(kind, 16 if rows <= 16 else ROWS, L, "cuda:90", torch.bfloat16)
    if tile.BM == ROWS and kind == "nf4":
        tile = tile._replace(BN=32, warps=2)  # pairs of x are divided in registers; wgmma reads shared memory
    elif tile.BM == ROWS:
        tile = tile._replace(stages=3)
    return tile._replace(parts=2 if L % 1024 == 0 and cdiv(W, 64) < sms else 1)


def tile_of_one(kind: str, rows: int, W: int, x: Tensor) -> Tile:
    """The tile for rows of x to a single matrix [W, L]: the highest with which most multiprocessors work.

    Higher tiles read the codes less often from L2.
    """
    arch, sms, _ = device_facts(x.device)
    if arch == "cuda:90" and x.element_size() == 2 and x.shape[1] % 128 == 0:
        return in_parts(kind, rows, W, x.shape[1], sms)
    heights = [64, 32, 16] if rows > 32 else [32, 16] if rows > 16 else [16]
    for BM in heights:
        tile = tile_of(kind, BM, x.shape[1], arch, x.dtype)
        tile = tile._replace(BN=min(tile.BN, 64))
        if cdiv(rows, tile.BM) * cdiv(W, tile.BN) * 4 >= 3 * sms:
            break
    return tile


def fits_direct(x: Tensor, matrix: Matrix, tile: Tile) -> bool:
    """Whether fragments.few_rows_direct computes this product: bf16, whole steps, NVIDIA from 80 on."""
    arch, _, _ = device_facts(x.device)
    if fragments is None or matrix.kind == "nf4" or x.dtype != torch.bfloat16 or not arch.startswith("cuda"):
        return False
    if matrix.kind == "int4" and (matrix.shape[-1] % INT4_GROUP or tile.BL != INT4_GROUP // 2):
        return False
    whole = matrix.a_row[0] % (tile.BL * tile.parts) == 0 and tile.BN % (16 * tile.warps) == 0
    return int(arch[5:]) >= 80 and whole


def last_of(steps: int) -> int:
    """The argument LAST of fragments.few_rows_direct."""
    return steps if steps < 3 else 3 + (steps - 3) % 4


def settled(device: torch.device) -> bool:
    """Whether the previous kernel cannot have written a weight: in a captured graph, as in decoding."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def few_rows(
    x: Tensor,
    matrix: Matrix,
    bias: Tensor | None,
    tile: Tile,
    activation: str | None = None,
    layer: LayerLaunches | None = None,
    gather: bool = False,
    routed: bool = False,
) -> Tensor:
    """Rows of x times a quantised matrix, or the activation of that product.

    layer: of a product with each expert's matrix; None: there is one matrix. gather: rows of x are tokens,
    and the product's rows the layer's pairs. routed: the previous launch on the stream was a product of the
    same layer, so the table of tiles is complete before this launch may start.
    """
    arch, _, _ = device_facts(x.device)
    halves = 1 if activation is None else activations.activation(activation).halves
    W, L = matrix.shape[-2] // halves, matrix.shape[-1]
    rows = x.shape[0] if layer is None else layer.N
    parts = tile.parts if layer is None else 1
    y = empty(
        (rows, W) if parts == 1 else (parts, rows, W), x.dtype if parts == 1 else torch.float32, x.device
    )
    rest, bias = (bias, None) if parts > 1 else (None, bias)
    num_n = cdiv(W, tile.BN // halves)
    table, tiles, height = _table(x, tile, layer)
    act = None if activation is None else activations.full(activation)
    order = layer.meta.order if gather and layer else None
    K, grid = layer.K if layer else 1, (max(1, tiles * num_n), parts)
    rows_of = bias, order, *table, y, rows, W
    how = matrix.kind, act, K, height, layer is not None, tile.BN, tile.BM, tile.BL
    ahead, (C, G) = early(x.device), matrix.a_row
    if tile.direct:
        steps = C // tile.BL // parts
        launch(
            fragments.few_rows_direct, grid,
            x.view(torch.int32), matrix.codes.view(torch.int32), matrix.scales, *rows_of,
            L // 2, C // 4, G, num_n, steps,
            *how, steps % 2 == 1, tile.warps, parts, bool(ahead),
            (layer is None or routed) and settled(x.device),
            last_of(steps) if matrix.kind == "int4" and tile.stages == DEEP else 0,
            num_warps=tile.warps, **ahead,
        )  # fmt: skip
    else:
        step = {"int4": INT4_GROUP, "nf4": NF4_BLOCK}.get(matrix.kind, tile.BL)
        ptx = arch.startswith("cuda") and x.device.type != "cpu"
        precision = "tf32" if tf32() and ptx else "ieee"
        launch(
            kernels.few_rows, grid,
            x, *arguments(matrix), *rows_of, L, C, G, num_n,
            *how, L % step == 0, ptx, precision, parts, bool(ahead),
            num_warps=tile.warps, num_stages=tile.stages, **ahead,
        )  # fmt: skip
    return y if parts == 1 else sum_of(y, rest, x.dtype)


def _table(x: Tensor, tile: Tile, layer: LayerLaunches | None) -> tuple[tuple[Tensor, int, Tensor], int, int]:
    """The table of row tiles (without a layer it is not read), an upper bound on their number, their rows."""
    if layer is None:
        return (x, 0, x), cdiv(x.shape[0], tile.BM), tile.BM
    capacity = Metadata.capacity(layer.N, layer.E, ROWS)
    return (layer.meta.tiles[ROWS], capacity, layer.meta.offsets), layer.N // ROWS + layer.E, ROWS


def sum_of(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of parts [P, T, W] over P, plus the bias, in this type."""
    P, T, W = parts.shape
    y = empty((T, W), dtype, parts.device)
    ahead = early(parts.device)
    block = 1024
    launch(
        kernels.add_parts, (cdiv(T * W, block),),
        parts, bias, y, T * W, W, P, block, bool(ahead), num_warps=4, **ahead,
    )  # fmt: skip
    return y


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """y [T, W] = x [T, L] times a quantised matrix [W, L], plus the bias [W]. T is at least 1."""
    x = x.contiguous()
    return few_rows(x, matrix, bias, tile_of_one(matrix.kind, x.shape[0], matrix.shape[0], x))


def values(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The values of a quantised weight, with the bits of `dequantise`."""
    device, width = matrix.codes.device, matrix.shape[-1]
    out = empty(matrix.shape, dtype, device)
    n = math.prod(matrix.shape)
    if n == 0:
        return out
    if matrix.kind == "nf4":
        launch(
            kernels.nf4_values, (cdiv(n, NF4_BLOCK * BLOCKS),),
            *arguments(matrix), out, n, BLOCKS, n % NF4_BLOCK == 0, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return out
    arch, _, _ = device_facts(device)
    M, BR, BL = n // width, 16, INT4_GROUP
    launch(
        kernels.values, (cdiv(M, BR), cdiv(width, BL)),
        matrix.codes, matrix.scales, out, M, width, *matrix.a_row, matrix.kind, BR, BL,
        arch.startswith("cuda") and device.type != "cpu", num_warps=4,
    )  # fmt: skip
    return out


def moe_mlp(
    x: Tensor,
    gate_up: Matrix,
    down: Matrix,
    routed: tuple[Tensor, Tensor],
    bias: Tensor | None,
    activation: str,
    pairs: int,
) -> Tensor:
    """y [T, D] of experts with quantised matrices. routed: weights [T, K], ids [T, K].

    pairs: as in moe_mlp; of few rows the memory is for all pairs.
    """
    x, (weights, ids) = x.contiguous(), (t.contiguous() for t in routed)
    (T, D), K = x.shape, ids.shape[1]
    E, _, F = down.shape
    if T * K == 0:
        return torch.zeros_like(x)
    if T * K > FEW_AN_EXPERT * E or not (reads(gate_up) and reads(down)):
        matrices = values(gate_up, x.dtype), values(down, x.dtype)
        return moe_mlp_forward(x, *matrices, weights, ids, bias, activation, pairs, False)[0]
    layer = LayerLaunches(x, (E, D, F), K, route(ids, E), weights, (), activation)
    how = layer.arch, x.dtype
    tiles = [tile_of(gate_up.kind, T * K / E * 2, L, *how) for L in (D, F)]
    act = few_rows(x, gate_up, bias, tiles[0], activation, layer, gather=True)
    y, _ = layer.combine(few_rows(act, down, None, tiles[1], None, layer, routed=True), weights)
    return y
