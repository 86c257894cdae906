"""router_product: a router's logits as accurate as an fp32 product, on the matrix units that multiply bf16.

A number of 24 significant bits is the sum of three pieces of 8 bits: hi = bf16(a), mid = bf16(a - hi), lo =
a - hi - mid. The sum is exact down to 2^-110; below that bf16's exponents end, and at most 2^-134 is lost.
Products of bf16 are exact in fp32, and the matrix units add in fp32. So x is multiplied by the pieces of W in
one product, and the sum of the results is as accurate as an fp32 product. A bf16 W is a single piece.

The gradient dlogits is fp32 and is split as well. dW uses as many pieces as its type can represent: three, or
two (accurate to 2^-17 of each element, while bf16 resolves 2^-8). dx is bf16: it uses two pieces of dlogits
and at most two of W. One piece would be enough for a plain sum. But the gradient of a softmax sums to zero
over experts, and the small remainder of that sum must not consist of the rounding errors of its terms.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.argument_checks import require
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, launch
from tmoe.ops.launch.shapes import LayerShapes
from tmoe.ops.register import Backward, register_differentiable

HI, MID, LO = 0, 1, 2
PIECES = {torch.bfloat16: 1, torch.float16: 2}  # pieces of W by its type; wider types have three
LARGEST = torch.finfo(torch.bfloat16).max
ALIGN = 8  # experts; cuBLAS uses its fast loads only if rows of bf16 pieces are aligned to 16 bytes


def router_product(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x W^T with fp32's accuracy, whatever the settings for fp32 products (TF32) or autocast.

    Args:
        x_TD: [T, D] bfloat16; T may be 0 and may change without recompilation.
        weight_ED: [E, D] of any float type (float64 is converted to float32). Any E and D; on a GPU it is
            fast if E is a multiple of 4 and D of 8.

    Returns logits_TE fp32, differentiable once in both arguments, with gradients in their types. For backward
    it keeps only its inputs. Elements that are inf or NaN in an fp32 product are inf or NaN in this product.
    Raises ValueError for shapes, types or devices that do not fit.

    float16 x is not supported: it would need two pieces, so twice the work, and no tmoe model trains in it.
    """
    require(x_TD.dim() == 2, "x", f"shape {tuple(x_TD.shape)}", "[T, D]")
    require(x_TD.dtype == torch.bfloat16, "x", x_TD.dtype, torch.bfloat16)
    fits = weight_ED.dim() == 2 and weight_ED.shape[1] == x_TD.shape[1]
    require(fits, "weight", f"shape {tuple(weight_ED.shape)}", f"[E, D={x_TD.shape[1]}]")
    require(weight_ED.is_floating_point(), "weight", weight_ED.dtype, "a floating type")
    require(weight_ED.device == x_TD.device, "weight", weight_ED.device, f"{x_TD.device}, where x is")
    return torch.ops.tmoe.router_product(x_TD, weight_ED)


def _without_autocast(run: Callable) -> Callable:
    """`run` with autocast off, so that its products use the types of its tensors."""

    def exact(*tensors: Tensor) -> Any:
        with torch.autocast(tensors[0].device.type, enabled=False):
            return run(*tensors)

    return exact


def _forward_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


# ---- the arithmetic, on any device


def forward(x: Tensor, weight: Tensor) -> Tensor:
    """logits [T, E] fp32: one product, followed by the sum over the pieces if W has several."""
    T = x.shape[0]
    E = weight.shape[0]
    pieces = PIECES.get(weight.dtype, 3)
    if not T:
        return x.new_empty(0, E, dtype=torch.float32)
    if pieces == 1:
        return product(x, weight.t())
    order = (LO, MID, HI)[-pieces:]
    parts = product(x, stacked(weight, order).t()).view(T, pieces, -1)[..., :E]
    return add(parts.unbind(1), torch.float32)


def backward(dlogits: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dx [T, D] and dW [E, D].

    dlogits is split once, for two products; the pieces of dx are added inside its product.
    """
    E, D = weight.shape
    pieces = PIECES.get(weight.dtype, 3)
    if not x.shape[0]:
        return torch.empty_like(x), torch.zeros_like(weight)
    # [lo |] mid | hi         times x: dW
    #        mid | hi [| hi]  times the rows of W hi, hi [, mid]: dx
    # mid * mid is left out, because it is 2^-16 of hi * hi
    several = pieces > 1
    d = side_by_side(dlogits, (LO,) * (pieces == 3) + (MID, HI) + (HI,) * several)
    width = cdiv(E, ALIGN) * ALIGN
    of_dw = 3 if pieces == 3 else 2
    parts = product(d[:, : of_dw * width].t(), x).view(of_dw, width, D)[:, :E]
    factors = stacked(weight, (HI, HI) + (MID,) * several)
    return product(d[:, -factors.shape[0] :], factors, x.dtype), add(parts.unbind(0), weight.dtype)


def product(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The product a b of bf16 operands, summed in fp32 and rounded once to dtype."""
    if not a.is_cuda or torch.version.hip:  # only cuBLAS multiplies bf16 with an fp32 result
        return (a.float() @ b.float()).to(dtype)
    return torch.mm(a, b, out_dtype=dtype)


def add(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of parts in fp32, rounded once to dtype. Parts are ordered from small to large."""
    total = parts[0]
    for part in parts[1:-1]:
        total = total + part
    return torch.add(total, parts[-1], out=torch.empty(total.shape, dtype=dtype, device=total.device))


def side_by_side(a_RC: Tensor, order: tuple[int, ...]) -> Tensor:
    """The pieces of a in this order, concatenated along columns: [R, pieces * columns].

    Each piece is padded with zeros to a multiple of ALIGN columns.
    """
    R, C = a_RC.shape
    columns = cdiv(C, ALIGN) * ALIGN
    out = torch.empty(R, len(order) * columns, dtype=torch.bfloat16, device=a_RC.device)
    split(a_RC, order, out.view(R, len(order), columns).transpose(0, 1))
    return out


def stacked(a_RC: Tensor, order: tuple[int, ...]) -> Tensor:
    """The pieces of a in this order, concatenated along rows: [pieces * rows, C].

    Each piece is padded with zeros to a multiple of ALIGN rows.
    """
    R, C = a_RC.shape
    rows = cdiv(R, ALIGN) * ALIGN
    out = torch.empty(len(order) * rows, C, dtype=torch.bfloat16, device=a_RC.device)
    split(a_RC, order, out.view(len(order), rows, C))
    return out


def split(a_RC: Tensor, order: tuple[int, ...], out_PRC: Tensor) -> None:
    """Fill out with pieces of a, padded with zeros.

    out_PRC: a view [pieces, rows >= R, columns >= C] with contiguous columns.
    """
    if a_RC.device.type != "cpu":  # meta tensors too: see trace
        return split_gpu(a_RC.contiguous(), order, out_PRC)
    R, C = a_RC.shape
    pieces = three_pieces(a_RC)
    out_PRC.zero_()
    for out, piece in zip(out_PRC, order, strict=True):
        out[:R, :C] = pieces[piece]


def three_pieces(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(hi, mid, lo), bf16.

    If bf16(a) would be inf for a finite a, hi is bf16's largest number. For inf and NaN, hi has the value and
    mid and lo are 0.
    """
    a = a.float()
    finite = a.abs() < float("inf")
    hi = torch.where(finite, a.clamp(-LARGEST, LARGEST), a).to(torch.bfloat16)
    rest = torch.where(finite, a - hi.float(), 0.0)
    mid = rest.to(torch.bfloat16)
    return hi, mid, (rest - mid.float()).to(torch.bfloat16)


@triton.jit(do_not_specialize=["R", "rows"])
def split_kernel(
    a, out, R, rows,
    C: tl.constexpr, COLUMNS: tl.constexpr, PIECE: tl.constexpr, ROW: tl.constexpr, PIECES: tl.constexpr,
    ORDER: tl.constexpr,
    LARGEST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`three_pieces` of BR x BC elements. PIECE, ROW: strides of out. Two bits of ORDER select each piece."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    row, column = r.to(tl.int64)[:, None], c[None, :]
    x = tl.load(a + row * C + column, mask=(r < R)[:, None] & (column < C), other=0.0).to(tl.float32)
    finite = tl.abs(x) < float("inf")
    hi = tl.where(finite, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), x).to(tl.bfloat16)
    rest = tl.where(finite, x - hi.to(tl.float32), 0.0)
    mid = rest.to(tl.bfloat16)
    lo = (rest - mid.to(tl.float32)).to(tl.bfloat16)
    stored = (r < rows)[:, None] & (column < COLUMNS)
    for i in tl.static_range(PIECES):
        piece = hi
        if (ORDER >> (2 * i)) & 3 == 1:
            piece = mid
        if (ORDER >> (2 * i)) & 3 == 2:
            piece = lo
        tl.store(out + row * ROW + column + i * PIECE, piece, mask=stored)


def split_gpu(a_RC: Tensor, order: tuple[int, ...], out_PRC: Tensor) -> None:
    """`split` in one launch, which reads a once."""
    R, C = a_RC.shape
    pieces, rows, columns = out_PRC.shape
    BC = min(256, power_of_2(columns))
    BR = 2048 // BC
    launch(
        split_kernel, (cdiv(rows, BR), cdiv(columns, BC)), a_RC, out_PRC, R, rows,
        C, columns, out_PRC.stride(0), out_PRC.stride(1), pieces, sum(piece << 2 * i for i,
        piece in enumerate(order)),
        LARGEST, BR, BC, num_warps=4,
    )  # fmt: skip


def trace(T: int, D: int, E: int, dtype: torch.dtype) -> None:
    """Run the op on meta tensors inside compile_only, for precompile.py. dtype: the weight's type."""
    x = torch.empty(T, D, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(E, D, dtype=dtype, device="meta")
    backward(forward(x, weight), x, weight)


def _of_layer(layer: LayerShapes) -> Iterable[tuple]:
    if layer.dtype == torch.bfloat16:
        yield trace, layer.tokens, layer.dim, layer.router.outputs, layer.dtype


register_differentiable(
    "router_product",
    "(Tensor x, Tensor weight) -> Tensor",
    returns="logits",
    cpu=_without_autocast(forward),
    cuda=_without_autocast(forward),
    fake=_forward_fake,
    backward=Backward(
        "(Tensor dlogits, Tensor x, Tensor weight) -> (Tensor, Tensor)",
        gradients="x weight",
        cpu=_without_autocast(backward),
        cuda=_without_autocast(backward),
    ),
    traces={LayerShapes: _of_layer},
)
