"""The gated delta rule on a GPU: the launches of ops/delta/kernels.py and kernels_back.py.

Kept for backward: q, k, v, g, beta, T, and which outputs are NaN. States, U, W and F are computed again.
Without the correction there is no T.

next: ops/delta/rule.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.ops.delta import kernels, kernels_back
from tmoe.ops.experts.pair_order import power_of_2
from tmoe.ops.launch.kernel_launch import cdiv, device_facts, empty, launch, tf32
from tmoe.ops.launch.shapes import LinearShapes

LENGTH, ROWS = kernels.L.value, kernels.ROWS.value  # tokens of a chunk; rows of the buffer `tokens`

# Architectures on which tests/ops/test_delta_gpu.py has passed. On other GPUs the plain form computes the
# rule and the convolution: a kernel that a compiler gets wrong raises no error.
MEASURED: frozenset[str] = frozenset({"cuda:90"})
# Channels (K, V) of heads that the test covers, with the correction and without. The plain form computes
# other heads: ptxas 12.8 gives some kernels of other widths wrong addresses of shared memory
# (docs/decisions/108-linear-layers-in-chunks.md).
HEADS = {True: {(128, 128), (64, 64)}, False: {(128, 64), (128, 128), (64, 64)}}


class Way(NamedTuple):
    """How a kernel is launched."""

    channels: int  # of values (inner_back: of keys) that a program handles at a time, at most
    warps: int
    stages: int


# by the kernel's name: on Hopper, for heads of at most 128 channels in bf16
WAYS = {
    "prepare": Way(256, 4, 1),  # a warp holds one of the inverse's four blocks
    "scan": Way(32, 4, 3),
    "outputs": Way(128, 8, 1),
    "local_back": Way(256, 4, 1),
    "scan_back": Way(32, 4, 2),
    "solve_back": Way(32, 8, 2),
    "states_back": Way(32, 8, 1),
    "inner_back": Way(64, 4, 1),
}
# on other GPUs, and for other types and wider heads: small enough for registers and shared memory
OTHERS = {
    "prepare": Way(256, 8, 1),
    "scan": Way(32, 8, 1),
    "outputs": Way(16, 8, 1),
    "local_back": Way(256, 8, 1),
    "scan_back": Way(16, 8, 1),
    "solve_back": Way(32, 8, 1),
    "states_back": Way(16, 8, 1),
    "inner_back": Way(64, 8, 1),
}

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


def temporaries(heads: tuple[int, int, int, int], bf16: bool, correct: bool = True) -> int:
    """Bytes that a backward holds at one time for each token, without the gradients.

    heads: H, G, K, V. bf16: the inputs' type; for others intermediate results are fp32.

    q and k in chunks; U, dO, P^T dO; shares of dq and dk; two states for each chunk; the gradient of q k^T;
    decays. With the correction W and the gradient of k k^T too.
    """
    H, G, K, V = heads
    more = K + LENGTH if correct else 0
    numbers = H * (3 * V + 2 * K + LENGTH + more + 2 * cdiv(K * V, LENGTH)) + 2 * G * K
    return (2 if bf16 else 4) * numbers + 4 * H * ROWS


def fits(K: int, V: int, bf16: bool, correct: bool) -> bool:
    """Whether the kernels of chunks are tested for such heads, with inputs in bf16."""
    return bf16 and (K, V) in HEADS[correct]


def sizes_of(q: Tensor, v: Tensor) -> Sizes:
    B, S, H, V = v.shape
    return Sizes(B, S, H, q.shape[2], q.shape[3], V)


def padded(width: int) -> int:
    """Channels of a tile: products need at least 16."""
    return max(16, power_of_2(width))


def precision(dtype: torch.dtype) -> str:
    """How products of fp32 are computed: exactly, unless torch allows TF32."""
    return "tf32" if dtype != torch.float32 or tf32() else "tf32x3"


def _arch(device: torch.device) -> str:
    """The GPU's architecture; "" for triton's interpreter."""
    return "" if device.type == "cpu" else device_facts(device)[0]


def measured(device: torch.device) -> bool:
    """Whether the kernels have passed their tests on this GPU's architecture."""
    return device.type == "cuda" and bool(MEASURED) and _arch(device) in MEASURED


def compiles() -> bool:
    """The same of the architecture for which compile_only compiles."""
    return device_facts(torch.device("meta"))[0] in MEASURED


def between(dtype: torch.dtype) -> torch.dtype:
    """The type of intermediate results. Gradients of fp16 may exceed its range."""
    return dtype if dtype == torch.bfloat16 else torch.float32


class Call:
    """The arguments that the kernels of a call share, and its buffers of chunks."""

    def __init__(self, sizes: Sizes, run: Tensor | None, dtype: torch.dtype, device: torch.device):
        self.sizes = n = sizes
        self.run = run
        self.dtype, self.device = between(dtype), device
        self.KP, self.VP = padded(n.K), padded(n.V)
        self.arch = _arch(device)
        self.precision = precision(dtype)
        self.queries, self.keys = (empty((n.B, n.G, n.N, LENGTH, n.K), dtype, device) for _ in range(2))
        self.tokens = self.room(ROWS, LENGTH, wide=True)
        self.marks, self.lost = (empty((n.chunks,), torch.int32, device) for _ in range(2))

    def room(self, *shape: int, wide: bool = False) -> Tensor:
        """An empty tensor for each chunk in the type of intermediate results; wide: in fp32."""
        return empty((self.sizes.chunks, *shape), torch.float32 if wide else self.dtype, self.device)

    def runs(self) -> Tensor:
        """The runs, or any tensor in their place."""
        return self.tokens if self.run is None else self.run

    def way(self, name: str) -> tuple[int, dict[str, int]]:
        """Channels that a program of a kernel handles at a time, and options of the launch."""
        width = max(self.KP, self.VP)
        if self.arch in ("", "cuda:90") and self.dtype == torch.bfloat16 and width <= 128:
            way = WAYS[name]
        elif name == "outputs" and self.arch.startswith("hip"):
            way = Way(64, 8, 1)
        elif name == "prepare" and width <= 64:
            way = Way(64, 4, 1)
        else:
            way = OTHERS[name]
        most = self.KP if name == "inner_back" else self.VP
        return min(way.channels, most), dict(num_warps=way.warps, num_stages=way.stages)

    def prepare(self, inputs: Inputs, t: Tensor, correct: bool, solve: bool) -> tuple[Tensor, Tensor]:
        """U and W; fills the buffers of q, k and decays, and T if `solve`. Without correction W is U."""
        n = self.sizes
        u = self.room(LENGTH, n.V)
        w = self.room(LENGTH, n.K) if correct else u
        _, options = self.way("prepare")
        accurate = "bf16x3" if self.dtype == torch.bfloat16 and self.arch.startswith("cuda") else "ieee"
        launch(
            kernels.prepare, (n.B * n.H, n.N), *inputs, self.runs(), self.queries, self.keys, self.tokens,
            self.marks, t, u, w, n.S, n.N, *n.heads, self.KP, self.VP, self.run is not None, self.precision,
            correct, solve, accurate, **options,
        )  # fmt: skip
        return u, w

    def scan(self, u: Tensor, w: Tensor, correct: bool) -> Tensor:
        """The transposes of the states before each chunk."""
        n = self.sizes
        states = self.room(n.V, n.K)
        BV, options = self.way("scan")
        launch(
            kernels.scan, (cdiv(n.V, BV), n.B * n.H), self.keys, self.tokens, self.marks, u, w, states,
            self.lost, n.N, *n.heads, self.KP, BV, self.precision, correct, **options,
        )  # fmt: skip
        return states


def kept(q: Tensor, v: Tensor, correct: bool) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shapes and types of T, and of which outputs are NaN, which a forward keeps for its backward."""
    n = sizes_of(q, v)
    t = (n.chunks, LENGTH, LENGTH) if correct else (0,)
    return (t, between(v.dtype)), (tuple(v.shape[:3]), torch.uint8)


def forward(inputs: Inputs, run: Tensor | None, correct: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """o, T, and 1 for each output that is NaN [B, S, H]; T is empty without the correction.

    inputs: q, k, v of one type, g and beta in fp32, all contiguous.
    """
    q, _, v, *_ = inputs
    n = sizes_of(q, v)
    call = Call(n, run, v.dtype, v.device)
    t, lost = (empty(shape, dtype, v.device) for shape, dtype in kept(q, v, correct))
    u, w = call.prepare(inputs, t, correct, solve=True)
    states = call.scan(u, w, correct)
    o = empty(v.shape, v.dtype, v.device)
    BV, options = call.way("outputs")
    launch(
        kernels.outputs, (n.B * n.H, n.N, cdiv(n.V, BV)), call.queries, call.keys, call.runs(), call.tokens,
        u, w, states, call.lost, o, lost, n.S, n.N, *n.heads, call.KP, BV, run is not None, call.precision,
        correct, **options,
    )  # fmt: skip
    return o, t, lost


def backward(
    do: Tensor, inputs: Inputs, run: Tensor | None, t: Tensor, lost: Tensor, correct: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g and beta. do: v's type, contiguous, of any values where o is NaN.

    t, lost, correct: as of `forward`.
    """
    q, _, v, *_ = inputs
    n = sizes_of(q, v)
    call = Call(n, run, v.dtype, v.device)
    u, w = call.prepare(inputs, t, correct, solve=False)
    states = call.scan(u, w, correct)
    d, df, after = call.room(LENGTH, n.V), call.room(LENGTH, n.V), call.room(n.V, n.K)
    of_chunk, ended = (n.B * n.H, n.N), (call.precision, correct)
    _, options = call.way("local_back")
    launch(
        kernels_back.local_back, of_chunk, call.queries, call.keys, do, call.runs(), call.tokens, lost, d, df,
        n.S, n.N, *n.heads, call.KP, call.VP, run is not None, call.precision, **options,
    )  # fmt: skip
    BV, options = call.way("scan_back")
    launch(
        kernels_back.scan_back, (cdiv(n.V, BV), n.B * n.H), call.queries, call.keys, call.tokens, d, df, w,
        after, n.N, *n.heads, call.KP, BV, *ended, **options,
    )  # fmt: skip
    new_q, new_k, pairs = call.room(LENGTH, n.K), call.room(LENGTH, n.K), call.room(LENGTH, LENGTH)
    lower, shares = call.room(LENGTH, LENGTH) if correct else pairs, call.room(2, LENGTH, wide=True)
    dq, dk, dv, dg, db = (empty(x.shape, x.dtype, x.device) for x in inputs)
    BV, options = call.way("solve_back")
    launch(
        kernels_back.solve_back, of_chunk, call.keys, v, call.runs(), call.tokens, df, t, u, w, states, after,
        lower, new_k, dv, shares, n.S, n.N, *n.heads, call.KP, BV, run is not None, *ended, **options,
    )  # fmt: skip
    BV, options = call.way("states_back")
    launch(
        kernels_back.states_back, of_chunk, call.queries, call.keys, call.runs(), call.tokens, d, u, w,
        states, after, pairs, new_k, new_q, new_k, shares, dg, db, n.S, n.N, *n.heads, call.KP, BV,
        run is not None, *ended, **options,
    )  # fmt: skip
    BK, options = call.way("inner_back")
    launch(
        kernels_back.inner_back, (n.B * n.G, n.N, cdiv(n.K, BK)), call.queries, call.keys, pairs, lower,
        new_q, new_k, dq, dk, n.S, n.N, n.H, n.G, n.K, BK, *ended, **options,
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


def _without_memory(n: LinearShapes, S: int) -> Inputs:
    """q, k, v, g and beta of a row of S tokens on the meta device."""
    q = torch.empty(1, S, n.key_heads, n.key_dim, dtype=n.dtype, device="meta")
    v = torch.empty(1, S, n.value_heads, n.value_dim, dtype=n.dtype, device="meta")
    g = torch.empty(1, S, n.value_heads, device="meta")
    return q, q, v, g, g


def trace_step(n: LinearShapes) -> None:
    """Launch `one_token` on meta tensors, inside compile_only; not where it is not measured."""
    if compiles():
        state = torch.empty(1, n.value_heads, n.key_dim, n.value_dim, device="meta")
        step(_without_memory(n, 1), state, n.correct)


def trace(n: LinearShapes, runs: bool) -> None:
    """Launch the kernels on meta tensors, inside compile_only; not where they are not measured."""
    if not compiles():
        return
    inputs = _without_memory(n, LENGTH + 1)
    run = torch.empty(1, LENGTH + 1, dtype=torch.int64, device="meta") if runs else None
    _, t, lost = forward(inputs, run, n.correct)
    if n.trained:
        backward(inputs[2], inputs, run, t, lost, n.correct)


def of_linear(n: LinearShapes) -> Iterable[tuple]:
    """The traces of a linear layer: rows of one document, and of several; without gradients, a step too."""
    if not n.trained and n.dtype != torch.float64:
        yield trace_step, n
    for runs in (False, True) if fits(n.key_dim, n.value_dim, n.dtype == torch.bfloat16, n.correct) else ():
        yield trace, n, runs
