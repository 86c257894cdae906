"""The gated delta rule on a GPU: the launches of ops/delta/kernels.py, forward and backward.

Kept for backward: q, k, v, g, beta, sums of g, and T. States, U, W and F are computed again. Without the
correction the inputs alone are kept.

next: ops/delta/rule.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.ops.delta import kernels
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, device_facts, empty, launch, tf32
from tmoe.ops.launch.shapes import LinearShapes

LENGTH = 64  # tokens of a chunk, L of the kernels
WIDEST = 256  # most channels of a key or value head

# Architectures on which tests/ops/test_delta_gpu.py has passed, such as "cuda:90". On other GPUs the plain
# form computes the rule and the convolution: a kernel that a compiler gets wrong raises no error.
MEASURED: frozenset[str] = frozenset()


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, g, beta


class Sizes(NamedTuple):
    """Sizes of a call."""

    B: int
    S: int
    H: int
    G: int
    K: int
    V: int

    @property
    def N(self) -> int:
        """Chunks of a row."""
        return cdiv(self.S, LENGTH)

    @property
    def chunks(self) -> int:
        """Chunks of all heads and rows."""
        return self.B * self.H * self.N

    @property
    def heads(self) -> tuple[int, int, int, int]:
        return self.H, self.G, self.K, self.V


def temporaries(H: int, K: int, V: int, correct: bool = True) -> int:
    """Numbers in fp32 that a backward holds at one time for each token.

    U, F, dF and d(beta v); W, d(beta head k), dq and dk of each head; two states for each chunk. Without the
    correction U and dF, dq and dk, and two states.
    """
    if not correct:
        return H * (2 * V + 2 * K + 2 * cdiv(K * V, LENGTH))
    return H * (4 * V + 4 * K + 2 * cdiv(K * V, LENGTH))


def fits(K: int, V: int) -> bool:
    """Whether the kernels have room for heads of these widths."""
    return 0 < K <= WIDEST and 0 < V <= WIDEST


def sizes_of(q: Tensor, v: Tensor) -> Sizes:
    B, S, H, V = v.shape
    return Sizes(B, S, H, q.shape[2], q.shape[3], V)


def padded(width: int) -> int:
    """Channels of a tile: products need at least 16."""
    return max(16, power_of_2(width))


def precision(dtype: torch.dtype) -> str:
    """How products of fp32 are computed: exactly, unless torch allows TF32."""
    return "tf32" if dtype != torch.float32 or tf32() else "ieee"


def _arch(device: torch.device) -> str:
    """The GPU's architecture; "" for triton's interpreter."""
    return "" if device.type == "cpu" else device_facts(device)[0]


def measured(device: torch.device) -> bool:
    """Whether the kernels have passed their tests on this GPU's architecture."""
    return device.type == "cuda" and bool(MEASURED) and _arch(device) in MEASURED


class Call:
    """The arguments that the kernels of a call share."""

    def __init__(self, sizes: Sizes, run: Tensor | None, dtype: torch.dtype, device: torch.device):
        self.sizes = sizes
        self.run = run
        # intermediate results, and the operands of products with them, are fp32 (TF32) where registers and
        # shared memory suffice, on Hopper and later; else of the inputs' type
        wide = _arch(device) in ("", "cuda:90", "cuda:100", "cuda:120")
        self.dtype, self.device = torch.float32 if wide else dtype, device
        self.KP, self.VP = padded(sizes.K), padded(sizes.V)
        self.BV = min(32, self.VP)  # channels of values that a program handles
        self.parts = cdiv(sizes.V, self.BV)
        self.of_chunk = (sizes.N, sizes.B * sizes.H)
        self.of_head = (self.parts, sizes.B * sizes.H)
        self.warps = 8 if _arch(device).startswith("hip") else 4  # 4 waves would need 264 registers and more
        self.how = (self.run is not None, precision(dtype))

    def room(self, *shape: int, wide: bool = False) -> Tensor:
        """An empty tensor in the type of intermediate results; wide: in fp32."""
        return empty(shape, torch.float32 if wide else self.dtype, self.device)

    def runs(self, other: Tensor) -> Tensor:
        """The runs, or any tensor in their place."""
        return other if self.run is None else self.run


def prepared(
    call: Call, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, known: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, ...]:
    """Sums of g, T, U and W. known: sums and T, if they are known."""
    n = call.sizes
    sums, t = known or (call.room(n.chunks, LENGTH, wide=True), call.room(n.chunks, LENGTH, LENGTH))
    u, w = call.room(n.chunks, LENGTH, n.V), call.room(n.chunks, LENGTH, n.K)
    launch(
        kernels.prepare, call.of_chunk, k, v, g, beta, call.runs(g), sums, t, u, w, n.S, n.N, *n.heads,
        call.KP, call.VP, call.how[0], known is None, call.how[1], num_warps=8,
    )  # fmt: skip
    return sums, t, u, w


def weighed(call: Call, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of g, and F without the correction."""
    n = call.sizes
    sums, fresh = call.room(n.chunks, LENGTH, wide=True), call.room(n.chunks, LENGTH, n.V)
    launch(kernels.weigh, call.of_chunk, v, g, beta, sums, fresh, n.S, n.N, n.H, n.V, call.VP, num_warps=4)
    return sums, fresh


def scanned(call: Call, k: Tensor, sums: Tensor, u: Tensor, w: Tensor | None) -> Tensor:
    """The states before each chunk; F is written over u. w: None without the correction."""
    n = call.sizes
    states = call.room(n.chunks, n.K, n.V)
    launch(
        kernels.scan, call.of_head, k, call.runs(sums), sums, u, u if w is None else w, states, n.S, n.N,
        *n.heads, call.KP, call.BV, *call.how, w is not None, num_warps=4, num_stages=1,
    )  # fmt: skip
    return states


def kept_shapes(q: Tensor, v: Tensor, correct: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the sums of g and of T, which a forward keeps for its backward; empty without correction."""
    n = sizes_of(q, v)
    return ((n.chunks, LENGTH), (n.chunks, LENGTH, LENGTH)) if correct else ((0,), (0,))


def forward(inputs: Inputs, run: Tensor | None, correct: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """o, the sums of g in chunks, and T; the latter two are empty without the correction.

    inputs: q, k, v of one type, g and beta in fp32, all contiguous.
    """
    q, k, v, g, beta = inputs
    n = sizes_of(q, v)
    call = Call(n, run, v.dtype, v.device)
    if correct:
        sums, t, u, w = prepared(call, k, v, g, beta, None)
        kept = sums, t
    else:
        (sums, u), w = weighed(call, v, g, beta), None
        kept = call.room(0, wide=True), call.room(0, wide=True)
    states = scanned(call, k, sums, u, w)
    o = empty(v.shape, v.dtype, v.device)
    launch(
        kernels.outputs, (*call.of_chunk, call.parts), q, k, call.runs(g), sums, u, states, o, n.S, n.N,
        *n.heads, call.KP, call.BV, *call.how, num_warps=call.warps,
    )  # fmt: skip
    return o, *kept


def backward(
    do: Tensor, inputs: Inputs, run: Tensor | None, sums: Tensor, t: Tensor, correct: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k (fp32, summed over the heads that share them), v, g and beta. do: v's type.

    sums, t, correct: as of `forward`.
    """
    q, _, v, *_ = inputs
    n = sizes_of(q, v)
    call = Call(n, run, v.dtype, v.device)
    found = back_corrected(call, do, inputs, sums, t) if correct else back_weighed(call, do, inputs)
    dq, dk, dv, dg, db = found
    if n.H > n.G:
        dq, dk = (t.unflatten(2, (n.G, -1)).sum(3) for t in (dq, dk))
    return dq, dk, dv, dg, db


def back_weighed(call: Call, do: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    """`backward` without the correction; gradients of q and k for each head of values."""
    q, k, v, g, beta = inputs
    n = call.sizes
    sums, fresh = weighed(call, v, g, beta)
    states = scanned(call, k, sums, fresh, None)
    df, after = call.room(n.chunks, LENGTH, n.V), call.room(n.chunks, n.K, n.V)
    shared = (call.runs(g), sums)
    sized = (n.S, n.N, *n.heads, call.KP, call.BV, *call.how)
    launch(
        kernels.local_back, (*call.of_chunk, call.parts), q, k, do, *shared, df, *sized, num_warps=call.warps
    )
    launch(
        kernels.scan_back, call.of_head, q, k, do, *shared, df, df, after, *sized, False, num_warps=8,
        num_stages=1,
    )  # fmt: skip
    dv, d_sums = empty(v.shape, v.dtype, v.device), call.room(n.chunks, LENGTH, wide=True)
    dg, db = (empty(g.shape, torch.float32, g.device) for _ in range(2))
    launch(
        kernels.values_back, call.of_chunk, v, beta, df, df, df, dv, db, n.S, n.N, n.H, n.V, call.VP,
        call.how[1], False, num_warps=4,
    )  # fmt: skip
    dq, dk = (call.room(n.B, n.S, n.H, n.K, wide=True) for _ in range(2))
    launch(
        kernels.states_back, call.of_chunk, q, k, do, *shared, fresh, states, after, dq, dk, d_sums, *sized,
        False, num_warps=8, num_stages=1,
    )  # fmt: skip
    launch(
        kernels.scores_back, call.of_chunk, q, k, do, *shared, fresh, dq, dk, d_sums, dg, *sized,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return dq, dk, dv, dg, db


def back_corrected(call: Call, do: Tensor, inputs: Inputs, sums: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    """`backward` with the correction; gradients of q and k for each head of values."""
    q, k, v, g, beta = inputs
    n = call.sizes
    _, _, u, w = prepared(call, k, v, g, beta, (sums, t))
    fresh = u.clone()
    states = scanned(call, k, sums, fresh, w)
    df, after = call.room(n.chunks, LENGTH, n.V), call.room(n.chunks, n.K, n.V)
    shared = (call.runs(g), sums)
    sized = (n.S, n.N, *n.heads, call.KP, call.BV, *call.how)
    grid = (*call.of_chunk, call.parts)
    launch(kernels.local_back, grid, q, k, do, *shared, df, *sized, num_warps=call.warps)
    launch(
        kernels.scan_back, call.of_head, q, k, do, *shared, w, df, after, *sized, True, num_warps=8,
        num_stages=1,
    )  # fmt: skip
    d_bv, d_bk = call.room(n.chunks, LENGTH, n.V), call.room(n.chunks, LENGTH, n.K)
    d_beta, d_sums = (call.room(n.chunks, LENGTH, wide=True) for _ in range(2))
    dv = empty(v.shape, v.dtype, v.device)
    launch(
        kernels.values_back, call.of_chunk, v, beta, t, df, d_bv, dv, d_beta, n.S, n.N, n.H, n.V, call.VP,
        call.how[1], True, num_warps=4,
    )  # fmt: skip
    dq, dk = (call.room(n.B, n.S, n.H, n.K, wide=True) for _ in range(2))
    dg, db = (empty(g.shape, torch.float32, g.device) for _ in range(2))
    launch(
        kernels.keys_back, call.of_chunk, k, *shared, beta, t, states, df, after, dk, d_bk, d_beta, d_sums,
        *sized, num_warps=8, num_stages=1,
    )  # fmt: skip
    launch(
        kernels.states_back, call.of_chunk, q, k, do, *shared, fresh, states, after, dq, dk, d_sums, *sized,
        True, num_warps=8, num_stages=1,
    )  # fmt: skip
    launch(
        kernels.lower_back, call.of_chunk, k, *shared, beta, u, w, d_bv, d_bk, dk, d_beta, d_sums, db,
        *sized, num_warps=8, num_stages=1,
    )  # fmt: skip
    launch(
        kernels.upper_back, call.of_chunk, k, *shared, beta, u, w, d_bv, d_bk, dk, *sized, num_warps=8,
        num_stages=1,
    )  # fmt: skip
    launch(
        kernels.scores_back, call.of_chunk, q, k, do, *shared, fresh, dq, dk, d_sums, dg, *sized,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return dq, dk, dv, dg, db


def step(inputs: Inputs, state: Tensor, correct: bool = True) -> Tensor:
    """o [B, 1, H, V] of one token of each sequence; the states [B, H, K, V], fp32, are overwritten."""
    q, k, v, g, beta = inputs
    n = sizes_of(q, v)
    o = empty(v.shape, v.dtype, v.device)
    KP, BV = padded(n.K), min(32, padded(n.V))
    grid = n.B * n.H, cdiv(n.V, BV)
    launch(kernels.one_token, grid, q, k, v, g, beta, state, o, *n.heads, KP, BV, correct, num_warps=4)
    return o


def trace_step(n: LinearShapes) -> None:
    """Launch `one_token` on meta tensors, inside compile_only."""

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(1, *shape, dtype=dtype, device="meta")

    q = made(1, n.key_heads, n.key_dim, dtype=n.dtype)
    v = made(1, n.value_heads, n.value_dim, dtype=n.dtype)
    g = made(1, n.value_heads)
    step((q, q, v, g, g), made(n.value_heads, n.key_dim, n.value_dim), n.correct)


def trace(n: LinearShapes, runs: bool) -> None:
    """Launch the kernels on meta tensors, inside compile_only."""
    S = LENGTH + 1

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(1, S, *shape, dtype=dtype, device="meta")

    q = made(n.key_heads, n.key_dim, dtype=n.dtype)
    v = made(n.value_heads, n.value_dim, dtype=n.dtype)
    g = made(n.value_heads)
    run = made(dtype=torch.int64) if runs else None
    inputs = q, q, v, g, g
    _, sums, t = forward(inputs, run, n.correct)
    if n.trained:
        backward(v, inputs, run, sums, t, n.correct)


def of_linear(n: LinearShapes) -> Iterable[tuple]:
    """The traces of a linear layer: rows of one document, and of several; without gradients, a step too."""
    if MEASURED and fits(n.key_dim, n.value_dim) and n.dtype != torch.float64:
        if not n.trained:
            yield trace_step, n
        for runs in (False, True):
            yield trace, n, runs
