"""AdamW on one tensor in one pass over memory: clipping, the choice not to step, and the copy to compute with, all included."""

from typing import Any, cast

import torch
import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    weight, grad, mean, square, copy, step, factor, finite, numel, lr, beta1, beta2, eps, decay,
    COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(finite) == 0:
        return
    n = tl.load(step)
    correction1 = 1 - tl.exp2(n * tl.log2(beta1))
    correction2 = tl.sqrt(1 - tl.exp2(n * tl.log2(beta2)))
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < numel
    w = tl.load(weight + at, here)
    g = tl.load(grad + at, here).to(tl.float32) * tl.load(factor)
    m = tl.load(mean + at, here)
    v = tl.load(square + at, here)
    m += (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    w -= lr * decay * w
    w -= lr / correction1 * m / (tl.sqrt(v) / correction2 + eps)
    tl.store(weight + at, w, here)
    tl.store(mean + at, m, here)
    tl.store(square + at, v, here)
    if COPY:
        tl.store(copy + at, w.to(copy.dtype.element_ty), here)


def adamw_(weight, grad, mean, square, copy, step, factor, finite, lr, betas, eps, decay):
    """One step of AdamW (Loshchilov & Hutter 2017, algorithm 2) in place, on the GPU.

    Args:
        weight, mean, square: fp32 and contiguous; weight decays by lr * decay.
        grad: float of any type, contiguous, of weight's shape; it counts times `factor`, and is not written.
        copy: receives the new weight, rounded to its type; or None.
        step: 0-dim fp32, the number of this step, from 1.
        factor, finite: 0-dim fp32. Where finite is 0 nothing is written. Scalars stay on the GPU: nobody waits for them.
    28 bytes an element with a bf16 gradient and a bf16 copy: reading and writing them is all the time that it takes.
    """
    BLOCK, n, (beta1, beta2) = 1024, weight.numel(), betas
    tensors = [t.view(-1) for t in (weight, grad, mean, square, weight if copy is None else copy)]
    # The rest apart, so that one and the same binary works on an element however a tensor is cut: the compiler makes another one for
    # lengths that 16 divides, and it rounds otherwise.
    for part in (slice(0, n - n % 16), slice(n - n % 16, n)):
        parts = [t[part] for t in tensors]
        if length := parts[0].numel():
            with torch.cuda.device(weight.device):
                cast(Any, adamw_kernel)[(triton.cdiv(length, BLOCK),)](
                    *parts,
                    step,
                    factor,
                    finite,
                    length,
                    lr,
                    beta1,
                    beta2,
                    eps,
                    decay,
                    copy is not None,
                    BLOCK,
                    num_warps=4,
                )
