"""A rank's experts at work on the rows that it received: moe_mlp's kernels, with results in the exchange's sections.

next: parallel/symm.py
"""

import torch

from tmoe.ops import gpu
from tmoe.ops.routing import route


class Experts:
    """Of one call; slots to which no token came keep whatever y and d_weights hold there: nobody reads them."""

    def __init__(self, ex, gate_up, down, bias, activation, K, dtype, pairs):
        (self.L, D, _), self.K, self.activation = down.shape, K, activation
        self.gate_up, self.down = gate_up.contiguous(), down.contiguous()
        self.bias = None if bias is None else bias.contiguous()
        self.x, self.dy, self.y = (ex.rows(name, D, dtype) for name in ("x", "dy", "y"))
        self.weights, self.d_weights = (ex.routes(name, K, torch.float32) for name in ("weights", "d_weights"))
        ids = ex.routes("ids", K, torch.int32)
        self.windows = list(gpu.windows(route(ids, self.L, pairs), ids.numel()))

    def layer(self, window):
        """moe_mlp's kernels for a window of the sorted rows."""
        operands = (self.gate_up, self.down, self.dy)
        return gpu.Layer(self.x, self.down.shape, self.K, window, self.weights, operands, self.activation)

    def forward(self, h):
        """y; H of the first window into h, unless it is None."""
        for i, window in enumerate(self.windows):
            layer = self.layer(window)
            rows = layer.products(self.gate_up, self.bias, None if i else h, self.down)
            layer.combine(rows, self.weights, self.y, add=i > 0, fill=False)

    def backward(self, h, x_is_here, dx_is_there):
        """d_gate_up, d_down, d_bias (None without one); dx and d_weights into their sections.

        Before anything reads x, x_is_here() is called, and once dx and d_weights are complete, dx_is_there(): what moves x runs
        beside the products before the first, what moves dx beside those after the second. Windows behind the first, empty unless
        routing is skewed, compute H again for either half.
        """
        first, *rest = self.windows
        dh, act, ds = self.gradient_of_h(first, h)
        self.gradient_of_x(0, dh, ds)
        x_is_here()
        for i, window in enumerate(rest, 1):
            dh_i, _, ds_i = self.gradient_of_h(window, None)
            self.gradient_of_x(i, dh_i, ds_i)
            del dh_i, ds_i
        dx_is_there()
        grads = self.gradients_of_experts(0, dh, act, None)
        del dh, act, ds
        for i, window in enumerate(rest, 1):
            dh, act, _ = self.gradient_of_h(window, None)
            grads = self.gradients_of_experts(i, dh, act, grads)
        return grads

    def gradient_of_h(self, window, h):
        """dH, the weighted activation and the parts of the routing weights' gradient; H is computed again where h is None."""
        layer = self.layer(window)
        if h is None:
            h = layer.empty(layer.N, 2 * layer.F)
            layer.up(self.gate_up, self.bias, h)
        return layer.dh(self.dy if layer.config("dh").gather else layer.gathered(self.dy), self.down, h)

    def gradient_of_x(self, i, dh, ds):
        """dx into y, d_weights; windows behind the first add to what is there."""
        layer = self.layer(self.windows[i])
        layer.combine(layer.rows("dx", dh, self.gate_up, False), None, self.y, ds, self.d_weights, i > 0, fill=False)

    def gradients_of_experts(self, i, dh, act, sums):
        """d_gate_up, d_down, d_bias (None without one) of window i, added to `sums` if that is not None."""
        layer, sums = self.layer(self.windows[i]), sums or (None,) * 3
        gather = {kernel: layer.config(kernel).gather for kernel in ("dw_down", "dw_up")}
        dy = self.dy if gather["dw_down"] else layer.gathered(self.dy)
        d_down = layer.dw("dw_down", dy, act, "a" if gather["dw_down"] else "", sums[1])
        x = self.x if gather["dw_up"] else layer.gathered(self.x)
        d_gate_up = layer.dw("dw_up", dh, x, "b" if gather["dw_up"] else "", sums[0])
        return d_gate_up, d_down, None if self.bias is None else layer.bias_gradient(dh, sums[2])
