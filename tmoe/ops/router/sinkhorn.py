"""sinkhorn: potentials that give every expert the same load, by a fixed number of iterations in one launch.

An iteration subtracts, from each expert's logits, the logarithm of its load under the present softmax; a load
is a multiple of the mean load. This is Sinkhorn's iteration in log space (Cuturi 2013): the softmax
normalizes the rows, the subtraction the columns. Nesterov's momentum of 1/2 doubles a slow rate of
convergence at no cost: with logits of standard deviation 6 (256 tokens, 128 experts) 32 iterations leave a
residual of 2e-5; without momentum it was 1e-2.

The kernel's programs share the tokens and synchronize once an iteration. All of them must be resident, so the
launch is cooperative. Each program adds up all programs' loads in the same order, so equal inputs give equal
bits.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.ops import reference
from tmoe.ops.argument_checks import check_tensors, require
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, device_facts, launch
from tmoe.ops.launch.shapes import LayerShapes
from tmoe.ops.register import register

WARPS = 8
REGISTERS = 64  # most registers a thread
PARTS = 16  # programs whose sums are read at a time


def sinkhorn(logits_TE: Tensor, live_T: Tensor | None, iterations: int) -> tuple[Tensor, Tensor]:
    """Potentials: a number to add to each expert's logits so that the softmax loads all experts evenly.

    Args:
        logits_TE: [T, E] float32 or float64; T may be 0.
        live_T: bool, False at tokens that do not count; None: all count.
        iterations: 1 or more.

    Returns potentials_E, in the logits' type, and the residual, 0-dim: the largest relative error of a load.
    Neither is differentiable. Raises ValueError for shapes or types that do not fit. Definition:
    `tmoe.ops.reference.sinkhorn`.
    """
    check_tensors(logits=logits_TE)
    require(logits_TE.dim() == 2, "logits", f"shape {tuple(logits_TE.shape)}", "[T, E]")
    require(logits_TE.dtype in (torch.float32, torch.float64), "logits", logits_TE.dtype, "fp32 or fp64")
    ok = type(iterations) is int and iterations > 0
    require(ok, "iterations", repr(iterations), "a whole number from 1 on")
    if live_T is not None:
        ok = live_T.dtype == torch.bool and live_T.shape == logits_TE.shape[:1]
        require(ok, "live", f"{live_T.dtype} {tuple(live_T.shape)}", f"torch.bool [T={len(logits_TE)}]")
        require(live_T.device == logits_TE.device, "live", live_T.device, f"{logits_TE.device}, as logits")
    return torch.ops.tmoe.sinkhorn(logits_TE.detach(), live_T, iterations)


@triton.jit
def meet(arrived, arrivals):
    """Wait until all programs have called this; afterwards their earlier stores are visible."""
    tl.debug_barrier()  # of all threads of this program
    tl.atomic_add(arrived, 1, sem="release", scope="gpu")
    while tl.load(arrived, volatile=True) < arrivals:
        pass
    tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["T", "iterations", "first", "programs"])
def sinkhorn_kernel(
    logits, live, potentials, residual, parts, arrived, T, iterations, first, programs,
    E: tl.constexpr, EP: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """One of `programs` programs that share T tokens, R at a time; this launch has those from `first` on.

    parts: [2, programs, 2, EP], for even and for odd iterations, each program's loads, followed by its number
        of tokens. With two buffers a program overwrites only numbers that all other programs have read.
    arrived: counter of the synchronization, 0 before the launch.
    """
    program = first + tl.program_id(0)
    e = tl.arange(0, EP)
    now = tl.zeros((EP,), tl.float32)
    uneven = now
    # Half of the last step. The loop cannot carry the last position itself: if a carried name is set to
    # another carried name, triton 3.6 treats it as a constant (its interpreter does not).
    momentum = tl.zeros((EP,), tl.float32)
    for i in range(iterations + 1):  # the last iteration only computes the residual
        last = i == iterations
        ahead = tl.where(last, now, now + momentum)
        load = tl.zeros((EP,), tl.float32)
        tokens = tl.zeros((R,), tl.float32)
        for start in range(program * R, T, programs * R):
            r = start + tl.arange(0, R)
            weight = (r < T).to(tl.float32)
            if LIVE:
                weight = tl.load(live + r, mask=r < T, other=0).to(tl.float32)
            at = r.to(tl.int64)[:, None] * E + e[None, :]
            x = tl.load(logits + at, mask=(r < T)[:, None] & (e < E)[None, :], other=float("-inf"))
            x += ahead[None, :]
            most = tl.max(x, 1)
            plan = tl.exp(x - tl.where(r < T, most, 0.0)[:, None])
            total = tl.where(r < T, tl.sum(plan, 1), 1.0)
            load += tl.sum(plan * (weight / total)[:, None], 0)
            tokens += weight
        own_part = parts + ((i % 2) * programs + program).to(tl.int64) * 2 * EP
        tl.store(own_part + e, load)
        tl.store(own_part + EP, tl.sum(tokens, 0))
        meet(arrived, (i + 1) * programs)

        load = tl.zeros((EP,), tl.float32)
        tokens = tl.zeros((PARTS,), tl.float32)
        for p in range(0, programs, PARTS):
            q = p + tl.arange(0, PARTS)
            other_parts = parts + ((i % 2) * programs + q).to(tl.int64) * 2 * EP
            there = q < programs
            # bypass the L1 cache, which may hold values from two iterations ago
            loads = tl.load(other_parts[:, None] + e[None, :], there[:, None], 0.0, cache_modifier=".cg")
            load += tl.sum(loads, 0)
            tokens += tl.load(other_parts + EP, there, 0.0, cache_modifier=".cg")
        uneven = load * (E / tl.maximum(tl.sum(tokens, 0), 1.0))
        moved = ahead - tl.log(tl.maximum(uneven, 1e-30))
        momentum = (moved - now) / 2
        now = tl.where(last, now, moved)
    if program == 0:
        tl.store(potentials + e, now, mask=e < E)
        tl.store(residual, tl.max(tl.where(e < E, tl.abs(uneven - 1.0), 0.0), 0))


def rows_a_turn(E: int) -> int:
    """Tokens that a program handles at a time: 8 numbers a thread."""
    return max(1, 2048 // power_of_2(E))


def forward(logits: Tensor, live: Tensor | None, iterations: int) -> tuple[Tensor, Tensor]:
    """The op on the GPU; fp64 logits use the reference."""
    if logits.dtype == torch.float64:
        return reference.sinkhorn(logits, live, iterations)
    logits = logits.contiguous()
    T, E = logits.shape
    arch, processors, _ = device_facts(logits.device)
    programs = max(1, min(processors, cdiv(T, rows_a_turn(E))))
    potentials, residual = logits.new_empty(E), logits.new_empty(())
    parts = logits.new_empty(2, programs, 2, power_of_2(E))
    arrived = torch.zeros(1, dtype=torch.int32, device=logits.device)
    marks = None if live is None else live.contiguous()
    # ptxas would spill to make room for a second program, which never runs; AMD's compiler has no such option
    room = {} if arch.startswith("hip") else {"maxnreg": REGISTERS}
    launch(
        sinkhorn_kernel, (programs,), logits, marks, potentials, residual, parts, arrived, T, iterations,
        0, programs, E, power_of_2(E), rows_a_turn(E), PARTS, live is not None,
        num_warps=WARPS, launch_cooperative_grid=True, **room,
    )  # fmt: skip
    return potentials, residual


def _forward_cuda(logits: Tensor, live: Tensor | None, iterations: int) -> tuple[Tensor, Tensor]:
    with torch.cuda.device(logits.device):
        return forward(logits, live, iterations)


def _fake(logits: Tensor, live: Tensor | None, iterations: int) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[1]), logits.new_empty(())


def trace(T: int, E: int) -> None:
    """Run the kernel on meta tensors, with padding and without, inside compile_only."""
    logits = torch.empty(T, E, device="meta")
    for live in (None, torch.empty(T, dtype=torch.bool, device="meta")):
        forward(logits, live, 1)


def _of_layer(layer: LayerShapes) -> Iterable[tuple]:
    if layer.router.sinkhorn:
        yield trace, layer.tokens, layer.router.outputs


register(
    "sinkhorn",
    "(Tensor logits, Tensor? live, int iterations) -> (Tensor, Tensor)",
    cpu=reference.sinkhorn,
    cuda=_forward_cuda,
    fake=_fake,
    traces={LayerShapes: _of_layer},
)
