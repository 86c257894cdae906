"""moe_mlp_adapted on the GPU: which kernels run, in which order, on which buffers.

Forward: route, u = s x A1^T (gathers x), up with B1, u' = s act A2^T, down with B2, combine. Backward: v =
s g B2 and the gradient of B2 (gathers dy), dh with A2, the gradient of A2, v' = s dH B1 and the gradient of
B1, dx with A1, combine, the gradient of A1 (gathers x).

A bound on the routed pairs gives the same windows as in gpu.py. A matrix without an adapter has the kernels
of gpu.py.

next: ops/experts/adapted_kernels.py
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.base.activations import activation as named
from tmoe.ops.experts import adapted_kernels as kernels
from tmoe.ops.experts import gpu
from tmoe.ops.experts.gpu import Product, halves, plain, ragged, windows
from tmoe.ops.experts.pair_order import Metadata, power_of_2, route
from tmoe.ops.launch.kernel_launch import cdiv, early, empty, launch

COPY = 512  # rows of a factor that a program of narrow_kernel widens at a time
FEW = 48  # up to this many rows per expert, tiles of narrow products have 64 rows


class Chunk(NamedTuple):
    """Sizes of narrow_and_factor_kernel."""

    rows: int  # rows of an expert that a program reads
    BL: int  # columns of a step
    warps: int
    stages: int
    ctas: int = 1  # programs on an SM


class Tile(NamedTuple):
    """Sizes of factor_kernel."""

    BN: int  # columns of a tile
    BL: int  # rows of a step
    warps: int
    stages: int
    ctas: int  # programs on an SM
    slab: int  # column tiles of all experts that are computed at one time if rows are gathered


class AdaptedLaunches(gpu.LayerLaunches):
    """gpu.LayerLaunches with the launches that have a low-rank step.

    Kernels whose result has r columns or rows are as slow as reading an operand. For them `narrow_config`,
    `chunk` and `tile` choose the sizes.
    """

    def narrow_config(self, L: int, gather: bool) -> tuple[gpu.KernelConfig, bool]:
        """The configuration of narrow_kernel for a sum of length L, and whether blocks are spread."""
        portable = copy.copy(self)
        portable.tma = False  # operands are read by pointers
        cfg = gpu.LayerLaunches.config(portable, "down")
        few = self.N <= FEW * self.E
        if self.tma and few:  # few steps, since each waits for memory
            cfg = cfg._replace(BM=64, BL=64 if L % 256 else 256, stages=3)
        elif self.tma:  # many bytes in flight
            cfg = cfg._replace(BM=128, BL=64, stages=4, ctas=3)
        return cfg, gather and not few

    def chunk(self, R: int) -> Chunk:
        """The sizes of narrow_and_factor_kernel for rank R."""
        if self.tma:  # chunks of 512 rows have too little shared memory above rank 16
            return Chunk(512 if R <= 16 else 256, 64, 8, 3)
        if self.x.element_size() == 2:
            return Chunk(128, 64, 4, 2) if R <= 16 else Chunk(64, 32, 4, 2)
        return Chunk(64, 32, 4, 2)

    def tile(self, R: int) -> Tile:
        """The sizes of factor_kernel for rank R."""
        if self.tma:
            return Tile(128, 128, 4, 3, 2, 2) if R <= 16 else Tile(128, 64, 4, 4, 2, 2)
        if self.x.element_size() == 2:
            return Tile(64, 64 if R <= 16 else 32, 4, 4, 2, 4)
        return Tile(32, 32, 4, 4, 2, 4)

    def narrow(
        self, a: Tensor, b: Tensor, scale: float, gather: bool = False, other: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """u [N, r] = scale times rows of a times each expert's b [E, r, L]; r rounded up to 16 bytes.

        gather: a is [T, L], else [N, L].
        other: the adapter's other factor [E, n, r]. It is returned with r rounded up to 16 bytes; the same
            tensor if r is not rounded.
        """
        L, R = a.shape[1], b.shape[1]
        W = wide(R)
        cfg, spread = self.narrow_config(L, gather)
        c, wider, height, copies = self.empty(self.N, W), None, 0, 0
        if other is not None and W > R:
            height = other.shape[0] * other.shape[1]
            wider = self.empty(*other.shape[:2], W)
            copies = min(self.sms, cdiv(height, COPY))
        (programs,) = self.grid(cfg, self.row_tiles(cfg, W, steps(R)))
        ahead = early(self.x.device)
        launch(
            kernels.narrow_kernel, (programs + copies,),
            a, b, c, None if wider is None else other, wider, self.meta.order, *self.tile_args(cfg),
            self.E, self.bits(cfg.BM), L, R, W, height, scale, programs,
            cfg.BM, steps(R), cfg.BL, COPY, power_of_2(W), power_of_2(self.E), cfg.GROUP, self.K, gather,
            spread, self.even(cfg, L), self.precision, bool(ahead),
            num_warps=cfg.warps, num_stages=cfg.stages, **ahead,
        )  # fmt: skip
        return c, other if wider is None else wider

    def bits(self, rows: int) -> int:
        """The argument `bits` of kernels.spread_at for blocks of this many rows."""
        return cdiv(self.N, rows).bit_length()

    def narrow_and_factor(
        self, g: Tensor, b: Tensor, u: Tensor, scale: float, gather: bool, c: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """v [N, r], scale times rows of g times each expert's b [E, L, r]; and b's gradient, g rows^T u rows.

        gather: g is [T, L], and rows of u are multiplied by their routing weights; else g is [N, L].
        c: a tensor to which the gradient is added; None: a new one.
        """
        E, L, R = b.shape
        W, chunk, add = u.shape[1], self.chunk(R), c is not None
        c = self.empty(E, L, R) if c is None else c
        v = self.empty(self.N, W)
        chunks, EP = self.N // chunk.rows + E, power_of_2(E)
        parts = self.empty(chunks, L, R, dtype=torch.float32)
        launch(
            kernels.narrow_and_factor_kernel, (max(1, min(chunk.ctas * self.sms, chunks)),),
            g, b, u, self.weights, v, parts, self.meta.order, self.meta.offsets, E, self.bits(chunk.rows), L,
            R, W, scale, chunks, chunk.rows, steps(R), chunk.BL, EP, self.K, gather, self.precision,
            num_warps=chunk.warps, num_stages=chunk.stages,
        )  # fmt: skip
        launch(
            kernels.sum_chunks_kernel, (E, cdiv(L * R, 1024)),
            parts, c, self.meta.offsets, E, L * R, chunk.rows, EP, 1024, add, num_warps=4,
        )  # fmt: skip
        return v, c

    def factor(self, v: Tensor, x: Tensor, R: int, gather: bool, c: Tensor | None) -> Tensor:
        """The gradient of an a, [E, r, L] = v rows^T x rows; v is [N, r or more].

        gather: x is [T, L], else [N, L]. c: a tensor to which the gradient is added; None: a new one.
        """
        L, tile, add = x.shape[1], self.tile(R), c is not None
        c = self.empty(self.E, R, L) if c is None else c
        columns = cdiv(L, tile.BN)
        slab = math.gcd(columns, tile.slab) if gather else columns
        tiles = self.E * cdiv(R, steps(R)) * columns
        launch(
            kernels.factor_kernel, (max(1, min(tile.ctas * self.sms, tiles)),),
            v, x, c, self.meta.order, self.meta.offsets, self.meta.by_size, self.E, R, v.shape[1], L,
            steps(R), tile.BN, tile.BL, slab, self.K, gather, add, self.precision,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return c

    def up_with(
        self, gate_up: Tensor, bias: Tensor | None, u: Tensor | None, b: Tensor | None, h: Tensor | None
    ) -> Tensor:
        """act [N, F] with u b[e]^T added to H; writes H unless it is None. u None: `up`.

        b: as `narrow` returns it.
        """
        if u is None:
            return super().up(gate_up, bias, h)
        cfg = self.config("up")
        act = self.empty(self.N, self.F)
        assert b is not None
        n, R = self.halves, b.shape[2]
        x = self.x if cfg.gather else self.gathered(self.x)
        w = gate_up.view(n * self.E, self.F, self.D)
        if cfg.outs:
            v = b.view(n * self.E, self.F, -1)
            product = Product(x, w, self.F, self.D, True, "a" if cfg.gather else "", bias=bias, u=u, v=v)
            outs = (None, None) if h is None else (*h.split(self.F, 1), None)
            self.specialised("up" if n == 2 else "ungated", cfg, product, (outs[0], outs[1], act))
            return act
        x = x if cfg.gather else plain(x, [cfg.BM, cfg.BL], self.tma)
        w = plain(w, [n, cfg.BN // n, cfg.BL], self.tma)
        block = [cfg.BM, cfg.BN // n // cfg.SUB]
        h_gate, h_up = (None, None) if h is None else halves(h, self.F, block, self.tma)
        launch(
            kernels.up_adapted, self.grid(cfg, self.row_tiles(cfg, self.F, cfg.BN // n)),
            x, w, bias, u, b, h_gate, h_up, ragged(act, block, self.tma), self.meta.order,
            *self.tile_args(cfg), self.D, self.F, R, u.shape[1], self.D,
            cfg.BM, cfg.BN, cfg.BL, cfg.GROUP, cfg.SUB, self.K, steps(R), self.activation, h is not None,
            cfg.gather, self.tma, self.even(cfg, self.D), self.precision,
            num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return act

    def forward_products(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor | None,
        bias: Tensor | None,
        factors: Sequence[Tensor | None],
        scales: tuple[float, float],
        h: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The rows of down's product (None if down is None), u of gate_up, u of down.

        Writes H unless h is None. factors: gate_up's a and b, down's a and b.
        """
        up_a, up_b, down_a, down_b = factors
        u_up = u_down = None
        if up_a is not None:
            other = up_b if self.config("up").outs else None
            u_up, wider = self.narrow(x, up_a, scales[0], True, other)
            up_b = up_b if wider is None else wider
        act = self.up_with(gate_up, bias, u_up, up_b, h)
        if down_a is not None:
            other = down_b if down is not None and self.config("down").outs else None
            u_down, wider = self.narrow(act, down_a, scales[1], False, other)
            down_b = down_b if wider is None else wider
        rows = None if down is None else self.rows_with("down", act, down, True, u_down, down_b)
        return rows, u_up, u_down

    def rows_with(
        self, kernel: str, a: Tensor, b: Tensor, b_rows: bool, u: Tensor | None, v: Tensor | None
    ) -> Tensor:
        """`rows` with u v[e] added, v [W, r] rows if b_rows (as `narrow` returns it) else [r, W].

        u None: `rows`.
        """
        if u is None or v is None:
            return super().rows(kernel, a, b, b_rows)
        cfg = self.config(kernel)
        P, Q = b.shape[1:]
        L, W, R = a.shape[1], P if b_rows else Q, v.shape[2] if b_rows else v.shape[1]
        c = self.empty(self.N, W)
        if cfg.outs:
            self.specialised("rows", cfg, Product(a, b, W, L, b_rows, u=u, v=v), (c, None, None))
            return c
        launch(
            kernels.rows_adapted, self.grid(cfg, self.row_tiles(cfg, W, cfg.BN)),
            plain(a, [cfg.BM, cfg.BL], self.tma),
            plain(b, [1, cfg.BN, cfg.BL] if b_rows else [1, cfg.BL, cfg.BN], self.tma),
            u, v, ragged(c, [cfg.BM, cfg.BN // cfg.SUB], self.tma), *self.tile_args(cfg), L, W, R, u.shape[1],
            P * Q,
            Q if b_rows else 1, 1 if b_rows else Q, R if b_rows else 1, 1 if b_rows else W,
            cfg.BM, cfg.BN, cfg.BL, cfg.GROUP, cfg.SUB, steps(R), b_rows, self.tma, self.even(cfg, L),
            self.precision, num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return c

    def dh_with(
        self, dy: Tensor, down: Tensor, h: Tensor, u: Tensor | None, v: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`dh` with u v[e] added to the activation's gradient, v [E, r, F]; dy is [T, D]."""
        cfg = self.config("dh")
        dy = dy if cfg.gather else self.gathered(dy)
        if u is None:
            return super().dh(dy, down, h)
        assert v is not None
        R = v.shape[1]
        dh, act = self.empty(self.N, self.H), self.empty(self.N, self.F)
        ds = self.empty(cdiv(self.F, cfg.BN), self.N, dtype=torch.float32)
        if cfg.outs:
            product = Product(
                dy, down, self.F, self.D, gather="a" if cfg.gather else "", h=h, ds=ds, u=u, v=v
            )
            self.specialised("dh", cfg, product, (dh, None, act))
            return dh, act, ds
        block = [cfg.BM, cfg.BN // cfg.SUB]
        launch(
            kernels.dh_adapted, self.grid(cfg, self.row_tiles(cfg, self.F, cfg.BN)),
            dy if cfg.gather else plain(dy, [cfg.BM, cfg.BL], self.tma),
            plain(down, [1, cfg.BL, cfg.BN], self.tma), u, v,
            *halves(h, self.F, block, self.tma), *halves(dh, self.F, block, self.tma),
            ragged(act, block, self.tma), self.weights, ds, self.meta.order, *self.tile_args(cfg),
            self.N, self.D, self.F, R, u.shape[1], self.D,
            cfg.BM, cfg.BN, cfg.BL, cfg.GROUP, cfg.SUB, self.K, steps(R), self.activation, cfg.gather,
            self.tma, self.even(cfg, self.D), self.precision, num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return dh, act, ds


def wide(R: int) -> int:
    """The rank, rounded up to 8: rows of 16 bytes."""
    return cdiv(R, 8) * 8


def steps(R: int) -> int:
    """RB, the rows of one step: the rank rounded up to a power of two, 16 to 64."""
    return max(16, min(64, power_of_2(R)))


def forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    *rest: Any,
    kind: Callable[..., AdaptedLaunches] = AdaptedLaunches,
) -> tuple[Tensor, ...]:
    """y, H, u_up and u_down of the first window (empty unless keep), and the packed metadata.

    rest: the four adapters' factors (or None), activation, pairs, keep, the scales.
    kind: makes the launches of a window; adapted_fp8_gpu.py has others.
    """
    *factors, activation, pairs, keep, up_scale, down_scale = rest
    x, gate_up, down, weights, ids = (t.contiguous() for t in (x, gate_up, down, weights, ids))
    bias, *factors = (t if t is None else t.contiguous() for t in (bias, *factors))
    N = pairs if keep else 0
    ranks = (0 if a is None else wide(a.shape[1]) for a in (factors[0], factors[2]))
    h = empty((0, gate_up.shape[1]), x.dtype, x.device)
    none = [empty((N, rank), x.dtype, x.device) for rank in ranks]
    meta = route(ids, down.shape[0], pairs)
    y: Any = None
    kept: list[Tensor] = none
    layer_of = partial(kind, x, down.shape, ids.shape[1])
    how = weights, tuple(t for t in (gate_up, down, *factors) if t is not None), activation
    if keep:
        h = layer_of(meta, *how).room_for_h()
    if ids.numel() == 0:
        return torch.zeros_like(x), h, *none, meta.packed
    for window in windows(meta, ids.numel()):
        layer = layer_of(window, *how)
        rows, u_up, u_down = layer.forward_products(
            x, gate_up, down, bias, factors, (up_scale, down_scale), h if keep and y is None else None
        )
        assert rows is not None
        if keep and y is None:
            kept = [t if u is None else u for u, t in zip((u_up, u_down), none, strict=True)]
        y, _ = layer.combine(rows, weights, y)
        del rows, u_up, u_down  # freed before the next window allocates its own
    return y, h, *kept, meta.packed


def backward(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    *rest: Any,
    kind: Callable[..., AdaptedLaunches] = AdaptedLaunches,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weights, the bias and the four factors (None for what is not there).

    rest: H, u_up and u_down of the first window, packed metadata, bias, the factors, activation, pairs, the
    scales.
    """
    h, u_up, u_down, packed, bias, *factors, activation, pairs, up_scale, down_scale = rest
    dy, x, gate_up, down, weights = (t.contiguous() for t in (dy, x, gate_up, down, weights))
    bias, up_a, up_b, down_a, down_b = (t if t is None else t.contiguous() for t in (bias, *factors))
    present = (x, weights, bias, up_a, up_b, down_a, down_b)
    if weights.numel() == 0:
        return tuple(None if t is None else torch.zeros_like(t) for t in present)
    dx = d_weights = d_bias = d_up_a = d_up_b = d_down_a = d_down_b = None
    operands = tuple(t for t in (gate_up, down, dy, up_a, up_b, down_a, down_b) if t is not None)
    for window in windows(Metadata(packed, weights.numel(), down.shape[0], pairs), weights.numel()):
        layer = kind(x, down.shape, weights.shape[1], window, weights, operands, activation)
        if dx is not None:  # a later window: computed again
            h = layer.room_for_h()
            factors = up_a, up_b, down_a, down_b
            _, u_up, u_down = layer.forward_products(
                x, gate_up, None, bias, factors, (up_scale, down_scale), h
            )

        v = None
        if down_a is not None and down_b is not None:
            v, d_down_b = layer.narrow_and_factor(dy, down_b, u_down, down_scale, True, d_down_b)
        dh, act, ds = layer.dh_with(dy, down, h, v, down_a)
        if v is not None and down_a is not None:
            d_down_a = layer.factor(v, act, down_a.shape[1], False, d_down_a)
        del act

        v = None
        if up_a is not None and up_b is not None:
            v, d_up_b = layer.narrow_and_factor(dh, up_b, u_up, up_scale, False, d_up_b)
        rows = layer.rows_with("dx", dh, gate_up, False, v, up_a)
        dx, d_weights = layer.combine(rows, None, dx, ds, d_weights)
        if v is not None and up_a is not None:
            d_up_a = layer.factor(v, x, up_a.shape[1], True, d_up_a)
        if bias is not None:
            d_bias = layer.bias_gradient(dh, d_bias)
        del h, u_up, u_down, dh, ds, v, rows  # freed before the next window allocates its own
    return dx, d_weights, d_bias, d_up_a, d_up_b, d_down_a, d_down_b


def trace(
    sizes: tuple[int, int, int, int, int],
    ranks: tuple[int, int],
    dtype: torch.dtype,
    pairs: int | None = None,
    activation: str = "swiglu",
    biased: bool = False,
    trained: bool = True,
    kind: Callable[..., AdaptedLaunches] = AdaptedLaunches,
) -> None:
    """Run moe_mlp_adapted's forward (for training and without) and backward on meta tensors.

    It runs inside compile_only. sizes: T, D, F, E, K of `op.trace`. ranks: ranks of the adapters of gate_up
    and of down, 0 for none. All other arguments are those of `op.trace`.
    """
    T, D, F, E, K = sizes
    new = partial(torch.empty, dtype=dtype, device="meta")
    (r, q), rows = ranks, named(activation).halves * F
    x, matrices = new(T, D), (new(E, rows, D), new(E, D, F))
    up = (new(E, r, D), new(E, rows, r)) if r else (None, None)
    factors: tuple[Any, ...] = *up, *((new(E, q, F), new(E, D, q)) if q else (None, None))
    bias = new(E, rows) if biased else None
    weights = torch.empty(T, K, device="meta")
    ids = torch.empty(T, K, dtype=torch.int32, device="meta")
    how, scales = (activation, T * K if pairs is None else pairs), (1.0, 1.0)
    call = x, *matrices, weights, ids, bias, *factors, *how
    forward(*call, False, *scales, kind=kind)
    if trained:
        _, *kept = forward(*call, True, *scales, kind=kind)
        backward(x, x, *matrices, weights, *kept, bias, *factors, *how, *scales, kind=kind)
