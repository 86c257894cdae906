"""moe_mlp with fp8 products on Hopper: the launches of gpu.py with other kernels for its products.

Forward: cast of x, up (with the casts of H and of the activation), down, combine. Backward: cast of dy, dh
(with dH's cast), down's gradient, dx, gate_up's gradient, combine. Gradients of matrices are of transposed
codes, or as in bf16.

next: ops/experts/fp8_kernels.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.base.activations import activation as named
from tmoe.ops.experts import fp8_kernels, gpu, kernels
from tmoe.ops.experts.fp8_codes import BLOCK, E4M3, Codes, KeptH, encode_gpu
from tmoe.ops.experts.fp8_table import fastest
from tmoe.ops.experts.gpu import LayerLaunches, Operand, halves
from tmoe.ops.experts.pair_order import Metadata, power_of_2
from tmoe.ops.experts.table import KernelConfig
from tmoe.ops.launch.kernel_launch import cdiv, describe, describe_ragged, device_facts, gluon_lacks, launch

try:
    from tmoe.ops.experts import fp8_hopper
except ImportError:  # as in gpu.py
    fp8_hopper = None

BM = 128  # rows of a row tile: two tiles of fp8_codes.py
# Plain Triton has tiles of 128 x 128: with 256 columns the sum of a block and the sum of all blocks do not
# fit into registers.
CONFIGS = {
    "up": KernelConfig(BM, 128, BLOCK, 16, 4, 8, 3, 1, True),
    "down": KernelConfig(BM, 128, BLOCK, 16, 1, 8, 4, 1, False),
    "dh": KernelConfig(BM, 128, BLOCK, 16, 8, 8, 4, 1, True),
    "dx": KernelConfig(BM, 128, BLOCK, 16, 1, 8, 4, 1, False),
}
# The kernels of fp8_hopper.py: `stages` of the ring, `outs` staging buffers of each consumer, `warps` that
# share a tile.
HOPPER = {
    "up": KernelConfig(BM, 256, BLOCK, 8, 2, 8, 4, 1, True, 2),
    "down": KernelConfig(BM, 256, BLOCK, 8, 2, 8, 4, 1, False, 2),
    "dh": KernelConfig(BM, 128, BLOCK, 8, 2, 8, 6, 1, True, 2),
    "dx": KernelConfig(BM, 256, BLOCK, 8, 2, 8, 4, 1, False, 2),
}
# The same for gradients of matrices. They are in bf16 unless the table has such a configuration.
WEIGHTS = {name: KernelConfig(BM, 256, BLOCK, 8, 2, 8, 4, 1, True, 2) for name in ("dw_down", "dw_up")}
STAGED = [64, 64]  # box of a staging buffer


def cast_rows(x_TD: Tensor, codes_TD: Tensor, scales_T: Tensor) -> None:
    """Writes codes of rows, e4m3, and their scales, float32. All are contiguous, on one GPU."""
    T, D = x_TD.shape
    kernel, warps = fp8_kernels.cast_rows_kernel, 4 if D <= 4096 else 8
    launch(kernel, (T,), x_TD, codes_TD, scales_T, D, power_of_2(D), num_warps=warps)


def halves_of_rows(t: Tensor, N: int, box: list[int]) -> tuple[Operand, Operand | None]:
    """Descriptors of t's first N rows, and of the N rows after them if there are any."""
    return describe_ragged(t[:N], box), describe_ragged(t[N:], box) if len(t) > N else None


class Product8(NamedTuple):
    """A product for fp8_hopper.fp8_specialised, which documents the other fields."""

    kind: str
    cfg: KernelConfig
    a: tuple[Operand, Tensor]  # a, sa
    b: tuple[Operand, Tensor]  # b, sb
    width: int  # columns of the result, or of one half of it
    length: int  # of the sum, or of one half of it
    strides: tuple[int, int]  # s_n, s_k
    outs: tuple[Any, ...]  # c, c_gate, c_up, gate_codes, up_codes, sc
    parts: int = 1
    bias: Tensor | None = None
    h: tuple[Operand | None, Operand | None, Tensor | None] = (None, None, None)  # h_gate, h_up, sh
    ds: Tensor | None = None
    P: int = 0  # rows of a gradient of a matrix
    first: Tensor | None = None
    sums: str = ""


class Fp8Launches(LayerLaunches):
    """One call's launches with fp8 products. Rows of x and dy are cast once for all windows of a call."""

    def __init__(self, *args: Any, codes: tuple[Tensor, Tensor], casts: dict[int, Any]) -> None:
        """codes: packed codes of gate_up and down; casts: of earlier windows, by address."""
        super().__init__(*args)
        matrices = self.E, self.H, self.D
        self.up_codes = Codes.of(codes[0], matrices, self.halves)
        self.down_codes = Codes.of(codes[1], (self.E, self.D, self.F), 1)
        self.casts = casts
        self.dh_codes: tuple[Tensor, Tensor] | None = None

    def config(self, kernel: str) -> KernelConfig:
        """As in gpu.py. Its functions hand over dy as it is: `operand` gathers its codes."""
        if kernel in CONFIGS:
            return self.own(kernel)._replace(gather=True)
        cfg = super().config(kernel)
        return cfg._replace(gather=True) if kernel in WEIGHTS and self.weights_config(kernel) else cfg

    def in_gluon(self) -> bool:
        """Whether the kernels of fp8_hopper.py can run."""
        return self.tma and self.x.device.type != "cpu" and not gluon_lacks("fp8_hopper")

    def own(self, kernel: str) -> KernelConfig:
        """The configuration of an fp8 product; with `outs` for the kernels of fp8_hopper.py."""
        if not self.in_gluon():
            return CONFIGS[kernel]
        return fastest(kernel, self.arch, self.D, self.F, self.N / self.E) or HOPPER[kernel]

    def weights_config(self, kernel: str) -> KernelConfig | None:
        """The configuration of a gradient of matrices in fp8; None: it is in bf16."""
        if not self.in_gluon():
            return None
        cfg = fastest(kernel, self.arch, self.D, self.F, self.N / self.E)
        return cfg if cfg and cfg.outs and cfg.BL == BLOCK else None

    def warp_specialised(self, product: Product8) -> None:
        """Launch fp8_hopper.fp8_specialised."""
        p, cfg = product, product.cfg
        columns = 128 if p.kind == "up" and self.halves == 2 else cfg.BN
        # other products depend on none of these, and need fewer binaries if they are constant
        K, activation, gather, even = 1, "swiglu", False, True
        if p.kind in ("up", "dh"):
            K, activation, gather, even = self.K, self.activation, cfg.gather, self.D % BLOCK == 0
        num_m, num_n, (tiles, capacity, offsets) = cdiv(p.P, BM), cdiv(p.width, columns), self.tile_args(cfg)
        bound = self.row_tiles(cfg, p.width, columns)
        if p.kind == "dw":
            tiles, bound = self.meta.by_size, self.E * num_m * num_n
        launch(
            fp8_hopper.fp8_specialised, self.grid(cfg, bound),
            *p.a, *p.b, p.bias, *p.h, *p.outs, None if p.ds is None else self.weights, p.ds, self.meta.order,
            tiles, capacity, offsets, p.first, self.N, self.E, p.P, p.width, num_m, num_n,
            cdiv(p.length, BLOCK), *p.strides, cfg.GROUP, self.D,
            cfg.BN, cfg.stages, cfg.outs, K, p.kind, activation, p.h[0] is not None, p.parts, gather, even,
            p.sums, num_warps=4,
        )  # fmt: skip

    def cast(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [T, D] and scales [T] of rows."""
        if x_TD.data_ptr() not in self.casts:
            codes, scales = self.empty(*x_TD.shape, dtype=E4M3), self.empty(len(x_TD), dtype=torch.float32)
            cast_rows(x_TD, codes, scales)
            self.casts[x_TD.data_ptr()] = codes, scales
        return self.casts[x_TD.data_ptr()]

    def operand(self, codes_TD: Tensor, cfg: KernelConfig) -> Operand:
        """Codes of rows, for a kernel that gathers them; else a descriptor of a copy in expert order."""
        if cfg.gather:
            return codes_TD
        rows = self.empty(self.N, self.D, dtype=E4M3)
        block = min(1024, power_of_2(self.D))
        launch(
            kernels.gather_kernel, (cdiv(self.N, 8), cdiv(self.D, block)),
            codes_TD, self.meta.order, self.meta.offsets, rows, self.D, self.E, self.K, 8, block, num_warps=4,
        )  # fmt: skip
        return describe(rows, [BM, BLOCK])

    def matrices(self, codes: Codes, turned: bool) -> tuple[Operand, Tensor]:
        """Codes of matrices, or their transposed copy, and the scales."""
        return describe(codes.turned if turned else codes.codes, [1, BLOCK, BLOCK]), codes.scales

    def tile_scales(self, parts: int) -> Tensor:
        """Room for the scales of tiles, for `parts` blocks of columns."""
        return self.empty(parts, 2 * Metadata.capacity(self.N, self.E, BM), dtype=torch.float32)

    def room_for_h(self) -> Tensor:
        """A new tensor for the codes of H of a window."""
        return self.empty(KeptH.size(self.N, (self.E, self.D, self.F), self.activation), dtype=torch.uint8)

    def coded_h(
        self, h: Tensor | None, box: list[int]
    ) -> tuple[Operand | None, Operand | None, Tensor | None]:
        """Operands of a kernel: codes of gate and of up, if there is a gate, and scales. None without H."""
        if h is None:
            return None, None, None
        codes, scales = KeptH.of(h, self.N, (self.E, self.D, self.F), self.activation)
        return *halves_of_rows(codes.view(-1, self.F), self.N, box), scales

    def up_cast(self, bias: Tensor | None, h: Tensor | None) -> tuple[Tensor, Tensor]:
        """Codes [N, F] and scales of the activation; writes the codes of H unless it is None."""
        cfg = self.own("up")
        codes, scales = self.cast(self.x)
        parts = cdiv(self.F, BLOCK)
        act, s_act = self.empty(self.N, self.F, dtype=E4M3), self.tile_scales(parts)
        if cfg.outs:
            product = Product8(
                "up", cfg, (self.operand(codes, cfg), scales), self.matrices(self.up_codes, False), self.F,
                self.D, (cdiv(self.D, BLOCK), 1),
                (describe_ragged(act, [64, BLOCK]), *[None] * 4, s_act), bias=bias,
                h=self.coded_h(h, [64, BLOCK]),
            )  # fmt: skip
            self.warp_specialised(product)
            return act, s_act
        box = [BM, BLOCK // cfg.SUB]
        launch(
            fp8_kernels.up_fp8_kernel, self.grid(cfg, self.row_tiles(cfg, self.F, BLOCK)),
            self.operand(codes, cfg), scales, *self.matrices(self.up_codes, False), bias,
            *self.coded_h(h, box), describe_ragged(act, box), s_act, self.meta.order, *self.tile_args(cfg),
            self.D, self.F, BM, cfg.GROUP, cfg.SUB, self.K, self.activation, h is not None, cfg.gather,
            self.D % BLOCK == 0, num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return act, s_act

    def up(self, gate_up: Tensor, bias: Tensor | None, h_N2F: Tensor | None) -> Tensor:
        """Codes [N, F] of the activation; writes the codes of H unless it is None."""
        return self.up_cast(bias, h_N2F)[0]

    def summed_rows(self, kernel: str, a: tuple[Tensor, Tensor], b: Codes, turned: bool) -> Tensor:
        """[N, W] in x's type: rows of a times matrices of b, or of its copy `turned`, summed over halves."""
        cfg = self.own(kernel)
        M, W, L = (b.turned if turned else b.codes).shape
        c = self.empty(self.N, W)
        blocks = b.scales.stride()[1:]
        s_n, s_k = blocks[::-1] if turned else blocks
        if cfg.outs:
            out = describe_ragged(c, STAGED), *[None] * 5
            product = Product8(
                "rows", cfg, (describe(a[0], [BM, BLOCK]), a[1]), self.matrices(b, turned), W, L, (s_n, s_k),
                out, M // self.E,
            )  # fmt: skip
            self.warp_specialised(product)
            return c
        launch(
            fp8_kernels.rows_fp8_kernel, self.grid(cfg, self.row_tiles(cfg, W, BLOCK)),
            describe(a[0], [BM, BLOCK]), a[1], *self.matrices(b, turned),
            describe_ragged(c, [BM, BLOCK]), *self.tile_args(cfg), self.N, L, W, s_n, s_k, BM, cfg.GROUP,
            M // self.E, num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return c

    def rows(self, kernel: str, a: Tensor, b: Tensor, b_rows: bool) -> Tensor:
        """The product dx, of the codes that `dh` has made."""
        assert kernel == "dx" and self.dh_codes is not None
        return self.summed_rows("dx", self.dh_codes, self.up_codes, True)

    def products(self, gate_up: Tensor, bias: Tensor | None, h_N2F: Tensor | None, down: Tensor) -> Tensor:
        return self.summed_rows("down", self.up_cast(bias, h_N2F), self.down_codes, False)

    def dh(self, dy: Tensor, down: Tensor, h_N2F: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in bf16, and the codes of dH for `rows`. dy: [T, D]; h_N2F: the codes of H."""
        cfg = self.own("dh")
        codes, scales = self.cast(dy)
        parts = cdiv(self.F, BLOCK)
        dh, act = self.empty(self.N, self.H), self.empty(self.N, self.F)
        ds = self.empty(cdiv(self.F, cfg.BN), self.N, dtype=torch.float32)
        dh8 = self.empty(self.halves * self.N, self.F, dtype=E4M3)
        s_dh = self.tile_scales(self.halves * parts)
        self.dh_codes = dh8, s_dh
        if cfg.outs:
            gate_codes, up_codes = halves_of_rows(dh8, self.N, [64, BLOCK])
            product = Product8(
                "dh", cfg, (self.operand(codes, cfg), scales), self.matrices(self.down_codes, True), self.F,
                self.D, (1, parts),
                (describe_ragged(act, STAGED), *halves(dh, self.F, STAGED, True), gate_codes, up_codes, s_dh),
                h=self.coded_h(h_N2F, [BM, 64]), ds=ds,
            )  # fmt: skip
            self.warp_specialised(product)
            return dh, act, ds
        box = [BM, BLOCK // cfg.SUB]
        gate_codes, up_codes = halves_of_rows(dh8, self.N, box)
        launch(
            fp8_kernels.dh_fp8_kernel, self.grid(cfg, self.row_tiles(cfg, self.F, BLOCK)),
            self.operand(codes, cfg), scales, *self.matrices(self.down_codes, True),
            *self.coded_h(h_N2F, box), *halves(dh, self.F, box, True), describe_ragged(act, box),
            gate_codes, up_codes, s_dh, self.weights, ds, self.meta.order,
            *self.tile_args(cfg), self.N, self.D, self.F, BM, cfg.GROUP, cfg.SUB, self.K, self.activation,
            cfg.gather, self.D % BLOCK == 0, num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return dh, act, ds

    def turned(self, t: Tensor, gather: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Transposed codes of sorted rows, or with `gather` of [T, C]; their scales, and `first`."""
        capacity, C = Metadata.capacity(self.N, self.E, BM), t.shape[1]
        codes = self.empty(C, BM * capacity, dtype=E4M3)
        scales = self.empty(cdiv(C, BLOCK), capacity, dtype=torch.float32)
        first = self.empty(self.E, dtype=torch.int32)
        launch(
            fp8_kernels.turned_kernel, (capacity, cdiv(C, BLOCK)), t, codes, scales, first, self.meta.order,
            self.meta.tiles[BM], capacity, self.meta.offsets, C, self.K, gather, num_warps=8,
        )  # fmt: skip
        return codes, scales, first

    def dw(
        self, kernel: str, a: Tensor, b: Tensor, gather: str, c: Tensor | None = None, how: str = "again"
    ) -> Tensor:
        """As in bf16, or of codes of the rows. A window after the first has few rows, and is in bf16."""
        cfg = self.weights_config(kernel)
        if cfg is None or (c is not None and how == "again") or (c is not None and c.dtype != torch.float32):
            return super().dw(kernel, a, b, gather, c, how)
        P, Q = a.shape[1], b.shape[1]
        sums = "" if c is None else how
        c = self.empty(self.E, P, Q) if c is None else c
        codes_a, s_a, first = self.turned(a, gather == "a")
        codes_b, s_b, _ = self.turned(b, gather == "b")
        matrix = describe(codes_b.view(1, *codes_b.shape), [1, BLOCK, BLOCK])
        out = c if sums else describe(c, [1, *STAGED])
        product = Product8(
            "dw", cfg, (describe(codes_a, [BM, BLOCK]), s_a), (matrix, s_b), Q, BLOCK, (s_b.shape[1], 1),
            (out, *[None] * 5), P=P, first=first, sums=sums,
        )  # fmt: skip
        self.warp_specialised(product)
        return c


def in_fp8(run: Callable[..., tuple], *args: Any) -> tuple:
    """A function of gpu.py with fp8 products: the codes of gate_up and down come after its tensors."""
    how = next(i for i, arg in enumerate(args) if isinstance(arg, str))  # the activation
    kind = partial(Fp8Launches, codes=args[how - 2 : how], casts={})
    return run(*args[: how - 2], *args[how:], kind=kind)


forward = partial(in_fp8, gpu.forward)
backward = partial(in_fp8, gpu.backward)
backward_into = partial(in_fp8, gpu.backward_into)
backward_of_x = partial(in_fp8, gpu.backward_of_x)
backward_of_matrices = partial(in_fp8, gpu.backward_of_matrices)


def trace(sizes: tuple[int, ...], dtype: torch.dtype, pairs: int | None, how: tuple[str, bool, bool]) -> None:
    """Run forward and backward on meta tensors, inside compile_only. Other chips than Hopper have none.

    sizes: T, D, F, E, K. pairs: as for `op.trace`. how: activation, whether there is a bias, whether trained.
    """
    T, D, F, E, K = sizes
    activation, biased, trained = how
    if device_facts(torch.device("meta"))[0] != "cuda:90":
        return
    n = named(activation).halves
    x = torch.empty(T, D, dtype=dtype, device="meta")
    gate_up = torch.empty(E, n * F, D, dtype=dtype, device="meta")
    down = torch.empty(E, D, F, dtype=dtype, device="meta")
    bias = torch.empty(E, n * F, dtype=dtype, device="meta") if biased else None
    weights = torch.empty(T, K, device="meta")
    ids = torch.empty(T, K, dtype=torch.int32, device="meta")
    how_many = activation, T * K if pairs is None else pairs
    codes = encode_gpu(gate_up, n), encode_gpu(down, 1)
    forward(x, gate_up, down, weights, ids, bias, *codes, *how_many, False)
    if trained:
        _, h, packed = forward(x, gate_up, down, weights, ids, bias, *codes, *how_many, True)
        backward(x, x, gate_up, down, weights, h, packed, bias, *codes, *how_many)
