"""Cross-entropy of a block of logits, and its gradient, which overwrites the logits.

It is one kernel, which reads each row twice and writes it once.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.launch.kernel_launch import cdiv, device_facts, launch
from tmoe.ops.launch.shapes import StepShapes
from tmoe.ops.register import collect

# For rows of fp32 triton 3.8 needs one register a thread more than 64; triton 3.6 does not.
WIDER = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)


@triton.jit
def cross_entropy_kernel(
    logits,
    targets,
    losses,
    V: tl.constexpr,
    W: tl.constexpr,
    IGNORE: tl.constexpr,
    GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row's loss; with GRAD also its gradient, written over the logits. See `cross_entropy_`."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * W
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits + start + columns, start + columns < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x))
        from_here = tl.where(higher > float("-inf"), higher, 0.0)  # avoids -inf - -inf if all are -inf so far
        total = total * tl.exp(top - from_here) + tl.sum(tl.exp(x - from_here))
        top = higher
    lse = top + tl.log(total)
    if target == IGNORE:
        tl.store(losses + row, 0.0)
        if GRAD:
            for start in range(0, W, BLOCK):
                tl.store(
                    logits + start + columns, tl.zeros((BLOCK,), logits.dtype.element_ty), start + columns < W
                )
    else:
        inside = (target >= 0) & (target < V)  # otherwise it would read another row's logits
        lse = tl.where(inside, lse, float("nan"))
        tl.store(losses + row, lse - tl.load(logits + target, inside, other=0.0).to(tl.float32))
        tl.debug_barrier()  # the target's logit is read before a thread writes over it
        if GRAD:
            for start in range(0, W, BLOCK):
                x = tl.load(logits + start + columns, start + columns < V, other=float("-inf")).to(tl.float32)
                p = tl.exp(x - lse) - tl.where(start + columns == target, 1.0, 0.0)
                tl.store(logits + start + columns, p.to(logits.dtype.element_ty), start + columns < W)


def aligned(V: int, width: int) -> int:
    """Columns of logits for V tokens of `width` bytes each, such that each row is aligned to 16 bytes.

    Products with unaligned rows run at a sixth of the speed. Measured on an H200 with V = 49155 in bf16 and
    16384 rows of 1536, loss and gradients took 62 ms, and 11 ms for V = 49152. With aligned row strides but
    V = 49155 columns they took 49 ms.
    """
    return cdiv(V * width, 16) * 16 // width


def cross_entropy_(logits_RW: Tensor, targets_R: Tensor, V: int, ignore: int, grad: bool) -> Tensor:
    """-log softmax(logits[:, :V])[target] of each row, fp32 [R], 0 where the target is `ignore`; on the GPU.

    With grad, softmax - onehot overwrites the logits, rounded to their type. It is 0 in ignored rows, and in
    the columns from V on. Without grad the logits do not change.

    logits_RW: contiguous, of any float type; the arithmetic is fp32. A row that fits in the cache is read
        from memory once.
    targets_R: the target of each row. A target that is neither `ignore` nor in 0 .. V - 1 makes its row's
        loss and gradient NaN, because the host would have to wait for the GPU to raise an error.
    """
    R, W = logits_RW.shape
    losses = torch.empty(R, dtype=torch.float32, device=logits_RW.device)
    if R:
        aligned_rows = logits_RW.dtype == torch.float32 and grad and V % 16 == 0
        wider = WIDER and aligned_rows and device_facts(logits_RW.device)[0] == "cuda:90"
        options = {"maxnreg": 72} if wider else {}
        with torch.cuda.device_of(logits_RW):
            launch(
                cross_entropy_kernel, (R,), logits_RW, targets_R, losses, V, W, ignore, grad, 8192,
                num_warps=8, **options,
            )  # fmt: skip
    return losses


@triton.jit
def scale_kernel(x, factor, out, numel, BLOCK: tl.constexpr):
    """out = x * factor, BLOCK elements a program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + at, at < numel) * tl.load(factor)
    tl.store(out + at, y.to(out.dtype.element_ty), at < numel)


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype, in_place: bool = False) -> Tensor:
    """x * factor, rounded to dtype, in one pass. x is contiguous; factor is 0-dim, on the GPU.

    torch.mul(x, factor, out=...) reaches a third of the bandwidth if the types differ.

    in_place: write the result over x, if dtype is x's type.
    """
    out = x if in_place and x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    if n := x.numel():
        with torch.cuda.device_of(x):
            launch(scale_kernel, (cdiv(n, 2048),), x, factor, out, n, 2048, num_warps=8)
    return out


def trace(V: int, D: int, ignore: int, dtype: torch.dtype) -> None:
    """Launch the kernels on meta tensors, inside compile_only.

    They are launched for logits with and without gradient, and for the gradient of the head [V, D].
    """
    logits = torch.empty(1, aligned(V, dtype.itemsize), dtype=dtype, device="meta")
    for grad in (True, False):
        cross_entropy_(logits, torch.empty(1, dtype=torch.int64, device="meta"), V, ignore, grad)
    for grad_dtype in dict.fromkeys(
        (torch.float32, dtype)
    ):  # gradients of the head, and of the hidden states
        scaled(torch.empty(V, D, dtype=grad_dtype, device="meta"), torch.empty((), device="meta"), dtype)


def _of_step(step: StepShapes) -> Iterable[tuple]:
    yield trace, step.vocab, step.dim, step.ignore, step.dtype


collect("cross_entropy", {StepShapes: _of_step})
