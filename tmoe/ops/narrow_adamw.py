"""AdamW with moments in bf16 or 8 bits, and weights in bf16 on request, in one pass over their memory.

It is the step of adamw_op.py for parameters whose numbers are not all fp32. The rule is computed in fp32. The
new weight follows from the moments before they are rounded.

    moments in bf16     rounded stochastically. 0.95 v + 0.05 g^2 differs from v by less than half of a unit
                        in the last place of bf16 where g^2 is within 4% of v, so rounding to the nearest
                        would stop v there; with a beta of 0.999 it would stop almost everywhere
    moments in 8 bits   the dynamic map's nearest values, in blocks of at most 256 numbers of a row
    weights in bf16     rounded stochastically, so that steps below a unit in the last place add up

next: optim/states.py
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.adamw_op import DTYPES, pointer, table_of
from tmoe.ops.dynamic_map import BLOCK, TINY, code_of, decades, dequantise, maps, quantise
from tmoe.ops.launch.kernel_launch import cdiv, launch
from tmoe.ops.launch.shapes import StepShapes
from tmoe.ops.reference import AdamWRule, adamw
from tmoe.ops.register import collect
from tmoe.ops.stochastic import Place, bits_after, bits_of, mixed, random_bits, round_bf16, rounded

ROWS = 4  # rows of BLOCK elements, or blocks, of a program
# length of the table's line for a tensor: its first program, its number of elements or blocks, the addresses
# of weight, grad, mean, square, copy, step and both scales, then salt, base, chunk and stride of its place,
# the number of its first element, and the length of a block
LINE = tl.constexpr(16)
KINDS = DTYPES | {torch.uint8: tl.uint8}
STORED = torch.float32, torch.bfloat16, torch.uint8


class Row(NamedTuple):
    """One parameter's tensors on one device, all contiguous and of the weight's length.

    weight: fp32 or bf16. grad: any float type; not written. mean, square: fp32, bf16, or uint8 with scales.
    copy: the new weight is written to it, rounded to the nearest; or None. step: 0-dim fp32, the number of
    this step, from 1.
    """

    weight: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor
    copy: Tensor | None
    step: Tensor
    place: Place
    mean_scale: Tensor | None = None
    square_scale: Tensor | None = None
    first: int = 0
    """number of the first element of these tensors in the rank's part, of which they may be a piece"""

    @property
    def block(self) -> int:
        """Length of a block; 0: the moments are not in blocks."""
        scale = self.mean_scale
        return 0 if scale is None or not scale.numel() else self.mean.numel() // scale.numel()


@triton.jit
def moment(p, scale, at, rows, mask, live, values, ZERO: tl.constexpr, STATE: tl.constexpr):
    """A moment in fp32, 0 outside of the mask.

    at, mask: of elements; rows, live: of blocks; ZERO: the code of 0.
    """
    if tl.uint8 == STATE:
        of_block = tl.load(scale + rows, live, other=0.0)
        return tl.load(values + tl.load(p + at, mask, other=ZERO).to(tl.int32)) * of_block
    else:
        return tl.load(p + at, mask, other=0.0).to(tl.float32)


@triton.jit
def store_moment(
    p, scale, x, draws, at, rows, mask, live, bounds, decades, LEAST: tl.constexpr, STATE: tl.constexpr,
    SIGNED: tl.constexpr,
):  # fmt: skip
    """Stores a moment x; it is 0 outside of the mask."""
    if tl.uint8 == STATE:
        most = tl.max(tl.max(tl.abs(x), axis=2, keep_dims=True), axis=0, keep_dims=True)
        most = tl.maximum(most, LEAST)
        tl.store(scale + rows, most, live)
        tl.store(p + at, code_of(x * (1 / most), bounds, decades, SIGNED).to(tl.uint8), mask)
    elif tl.bfloat16 == STATE:
        tl.store(p + at, round_bf16(x, draws), mask)
    else:
        tl.store(p + at, x, mask)


@triton.jit(do_not_specialize=["lines", "lr", "beta1", "beta2", "eps", "decay"])
def narrow_adamw_kernel(
    table, lines, factor, finite, maps, decades, lr, beta1, beta2, eps, decay,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, COPY: tl.constexpr, CUT: tl.constexpr,
    WIDE: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One AdamW step for ROWS rows of the tensor that this program's line of the table describes."""
    if tl.load(finite) == 0:
        return
    program = tl.program_id(0)
    low, high = program * 0, lines
    while high - low > 1:  # as in adamw_kernel
        middle = (low + high) // 2
        later = tl.load(table + middle * LINE) > program
        low, high = tl.where(later, low, middle), tl.where(later, middle, high)
    line = table + low * LINE
    count = tl.load(line + 1)
    begin = (program - tl.load(line)) * ROWS  # the program's first row
    row = tl.arange(0, ROWS)
    if tl.uint8 == STATE:
        # the axes are columns of half of a block, blocks and halves: a warp has a block and a thread four
        # columns of each half, in all loads and stores
        length = tl.load(line + 15).to(tl.int32)
        if WIDE:
            length = tl.multiple_of(length, 16)
        row = row[None, :, None]
        cols = tl.arange(0, COLS // 2)[:, None, None] + tl.arange(0, 2)[None, None, :] * (COLS // 2)
        near = tl.max_contiguous(row * length + cols, [4, 1, 1])
        live = row < tl.minimum(count - begin, ROWS).to(tl.int32)
        mask = live & (cols < length)
        start = begin * length
    else:
        start = begin * COLS
        left = tl.minimum(count - start, ROWS * COLS).to(tl.int32)
        if WIDE:
            left = tl.multiple_of(left, 16)
        live = row * COLS < left
        near = row[:, None] * COLS + tl.arange(0, COLS)[None, :]
        mask = near < left

    weight = pointer(line + 2, WEIGHT, WIDE) + start
    mean, square = pointer(line + 4, STATE, WIDE) + start, pointer(line + 5, STATE, WIDE) + start
    mean_scale = pointer(line + 8, tl.float32, False) + begin
    square_scale = pointer(line + 9, tl.float32, False) + begin
    n = tl.load(pointer(line + 7, tl.float32, False))
    correction1 = 1 - tl.exp2(n * tl.log2(beta1))
    correction2 = tl.sqrt(1 - tl.exp2(n * tl.log2(beta2)))
    w = tl.load(weight + near, mask, other=0.0).to(tl.float32)
    grad = pointer(line + 3, GRAD, WIDE) + start
    g = tl.load(grad + near, mask, other=0.0).to(tl.float32) * tl.load(factor)
    m = moment(mean, mean_scale, near, row, mask, live, maps, 127, STATE)
    v = moment(square, square_scale, near, row, mask, live, maps + 512, 0, STATE)
    m += (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    w -= lr * decay * w
    w -= lr / correction1 * m / (tl.sqrt(v) / correction2 + eps)

    key = mixed(tl.load(line + 10).to(tl.uint32) ^ n.to(tl.int32).to(tl.uint32))
    here = tl.load(line + 14) + start
    if CUT:
        chunk, local = tl.load(line + 12), here + near
        local = local // chunk * tl.load(line + 13) + local % chunk
        first, second = bits_of(tl.load(line + 11) + local, key)
    else:
        first, second = bits_after(tl.load(line + 11) + here, near, key)
    store_moment(
        mean, mean_scale, m, first & 0xFFFF, near, row, mask, live, maps + 256, decades, LEAST, STATE, True
    )
    store_moment(
        square, square_scale, v, first >> 16, near, row, mask, live, maps + 768, decades + 8, LEAST, STATE,
        False,
    )  # fmt: skip
    if tl.bfloat16 == WEIGHT:
        tl.store(weight + near, round_bf16(w, second & 0xFFFF), mask)
    else:
        tl.store(weight + near, w, mask)
    if COPY is not None:
        tl.store(pointer(line + 6, COPY, WIDE) + start + near, w.to(COPY), mask)


def narrow_adamw_(
    rows: Iterable[Row],
    factor: Tensor,
    finite: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """One step of AdamW (Loshchilov & Hutter 2017, algorithm 2) in place, on the GPU; see `adamw_`.

    factor, finite: 0-dim fp32; the first multiplies the gradients; if the second is 0 nothing is written.

    Raises ValueError for tensors that are not as `Row` says, RuntimeError while a CUDA graph is captured.

    Memory traffic with a bf16 gradient and a bf16 copy is 20 bytes an element with moments in bf16, 16.1 with
    moments in 8 bits, and 14 with moments and weights in bf16, where fp32 has 28.
    """
    tables = defaultdict(list)
    programs = defaultdict(int)
    for row in rows:
        _check(row, finite, factor.device)
        for key, line, count in _lines(row):
            tables[key].append((programs[key], *line))
            programs[key] += count
    for key, lines in tables.items():
        with torch.cuda.device_of(factor):
            table = table_of(lines, factor)
            launch(
                narrow_adamw_kernel, (programs[key],), table, len(lines), factor, finite, maps(factor.device),
                decades(factor.device), lr, *betas, eps, decay, *key, TINY, ROWS, BLOCK,
                num_warps=4,
            )  # fmt: skip


def _lines(row: Row) -> Iterable[tuple[tuple, tuple, int]]:
    """(the kernel's types, a line of the table without its first program, number of programs) of a row.

    As in `adamw_`, elements past the last multiple of 16 are launched separately.
    """
    weight, grad, mean, _, copy = parts = row[:5]
    addresses = [0 if t is None else t.data_ptr() for t in parts]
    sizes = [0 if t is None else t.element_size() for t in parts]
    written = None if copy is None else KINDS[copy.dtype]
    types = KINDS[weight.dtype], KINDS[grad.dtype], KINDS[mean.dtype], written
    place, block, numel = row.place, row.block, weight.numel()
    cut = place.chunk != place.stride
    aligned = not any(address % 16 for address in addresses)
    scales = [0 if t is None else t.data_ptr() for t in (row.mean_scale, row.square_scale)]
    step = row.step.data_ptr()
    where = place.salt, place.base, place.chunk, place.stride
    if block:
        blocks = numel // block
        line = blocks, *addresses, step, *scales, *where, row.first, block
        yield (*types, cut, aligned and block % 16 == 0), line, cdiv(blocks, ROWS)
        return
    wide = numel - numel % 16 if aligned else 0
    for begin, end in ((0, wide), (wide, numel)):
        if begin < end:
            moved = [
                address + begin * size if address else 0
                for address, size in zip(addresses, sizes, strict=True)
            ]
            line = end - begin, *moved, step, *scales, *where, row.first + begin, 1
            yield (*types, cut, end == wide), line, cdiv(end - begin, ROWS * BLOCK)


@torch.no_grad()
def step_on_cpu_(
    rows: Iterable[Row],
    factor: Tensor | None,
    rule: AdamWRule,
) -> None:
    """The same step as `narrow_adamw_` in plain PyTorch, on any device; copies are not written.

    factor: 0-dim; None: 1.
    """
    for row in rows:
        _check(row, row.step, row.weight.device)
        if not row.weight.numel():
            continue
        m, v = _moments(row)
        grad = row.grad.float() if factor is None else row.grad.float() * factor
        w, m, v = adamw(row.weight.float(), grad, m, v, int(row.step), rule)
        bits = random_bits(row.place, int(row.step), w.numel(), w.device, row.first)
        first, second = (drawn.view(w.shape) for drawn in bits)
        for stored, scale, new, draws in (
            (row.mean, row.mean_scale, m, first & 0xFFFF),
            (row.square, row.square_scale, v, first >> 16),
            (row.weight, None, w, second & 0xFFFF),
        ):
            if scale is not None:
                codes, scales = quantise(new.view(-1), row.block, signed=stored is row.mean)
                stored.copy_(codes.view(stored.shape))
                scale.copy_(scales.view(scale.shape))
            else:
                stored.copy_(rounded(new, draws) if stored.dtype == torch.bfloat16 else new)


def _moments(row: Row) -> tuple[Tensor, Tensor]:
    """Both moments in fp32."""
    if row.mean_scale is None or row.square_scale is None:
        return row.mean.float(), row.square.float()
    pairs = (row.mean, row.mean_scale, True), (row.square, row.square_scale, False)
    mean, square = (
        dequantise(codes.view(-1), scale.view(-1), signed).view(codes.shape) for codes, scale, signed in pairs
    )
    return mean, square


def _check(row: Row, finite: Tensor, device: torch.device) -> None:
    """Raises ValueError unless the tensors are as `Row` says, on this device."""
    tensors = [t for t in row[:5] if t is not None]
    scales = [t for t in (row.mean_scale, row.square_scale) if t is not None]
    alike = all(t.numel() == row.weight.numel() and t.is_contiguous() for t in tensors)
    here = all(t.device == device for t in (*tensors, *scales, row.step, finite))
    if not (alike and here and _types_fit(row, scales)):
        got = [
            f"{t.dtype} {list(t.shape)} by {t.stride()} on {t.device}" for t in (*tensors, *scales, row.step)
        ]
        raise ValueError(
            "narrow_adamw_: weight must be fp32 or bf16, mean and square both fp32, bf16 or uint8 with "
            f"scales, all contiguous, of weight's length and on {device}; "
            f"weight, grad, mean, square, copy, scales, step: {got}"
        )


def _types_fit(row: Row, scales: list[Tensor]) -> bool:
    """Whether the types are as `Row` says, and the scales are those of blocks of at most BLOCK numbers."""
    kind, numel = row.mean.dtype, row.weight.numel()
    quantised = kind == torch.uint8
    known = row.weight.dtype in STORED[:2] and kind == row.square.dtype and kind in STORED
    floats = all(t.dtype in DTYPES for t in (row.grad, row.copy) if t is not None)
    blocks = not quantised or not numel or (0 < row.block <= BLOCK and numel % row.block == 0)
    exact = all(t.dtype == torch.float32 and t.is_contiguous() for t in (*scales, row.step))
    return known and floats and exact and len(scales) == 2 * quantised and blocks


def trace(dtype: torch.dtype, states: torch.dtype, masters: torch.dtype) -> None:
    """Launch the kernels that training in dtype needs with such moments and weights.

    They run on meta tensors, inside compile_only. Parts that are cut along another axis than the first are
    rare; their kernels are compiled when they are launched.
    """
    number = torch.empty((), device="meta")
    scale = torch.empty(1, device="meta")
    # 17 elements are split into a wide part and a remainder
    stored = {states: (256, scale) if states == torch.uint8 else (17, None)}
    if masters != torch.float32:  # moments of small parameters stay fp32
        stored[torch.float32] = 17, None
    copies = [None] if dtype in (torch.float32, masters) else [None, dtype]
    for kind, (n, scales) in stored.items():
        weight = torch.empty(n, device="meta", dtype=masters)
        moments = weight.to(kind)
        for grad, copy in itertools.product({torch.float32, dtype}, copies):
            written = None if copy is None else weight.to(copy)
            tensors = weight, weight.to(grad), moments, moments, written
            row = Row(*tensors, number, Place(0), scales, scales)
            narrow_adamw_([row], number, number, 1e-3, (0.9, 0.95), 1e-8, 0.1)


def _of_step(step: StepShapes) -> Iterable[tuple]:
    if (step.states, step.masters) != (torch.float32, torch.float32):
        yield trace, step.dtype, step.states, step.masters


collect("narrow_adamw", {StepShapes: _of_step})
