"""moe_mlp_adapted on the GPU: which kernels run, in which order, on which buffers.

Forward: route, u = x A1^T (gathers x), up with B1, u' = act A2^T, down with B2, combine. Backward: v = g B2
(gathers dy), dh with A2, the gradients of A2 and B2, v' = dH B1, dx with A1, those of A1 and B1, combine.

A bound on the routed pairs gives the same windows as in gpu.py. A matrix without an adapter has the kernels
of gpu.py.

next: ops/experts/adapted_kernels.py
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tmoe.base.activations import activation as named
from tmoe.ops.experts import adapted_kernels as kernels
from tmoe.ops.experts import gpu
from tmoe.ops.experts.gpu import halves, plain, ragged, windows
from tmoe.ops.experts.pair_order import Metadata, power_of_2, route
from tmoe.ops.experts.table import KernelConfig
from tmoe.ops.launch.kernel_launch import cdiv, empty, launch

FEW = 48  # tiles have 64 rows up to this many rows per expert
HOPPER = {  # for operands with descriptors; not tuned
    "up": KernelConfig(128, 128, 64, 16, 2, 8, 3, 1, True),
    "down": KernelConfig(128, 128, 64, 16, 2, 8, 3, 1, False),
    "dh": KernelConfig(128, 128, 64, 16, 4, 8, 3, 1, True),
    "dx": KernelConfig(128, 128, 64, 16, 2, 8, 3, 1, False),
}


class AdaptedLaunches(gpu.LayerLaunches):
    """gpu.LayerLaunches with the launches that have a low-rank step."""

    def config(self, kernel: str) -> KernelConfig:
        """The configuration of a Triton kernel: hopper.py's have no such step."""
        if not self.tma:
            return super().config(kernel)
        cfg = HOPPER[kernel]
        return cfg._replace(BM=64, warps=4) if self.N <= FEW * self.E else cfg

    @property
    def by_pointers(self) -> "AdaptedLaunches":
        """The layer without descriptors, which need rows of 16 bytes; for results of r columns or rows."""
        layer = copy.copy(self)
        layer.tma = False
        return layer

    def narrow(self, a: Tensor, b: Tensor, b_rows: bool, gather: bool = False) -> Tensor:
        """Rows of a times each expert's b, [N, r].

        b: [E, r, L] if b_rows, else [E, L, r]. gather: a is [T, L], else [N, L].
        """
        layer = self.by_pointers
        cfg = layer.config("down")
        L = a.shape[1]
        R = b.shape[1] if b_rows else b.shape[2]
        RB = steps(R)
        c = layer.empty(self.N, R)
        launch(
            kernels.narrow_kernel, layer.grid(cfg, layer.row_tiles(cfg, R, RB)),
            a, b, c, self.meta.order, *layer.tile_args(cfg), L, R, L if b_rows else 1, 1 if b_rows else R,
            cfg.BM, RB, cfg.BL, cfg.GROUP, self.K, gather, layer.even(cfg, L), self.precision,
            num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return c

    def up_with(
        self, gate_up: Tensor, bias: Tensor | None, u: Tensor | None, b: Tensor | None, h: Tensor | None
    ) -> Tensor:
        """act [N, F] with u b[e]^T added to H; writes H unless it is None. u None: `up`."""
        if u is None:
            return super().up(gate_up, bias, h)
        cfg = self.config("up")
        act = self.empty(self.N, self.F)
        n, R = self.halves, u.shape[1]
        x = self.x if cfg.gather else plain(self.gathered(self.x), [cfg.BM, cfg.BL], self.tma)
        w = plain(gate_up.view(n * self.E, self.F, self.D), [n, cfg.BN // n, cfg.BL], self.tma)
        block = [cfg.BM, cfg.BN // n // cfg.SUB]
        h_gate, h_up = (None, None) if h is None else halves(h, self.F, block, self.tma)
        launch(
            kernels.up_adapted, self.grid(cfg, self.row_tiles(cfg, self.F, cfg.BN // n)),
            x, w, bias, u, b, h_gate, h_up, ragged(act, block, self.tma), self.meta.order,
            *self.tile_args(cfg), self.D, self.F, R, self.D,
            cfg.BM, cfg.BN, cfg.BL, cfg.GROUP, cfg.SUB, self.K, steps(R), self.activation, h is not None,
            cfg.gather, self.tma, self.even(cfg, self.D), self.precision,
            num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return act

    def rows_with(
        self, kernel: str, a: Tensor, b: Tensor, b_rows: bool, u: Tensor | None, v: Tensor | None
    ) -> Tensor:
        """`rows` with u v[e] added, v [W, r] rows if b_rows else [r, W]. u None: `rows`."""
        if u is None or v is None:
            return super().rows(kernel, a, b, b_rows)
        cfg = self.config(kernel)
        P, Q = b.shape[1:]
        L, W, R = a.shape[1], P if b_rows else Q, u.shape[1]
        c = self.empty(self.N, W)
        launch(
            kernels.rows_adapted, self.grid(cfg, self.row_tiles(cfg, W, cfg.BN)),
            plain(a, [cfg.BM, cfg.BL], self.tma),
            plain(b, [1, cfg.BN, cfg.BL] if b_rows else [1, cfg.BL, cfg.BN], self.tma),
            u, v, ragged(c, [cfg.BM, cfg.BN // cfg.SUB], self.tma), *self.tile_args(cfg), L, W, R, P * Q,
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
        R = u.shape[1]
        dh, act = self.empty(self.N, self.H), self.empty(self.N, self.F)
        ds = self.empty(cdiv(self.F, cfg.BN), self.N, dtype=torch.float32)
        block = [cfg.BM, cfg.BN // cfg.SUB]
        launch(
            kernels.dh_adapted, self.grid(cfg, self.row_tiles(cfg, self.F, cfg.BN)),
            dy if cfg.gather else plain(dy, [cfg.BM, cfg.BL], self.tma),
            plain(down, [1, cfg.BL, cfg.BN], self.tma), u, v,
            *halves(h, self.F, block, self.tma), *halves(dh, self.F, block, self.tma),
            ragged(act, block, self.tma), self.weights, ds, self.meta.order, *self.tile_args(cfg),
            self.N, self.D, self.F, R, self.D,
            cfg.BM, cfg.BN, cfg.BL, cfg.GROUP, cfg.SUB, self.K, steps(R), self.activation, cfg.gather,
            self.tma, self.even(cfg, self.D), self.precision, num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return dh, act, ds

    def factor(self, a: Tensor, b: Tensor, gather: str = "", c: Tensor | None = None) -> Tensor:
        """The gradient of a factor: `dw` by pointers."""
        return self.by_pointers.dw("dw_up", a, b, gather, c)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, H and u = x gate_up_a^T of the first window (empty unless keep) and the packed metadata.

    rest: the four adapters' factors (or None), activation, pairs, keep.
    """
    *factors, activation, pairs, keep = rest
    x, gate_up, down, weights, ids = (t.contiguous() for t in (x, gate_up, down, weights, ids))
    bias, up_a, up_b, down_a, down_b = (t if t is None else t.contiguous() for t in (bias, *factors))
    h = empty((pairs if keep else 0, gate_up.shape[1]), x.dtype, x.device)
    kept: Any = None
    rank = 0 if up_a is None else up_a.shape[1]
    meta = route(ids, down.shape[0], pairs)
    y: Any = None
    if ids.numel() == 0:
        return torch.zeros_like(x), h, empty((0, rank), x.dtype, x.device), meta.packed
    for window in windows(meta, ids.numel()):
        layer = AdaptedLaunches(x, down.shape, ids.shape[1], window, weights, (gate_up, down), activation)
        u = None if up_a is None else layer.narrow(x, up_a, True, gather=True)
        act = layer.up_with(gate_up, bias, u, up_b, h if keep and y is None else None)
        if keep and y is None:
            kept = u
        u = None if down_a is None else layer.narrow(act, down_a, True)
        rows = layer.rows_with("down", act, down, True, u, down_b)
        y, _ = layer.combine(rows, weights, y)
        del rows, act, u  # before the next window's are made
    kept = empty((pairs if keep else 0, rank), x.dtype, x.device) if kept is None else kept
    return y, h, kept, meta.packed


def backward(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weights, the bias and the four factors (None for what is not there).

    rest: H and u of the first window, packed metadata, bias, the factors, activation, pairs.
    """
    h, u, packed, bias, *factors, activation, pairs = rest
    dy, x, gate_up, down, weights = (t.contiguous() for t in (dy, x, gate_up, down, weights))
    bias, up_a, up_b, down_a, down_b = (t if t is None else t.contiguous() for t in (bias, *factors))
    if weights.numel() == 0:
        present = (x, weights, bias, up_a, up_b, down_a, down_b)
        return tuple(None if t is None else torch.zeros_like(t) for t in present)
    dx = d_weights = d_bias = d_up_a = d_up_b = d_down_a = d_down_b = None
    for window in windows(Metadata(packed, weights.numel(), down.shape[0], pairs), weights.numel()):
        layer = AdaptedLaunches(
            x, down.shape, weights.shape[1], window, weights, (gate_up, down, dy), activation
        )
        if dx is not None:  # a later window: computed again
            h = layer.empty(pairs, gate_up.shape[1])
            u = None if up_a is None else layer.narrow(x, up_a, True, gather=True)
            layer.up_with(gate_up, bias, u, up_b, h)

        v = None if down_b is None else layer.narrow(dy, down_b, False, gather=True)
        dh, act, ds = layer.dh_with(dy, down, h, v, down_a)
        if v is not None and down_a is not None:
            d_down_a = layer.factor(v, act, c=d_down_a)
            d_down_b = layer.factor(dy, layer.narrow(act, down_a, True), "a", d_down_b)
        del act

        v = None if up_b is None else layer.narrow(dh, up_b, False)
        rows = layer.rows_with("dx", dh, gate_up, False, v, up_a)
        dx, d_weights = layer.combine(rows, None, dx, ds, d_weights)
        if v is not None:
            d_up_a = layer.factor(v, x, "b", d_up_a)
            d_up_b = layer.factor(dh, u, c=d_up_b)
        if bias is not None:
            d_bias = layer.bias_gradient(dh, d_bias)
        del h, u, dh, ds, v, rows  # before the next window's are made
    return dx, d_weights, d_bias, d_up_a, d_up_b, d_down_a, d_down_b


def trace(
    sizes: tuple[int, int, int, int, int],
    ranks: tuple[int, int],
    dtype: torch.dtype,
    pairs: int | None = None,
    activation: str = "swiglu",
    biased: bool = False,
    trained: bool = True,
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
    factors = *up, *((new(E, q, F), new(E, D, q)) if q else (None, None))
    bias = new(E, rows) if biased else None
    weights = torch.empty(T, K, device="meta")
    ids = torch.empty(T, K, dtype=torch.int32, device="meta")
    how = activation, T * K if pairs is None else pairs
    call = x, *matrices, weights, ids, bias, *factors, *how
    forward(*call, False)
    if trained:
        _, *kept = forward(*call, True)
        backward(x, x, *matrices, weights, *kept, bias, *factors, *how)
