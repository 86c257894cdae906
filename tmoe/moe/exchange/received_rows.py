"""Runs a rank's experts on the rows that it received: moe_mlp's kernels, results in the exchange's buffers.

The work between two movements of the exchange is one part. From its third call on, a part repeats its
launches without repeating its decisions (ops/launch/replay.py). A layer with two empty windows has 40
launches, and on a slow host 45 such layers took a tenth of the host's time in a step of moe-pilot-14b.

next: moe/exchange/symm.py
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.ops.experts import fp8_gpu, gpu
from tmoe.ops.experts.op import packed_codes
from tmoe.ops.experts.pair_order import Metadata, route
from tmoe.ops.gradient_sums import NEW, GradientSum
from tmoe.ops.launch.replay import remembered

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of gate_up, down and the bias


class ReceivedExperts:
    """The experts of one call, over the sections of an Exchange `ex` (moe/exchange/symm.py).

    A slot that received no token keeps the old contents of y and d_weights, which are not used.
    """

    def __init__(
        self,
        ex: Any,
        gate_up: Tensor,
        down: Tensor,
        bias: Tensor | None,
        activation: str,
        K: int,
        dtype: torch.dtype,
        pairs: int,
        codes: tuple[Tensor, Tensor] | None = None,
        packed: bool = False,
    ):
        """codes: of gate_up and down, for products in fp8.

        packed: x and dy have arrived as codes and scales, by which these products multiply. Their sections of
            rows then need values only before the gradients of the matrices.
        """
        D = down.shape[1]
        x, dy, y = (ex.rows(name, D, dtype) for name in ("x", "dy", "y"))
        weights, d_weights = (ex.routes(name, K, torch.float32) for name in ("weights", "d_weights"))
        bias = None if bias is None else bias.contiguous()
        rows = [t for name in ("x", "dy") for t in ex.packed(name, D)] if packed and codes else [None] * 4
        self.matrices = gate_up.contiguous(), down.contiguous()
        self.operands = (x, dy, y, weights, d_weights, *self.matrices, *(codes or (None, None)), *rows, bias)
        self.ids = ex.routes("ids", K, torch.int32)
        self.how = (activation, pairs)

    def do(self, part: Callable, *tensors: Tensor | None, how: tuple[str, ...] = ()) -> Any:
        """The result of a part for these operands. Its launches are replayed if that is possible.

        how: further arguments of the part.
        """
        return remembered(part, (*self.operands, *tensors), *how, *self.how)

    def forward(self, h: Tensor | None) -> None:
        """Writes y into its section, and H of the first window into h, unless h is None."""
        self.do(outputs, self.ids, h)

    def backward(
        self,
        h: Tensor,
        x_is_here: Callable[[], None],
        dx_is_there: Callable[[], None],
        frozen: bool = False,
        sums: Sequence[GradientSum] = (),
    ) -> Gradients:
        """d_gate_up, d_down, d_bias (None without a bias); dx and d_weights are written into their sections.

        sums: of gate_up and down, if the gradients are added to them; None is then returned for both.
        frozen: neither matrix needs a gradient. Their products are left out, and None is in their place.
        x_is_here() is called before anything reads x, and dx_is_there() once dx and d_weights are complete.
        Therefore the transfer of x overlaps with the products before the first call, and the transfer of dx
        with the products after the second. Windows after the first, which are empty unless routing is skewed,
        compute H again in each half.
        """
        dh, act, *packed = self.do(gradient_of_x, self.ids, h)
        x_is_here()
        if packed[1:]:
            self.do(add_to_gradient_of_x, *packed)
        dx_is_there()
        if frozen:
            del act
            return None, None, self.gradient_of_bias(dh, packed)
        opened = zip(sums, self.matrices, strict=False)
        into = [total.open().allocated(t) for total, t in opened] or [NEW, NEW]
        how = tuple("add" if target.add else "write" for target in into)
        given = [target.tensor for target in into]
        *made, d_bias = self.do(gradients_of_experts, dh, act, packed[0], *given, how=how)
        del dh, act
        grads = [one if there is None else there for one, there in zip(made, given, strict=True)]
        if packed[1:]:
            self.do(add_to_gradients_of_experts, *grads, d_bias, *packed)
        if not sums:
            return grads[0], grads[1], d_bias
        for total, target, grad in zip(sums, into, grads, strict=True):
            total.close(target, grad)
        return None, None, d_bias

    def gradient_of_bias(self, dh: Tensor, packed: Sequence[Tensor]) -> Tensor | None:
        """d_bias alone, of dH of the first window; packed: metadata of all windows. None without a bias."""
        if self.operands[-1] is None:
            return None
        (d_bias,) = self.do(gradient_of_bias, dh, packed[0])
        if packed[1:]:
            self.do(add_to_gradient_of_bias, d_bias, *packed)
        return d_bias


class Work(NamedTuple):
    """The operands of a call, and the steps that several parts share.

    The codes of matrices are None without products in fp8, those of rows unless x and dy have arrived packed.
    """

    x: Tensor
    dy: Tensor
    y: Tensor
    weights: Tensor
    d_weights: Tensor
    gate_up: Tensor
    down: Tensor
    up_codes: Tensor | None
    down_codes: Tensor | None
    x_codes: Tensor | None
    x_scales: Tensor | None
    dy_codes: Tensor | None
    dy_scales: Tensor | None
    bias: Tensor | None
    activation: str
    pairs: int

    def windows(self, ids: Tensor) -> Iterator[Metadata]:
        """The windows of the sorted rows, as metadata, computed from the ids."""
        return gpu.windows(route(ids, self.down.shape[0], self.pairs), ids.numel())

    def windows_in(self, packed: Sequence[Tensor]) -> list[Metadata]:
        """The same windows, from metadata that `windows` computed earlier."""
        first = Metadata(packed[0], self.weights.numel(), self.down.shape[0], self.pairs)
        return [first, *(first.over(i * self.pairs, more) for i, more in enumerate(packed[1:], 1))]

    def layers(self) -> Callable[[Metadata], gpu.LayerLaunches]:
        """A function that makes the launches of moe_mlp for a window of one part.

        In fp8 windows share the casts of x and dy, which are received codes if these arrived packed.
        """
        operands = (self.gate_up, self.down, self.dy)
        K, kind = self.weights.shape[1], gpu.LayerLaunches
        if (matrices := packed_codes(self)) is not None:
            casts = {
                rows.data_ptr(): (codes, scales)
                for rows, codes, scales in (
                    (self.x, self.x_codes, self.x_scales),
                    (self.dy, self.dy_codes, self.dy_scales),
                )
                if codes is not None
            }
            kind = partial(fp8_gpu.Fp8Launches, codes=matrices, casts=casts)
        return lambda window: kind(
            self.x, self.down.shape, K, window, self.weights, operands, self.activation
        )

    def gradient_of_h(self, layer: gpu.LayerLaunches, h: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """dH, the weighted activation, and the parts of the routing weights' gradient.

        H is computed again where h is None.
        """
        if h is None:
            h = layer.room_for_h()
            layer.up(self.gate_up, self.bias, h)
        dy = self.dy if layer.config("dh").gather else layer.gathered(self.dy)
        return layer.dh(dy, self.down, h)

    def gradient_of_x(self, layer: gpu.LayerLaunches, dh: Tensor, ds: Tensor, add: bool) -> None:
        """Writes dx into y, and d_weights; add: adds them to the present values.

        layer: the launches with which `gradient_of_h` has computed dH.
        """
        rows = layer.rows("dx", dh, self.gate_up, False)
        layer.combine(rows, None, self.y, ds, self.d_weights, add, fill=False)

    def gradients_of_experts(
        self,
        layer: gpu.LayerLaunches,
        dh: Tensor,
        act: Tensor,
        sums: Sequence[Tensor | None] = (None, None, None),
        how: Sequence[str] = ("again", "again"),
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """d_gate_up, d_down, d_bias (None without a bias) of a window, in `sums` if they are given.

        how: of gate_up's and down's sums, as in `gpu.LayerLaunches.dw`.
        """
        gather_down = layer.config("dw_down").gather
        gather_up = layer.config("dw_up").gather

        dy = self.dy if gather_down else layer.gathered(self.dy)
        d_down = layer.dw("dw_down", dy, act, "a" if gather_down else "", sums[1], how[1])

        x = self.x if gather_up else layer.gathered(self.x)
        d_gate_up = layer.dw("dw_up", dh, x, "b" if gather_up else "", sums[0], how[0])

        d_bias = None if self.bias is None else layer.bias_gradient(dh, sums[2])
        return d_gate_up, d_down, d_bias


# The parts. The arguments of each part are Experts.operands, then its own tensors, then Experts.how. Its
# docstring names the own tensors before the colon, and the results after it.


def taken(args: tuple[Any, ...]) -> tuple[Work, tuple[Any, ...]]:
    """Splits a part's arguments into its Work and its own tensors."""
    return Work(*args[:14], *args[-2:]), args[14:-2]


def outputs(*args: Any) -> tuple[()]:
    """ids, h (or None): y of all windows; H of the first window, written into h."""
    work, (ids, h) = taken(args)
    layer_of = work.layers()
    for i, window in enumerate(work.windows(ids)):
        layer = layer_of(window)
        rows = layer.products(work.gate_up, work.bias, None if i else h, work.down)
        layer.combine(rows, work.weights, work.y, add=i > 0, fill=False)
    return ()


def gradient_of_x(*args: Any) -> tuple[Tensor, ...]:
    """ids, h: dx and d_weights of the first window.

    Returns its dH and weighted activation, and the packed metadata of all windows.
    """
    work, (ids, h) = taken(args)
    first, *rest = work.windows(ids)
    layer = work.layers()(first)
    dh, act, ds = work.gradient_of_h(layer, h)
    work.gradient_of_x(layer, dh, ds, False)
    return dh, act, first.packed, *(window.packed for window in rest)


def add_to_gradient_of_x(*args: Any) -> tuple[()]:
    """Packed metadata: dx and d_weights of the windows after the first, added to those of the first."""
    work, packed = taken(args)
    layer_of = work.layers()
    for window in work.windows_in(packed)[1:]:
        layer = layer_of(window)
        dh, _, ds = work.gradient_of_h(layer, None)
        work.gradient_of_x(layer, dh, ds, True)
        del dh, ds
    return ()


def gradients_of_experts(*args: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dH, weighted activation, packed metadata, all of the first window: its gradients of the experts.

    Further tensors: of gate_up's and down's sum, or None, and how each is changed. For a given sum None is
    returned.
    """
    work, (dh, act, packed, up_sum, down_sum, *how) = taken(args)
    given = up_sum, down_sum, None
    layer = work.layers()(work.windows_in([packed])[0])
    *made, d_bias = work.gradients_of_experts(layer, dh, act, given, how)
    d_gate_up, d_down = (one if there is None else None for one, there in zip(made, given, strict=False))
    return d_gate_up, d_down, d_bias


def add_to_gradients_of_experts(*args: Any) -> tuple[()]:
    """Sums, packed metadata: the experts' gradients of the windows after the first, added to the sums."""
    work, (d_gate_up, d_down, d_bias, *packed) = taken(args)
    layer_of = work.layers()
    for window in work.windows_in(packed)[1:]:
        layer = layer_of(window)
        dh, act, _ = work.gradient_of_h(layer, None)
        work.gradients_of_experts(layer, dh, act, (d_gate_up, d_down, d_bias))
        del dh, act
    return ()


def gradient_of_bias(*args: Any) -> tuple[Tensor]:
    """dH, packed metadata, both of the first window: its gradient of the bias."""
    work, (dh, *packed) = taken(args)
    return (work.layers()(work.windows_in(packed)[0]).bias_gradient(dh),)


def add_to_gradient_of_bias(*args: Any) -> tuple[()]:
    """Sum, packed metadata: the bias's gradient of the windows after the first, added to the sum."""
    work, (d_bias, *packed) = taken(args)
    layer_of = work.layers()
    for window in work.windows_in(packed)[1:]:
        layer = layer_of(window)
        dh, _, _ = work.gradient_of_h(layer, None)
        layer.bias_gradient(dh, d_bias)
        del dh
    return ()
