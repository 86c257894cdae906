"""AdamW on any number of tensors in one pass over their memory.

The same pass clips, can skip the step, and writes the working copies.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.launch.kernel_launch import cdiv, launch
from tmoe.ops.launch.shapes import StepShapes
from tmoe.ops.register import collect

BLOCK = 1024
# length of the table's line for a tensor: its first program, its number of elements, and the addresses of its
# weight, grad, mean, square, copy and step
ROW = tl.constexpr(8)
DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}


@triton.jit
def pointer(line, dtype, WIDE: tl.constexpr):
    """A pointer to the tensor whose address is in the table. WIDE: it is 16-byte aligned."""
    p = tl.load(line).to(tl.pointer_type(dtype), bitcast=True)
    return tl.multiple_of(p, 16) if WIDE else p


@triton.jit(do_not_specialize=["lines", "lr", "beta1", "beta2", "eps", "decay"])
def adamw_kernel(
    table, lines, factor, finite, lr, beta1, beta2, eps, decay,
    GRAD: tl.constexpr, COPY: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One AdamW step for BLOCK elements of the tensor that this program's line of the table describes."""
    if tl.load(finite) == 0:
        return
    program = tl.program_id(0)
    low, high = program * 0, lines
    # find the last line whose first program is at most this program: 9 reads from L1 for 400 tensors
    while high - low > 1:
        middle = (low + high) // 2
        later = tl.load(table + middle * ROW) > program
        low, high = tl.where(later, low, middle), tl.where(later, middle, high)
    line = table + low * ROW
    numel = tl.load(line + 1)
    if WIDE:
        numel = tl.multiple_of(numel, 16)
    at = (program - tl.load(line)) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    weight, mean, square = (
        pointer(line + 2, tl.float32, WIDE), pointer(line + 4, tl.float32, WIDE), pointer(line + 5,
        tl.float32, WIDE),
    )  # fmt: skip
    n = tl.load(pointer(line + 7, tl.float32, False))
    correction1 = 1 - tl.exp2(n * tl.log2(beta1))
    correction2 = tl.sqrt(1 - tl.exp2(n * tl.log2(beta2)))
    w = tl.load(weight + at, mask)
    g = tl.load(pointer(line + 3, GRAD, WIDE) + at, mask).to(tl.float32) * tl.load(factor)
    m = tl.load(mean + at, mask)
    v = tl.load(square + at, mask)
    m += (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    w -= lr * decay * w
    w -= lr / correction1 * m / (tl.sqrt(v) / correction2 + eps)
    tl.store(weight + at, w, mask)
    tl.store(mean + at, m, mask)
    tl.store(square + at, v, mask)
    if COPY is not None:
        tl.store(pointer(line + 6, COPY, WIDE) + at, w.to(COPY), mask)


def adamw_(
    tensors: Iterable[tuple[Tensor | None, ...]],
    factor: Tensor,
    finite: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """One step of AdamW (Loshchilov & Hutter 2017, algorithm 2) in place, on the GPU.

    Args:
        tensors: (weight, grad, mean, square, copy, step) of each parameter, all on one GPU.
            weight, mean, square: fp32 and contiguous; weight decays by lr * decay.
            grad: float of any type, contiguous, of weight's shape; it is multiplied by `factor`, and is not
                written.
            copy: contiguous; the new weight is written to it, rounded to its type; or None.
            step: 0-dim fp32, the number of this step, from 1.
        factor: 0-dim fp32, multiplies the gradients.
        finite: 0-dim fp32; if it is 0 nothing is written. Both scalars stay on the GPU, so the host does not
            wait for them.
        lr: learning rate.
        betas: decay rates of mean and square. The corrections 1 - beta^step are computed in fp32. In the
            first steps the relative error of the step's length is therefore 1e-6 at 0.99, 1e-5 at 0.999 and
            1e-4 at 0.9999. (A series without this error spilled registers.)
        eps: added to the root of the corrected square.
        decay: weight decay.

    Raises ValueError for tensors that are not as above, RuntimeError while a CUDA graph is captured.

    Memory traffic is 28 bytes an element with a bf16 gradient and a bf16 copy, and accounts for all of the
    time on the GPU. One launch handles all tensors of equal types: with one launch a tensor, 408 in
    moe-pilot-14b, the host was slower than the GPU.
    """
    tables = defaultdict(list)
    programs = defaultdict(int)
    for *parts, step in tensors:
        weight, grad, _, _, copy = parts
        numel = weight.numel()
        sizes = [0 if t is None else t.element_size() for t in parts]
        _check(parts, step, finite, factor.device)
        starts = [0 if t is None else t.data_ptr() for t in parts]

        # The part that is not wide is launched separately. So the same binary works on an element however a
        # tensor is sharded; another binary may round differently. If a tensor is cut at multiples of 16
        # elements, all its pieces are wide wherever the tensor is.
        wide = 0 if any(start % 16 for start in starts) else numel - numel % 16
        for begin, end in ((0, wide), (wide, numel)):
            if begin < end:
                key = DTYPES[grad.dtype], None if copy is None else DTYPES[copy.dtype], end == wide
                addresses = [start + begin * size for start, size in zip(starts, sizes, strict=True)]
                tables[key].append((programs[key], end - begin, *addresses, step.data_ptr()))
                programs[key] += cdiv(end - begin, BLOCK)

    for key, lines in tables.items():
        with torch.cuda.device_of(factor):
            table = table_of(lines, factor)
            launch(
                adamw_kernel, (programs[key],), table, len(lines), factor, finite, lr, *betas, eps, decay,
                *key, BLOCK,
                num_warps=4,
            )  # fmt: skip


def table_of(lines: list[tuple[int, ...]], like: Tensor) -> Tensor:
    """The table of a launch, int64 [len(lines), numbers of a line], on the device of `like`.

    Raises RuntimeError while a CUDA graph is captured.
    """
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "AdamW's step cannot be captured in a CUDA graph: the next step's gradients have other addresses"
        )
    table = torch.tensor(lines, dtype=torch.int64, pin_memory=like.is_cuda)
    return table.to(like.device, non_blocking=True)


def _check(parts: list[Any], step: Any, finite: Tensor, device: torch.device) -> None:
    """Raises ValueError unless weight, grad, mean, square, copy and step are as `adamw_` requires."""
    weight, _, mean, square, _ = parts
    numel = weight.numel()
    if not (
        weight.dtype == mean.dtype == square.dtype == step.dtype == torch.float32
        and all(t is None or (t.numel() == numel and t.is_contiguous() and t.dtype in DTYPES) for t in parts)
        and all(t is None or t.device == device for t in (*parts, step, finite))
    ):
        got = [
            t if t is None else f"{t.dtype} {list(t.shape)} by {t.stride()} on {t.device}"
            for t in (*parts, step, finite)
        ]
        raise ValueError(
            "adamw_: weight, mean, square and step must be fp32, all contiguous, "
            f"of weight's length and on {device}; "
            f"weight, grad, mean, square, copy, step, finite: {got}"
        )


def trace(dtype: torch.dtype) -> None:
    """Launch the kernels that training in dtype needs, with and without copies.

    They run on meta tensors, inside compile_only.
    """
    # 17 elements are split into a wide part and a remainder; meta tensors begin at address 0
    weight = torch.empty(17, device="meta")
    number = torch.empty((), device="meta")
    for grad in {torch.float32, dtype}:
        for copy in [None] if dtype == torch.float32 else [None, weight.to(dtype)]:
            parts = weight, weight.to(grad), weight, weight, copy
            adamw_([(*parts, number)], number, number, 1e-3, (0.9, 0.95), 1e-8, 0.1)


def _of_step(step: StepShapes) -> Iterable[tuple]:
    yield trace, step.dtype


collect("adamw", {StepShapes: _of_step})
