"""A rank's experts at work on the rows that it received: moe_mlp's kernels, with results in the exchange's sections.

What has nothing of the exchange in it is one part, and the third call of a part decides nothing anew (ops/launch/replay.py): a layer with two
windows that are empty has 40 launches, and 45 such layers were a tenth of what a slow host does in moe-pilot-14b's step.

next: moe/symm.py
"""

import torch

from tmoe.ops.experts import gpu
from tmoe.ops.experts.routing import Metadata, route
from tmoe.ops.launch.replay import remembered


class Experts:
    """Of one call; slots to which no token came keep whatever y and d_weights hold there: nobody reads them."""

    def __init__(self, ex, gate_up, down, bias, activation, K, dtype, pairs):
        D = down.shape[1]
        x, dy, y = (ex.rows(name, D, dtype) for name in ("x", "dy", "y"))
        weights, d_weights = (ex.routes(name, K, torch.float32) for name in ("weights", "d_weights"))
        bias = None if bias is None else bias.contiguous()
        self.operands = x, dy, y, weights, d_weights, gate_up.contiguous(), down.contiguous(), bias
        self.ids, self.how = ex.routes("ids", K, torch.int32), (activation, pairs)

    def do(self, part, *tensors):
        return remembered(part, (*self.operands, *tensors), *self.how)

    def forward(self, h):
        """y; H of the first window into h, unless it is None."""
        self.do(outputs, self.ids, h)

    def backward(self, h, x_is_here, dx_is_there):
        """d_gate_up, d_down, d_bias (None without one); dx and d_weights into their sections.

        Before anything reads x, x_is_here() is called, and once dx and d_weights are complete, dx_is_there(): what moves x runs
        beside the products before the first, what moves dx beside those after the second. Windows behind the first, empty unless
        routing is skewed, compute H again for either half.
        """
        dh, act, *packed = self.do(gradient_of_x, self.ids, h)
        x_is_here()
        if packed[1:]:
            self.do(add_to_gradient_of_x, *packed)
        dx_is_there()
        sums = self.do(gradients_of_experts, dh, act, packed[0])
        del dh, act
        if packed[1:]:
            self.do(add_to_gradients_of_experts, *sums, *packed)
        return sums


class Work:
    """What the parts have in common."""

    def __init__(self, x, dy, y, weights, d_weights, gate_up, down, bias, activation, pairs):
        self.x, self.dy, self.y, self.weights, self.d_weights = x, dy, y, weights, d_weights
        self.gate_up, self.down, self.bias, self.activation, self.pairs = (
            gate_up,
            down,
            bias,
            activation,
            pairs,
        )

    def windows(self, ids):
        """Of the sorted rows: their metadata, from the ids."""
        return gpu.windows(route(ids, self.down.shape[0], self.pairs), ids.numel())

    def windows_in(self, packed):
        """The same, where all of it has been written down already."""
        first = Metadata(packed[0], self.weights.numel(), self.down.shape[0], self.pairs)
        return [first, *(first.over(i * self.pairs, more) for i, more in enumerate(packed[1:], 1))]

    def layer(self, window):
        """moe_mlp's kernels for a window."""
        operands = (self.gate_up, self.down, self.dy)
        return gpu.Layer(
            self.x, self.down.shape, self.weights.shape[1], window, self.weights, operands, self.activation
        )

    def gradient_of_h(self, window, h):
        """dH, the weighted activation and the parts of the routing weights' gradient; H is computed again where h is None."""
        layer = self.layer(window)
        if h is None:
            h = layer.empty(layer.N, 2 * layer.F)
            layer.up(self.gate_up, self.bias, h)
        return layer.dh(self.dy if layer.config("dh").gather else layer.gathered(self.dy), self.down, h)

    def gradient_of_x(self, window, dh, ds, add):
        """dx into y, and d_weights; added to what is there, or over it."""
        layer = self.layer(window)
        layer.combine(
            layer.rows("dx", dh, self.gate_up, False), None, self.y, ds, self.d_weights, add, fill=False
        )

    def gradients_of_experts(self, window, dh, act, sums=(None, None, None)):
        """d_gate_up, d_down, d_bias (None without one) of a window, added to `sums` where there are any."""
        layer = self.layer(window)
        gather = {kernel: layer.config(kernel).gather for kernel in ("dw_down", "dw_up")}
        dy = self.dy if gather["dw_down"] else layer.gathered(self.dy)
        d_down = layer.dw("dw_down", dy, act, "a" if gather["dw_down"] else "", sums[1])
        x = self.x if gather["dw_up"] else layer.gathered(self.x)
        d_gate_up = layer.dw("dw_up", dh, x, "b" if gather["dw_up"] else "", sums[0])
        return d_gate_up, d_down, None if self.bias is None else layer.bias_gradient(dh, sums[2])


# The parts: functions of Experts.operands, tensors of their own, and Experts.how.


def taken(args):
    """A part's arguments: its Work, and its own tensors."""
    return Work(*args[:8], *args[-2:]), args[8:-2]


def outputs(*args):
    """ids, h (or None): y."""
    work, (ids, h) = taken(args)
    for i, window in enumerate(work.windows(ids)):
        layer = work.layer(window)
        rows = layer.products(work.gate_up, work.bias, None if i else h, work.down)
        layer.combine(rows, work.weights, work.y, add=i > 0, fill=False)
    return ()


def gradient_of_x(*args):
    """ids, h: dx and d_weights of the first window; its dH and weighted activation, and the packed metadata of all windows."""
    work, (ids, h) = taken(args)
    first, *rest = work.windows(ids)
    dh, act, ds = work.gradient_of_h(first, h)
    work.gradient_of_x(first, dh, ds, False)
    return dh, act, first.packed, *(window.packed for window in rest)


def add_to_gradient_of_x(*args):
    """Packed metadata: dx and d_weights of the windows behind the first."""
    work, packed = taken(args)
    for window in work.windows_in(packed)[1:]:
        dh, _, ds = work.gradient_of_h(window, None)
        work.gradient_of_x(window, dh, ds, True)
        del dh, ds
    return ()


def gradients_of_experts(*args):
    """dH, the weighted activation, packed metadata of the first window: its gradients of the experts."""
    work, (dh, act, *packed) = taken(args)
    return work.gradients_of_experts(work.windows_in(packed)[0], dh, act)


def add_to_gradients_of_experts(*args):
    """Sums, packed metadata: the gradients of the experts of the windows behind the first, added to the sums."""
    work, (d_gate_up, d_down, d_bias, *packed) = taken(args)
    for window in work.windows_in(packed)[1:]:
        dh, act, _ = work.gradient_of_h(window, None)
        work.gradients_of_experts(window, dh, act, (d_gate_up, d_down, d_bias))
        del dh, act
    return ()
