"""Gated DeltaNet: a linear layer in the place of attention (Yang et al. 2024; Qwen3-Next).

    q, k, v = silu(causal depthwise convolution of W_qkv x);  q, k of length 1, q times K^-1/2
    beta = sigmoid(W_b x);   g = -exp(A_log) softplus(W_a x + dt_bias)
    o = delta_rule(q, k, v, g, beta);   y = W_o (norm(o) * silu(W_z x)),  the norm over each head

next: ops/delta/rule.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tmoe.config.model import ModelConfig
from tmoe.model.attention_parallel import ALONE
from tmoe.ops.delta.rule import delta_rule, delta_rule_from, delta_rule_step
from tmoe.ops.delta.runs import Runs
from tmoe.ops.delta.short_conv import short_conv
from tmoe.parallel.precise import Precise

LENGTH_EPS = 1e-6  # added to the squared length of queries and keys, as in the published code


class Rates(Precise):
    """The parameters of a DeltaNet that are no matrices of a product, in fp32."""

    def __init__(self, channels: int, taps: int, heads: int):
        super().__init__()
        self.conv = nn.Parameter(torch.empty(channels, taps))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))


class State(NamedTuple):
    """The memory of B sequences in one layer, of fixed size."""

    inputs_BJX: Tensor
    """the last inputs of the convolution, in the compute type"""
    state_BHKV: Tensor
    """the rule's state, fp32"""


class DeltaNet(nn.Module):
    """Gated DeltaNet with G heads of queries and keys, and H heads of values, gates and decays."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        linear = cfg.linear
        self.sizes = linear
        self.spread = ALONE  # model/parallelize.py: how tp, and cp by heads, divide the work
        G, H, K, V = linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim
        # rows: queries, keys, values and the gates z, head by head, in one product
        self.qkvz = nn.Linear(cfg.dim, 2 * G * K + 2 * H * V, bias=False)
        # rows: beta, then decays
        self.ba = nn.Linear(cfg.dim, 2 * H, bias=False)
        self.rates = Rates(linear.mixed, linear.conv, H)
        self.norm = nn.RMSNorm(V, cfg.norm_eps)  # its factor is the weight itself, with norm_offset as well
        self.out = nn.Linear(H * V, cfg.dim, bias=False)

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor, runs: Runs | None) -> Tensor:
        """y [B, s, D] for the s tokens of this rank: all S of the row, unless tp or cp divide them.

        runs: the documents and the padding of whole rows; None: each row is one document. cos_SC, sin_SC: not
        used, since the order of tokens is known from the state.
        """
        if self.spread is not ALONE:
            return self.divided(x_BSD, runs)
        padding_BS = None if runs is None else runs.padding_BS
        if padding_BS is not None:
            x_BSD = x_BSD.masked_fill(padding_BS[..., None], 0.0)
        mixed, z = self.qkvz(x_BSD).split([self.sizes.mixed, self.sizes.value_width], -1)
        mixed = short_conv(mixed, self.rates.conv, runs)
        g, beta = self.gates(self.ba(x_BSD), padding_BS)
        o = delta_rule(*self.heads(mixed), g, beta, None if runs is None else runs.number_BS)
        return self.out(self.gated(o, z).flatten(-2))

    def divided(self, x_BSD: Tensor, runs: Runs | None) -> Tensor:
        """`forward` of one of several ranks, which has some key heads, and the value heads that share them.

        tp gathers tokens before the projections, and scatters the sum of the results. cp sends, for each key
        head, its query, key, values and gates of this rank's tokens to the rank that has the head.
        """
        n, spread = self.sizes, self.spread
        G, R, K, V = n.key_heads, n.value_heads // n.key_heads, n.key_dim, n.value_dim
        own = spread.heads(G)
        # first row, and rows of a key head: of queries, keys, values, z; of beta, decays
        spans = (0, K), (G * K, K), (2 * G * K, R * V), (n.mixed, R * V)
        rows = [slice(first + own.start * one, first + own.stop * one) for first, one in spans]
        *mixed, z = spread.project(self.qkvz, x_BSD, rows).split(
            [part.stop - part.start for part in rows], -1
        )
        rows = [slice(first + own.start * R, first + own.stop * R) for first in (0, n.value_heads)]
        gates = spread.project(self.ba, x_BSD, rows).chunk(2, -1)
        by_head = [
            rearrange(t, "b s (head x) -> b s head x", head=own.stop - own.start) for t in (*mixed, *gates)
        ]
        sizes = [t.shape[-1] for t in by_head]
        parts = spread.tokens_to_heads(torch.cat(by_head, -1)).split(sizes, -1)
        q, k, v, beta, decay = (t.flatten(-2) for t in parts)
        padding_BS = None if runs is None else runs.padding_BS
        heads = spread.own_heads(G)
        inputs = torch.cat([q, k, v], -1)
        if padding_BS is not None:
            inputs = inputs.masked_fill(padding_BS[..., None], 0.0)
        spans = spans[:3]
        weight = torch.cat(
            [self.rates.conv[first + heads.start * one : first + heads.stop * one] for first, one in spans]
        )
        inputs = short_conv(inputs, weight, runs)
        values = slice(heads.start * R, heads.stop * R)
        g, beta = self.gates(torch.cat([beta, decay], -1), padding_BS, values)
        number_BS = None if runs is None else runs.number_BS
        o = delta_rule(*self.heads(inputs, heads.stop - heads.start), g, beta, number_BS)
        y = self.gated(spread.from_heads(o), z)
        return spread.output(self.out, y.flatten(-2))

    def gates(
        self, ba_BSH: Tensor, padding_BS: Tensor | None = None, heads: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Logarithms of the decays, and beta, [B, S, H] in fp32; both 0 at padding.

        ba_BSH: beta, then decays, before their functions. heads: the value heads that it has.
        """
        wide = torch.promote_types(ba_BSH.dtype, torch.float32)
        beta, decay = ba_BSH.to(wide).chunk(2, -1)
        beta = beta.sigmoid()
        rate, bias = (t[heads].to(wide) for t in (self.rates.A_log, self.rates.dt_bias))
        g = -rate.exp() * F.softplus(decay + bias)
        if padding_BS is not None:
            g, beta = (t.masked_fill(padding_BS[..., None], 0.0) for t in (g, beta))
        return g, beta

    def heads(self, mixed_BSX: Tensor, count: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, S, G, K], normed to length 1, and values [B, S, H, V].

        count: number of key heads that are there; None: all.
        """
        n = self.sizes
        keys = n.key_width if count is None else count * n.key_dim
        q, k, v = mixed_BSX.split([keys, keys, mixed_BSX.shape[-1] - 2 * keys], -1)
        q, k = (rearrange(t, "b s (head k) -> b s head k", k=n.key_dim) for t in (q, k))
        v = rearrange(v, "b s (head v) -> b s head v", v=n.value_dim)
        return of_length_1(q, n.key_dim**-0.5), of_length_1(k), v

    def gated(self, o_BSHV: Tensor, z_BSX: Tensor) -> Tensor:
        """The rule's results, normed and gated, [B, S, H, V]."""
        gate = rearrange(z_BSX, "b s (head v) -> b s head v", v=self.sizes.value_dim)
        wide = torch.promote_types(gate.dtype, torch.float32)
        y = self.norm(o_BSHV).to(wide) * F.silu(gate.to(wide))
        return y.to(gate.dtype)

    # ---- with a state ----

    def begin(self, rows: int, dtype: torch.dtype, device: torch.device) -> State:
        """The state of `rows` sequences before their first tokens."""
        n = self.sizes
        inputs = torch.zeros(rows, n.conv - 1, n.mixed, dtype=dtype, device=device)
        wide = torch.promote_types(dtype, torch.float32)
        shape = rows, n.value_heads, n.key_dim, n.value_dim
        return State(inputs, torch.zeros(shape, dtype=wide, device=device))

    def step(self, x_B1D: Tensor, state: State) -> Tensor:
        """y [B, 1, D] for one more token of each sequence; the states are overwritten in place."""
        mixed, z = self.qkvz(x_B1D).split([self.sizes.mixed, self.sizes.value_width], -1)
        whole = torch.cat([state.inputs_BJX, mixed], 1)
        mixed = short_conv(whole, self.rates.conv)[:, -1:]
        g, beta = self.gates(self.ba(x_B1D))
        o = delta_rule_step((*self.heads(mixed), g, beta), state.state_BHKV)
        state.inputs_BJX.copy_(whole[:, 1:])
        return self.out(self.gated(o, z).flatten(-2))

    def go_on(self, x_BSD: Tensor, state: State) -> tuple[Tensor, State]:
        """y [B, S, D] for S more tokens of each sequence, and the states after them. Not differentiable."""
        mixed, z = self.qkvz(x_BSD).split([self.sizes.mixed, self.sizes.value_width], -1)
        kept = self.sizes.conv - 1
        whole = torch.cat([state.inputs_BJX, mixed], 1)
        mixed = short_conv(whole, self.rates.conv)[:, kept:]
        g, beta = self.gates(self.ba(x_BSD))
        o, after = delta_rule_from(*self.heads(mixed), g, beta, state.state_BHKV)
        return self.out(self.gated(o, z).flatten(-2)), State(whole[:, whole.shape[1] - kept :], after)


def of_length_1(t: Tensor, factor: float = 1.0) -> Tensor:
    """t / sqrt(sum of t^2 over the last dimension + 1e-6), times a factor; computed in fp32."""
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    return (wide * ((wide.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt() * factor)).to(t.dtype)
