"""The fp8 format of the experts' products: float8 e4m3 codes with scales that are powers of two.

    x, dy          one scale a row
    act, H, dH     one scale for a tile: 64 rows of an expert, from its first row on, and 128 columns; dH is
                   rounded to its own type first; gate and up of H and of dH are two matrices
    matrices       one scale for a block of 128 x 128; gate and up are two matrices
    x, dy, act, dH in gradients of matrices, where these are in fp8: one scale for 128 rows of an expert, from
                   its first row on, and 128 columns

A code times its scale is exact in bfloat16. The transposed copy of a matrix, which the products of the
backward read, has the same codes: a scale holds for a block in both directions.

next: ops/experts/fp8_cpu.py
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.base.activations import activation as named
from tmoe.base.activations import full
from tmoe.ops.argument_checks import FLOATS, check_device, check_tensors, require
from tmoe.ops.experts.fp8_kernels import encode_kernel, over_limit, up_to_limit
from tmoe.ops.experts.pair_order import Metadata
from tmoe.ops.launch.kernel_launch import device_facts, launch
from tmoe.ops.register import register

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
BLOCK = 128  # rows and columns of a matrix with one scale; columns of a tile
TILE = 64  # rows of a tile


def po2(amax: Tensor) -> tuple[Tensor, Tensor]:
    """The power of two from amax / 448 upwards, and its inverse, both float32 and exact.

    amax: float32, largest magnitudes. Exponents are between those of 2^-126 and 2^126, so that the inverse is
    no subnormal number; zeros therefore have a scale too.
    """
    bits = (amax * (1.0 / LARGEST)).view(torch.int32)
    exponent = ((bits + 0x7FFFFF) >> 23).clamp(1, 253)
    return (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)


def coded(t: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Codes e4m3 [..., R, C] of t, and their scales float32 [..., ceil(R / rows), ceil(C / columns)].

    rows, columns: sizes of a block with one scale. NaN stays NaN, and does not count for the scale of its
    block; infinity becomes NaN. Plain torch on any device: the definition of the kernels in fp8_kernels.py.
    """
    *batch, R, C = t.shape
    whole = t.new_zeros(*batch, _up(R, rows), _up(C, columns), dtype=torch.float32)
    whole[..., :R, :C] = t
    blocks = whole.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))  # [..., R', rows, C', columns]
    amax = blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax((-3, -1), keepdim=True)
    scale, inverse = po2(amax)
    codes = (blocks * inverse).to(E4M3).view_as(whole)[..., :R, :C].contiguous()
    return codes, scale.squeeze(-1).squeeze(-2)


def decoded(codes: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """The values of codes with these scales, float32 [..., R, C]; inverse of `coded` but for its rounding."""
    *_, R, C = codes.shape
    wide = scales.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return codes.float() * wide[..., :R, :C]


def rounded_rows(x_TD: Tensor) -> Tensor:
    """x with one scale a row, as products read it: float32 [T, D]."""
    columns = max(x_TD.shape[1], 1)
    return decoded(*coded(x_TD, 1, columns), 1, columns)


def rounded_tiles(t_NF: Tensor) -> Tensor:
    """Rows of one expert, with one scale a tile, as products read them: float32 [N, F]."""
    return decoded(*coded(t_NF, TILE, BLOCK), TILE, BLOCK)


def sided(t: Tensor, activation: str) -> Tensor:
    """t, of H, moved as little as needed for its code to be on t's side of the activation's limit.

    The definition of `sided` in fp8_kernels.py. It holds where the limit divided by the scale is a normal
    number of e4m3.
    """
    limit = named(activation).constants.get("limit")
    if limit is None:
        return t
    near, spelled = t.abs(), full(activation)
    over = near.clamp(min=over_limit(spelled))
    return torch.where(near > limit, over, near.clamp(max=up_to_limit(spelled))).copysign(t)


def rounded_blocks(t_NC: Tensor) -> Tensor:
    """Rows of one expert as fp8 gradients of matrices read them: float32 [N, C], one scale a block."""
    return decoded(*coded(t_NC, BLOCK, BLOCK), BLOCK, BLOCK)


class Codes(NamedTuple):
    """The codes of the experts' matrices [E, n R, C], as M = n E matrices [R, C]; views of one tensor."""

    codes: Tensor  # e4m3 [M, R, C]
    turned: Tensor  # e4m3 [M, C, R], the transposed copy
    scales: Tensor  # float32 [M, ceil(R / 128), ceil(C / 128)]

    @staticmethod
    def size(shape: tuple[int, ...], halves: int) -> int:
        """Bytes of the packed codes of matrices [E, halves R, C]."""
        E, rows, C = shape
        return 2 * E * rows * C + 4 * E * halves * _parts(rows // halves) * _parts(C)

    @staticmethod
    def of(packed: Tensor, shape: tuple[int, ...], halves: int) -> "Codes":
        """The views of packed codes: uint8, codes first, then the transposed copy, then scales."""
        E, rows, C = shape
        M, R, n = E * halves, rows // halves, E * rows * C
        scales = packed[2 * n :].view(torch.float32).view(M, _parts(R), _parts(C))
        return Codes(packed[:n].view(E4M3).view(M, R, C), packed[n : 2 * n].view(E4M3).view(M, C, R), scales)

    def value(self, m: int) -> Tensor:
        """Matrix m, float32 [R, C]."""
        return decoded(self.codes[m], self.scales[m], BLOCK, BLOCK)


class KeptH(NamedTuple):
    """The codes of H [N, halves F], as a forward keeps them for its backward; views of one tensor.

    Tiles are numbered as the 128-row tiles of Metadata, two for each.
    """

    codes: Tensor  # e4m3 [halves, N, F]
    scales: Tensor  # float32 [halves, ceil(F / 128), tiles]

    @staticmethod
    def size(N: int, shape: tuple[int, ...], activation: str) -> int:
        """Bytes for N rows of experts of this shape (E, D, F)."""
        E, _, F = shape
        return named(activation).halves * (N * F + 4 * _parts(F) * 2 * Metadata.capacity(N, E, 2 * TILE))

    @staticmethod
    def of(packed: Tensor, N: int, shape: tuple[int, ...], activation: str) -> "KeptH":
        """The views of packed codes: uint8 [`KeptH.size`], codes first, then scales."""
        F, halves = shape[2], named(activation).halves
        codes, scales = packed.split([halves * N * F, len(packed) - halves * N * F])
        return KeptH(
            codes.view(E4M3).view(halves, N, F), scales.view(torch.float32).view(halves, _parts(F), -1)
        )

    def keep(self, h_nH: Tensor, row: int, tile: int, activation: str) -> None:
        """Writes the codes of one expert's rows; row, tile: numbers of the first ones. Plain torch."""
        for half, t in enumerate(h_nH.chunk(len(self.codes), 1)):
            codes, scales = coded(sided(t, activation), TILE, BLOCK)
            self.codes[half, row : row + len(t)] = codes
            self.scales[half, :, tile : tile + len(scales)] = scales.T

    def rows(self, row: int, end: int, tile: int) -> Tensor:
        """The values of rows of one expert, float32 [end - row, halves F]; tile: the first one's number."""
        tiles = slice(tile, tile + -(-(end - row) // TILE))
        halves = zip(self.codes[:, row:end], self.scales[..., tiles], strict=True)
        return torch.cat([decoded(codes, scales.T, TILE, BLOCK) for codes, scales in halves], 1)


def encode(matrix: Tensor, halves: int = 1) -> Tensor:
    """The packed codes of matrices [E, halves R, C]: uint8 [`Codes.size`]; no gradient flows through them.

    Raises ValueError for a matrix without three dimensions, of a type that is not a float of up to 32 bits,
    and for R or C that is no multiple of 16.
    """
    check_tensors(matrix=matrix)
    if matrix.dim() != 3:
        require(False, "matrix", f"{matrix.dim()} dimensions", "[E, rows, columns]")
    if matrix.dtype not in FLOATS:
        require(False, "matrix", matrix.dtype, f"one of {FLOATS}")
    if matrix.shape[1] % (16 * halves) or matrix.shape[2] % 16:
        require(False, "matrix", f"shape {tuple(matrix.shape)}", "rows and columns that are multiples of 16")
    return torch.ops.tmoe.fp8_encode(matrix.detach(), halves)


OPERANDS = (torch.float32, torch.bfloat16)  # of a layer whose products are in fp8


def check_codes(x: Tensor, activation: str, **pairs: tuple[Tensor, Tensor | None]) -> None:
    """Raise ValueError unless each matrix has codes of its size, and x has a type that fp8 products support.

    pairs: gate_up=(matrix, codes), down=(matrix, codes).
    """
    if x.is_cuda:
        D, F = pairs["down"][0].shape[1:]
        hopper = device_facts(x.device)[0] == "cuda:90" and x.dtype == torch.bfloat16
        if not hopper or D % 64 or F % 64:
            got = f"{x.dtype} on {device_facts(x.device)[0]}, D={D}, F={F}"
            require(False, "codes", got, "bfloat16 on cuda:90, and widths that are multiples of 64")
    if x.dtype not in OPERANDS:
        require(False, "x", x.dtype, f"one of {OPERANDS} with codes")
    for name, (matrix, codes) in pairs.items():
        halves = named(activation).halves if name == "gate_up" else 1
        size = Codes.size(tuple(matrix.shape), halves)
        if codes is None or codes.dtype != torch.uint8 or codes.dim() != 1 or codes.numel() != size:
            got = None if codes is None else f"{codes.dtype} {tuple(codes.shape)}"
            require(False, f"{name}'s codes", got, f"torch.uint8 ({size},) = [`Codes.size`]")
        else:
            check_device(matrix, **{f"{name}'s codes": codes})


def codes_of(parameter: Tensor, matrix: Tensor, halves: int) -> Tensor:
    """The packed codes of a parameter, whose value on this rank is `matrix`.

    A parameter that has the attribute `fp8_codes`, a list, keeps them there; its owner empties the list
    whenever the value changes (parallel/copies.py). For other parameters they are computed in each call.
    """
    kept: list[Tensor] | None = getattr(parameter, "fp8_codes", None)
    if kept:
        return kept[0]
    codes = encode(matrix, halves)
    if kept is not None:
        kept.append(codes)
    return codes


def blank(matrix: Tensor, halves: int) -> Tensor:
    """Packed codes without memory, of a matrix without memory: for compiling, which reads no value."""
    packed = torch.empty(Codes.size(tuple(matrix.shape), halves), dtype=torch.uint8, device=matrix.device)
    packed.untyped_storage().resize_(0)
    return packed


def _parts(n: int) -> int:
    """Blocks along n rows or columns."""
    return -(-n // BLOCK)


def _up(n: int, step: int) -> int:
    """n rounded up to a multiple of step."""
    return -(-n // step) * step


def _encode_plain(matrix: Tensor, halves: int) -> Tensor:
    """The op on a CPU, expert by expert, so that temporaries are as large as one expert's."""
    shape = tuple(matrix.shape)
    packed = torch.empty(Codes.size(shape, halves), dtype=torch.uint8, device=matrix.device)
    codes, turned, scales = Codes.of(packed, shape, halves)
    for m, part in enumerate(matrix.reshape(codes.shape)):
        codes[m], scales[m] = coded(part, BLOCK, BLOCK)
        turned[m] = codes[m].T
    return packed


def encode_gpu(matrix: Tensor, halves: int) -> Tensor:
    """The op on a GPU."""
    matrix = matrix.contiguous()
    shape = tuple(matrix.shape)
    packed = torch.empty(Codes.size(shape, halves), dtype=torch.uint8, device=matrix.device)
    codes, turned, scales = Codes.of(packed, shape, halves)
    M, R, C = codes.shape
    grid = M, _parts(R), _parts(C)
    launch(encode_kernel, grid, matrix, codes, turned, scales, R, C, BLOCK, num_warps=8)
    return packed


def _encode_fake(matrix: Tensor, halves: int) -> Tensor:
    return matrix.new_empty(Codes.size(tuple(matrix.shape), halves), dtype=torch.uint8)


register(
    "fp8_encode",
    "(Tensor matrix, SymInt halves) -> Tensor",
    cpu=_encode_plain,
    cuda=encode_gpu,
    fake=_encode_fake,
)
