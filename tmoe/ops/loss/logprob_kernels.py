"""Log-probs and entropies of a block of logits, and the gradient of the logits: a kernel for each.

next: logprob.py
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops.launch.kernel_launch import launch
from tmoe.ops.launch.shapes import StepShapes
from tmoe.ops.loss.cross_entropy import aligned
from tmoe.ops.register import collect

BLOCK = 4096  # columns at a time


@triton.jit(do_not_specialize=["scale"])
def logprob_kernel(
    logits,
    targets,
    logp,
    lse,
    entropy,
    scale,
    V: tl.constexpr,
    W: tl.constexpr,
    IGNORE: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row in one pass: log-sum-exp, the target's log-prob, the entropy. See `measure`."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * W
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    if target == IGNORE:
        tl.store(logp + row, 0.0)
        tl.store(lse + row, 0.0)
        if ENTROPY:
            tl.store(entropy + row, 0.0)
    else:
        top = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)  # the sum of e^(x - top)
        drawn = tl.full((), 0.0, tl.float32)  # the sum of e^(x - top) (x - top)
        for start in range(0, V, BLOCK):
            x = tl.load(logits + start + columns, start + columns < V, other=float("-inf")).to(tl.float32)
            x *= scale
            higher = tl.maximum(top, tl.max(x))
            from_here = tl.where(higher > float("-inf"), higher, 0.0)  # avoids -inf - -inf
            shrink = tl.exp(top - from_here)
            share = tl.exp(x - from_here)
            if ENTROPY:  # `where` avoids 0 * -inf
                step = tl.where(top > float("-inf"), top - from_here, 0.0)
                part = tl.sum(tl.where(share > 0, share * (x - from_here), 0.0))
                drawn = shrink * (drawn + total * step) + part
            total = total * shrink + tl.sum(share)
            top = higher
        inside = (target >= 0) & (target < V)  # otherwise it would read another row's logits
        z = top + tl.log(total)
        z = tl.where(inside, z, float("nan"))
        tl.store(logp + row, tl.load(logits + target, inside, other=0.0).to(tl.float32) * scale - z)
        tl.store(lse + row, z)
        if ENTROPY:
            tl.store(entropy + row, tl.log(total) - drawn / total)


@triton.jit(do_not_specialize=["scale"])
def logprob_gradient_kernel(
    logits,
    targets,
    lse,
    entropy,
    by_logp,
    by_entropy,
    grad,
    scale,
    V: tl.constexpr,
    W: tl.constexpr,
    IGNORE: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row's gradient by its logits; `grad` may be the logits themselves. See `gradient`."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * W
    grad += row * W
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    if target == IGNORE:
        for start in range(0, W, BLOCK):
            tl.store(grad + start + columns, tl.zeros((BLOCK,), grad.dtype.element_ty), start + columns < W)
    else:
        z = tl.load(lse + row)
        g = tl.load(by_logp + row) * scale
        H = tl.load(entropy + row)  # without ENTROPY, entropy and by_entropy are unused placeholders
        g_H = tl.load(by_entropy + row) * scale
        for start in range(0, W, BLOCK):
            x = tl.load(logits + start + columns, start + columns < V, other=float("-inf")).to(tl.float32)
            x = x * scale - z
            p = tl.exp(x)
            d = g * (tl.where(start + columns == target, 1.0, 0.0) - p)
            if ENTROPY:
                d -= g_H * tl.where(p == 0, 0.0, p * (x + H))  # NaN is kept
            tl.store(grad + start + columns, d.to(grad.dtype.element_ty), start + columns < W)


def measure(
    logits_RW: Tensor, targets_R: Tensor, V: int, ignore: int, scale: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob of the target, log-sum-exp, entropy) of softmax(scale * logits[:, :V]); on the GPU.

    Each is fp32 [R], 0 in ignored rows; the entropy is empty unless `entropy` is True. The logits, contiguous
    and of any float type, are read once. A target that is neither `ignore` nor in 0 .. V - 1 gives NaN,
    because the host would have to wait for the GPU to raise an error.
    """
    R, W = logits_RW.shape
    logp, lse, H = (
        torch.empty(n, dtype=torch.float32, device=logits_RW.device) for n in (R, R, R if entropy else 0)
    )
    if R:
        with torch.cuda.device_of(logits_RW):
            launch(
                logprob_kernel, (R,), logits_RW, targets_R, logp, lse, H if entropy else lse, float(scale),
                V, W, ignore, entropy, BLOCK, num_warps=8,
            )  # fmt: skip
    return logp, lse, H


def gradient(
    logits_RW: Tensor,
    targets_R: Tensor,
    V: int,
    ignore: int,
    scale: float,
    found: tuple[Tensor, Tensor],
    by: tuple[Tensor, Tensor | None],
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits, [R, W] in dtype, on the GPU. It overwrites logits of that type.

    With p the softmax, H its entropy, g and g_H the gradients of log-prob and entropy, it is
    scale * (g (onehot(target) - p) - g_H p (ln p + H)). It is 0 in ignored rows and from column V on.

    found: log-sum-exp and entropy, as `measure` returned them.
    by: g, and g_H or None.
    """
    R, W = logits_RW.shape
    grad = logits_RW if logits_RW.dtype == dtype else torch.empty_like(logits_RW, dtype=dtype)
    (lse, H), (by_logp, by_entropy) = found, by
    with_entropy = by_entropy is not None
    if R:
        with torch.cuda.device_of(logits_RW):
            launch(
                logprob_gradient_kernel, (R,), logits_RW, targets_R, lse, H if with_entropy else lse, by_logp,
                by_entropy if with_entropy else by_logp, grad, float(scale), V, W, ignore, with_entropy,
                BLOCK, num_warps=8,
            )  # fmt: skip
    return grad


def trace(V: int, ignore: int, dtype: torch.dtype) -> None:
    """Launch the kernels on meta tensors, inside compile_only: for logits of this type and of fp32."""
    targets = torch.empty(1, dtype=torch.int64, device="meta")
    for logits_dtype in dict.fromkeys((dtype, torch.float32)):
        logits = torch.empty(1, aligned(V, dtype.itemsize), dtype=logits_dtype, device="meta")
        for entropy in (False, True):
            logp, lse, H = measure(logits, targets, V, ignore, 1.0, entropy)
            gradient(logits, targets, V, ignore, 1.0, (lse, H), (logp, H if entropy else None), dtype)


def _of_step(step: StepShapes) -> Iterable[tuple]:
    if step.by_log_probs:
        yield trace, step.vocab, step.ignore, step.dtype


collect("logprobs", {StepShapes: _of_step})
