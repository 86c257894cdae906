"""Mamba-2: a linear layer whose rule has no correction (Dao & Gu 2024; Granite-4, Nemotron-H).

In its own letters C, B and x are queries, keys and values; G is the number of groups, N = K, P = V:

    C, B, x = silu(causal depthwise convolution with bias);   dt = softplus(W_dt u + dt_bias), within limits
    S <- exp(-exp(A_log) dt) S + B (dt x)^T;   o = S^T C + D x
    gated = norm(o * silu(z)),  the norm over the channels of each group

next: model/transformer.py
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tmoe.config.model import ModelConfig
from tmoe.model.attention_parallel import ALONE, Spread
from tmoe.model.linear import LinearLayer
from tmoe.ops.delta.gpu import Inputs
from tmoe.parallel.precise import Precise
from tmoe.parallel.token_exchange import gather, scatter_sum

STEPS = 1e-3, 0.1  # between which the first dt is drawn, its logarithm uniformly
DECAYS = 1.0, 16.0  # between which exp(A_log) is drawn


class Mamba2Rates(Precise):
    """The parameters of a Mamba-2 layer that are no matrices of a product, in fp32."""

    def __init__(self, channels: int, taps: int, heads: int, biased: bool):
        super().__init__()
        self.conv = nn.Parameter(torch.empty(channels, taps))
        self.conv_bias = nn.Parameter(torch.empty(channels)) if biased else None
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        # parallel/init_weights.py: parameters as functions of a uniform number from 0 to 1
        self.drawn = dict(A_log=first_decay, dt_bias=first_step)


def first_decay(u: Tensor) -> Tensor:
    """A_log of a decay rate between the limits."""
    return (DECAYS[0] + (DECAYS[1] - DECAYS[0]) * u).log()


def first_step(u: Tensor) -> Tensor:
    """dt_bias whose softplus is between the limits."""
    low, high = map(math.log, STEPS)
    step = (low + (high - low) * u).exp()
    return step + (-torch.expm1(-step)).log()


class Mamba2(LinearLayer):
    """Mamba-2 with G groups and H heads of V channels; a group's state has K channels."""

    correct = False

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        n = cfg.linear
        self.rates = Mamba2Rates(n.mixed, n.conv, n.value_heads, n.conv_bias)
        self.norm = nn.RMSNorm(n.value_width, cfg.norm_eps)  # its factor is the weight, with norm_offset too
        self.eps = cfg.norm_eps

    def gates(
        self, ba_BSH: Tensor, padding_BS: Tensor | None = None, heads: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(ba_BSH.dtype, torch.float32)
        rate, bias = (t[heads].to(wide) for t in (self.rates.A_log, self.rates.dt_bias))
        step = F.softplus(ba_BSH.to(wide) + bias).clamp(self.sizes.least_step, self.sizes.most_step or None)
        if padding_BS is not None:
            step = step.masked_fill(padding_BS[..., None], 0.0)
        return -rate.exp() * step, step

    def result(self, o_BSHV: Tensor, inputs: Inputs, heads: slice = slice(None)) -> Tensor:
        """o + D x."""
        x = inputs[2]
        wide = torch.promote_types(x.dtype, torch.float32)
        return (o_BSHV.to(wide) + self.rates.D[heads].to(wide)[:, None] * x.to(wide)).to(x.dtype)

    def gated(self, o_BSHV: Tensor, z_BSX: Tensor, spread: Spread = ALONE) -> Tensor:
        n = self.sizes
        gate = rearrange(z_BSX, "b s (head v) -> b s head v", v=n.value_dim)
        wide = torch.promote_types(gate.dtype, torch.float32)
        y = o_BSHV.to(wide) * F.silu(gate.to(wide))
        square_BSH = y.square().sum(-1)
        each = n.value_heads // n.key_heads  # heads of a group
        own = spread.heads(n.value_heads)
        if n.key_heads % spread.tp == 0:
            square_BSG = square_BSH.unflatten(-1, (-1, each)).sum(-1).repeat_interleave(each, -1)
        else:  # other ranks have heads of the same groups
            groups_H = torch.arange(own.start, own.stop, device=y.device) // each
            square_BSG = y.new_zeros(*y.shape[:2], n.key_heads).index_add(2, groups_H, square_BSH)
            square_BSG = gather(scatter_sum(square_BSG, spread.tp_group), spread.tp_group)[..., groups_H]
        scale = (square_BSG / (each * n.value_dim) + self.eps).rsqrt()
        factor = self.norm.weight.view(-1, n.value_dim)[own].to(wide)
        return (y * scale[..., None] * factor).to(gate.dtype)
