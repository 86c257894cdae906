"""moe_mlp_adapted with fp8 products of the base on Hopper: the launches of adapted_gpu.py with other kernels.

Products with the adapters' factors are those of adapted_gpu.py, of rows in x's type. A matrix without an
adapter has the kernels of fp8_gpu.py.

next: ops/experts/adapted_fp8_kernels.py
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tmoe.base.activations import activation as named
from tmoe.ops.experts import adapted_fp8_kernels as kernels
from tmoe.ops.experts import adapted_gpu
from tmoe.ops.experts.adapted_gpu import AdaptedLaunches, steps
from tmoe.ops.experts.fp8_codes import BLOCK, E4M3, Codes, encode_gpu
from tmoe.ops.experts.fp8_gpu import BM, CONFIGS, Fp8Launches, halves_of_rows
from tmoe.ops.experts.gpu import halves
from tmoe.ops.launch.kernel_launch import cdiv, describe, describe_ragged, device_facts, launch


class AdaptedFp8Launches(Fp8Launches, AdaptedLaunches):
    """AdaptedLaunches whose products with gate_up and down are in fp8."""

    def up_adapted(
        self, bias: Tensor | None, u: Tensor | None, b: Tensor | None, h: Tensor | None, plain: bool
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """Codes and scales of the activation with u b[e]^T added to H, u None: nothing.

        plain: also its values [N, F].
        """
        cfg, R = CONFIGS["up"], 0 if b is None else b.shape[2]
        codes, scales = self.cast(self.x)
        act, s_act = self.empty(self.N, self.F, dtype=E4M3), self.tile_scales(cdiv(self.F, BLOCK))
        values = self.empty(self.N, self.F) if plain else None
        box = [BM, BLOCK // cfg.SUB]
        launch(
            kernels.up_fp8_adapted, self.grid(cfg, self.row_tiles(cfg, self.F, BLOCK)),
            self.operand(codes, cfg), scales, *self.matrices(self.up_codes, False), bias, u, b,
            *self.coded_h(h, box), describe_ragged(act, box),
            None if values is None else describe_ragged(values, box), s_act, self.meta.order,
            *self.tile_args(cfg), self.D, self.F, R, 0 if u is None else u.shape[1],
            BM, cfg.GROUP, cfg.SUB, self.K, min(steps(R), 32), self.activation, h is not None, cfg.gather,
            self.D % BLOCK == 0, self.precision, num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return (act, s_act), values

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
        up_a, up_b, down_a, down_b = factors
        u_up = None if up_a is None else self.narrow(x, up_a, scales[0], True)[0]
        coded, act = self.up_adapted(bias, u_up, up_b, h, down_a is not None)
        u_down = None if down_a is None or act is None else self.narrow(act, down_a, scales[1])[0]
        rows = None if down is None else self.added("down", coded, self.down_codes, False, u_down, down_b)
        return rows, u_up, u_down

    def rows_with(
        self, kernel: str, a: Tensor, b: Tensor, b_rows: bool, u: Tensor | None, v: Tensor | None
    ) -> Tensor:
        """The product dx, of the codes that `dh_with` has made."""
        assert kernel == "dx" and self.dh_codes is not None
        return self.added("dx", self.dh_codes, self.up_codes, True, u, v)

    def added(
        self,
        kernel: str,
        a: tuple[Tensor, Tensor],
        b: Codes,
        turned: bool,
        u: Tensor | None,
        v: Tensor | None,
    ) -> Tensor:
        """`summed_rows` with u v[e] added; v [W, r] rows, turned: [r, W]. u None: nothing is added."""
        if u is None or v is None:
            return self.summed_rows(kernel, a, b, turned)
        cfg = CONFIGS[kernel]
        M, W, L = (b.turned if turned else b.codes).shape
        c, R = self.empty(self.N, W), v.shape[1 if turned else 2]
        blocks = b.scales.stride()[1:]
        launch(
            kernels.rows_fp8_adapted, self.grid(cfg, self.row_tiles(cfg, W, BLOCK)),
            describe(a[0], [BM, BLOCK]), a[1], *self.matrices(b, turned), u, v,
            describe_ragged(c, [BM, BLOCK]), *self.tile_args(cfg), self.N, L, W, R, u.shape[1],
            *(blocks[::-1] if turned else blocks), *((1, W) if turned else (R, 1)), BM, cfg.GROUP, steps(R),
            M // self.E, self.precision, num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return c

    def dh_with(
        self, dy: Tensor, down: Tensor, h: Tensor, u: Tensor | None, v: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if u is None or v is None:
            return self.dh(dy, down, h)
        cfg, n, R = CONFIGS["dh"], self.halves, v.shape[1]
        codes, scales = self.cast(dy)
        parts = cdiv(self.F, BLOCK)
        dh, act = self.empty(self.N, self.H), self.empty(self.N, self.F)
        ds = self.empty(parts, self.N, dtype=torch.float32)
        self.dh_codes = self.empty(n * self.N, self.F, dtype=E4M3), self.tile_scales(n * parts)
        dh8, s_dh = self.dh_codes
        box = [BM, BLOCK // cfg.SUB]
        launch(
            kernels.dh_fp8_adapted, self.grid(cfg, self.row_tiles(cfg, self.F, BLOCK)),
            self.operand(codes, cfg), scales, *self.matrices(self.down_codes, True), u, v,
            *self.coded_h(h, box), *halves(dh, self.F, box, True), describe_ragged(act, box),
            *halves_of_rows(dh8, self.N, box), s_dh, self.weights, ds, self.meta.order, *self.tile_args(cfg),
            self.N, self.D, self.F, R, u.shape[1], BM, cfg.GROUP, cfg.SUB, self.K, steps(R), self.activation,
            cfg.gather, self.D % BLOCK == 0, self.precision, num_warps=cfg.warps, num_stages=cfg.stages,
        )  # fmt: skip
        return dh, act, ds


def forward(*args: Any) -> tuple[Tensor, ...]:
    """`adapted_gpu.forward`; the codes of gate_up and down come after the four factors."""
    return adapted_gpu.forward(*args[:10], *args[12:], kind=_kind(args[10:12]))


def backward(*args: Any) -> tuple[Tensor | None, ...]:
    """`adapted_gpu.backward`; the codes of gate_up and down come after the four factors."""
    return adapted_gpu.backward(*args[:14], *args[16:], kind=_kind(args[14:16]))


def _kind(codes: tuple[Any, ...]) -> partial[AdaptedFp8Launches]:
    return partial(AdaptedFp8Launches, codes=codes, casts={})


def trace(
    sizes: tuple[int, int, int, int, int],
    ranks: tuple[int, int],
    dtype: torch.dtype,
    pairs: int | None = None,
    activation: str = "swiglu",
    biased: bool = False,
    trained: bool = True,
) -> None:
    """`adapted_gpu.trace` for these kernels. Other chips than Hopper have none."""
    if device_facts(torch.device("meta"))[0] != "cuda:90":
        return
    _, D, F, E, _ = sizes
    n = named(activation).halves
    shapes = ((E, n * F, D), n), ((E, D, F), 1)
    codes = tuple(encode_gpu(torch.empty(shape, dtype=dtype, device="meta"), n) for shape, n in shapes)
    adapted_gpu.trace(sizes, ranks, dtype, pairs, activation, biased, trained, kind=_kind(codes))
