"""moe_mlp and grouped_mm on the GPU: which kernels run, in which order, on which buffers.

Forward: route, up (gathers x, keeps H), down, combine; up and down are one launch if experts have few rows.
Backward: dh (gathers dy, recomputes the activation), down's gradient, dx, gate_up's gradient, combine.

With a bound on the routed pairs, the same steps run over windows of that many sorted rows, and their results
are added up. All windows after the first are empty unless routing is skewed, and H is recomputed for them. If
a configuration uses gathered copies instead of gathering inside a kernel, all kernels that read the rows
share one copy.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.base import activations
from tmoe.ops.argument_checks import require
from tmoe.ops.experts import kernels
from tmoe.ops.experts.one_token import one_token
from tmoe.ops.experts.pair_order import FEW, Metadata, group, power_of_2, route
from tmoe.ops.experts.table import Few, KernelConfig, few, pick
from tmoe.ops.launch.kernel_launch import (
    Descriptor,
    cdiv,
    describe,
    describe_ragged,
    device_facts,
    early,
    empty,
    launch,
    tf32,
)

try:
    from tmoe.ops.experts import hopper
    from tmoe.ops.experts.few_rows import few_rows
except ImportError:  # then gluon_lacks of kernel_launch.py reports that no GPU can run them
    hopper = few_rows = None

Operand = Tensor | Descriptor  # an operand of a kernel
Outs = tuple[Any, Any, Any]  # tensors or None

# Waves of programs in a launch. One wave is best if products have the GPU to themselves. If a collective's
# kernel occupies a multiprocessor, a program for it must wait until another program ends. A launch in one
# wave then takes twice its time, in four waves a quarter more. Measured on two GPUs that share experts: 96.8,
# 97.4, 99.6 and 99.9 thousand tokens/s in 1, 2, 4 and 8 waves; with ep=2, 48.3 in 1 and 48.1 in 4 waves.
waves = 1
# How hopper.py adds to sums of weight gradients, and in how many column slices: see `hopper.into_sum`.
SUMS: str = "add"
SUMS_SUB: int = 8


def has_tma(x: Tensor, D: int, F: int, *tensors: Tensor) -> bool:
    """Whether tensor descriptors can describe the operands.

    They can on Hopper, with 16-bit elements, D and F multiples of 64 and addresses aligned to 16 bytes.
    """
    return (
        device_facts(x.device)[2]
        and x.element_size() == 2
        and D % 64 == 0
        and F % 64 == 0
        and all(t.data_ptr() % 16 == 0 for t in (x, *tensors))
    )


def plain(t: Tensor, block: list[int], tma: bool) -> Operand:
    """A tensor as an operand of a kernel: a descriptor with boxes of shape `block`, or the tensor itself."""
    return describe(t, block) if tma else t


def ragged(t: Tensor, block: list[int], tma: bool) -> Operand:
    """Expert-sorted rows [N, width] as an operand: a descriptor that clips at any row, or the tensor."""
    return describe_ragged(t, block) if tma else t


def halves(h_N2F: Tensor, F: int, block: list[int], tma: bool) -> tuple[Operand, Operand | None]:
    """The gate and up columns of H as two operands, so that no box contains columns of both.

    For experts without a gate, H [N, F] is the first operand and the second is None.
    """
    if h_N2F.shape[1] == F:
        return ragged(h_N2F, block, tma), None
    return ragged(h_N2F[:, :F], block, tma), ragged(h_N2F[:, F:], block, tma)


class Product(NamedTuple):
    """The operands of hopper.specialised, which documents the other fields."""

    a: Tensor
    b: Tensor
    width: int  # columns of the result
    length: int = 0  # length of the sum; unused in dw, which sums over each expert's rows
    b_rows: bool = False
    gather: str = ""  # the operand ("a", "b") that is [T, D] and not gathered yet
    h: Tensor | None = None
    ds: Tensor | None = None
    bias: Tensor | None = None
    u: Tensor | None = None
    v: Tensor | None = None
    sums: str = ""  # what a dw does with a sum in fp32; "": the result has the operands' type


def b_box(kind: str, b_rows: bool, BN: int, BL: int) -> list[int]:
    """The box of operand b of hopper.specialised for a step of BL numbers."""
    if kind == "dw":
        return [BL, BN]
    if kind == "up":
        return [2, BN // 2, BL]
    return [1, BN, BL] if b_rows else [1, BL, BN]


def low_rank(R: int, BL: int) -> int:
    """RL, the numbers of a low-rank step of rank R: as few as wgmma multiplies, 16, and at most BL."""
    return min(BL, max(16, power_of_2(R)))


def low_rank_step(
    kind: str, cfg: KernelConfig, product: Product
) -> tuple[Descriptor | None, Descriptor | None, int, int]:
    """The arguments u, v, RL and more of hopper.specialised."""
    u, v = product.u, product.v
    if u is None or v is None:
        return None, None, 0, 0
    R = u.shape[1]
    RL = low_rank(R, cfg.BL)
    box = b_box(kind, product.b_rows, cfg.BN, RL)
    return describe_ragged(u, [cfg.BM, RL]), describe(v, box), RL, cdiv(R, RL)


def stored(kind: str, box: list[int], outs: Outs, sums: str) -> Outs:
    """c, c2, c3 of hopper.specialised: descriptors of what the copy engine stores, else tensors.

    The finishers store the other results, and a sum in fp32 is written by the threads that hold its product.
    """
    c, c2, c3 = outs
    if c is None:
        return outs
    if kind in ("up", "ungated"):
        return describe_ragged(c, box), None if c2 is None else describe_ragged(c2, box), c3
    if kind == "rows":
        c = describe_ragged(c, box)
    elif kind == "dw" and not sums:
        c = describe(c, [1, *box])
    return c, c2, c3


class LayerLaunches:
    """One call's shapes and choices, and a method for each kernel launch."""

    def __init__(
        self,
        x: Tensor,
        shape: tuple[int, ...],
        K: int,
        meta: Metadata,
        weights: Tensor | None = None,
        operands: tuple[Tensor, ...] = (),
        activation: str = "swiglu",
    ) -> None:
        """Chooses precision and kind of kernels.

        x: the tokens [T, D].
        shape: (E, D, F).
        K: experts of a token.
        meta: the routing metadata of a window.
        weights: routing weights [T, K], if a kernel needs them.
        operands: the experts' matrices, whose alignment is checked.
        """
        self.x, self.meta, self.weights = x, meta, weights
        self.K, self.activation = K, activations.full(activation)
        self.E, self.D, self.F = shape
        self.halves = activations.activation(activation).halves
        self.H = self.halves * self.F  # columns of H: gate and up, or without a gate up
        self.T, self.N = x.shape[0], meta.P
        self.arch, self.sms, _ = device_facts(x.device)
        self.tma = has_tma(x, self.D, self.F, *operands)
        # kernels without descriptors index an expert's matrices with 32 bits
        if not self.tma and 2 * self.D * self.F >= 2**31:
            valid = "2 D F below 2^31 where there are no tensor descriptors"
            require(False, "an expert's matrices", f"D={self.D}, F={self.F}", valid)
        fast = tf32() and self.arch.startswith(("cuda", "hip:gfx942"))  # triton has TF32 for no other chips
        self.precision = "tf32" if fast else "ieee"

    def config(self, kernel: str) -> KernelConfig:
        """The configuration of a kernel for this layer."""
        return pick(kernel, self.arch, self.x.dtype, self.D, self.F, self.N / self.E, self.tma)

    def grid(self, cfg: KernelConfig, tiles: int) -> tuple[int]:
        """The number of programs: as many as can be resident, times `waves`, and at most `tiles`.

        tiles: the host's upper bound on the number of tiles.
        """
        return (max(1, min(self.sms * cfg.ctas * waves, tiles)),)

    def row_tiles(self, cfg: KernelConfig, width: int, columns: int) -> int:
        """An upper bound on the tiles of a result with `width` columns, `columns` a tile."""
        return (self.N // cfg.BM + self.E) * cdiv(width, columns)

    def tile_args(self, cfg: KernelConfig | Few) -> tuple[Tensor, int, Tensor]:
        """Arguments of a kernel: the table of row tiles, its capacity and the experts' offsets."""
        return self.meta.tiles[cfg.BM], Metadata.capacity(self.N, self.E, cfg.BM), self.meta.offsets

    def even(self, cfg: KernelConfig, length: int) -> bool:
        """Whether a length is a multiple of the configuration's step."""
        return length % cfg.BL == 0

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A new tensor on x's device. dtype: None: x's type."""
        return empty(shape, dtype or self.x.dtype, self.x.device)

    def room_for_h(self) -> Tensor:
        """A new tensor for H of a window."""
        return self.empty(self.N, self.H)

    def gathered(self, t_TD: Tensor) -> Tensor:
        """The rows of a [T, D] tensor in expert order."""
        rows = self.empty(self.N, self.D)
        R = 8
        block = min(1024, power_of_2(self.D))
        launch(
            kernels.gather_kernel, (cdiv(self.N, R), cdiv(self.D, block)),
            t_TD, self.meta.order, self.meta.offsets, rows, self.D, self.E, self.K, R, block, num_warps=4,
        )  # fmt: skip
        return rows

    def specialised(self, kind: str, cfg: KernelConfig, product: Product, outs: Outs) -> None:
        """Launch hopper.specialised; outs are its c, c2, c3, with `product.width` columns."""
        a, b, width, length, b_rows, gather, h, ds, bias, _, _, sums = product
        dw = kind == "dw"
        columns = cfg.BN // 2 if kind == "up" else cfg.BN

        # operands are descriptors, unless the kernel gathers them
        b_shape = b_box(kind, b_rows, cfg.BN, cfg.BL)
        a_arg = a if gather == "a" else describe_ragged(a, [cfg.BL, cfg.BM] if dw else [cfg.BM, cfg.BL])
        b_arg = b if gather == "b" else describe_ragged(b, b_shape) if dw else describe(b, b_shape)
        u_arg, v_arg, RL, more = low_rank_step(kind, cfg, product)
        box = [cfg.BM, cfg.BN // cfg.SUB]

        keeps_h = kind in ("up", "ungated") and outs[0] is not None
        c, c2, c3 = stored(kind, box, outs, sums)

        # with dw tiles divide the matrix of each expert, else its rows
        num_m = cdiv(a.shape[1], cfg.BM) if dw else 0
        num_n = cdiv(width, columns)
        if dw:
            tiles = self.E * num_m * num_n
            tile_args = self.meta.by_size, 0, self.meta.offsets
        else:
            tiles = self.row_tiles(cfg, width, columns)
            tile_args = self.tile_args(cfg)
        launch(
            hopper.specialised, self.grid(cfg, tiles),
            a_arg, b_arg, u_arg, v_arg, bias, h, c, c2, c3, self.weights, ds, self.meta.order, *tile_args,
            self.N, self.E, self.F, num_m, num_n, cdiv(length, cfg.BL), more, cfg.GROUP, self.D,
            a.shape[1], width,
            cfg.BM, cfg.BN, cfg.BL, RL, cfg.stages, cfg.SUB, cfg.outs, self.K, kind, self.activation, b_rows,
            keeps_h, gather, sums,
            dw and gather != "" and self.D % (cfg.BM if gather == "a" else cfg.BN) != 0,
            num_warps=cfg.warps,
        )  # fmt: skip

    def up(self, gate_up: Tensor, bias: Tensor | None, h_N2F: Tensor | None) -> Tensor:
        """act [N, F]; writes H unless it is None."""
        cfg = self.config("up")
        act = self.empty(self.N, self.F)
        x = self.x if cfg.gather else self.gathered(self.x)
        n = self.halves
        w = gate_up.view(n * self.E, self.F, self.D)
        if cfg.outs:
            h: tuple[Any, ...] = (None, None) if h_N2F is None else (*h_N2F.split(self.F, 1), None)
            product = Product(x, w, self.F, self.D, True, "a" if cfg.gather else "", bias=bias)
            self.specialised("up" if n == 2 else "ungated", cfg, product, (h[0], h[1], act))
            return act
        block = [cfg.BM, cfg.BN // n // cfg.SUB]
        h_gate, h_up = halves(h_N2F, self.F, block, self.tma) if h_N2F is not None else (None, None)
        x = x if cfg.gather else plain(x, [cfg.BM, cfg.BL], self.tma)
        w = plain(w, [n, cfg.BN // n, cfg.BL], self.tma)
        launch(
            kernels.up_kernel, self.grid(cfg, self.row_tiles(cfg, self.F, cfg.BN // n)),
            x, w, bias, h_gate, h_up, ragged(act, block, self.tma), self.meta.order, *self.tile_args(cfg),
            self.D, self.F, self.D,
            cfg.BM, cfg.BN, cfg.BL, cfg.GROUP, cfg.SUB, self.K, self.activation, h_N2F is not None,
            cfg.gather, self.tma,
            self.even(cfg, self.D), self.precision, num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return act

    def rows(self, kernel: str, a: Tensor, b: Tensor, b_rows: bool) -> Tensor:
        """[N, W] = rows of a times each expert's matrix b, [W, L] rows if b_rows else [L, W]."""
        cfg = self.config(kernel)
        R, C = b.shape[1:]
        L = a.shape[1]
        W = R if b_rows else C
        c = self.empty(self.N, W)
        if cfg.outs:
            self.specialised("rows", cfg, Product(a, b, W, L, b_rows), (c, None, None))
            return c
        launch(
            kernels.rows_kernel, self.grid(cfg, self.row_tiles(cfg, W, cfg.BN)),
            plain(a, [cfg.BM, cfg.BL], self.tma),
            plain(b, [1, cfg.BN, cfg.BL] if b_rows else [1, cfg.BL, cfg.BN], self.tma),
            ragged(c, [cfg.BM, cfg.BN // cfg.SUB], self.tma), *self.tile_args(cfg), L, W, R * C,
            C if b_rows else 1, 1 if b_rows else C,
            cfg.BM, cfg.BN, cfg.BL, cfg.GROUP, cfg.SUB, b_rows, self.tma, self.even(cfg, L), self.precision,
            num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return c

    def products(self, gate_up: Tensor, bias: Tensor | None, h_N2F: Tensor | None, down: Tensor) -> Tensor:
        """act @ down^T [N, D], expert by expert; writes H unless it is None.

        Call it once for each metadata, because it may change `ready` and `counter`.
        """
        cfg = few(self.arch, self.N / self.E, self.tma)
        if cfg is None:
            return self.rows("down", self.up(gate_up, bias, h_N2F), down, True)
        BN, BL = 256, 64
        act = self.empty(self.N, self.F)
        y = self.empty(self.N, self.D)
        n = self.halves
        num_up = cdiv(self.F, BN // n)
        num_down = cdiv(self.D, BN)
        # the routing kernel lets this launch start early, unless slots are many or this is a later window
        let_in = 0 < self.meta.N <= FEW
        guess = cfg.flight if cfg.flight < cfg.weight_stages and let_in else 0
        launch(
            few_rows, (max(1, min(self.sms, (self.N // cfg.BM + self.E) * max(num_up, num_down))),),
            self.x, describe(gate_up.view(n * self.E, self.F, self.D), [n, BN // n, BL]), describe(down, [1,
            BN, BL]),
            bias, h_N2F, act, y, self.meta.order, self.meta.ready, self.meta.counter, *self.tile_args(cfg),
            self.D, self.F, num_up, num_down,
            cdiv(self.D, BL), cdiv(self.F, BL), cfg.BM, BN, BL, cfg.SUB, cfg.row_stages, cfg.weight_stages,
            cfg.flight, guess, self.K,
            self.activation, num_warps=cfg.BM // 16, **early(self.x.device),
        )  # fmt: skip
        return y

    def dh(self, dy: Tensor, down: Tensor, h_N2F: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dH [N, H], s * act [N, F], partial sums of ds [parts, N]. dy: [T, D], or its gathered rows."""
        cfg = self.config("dh")
        parts = cdiv(self.F, cfg.BN)
        dh = self.empty(self.N, self.H)
        act = self.empty(self.N, self.F)
        ds = self.empty(parts, self.N, dtype=torch.float32)
        if cfg.outs:
            gather = "a" if cfg.gather else ""
            product = Product(dy, down, self.F, self.D, gather=gather, h=h_N2F, ds=ds)
            self.specialised("dh", cfg, product, (dh, None, act))
            return dh, act, ds
        block = [cfg.BM, cfg.BN // cfg.SUB]
        launch(
            kernels.dh_kernel, self.grid(cfg, self.row_tiles(cfg, self.F, cfg.BN)),
            dy if cfg.gather else plain(dy, [cfg.BM, cfg.BL], self.tma),
            plain(down, [1, cfg.BL, cfg.BN], self.tma),
            *halves(h_N2F, self.F, block, self.tma), *halves(dh, self.F, block, self.tma),
            ragged(act, block, self.tma), self.weights, ds, self.meta.order, *self.tile_args(cfg),
            self.N, self.D, self.F, self.D,
            cfg.BM, cfg.BN, cfg.BL, cfg.GROUP, cfg.SUB, self.K, self.activation, cfg.gather, self.tma,
            self.even(cfg, self.D),
            self.precision, num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return dh, act, ds

    def dw(
        self, kernel: str, a: Tensor, b: Tensor, gather: str, c: Tensor | None = None, how: str = "again"
    ) -> Tensor:
        """[E, P, Q] = for each expert, its rows of a transposed times its rows of b, in c.

        gather: the operand ("a", "b") that is [T, D] and not gathered yet, or "".
        c: None: a new tensor in x's type. In fp32, with 16-bit operands, products are not rounded.
        how: what happens to the values of a given c. "write": they are overwritten; "add": they are added to;
            "again": they are added to, and usually there are no rows (a window after the first).
        """
        P, Q = a.shape[1], b.shape[1]
        if c is None:
            c, how = self.empty(self.E, P, Q), "write"
        wide = c.dtype != self.x.dtype
        cfg = self.sum_config(kernel, how, wide)
        if cfg.outs:
            sums = "" if not wide else SUMS if how == "add" else how
            cfg = cfg._replace(SUB=SUMS_SUB) if wide else cfg
            self.specialised("dw", cfg, Product(a, b, Q, gather=gather, sums=sums), (c, None, None))
            return c
        boxes = self.tma and not wide
        launch(
            kernels.dw_kernel, self.grid(cfg, self.E * cdiv(P, cfg.BM) * cdiv(Q, cfg.BN)),
            a if gather == "a" else ragged(a, [cfg.BL, cfg.BM], self.tma),
            b if gather == "b" else ragged(b, [cfg.BL, cfg.BN], self.tma),
            plain(c, [1, cfg.BM, cfg.BN // cfg.SUB], boxes),
            self.meta.order, self.meta.offsets, self.meta.by_size, self.E, P, Q,
            cfg.BM, cfg.BN, cfg.BL, cfg.GROUP, cfg.SUB, self.K, gather, self.tma, boxes, how, self.precision,
            num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return c

    def sum_config(self, kernel: str, how: str, wide: bool) -> KernelConfig:
        """The configuration of `dw`. wide: c has a wider type than the operands.

        The kernel for Hopper adds only to wide sums. For "again" it would start too many programs.
        """
        cfg = self.config(kernel)
        if how != "write" and not (how == "add" and wide and cfg.outs):
            cfg = self.config("dw_add")
        uneven = self.D % 64 != 0 or self.F % 64 != 0
        # with masks and 32-bit addresses a wide tile in one piece would spill
        return cfg._replace(SUB=4) if wide and uneven and self.arch.startswith("cuda") else cfg

    def combine(
        self,
        rows: Tensor,
        weights: Tensor | None,
        y: Tensor | None = None,
        ds: Tensor | None = None,
        d_weights: Tensor | None = None,
        add: bool | None = None,
        fill: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """y [T, D], the sum of each token's rows in a fixed order; with ds also the weights' gradient.

        weights: factors of the rows; None: no factors.
        y, d_weights: tensors to which the results are added; None: new tensors.
        add: False: overwrite y and d_weights instead of adding. None: add if y is given.
        fill: False: y and d_weights do not change for tokens without a slot in any window. True: they get
            zeros.
        """
        add = y is not None if add is None else add
        y = self.empty(self.T, self.D) if y is None else y
        if ds is not None and d_weights is None:
            d_weights = self.empty(*self.weights.shape, dtype=self.weights.dtype)
        # if most slots have no row in the window, check before loading, two slots at a time
        sparse = 2 * self.N <= self.T * self.K
        block, group, warps = (2048, 2, 2) if sparse else (1024, self.K, 4)
        block = min(block, power_of_2(self.D))
        ahead = early(self.x.device)
        launch(
            kernels.combine_kernel, (min(self.T, 16 * self.sms) if add else self.T, cdiv(self.D, block)),
            rows, weights, self.meta.row_of, self.meta.offsets, y, ds, d_weights, self.meta.base, self.N,
            self.E, self.T, self.D,
            0 if ds is None else ds.shape[0], self.K, power_of_2(self.K), block, group, weights is not None,
            ds is not None, add,
            fill or add, bool(ahead), num_warps=warps, **ahead,
        )  # fmt: skip
        return y, d_weights

    def bias_gradient(self, dh: Tensor, d_bias: Tensor | None = None) -> Tensor:
        """[E, H], the sum of each expert's rows of dH; added to d_bias if given."""
        add = d_bias is not None
        W = dh.shape[1]
        block = 128
        d_bias = d_bias if d_bias is not None else self.empty(self.E, W)
        launch(
            kernels.bias_kernel,
            (self.E, cdiv(W, block)),
            dh,
            d_bias,
            self.meta.offsets,
            W,
            64,
            block,
            add,
            num_warps=4,
        )
        return d_bias

    def clear_rest(self, c: Tensor) -> Tensor:
        """Stores zeros in the rows of c [N, W] that belong to no expert; returns c."""
        N, W = c.shape
        R = 16
        block = min(1024, power_of_2(W))
        launch(
            kernels.clear_kernel, (cdiv(N, R), cdiv(W, block)),
            c, self.meta.offsets, N, self.E, W, R, block, num_warps=4,
        )  # fmt: skip
        return c


def windows(first: Metadata, N: int) -> Iterator[Metadata]:
    """Divides the N sorted rows into windows of P rows, and yields the metadata of each window."""
    yield first
    for base in range(first.P, N, first.P):
        yield first.window(base)


def forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    activation: str,
    pairs: int,
    keep: bool,
    kind: Callable[..., LayerLaunches] = LayerLaunches,
) -> tuple[Tensor, Tensor, Tensor]:
    """moe_mlp: returns y, H of the first window (empty unless keep) and the packed metadata.

    kind: makes the launches of a window; fp8_gpu.py has others. So in the functions below.
    """
    x, gate_up, down, weights, ids = (t.contiguous() for t in (x, gate_up, down, weights, ids))
    bias = None if bias is None else bias.contiguous()
    h = empty((0, gate_up.shape[1]), x.dtype, x.device)
    alone = len(x) == 1 and not keep and pairs == ids.numel() > 0
    if alone and kind is LayerLaunches:  # the metadata is never read; codes may stand for freed values
        packed = empty((Metadata.size(pairs, down.shape[0]),), torch.int32, x.device)
        return one_token(x, gate_up, down, weights, ids, bias, activation), h, packed
    meta = route(ids, down.shape[0], pairs)
    y: Any = None
    layer_of = partial(kind, x, down.shape, ids.shape[1])
    how = weights, (gate_up, down), activation
    if keep:
        h = layer_of(meta, *how).room_for_h()
    if ids.numel() == 0:
        return torch.zeros_like(x), h, meta.packed
    for window in windows(meta, ids.numel()):
        layer = layer_of(window, *how)
        rows = layer.products(gate_up, bias, h if keep and y is None else None, down)
        y, _ = layer.combine(rows, weights, y)
        del rows  # freed before the next window allocates its own
    return y, h, meta.packed


def backward(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    h: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    activation: str,
    pairs: int,
    kind: Callable[..., LayerLaunches] = LayerLaunches,
) -> tuple[Tensor | None, ...]:
    """moe_mlp's gradients of x, gate_up, down, weights and bias (None without one)."""
    tensors = dy, x, gate_up, down, weights, h, packed, bias
    return backward_into(*tensors, None, None, activation, pairs, ("write", "write"), kind)


def backward_into(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    h: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    up_sum: Tensor | None,
    down_sum: Tensor | None,
    activation: str,
    pairs: int,
    how: tuple[str, str],
    kind: Callable[..., LayerLaunches] = LayerLaunches,
) -> tuple[Tensor | None, ...]:
    """`backward`, with gradients of gate_up and down that are written into given tensors or added to them.

    up_sum, down_sum: the tensors; None: new ones, which are returned. For a given tensor None is returned.
    how: "write" or "add", for each of the two.
    """
    dy, x, gate_up, down, weights = (t.contiguous() for t in (dy, x, gate_up, down, weights))
    bias = None if bias is None else bias.contiguous()
    d_gate_up, d_down = up_sum, down_sum
    if weights.numel() == 0:
        dx, d_weights, d_bias = (None if t is None else torch.zeros_like(t) for t in (x, weights, bias))
        return dx, *no_rows((gate_up, down), (up_sum, down_sum), how), d_weights, d_bias
    dx = d_weights = d_bias = None
    for window in windows(Metadata(packed, weights.numel(), down.shape[0], pairs), weights.numel()):
        layer = kind(x, down.shape, weights.shape[1], window, weights, (gate_up, down, dy), activation)
        if dx is not None:
            h = layer.room_for_h()  # recomputed for every window after the first
            layer.up(gate_up, bias, h)
            how = "again", "again"

        fused = [layer.config(k).gather for k in ("dh", "dw_down", "dw_up")]
        dy_N: Any = None if fused[0] and fused[1] else layer.gathered(dy)
        dh, act, ds = layer.dh(dy if fused[0] else dy_N, down, h)
        gather = "a" if fused[1] else ""
        d_down = layer.dw("dw_down", dy if fused[1] else dy_N, act, gather, d_down, how[1])
        del dy_N, act

        dx, d_weights = layer.combine(layer.rows("dx", dh, gate_up, False), None, dx, ds, d_weights)
        gather = "b" if fused[2] else ""
        d_gate_up = layer.dw("dw_up", dh, x if fused[2] else layer.gathered(x), gather, d_gate_up, how[0])
        if bias is not None:
            d_bias = layer.bias_gradient(dh, d_bias)
        del h, dh, ds  # freed before the next window allocates its own
    of_matrices = d_gate_up if up_sum is None else None, d_down if down_sum is None else None
    return dx, *of_matrices, d_weights, d_bias


def no_rows(
    matrices: tuple[Tensor, Tensor], sums: tuple[Tensor | None, Tensor | None], how: tuple[str, str]
) -> list[Tensor | None]:
    """The results of `backward_into` for gate_up and down, if no row is routed."""
    for total, way in zip(sums, how, strict=True):
        if total is not None and way == "write":
            total.zero_()
    return [torch.zeros_like(t) if total is None else None for t, total in zip(matrices, sums, strict=True)]


def backward_of_x(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    h: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    activation: str,
    pairs: int,
    kind: Callable[..., LayerLaunches] = LayerLaunches,
) -> tuple[Tensor | None, ...]:
    """The part of `backward` that other stages wait for: the gradients of x, weights and bias (None without).

    It also returns the inputs of `backward_of_matrices` for the first window: dH [pairs, 2F] and the weighted
    activation [pairs, F]. They need F elements a pair more than H alone would. But with H alone, dH's product
    would have to be computed a second time: a sixth of the backward's products.
    """
    dy, x, gate_up, down, weights = (t.contiguous() for t in (dy, x, gate_up, down, weights))
    bias = None if bias is None else bias.contiguous()
    if weights.numel() == 0:
        none = x.new_empty(0, gate_up.shape[1]), x.new_empty(0, down.shape[2])
        return (*(None if t is None else torch.zeros_like(t) for t in (x, weights, bias)), *none)
    dx = d_weights = d_bias = None
    kept: tuple[Tensor, ...] = ()
    for window in windows(Metadata(packed, weights.numel(), down.shape[0], pairs), weights.numel()):
        layer = kind(x, down.shape, weights.shape[1], window, weights, (gate_up, down, dy), activation)
        if kept:
            h = layer.room_for_h()  # recomputed for every window after the first
            layer.up(gate_up, bias, h)
        dh, act, ds = layer.dh(dy if layer.config("dh").gather else layer.gathered(dy), down, h)
        dx, d_weights = layer.combine(layer.rows("dx", dh, gate_up, False), None, dx, ds, d_weights)
        if bias is not None:
            d_bias = layer.bias_gradient(dh, d_bias)
        kept = kept or (dh, act)
        del h, dh, act, ds  # freed before the next window allocates its own
    return dx, d_weights, d_bias, *kept


def backward_of_matrices(
    gate_up: Tensor,
    down: Tensor,
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    packed: Tensor,
    dh: Tensor,
    act: Tensor,
    bias: Tensor | None,
    up_sum: Tensor | None,
    down_sum: Tensor | None,
    activation: str,
    pairs: int,
    how: tuple[str, str] = ("write", "write"),
    kind: Callable[..., LayerLaunches] = LayerLaunches,
) -> tuple[Tensor | None, Tensor | None]:
    """The rest of `backward`: the gradients of gate_up and down.

    dy, x, weights: contiguous.
    dh, act: as `backward_of_x` returned them.
    up_sum, down_sum, how: as for `backward_into`.
    H, dH and the activation are recomputed for every window after the first. These windows hold rows only if
    routing is skewed.
    """
    gate_up, down = gate_up.contiguous(), down.contiguous()
    bias = None if bias is None else bias.contiguous()
    d_gate_up, d_down = up_sum, down_sum
    if weights.numel() == 0:
        up, out = no_rows((gate_up, down), (up_sum, down_sum), how)
        return up, out
    again = False
    for window in windows(Metadata(packed, weights.numel(), down.shape[0], pairs), weights.numel()):
        layer = kind(x, down.shape, weights.shape[1], window, weights, (gate_up, down, dy), activation)
        fused = [layer.config(k).gather for k in ("dh", "dw_down", "dw_up")]
        dy_N: Any = None if fused[1] and (fused[0] or not again) else layer.gathered(dy)
        if again:
            h = layer.room_for_h()
            layer.up(gate_up, bias, h)
            dh, act, _ = layer.dh(dy if fused[0] else dy_N, down, h)
            how = "again", "again"
            del h
        gather = "a" if fused[1] else ""
        d_down = layer.dw("dw_down", dy if fused[1] else dy_N, act, gather, d_down, how[1])
        del dy_N, act
        gather = "b" if fused[2] else ""
        d_gate_up = layer.dw("dw_up", dh, x if fused[2] else layer.gathered(x), gather, d_gate_up, how[0])
        del dh  # freed before the next window allocates its own
        again = True
    return d_gate_up if up_sum is None else None, d_down if down_sum is None else None


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """c of grouped_mm, computed by the kernel of the down projection, since rows are already sorted."""
    a, b = a.contiguous(), b.contiguous()
    if a.shape[0] == 0:
        return a.new_empty(0, b.shape[1])
    layer = LayerLaunches(a, b.shape, 1, group(ends.contiguous(), a.shape[0]), operands=(b,))
    return layer.clear_rest(layer.rows("down", a, b, True))


def grouped_mm_backward(dc: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """grouped_mm's gradients of a and b."""
    dc, a, b = dc.contiguous(), a.contiguous(), b.contiguous()
    if a.shape[0] == 0:
        return torch.zeros_like(a), torch.zeros_like(b)
    layer = LayerLaunches(a, b.shape, 1, group(ends.contiguous(), a.shape[0]), operands=(b, dc))
    return layer.clear_rest(layer.rows("dx", dc, b, False)), layer.dw("dw_down", dc, a, "")


def grouped_mm_backward_of_a(dc: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """grouped_mm's gradient of a."""
    dc, a, b = dc.contiguous(), a.contiguous(), b.contiguous()
    if a.shape[0] == 0:
        return torch.zeros_like(a)
    layer = LayerLaunches(a, b.shape, 1, group(ends.contiguous(), a.shape[0]), operands=(b, dc))
    return layer.clear_rest(layer.rows("dx", dc, b, False))
