"""The products of Newton-Schulz for a stack of matrices on a GPU; of a symmetric one, half of the tiles.

A library's product of two matrices does not know that its result is symmetric. These kernels compute the
tiles on and below the diagonal, and write each tile below it twice. With m / 128 = 6 tiles a side they
compute 21 of 36. Factors, sums and the multiple of I are applied where the product is rounded, so that no
pass over memory remains between the products. The result may have another type than the operands.

next: ops/muon_hopper.py
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.launch.kernel_launch import cdiv, describe, device_facts, launch, strides_of

try:
    from tmoe.ops import muon_hopper
except ImportError:  # then gluon_lacks of kernel_launch.py reports that no GPU can run it
    muon_hopper = None

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE, INNER = 128, 64  # rows and columns of a tile of the result, and columns of X that are read at a time


class Terms(NamedTuple):
    """Coefficients of X X^T, X and I. X is added, and I, for square X alone."""

    square: float
    linear: float = 0.0
    one: float = 0.0


class Tile(NamedTuple):
    """How a kernel of muon_hopper.py computes a tile of 128 rows."""

    columns: int
    stages: int  # steps of 64 numbers whose operands are in shared memory
    part: int  # columns that are stored at a time
    outs: int  # parts that are being stored


# The tile of each product of an iteration. An update without one is the library's product.
TILES: dict[str, Tile | None] = dict(
    gram=Tile(256, 3, 64, 2),
    mix=Tile(256, 4, 32, 2),
    commuting=Tile(256, 4, 32, 2),
    update=Tile(256, 3, 128, 2),
)


@triton.jit(do_not_specialize=["tiles", "square", "linear", "one"])
def symmetric_kernel(
    x, y, scales, out, tiles, rows, inner, stride, apart, square, linear, one,
    TALL: tl.constexpr, ADDS: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """The tile of one matrix that the program's number names, counted along the rows of the lower half.

    x, y: the operands, in equal layouts. tiles: of a matrix.
    stride, apart: elements from a row of X to the next, and from a matrix to the next.
    """
    tile = tl.program_id(0) % tiles
    low = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    low = tl.where(low * (low + 1) // 2 > tile, low - 1, low)  # the root may be rounded
    low = tl.where((low + 1) * (low + 2) // 2 <= tile, low + 1, low)
    left = tile - low * (low + 1) // 2
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    at_i, at_j, at_k = low * TILE + tl.arange(0, TILE), left * TILE + tl.arange(0, TILE), tl.arange(0, INNER)
    base, other = x + matrix * apart, y + matrix * apart
    if TALL:
        first, second = (
            base + at_i[:, None] + at_k[None, :] * stride,
            other + at_j[None, :] + at_k[:, None] * stride,
        )
        step = INNER * stride
    else:
        first, second = (
            base + at_i[:, None] * stride + at_k[None, :],
            other + at_j[None, :] * stride + at_k[:, None],
        )
        step = INNER
    sums = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, inner, INNER):
        inside = at_k < inner - k
        a = tl.load(first, (at_i < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(second, inside[:, None] & (at_j < rows)[None, :], other=0.0)
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
        first += step
        second += step
    sums *= square
    mask = (at_i < rows)[:, None] & (at_j < rows)[None, :]
    if ADDS:
        d = tl.load(base + at_i[:, None] * stride + at_j[None, :], mask, other=0.0)
        sums += linear * d.to(tl.float32)
        sums = tl.where(at_i[:, None] == at_j[None, :], sums + one, sums)
    result = (sums * tl.load(scales + matrix)).to(out.dtype.element_ty)
    to = out + matrix * rows * rows
    tl.store(to + at_i[:, None] * rows + at_j[None, :], result, mask)
    if low != left:
        mask = (at_j < rows)[:, None] & (at_i < rows)[None, :]
        tl.store(to + at_j[:, None] * rows + at_i[None, :], tl.trans(result), mask)


def symmetric_product(
    x: Tensor, scales: Tensor, terms: Terms, tall: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """scales (square X X^T + linear X + one I) [E, m, m], with fp32 sums; tall: X^T X.

    x: [E, m, k], or [E, k, m] if tall, in bf16, fp16 or fp32, on the GPU; its rows are contiguous. With a
    linear term or a one the matrices must be symmetric.
    scales: fp32 [E].
    dtype: of the result; None: x's.
    ValueError for other tensors.
    """
    E, m, k = x.mT.shape if tall else x.shape
    adds = bool(terms.linear or terms.one)
    if (
        x.dtype not in DTYPES
        or x.stride(2) != 1
        or (adds and (m != k or not x.is_contiguous()))
        or (scales.shape, scales.dtype) != ((E,), torch.float32)
    ):
        raise ValueError(
            f"symmetric_product: x, scales {_got(x, scales)}, valid: [E, m, k] of contiguous rows, fp32 [E]"
        )
    return _half(x, x, scales, terms, tall, "mix" if adds else "gram", dtype or x.dtype)


def commuting_product(a: Tensor, b: Tensor, scales: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """scales A B [E, m, m] of symmetric matrices that commute, with fp32 sums; A B is then symmetric.

    Rounded matrices commute only nearly. The result is the half of A B on and below the diagonal, and its
    transpose above.

    a, b: contiguous [E, m, m] of one type: bf16, fp16 or fp32, on the GPU. scales: fp32 [E].
    dtype: of the result; None: a's.
    ValueError for other tensors.
    """
    alike = a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous() and b.is_contiguous()
    square = a.ndim == 3 and a.shape[1] == a.shape[2] and a.dtype in DTYPES
    if not alike or not square or (scales.shape, scales.dtype) != (a.shape[:1], torch.float32):
        raise ValueError(
            f"commuting_product: a, b, scales {_got(a, b, scales)}, valid: contiguous [E, m, m], fp32 [E]"
        )
    return _half(a, b, scales, Terms(1.0), False, "commuting", dtype or a.dtype)


def _got(*tensors: Tensor) -> list[str]:
    return [f"{t.dtype} {list(t.shape)} by {t.stride()}" for t in tensors]


def _half(
    x: Tensor, y: Tensor, scales: Tensor, terms: Terms, tall: bool, kind: str, dtype: torch.dtype
) -> Tensor:
    """scales (square X Y^T + linear X + one I), or X^T Y for X Y^T if tall: half of its tiles are computed.

    kind: of TILES.
    """
    E, m, k = x.mT.shape if tall else x.shape
    out = torch.empty(E, m, m, dtype=dtype, device=x.device)
    if not out.numel():
        return out
    adds = kind == "mix"
    with torch.cuda.device_of(x):
        tile = TILES[kind]
        if tile is not None and on_hopper(x, y, out):
            box = [1, 64, 128] if tall else [1, 128, 64]
            wide = [1, 64, tile.columns] if tall else [1, tile.columns, 64]
            tiles = tiles_of_half(cdiv(m, 128), tile.columns // 128)
            launch(
                muon_hopper.stacked_kernel, (min(E * tiles, device_facts(x.device)[1]),),
                describe(x, box), describe(y, wide), describe(out, [1, 128, tile.part]),
                describe(out, [1, tile.part, 128]), x if adds else None, scales,
                E * tiles, tiles, 1, cdiv(k, 64), m, *terms,
                128, tile.columns, 64, tile.stages, tile.part, tile.outs, not tall, not tall, True, x is y,
                num_warps=8,
            )  # fmt: skip
            return out
        tiles, (apart, stride, _) = tiles_of_half(cdiv(m, TILE), 1), strides_of(x)
        args = x, y, scales, out, tiles, m, k, stride, apart, *terms
        how = tall, adds, "ieee" if x.dtype == torch.float32 else "tf32", TILE, INNER
        launch(symmetric_kernel, (tiles * E,), *args, *how, num_warps=8, num_stages=3)
    return out


def stacked_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """A B of every matrix of two stacks [E, m, k] and [E, k, n] of one type, rounded into `out` [E, m, n].

    The rows of each are contiguous.
    """
    tile = TILES["update"]
    if tile is None or not on_hopper(a, b, out):
        return torch.bmm(a, b, out=out) if out.dtype == a.dtype else out.copy_(torch.bmm(a, b))
    (E, m, k), n = a.shape, b.shape[2]
    num_n = cdiv(n, tile.columns)
    tiles = cdiv(m, 128) * num_n
    with torch.cuda.device_of(a):
        launch(
            muon_hopper.stacked_kernel, (min(E * tiles, device_facts(a.device)[1]),),
            describe(a, [1, 128, 64]), describe(b, [1, 64, tile.columns]), describe(out, [1, 128, tile.part]),
            None, None, None, E * tiles, tiles, num_n, cdiv(k, 64), 0, *Terms(1.0),
            128, tile.columns, 64, tile.stages, tile.part, tile.outs, True, False, False, False,
            num_warps=8,
        )  # fmt: skip
    return out


def tiles_of_half(side: int, ratio: int) -> int:
    """Tiles of a matrix that hold numbers on or below the diagonal.

    side: number of row tiles. ratio: columns of a tile for each of its rows.
    """
    return sum(i // ratio + 1 for i in range(side))


def on_hopper(*stacks: Tensor) -> bool:
    """Whether the kernels of muon_hopper.py multiply these stacks."""
    device = stacks[0].device
    return device.type != "cpu" and device_facts(device)[2] and describable(*stacks)  # cpu: interpreted


def describable(*stacks: Tensor) -> bool:
    """Whether descriptors can describe these stacks: 16-bit numbers in rows of a multiple of 16 bytes."""
    return all(
        t.element_size() == 2
        and t.data_ptr() % 16 == 0
        and t.shape[1] >= 64
        and t.shape[2] >= 64
        and all(stride % 8 == 0 for stride in strides_of(t)[:2])
        for t in stacks
    )
