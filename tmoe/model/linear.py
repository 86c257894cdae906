"""Linear layers, which stand in the place of attention and update a state; and Gated DeltaNet, one of them.

    u = W_qkvz x;  q, k, v = silu(causal depthwise convolution of a part of u);  z = another part of u
    o = rule(q, k, v, gates(W_ba x));   y = W_o gated(o, z)

Gated DeltaNet (Yang et al. 2024; Qwen3-Next) is:

    q, k of length 1, q times K^-1/2;   beta = sigmoid(W_b x);   g = -exp(A_log) softplus(W_a x + dt_bias)
    o = delta_rule(q, k, v, g, beta);   gated = norm(o) * silu(z),  the norm over each head

next: model/mamba2.py
"""

from __future__ import annotations

from math import lcm
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from tmoe.config.model import ModelConfig
from tmoe.model.attention_parallel import ALONE, Spread
from tmoe.ops.delta.gpu import Inputs
from tmoe.ops.delta.rule import delta_rule, delta_rule_from, delta_rule_step
from tmoe.ops.delta.runs import Runs
from tmoe.ops.delta.short_conv import short_conv
from tmoe.parallel.precise import Precise

LENGTH_EPS = 1e-6  # added to the squared length of queries and keys, as in the published code


class Rates(Precise):
    """The parameters of a DeltaNet that are no matrices of a product, in fp32."""

    conv_bias: Tensor | None = None

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


class LinearLayer(nn.Module):
    """A layer with G heads of queries and keys, and H heads of values and decays, each G with H/G of these.

    Subclasses define the rule's inputs and what follows the rule.
    """

    correct = True  # see delta_rule
    ba: nn.Linear | None  # None: its rows are the last ones of qkvz
    rates: Any  # Precise: conv [X, J], conv_bias [X] or None, and what `gates` reads

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        linear = cfg.linear
        self.sizes = linear
        self.spread = ALONE  # model/parallelize.py: how tp, and cp by heads, divide the work
        width, joint = linear.value_width, linear.kind == "mamba2"
        # rows: queries, keys, values and the gates z, head by head, in one product
        self.qkvz = nn.Linear(cfg.dim, linear.mixed + width + joint * linear.gate_rows, bias=False)
        # rows: beta, then decays
        self.ba = None if joint else nn.Linear(cfg.dim, linear.gate_rows, bias=False)
        self.out = nn.Linear(width, cfg.dim, bias=False)

    def projected(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The convolution's inputs, the gates z, and what `gates` reads."""
        n = self.sizes
        if self.ba is not None:
            mixed, z = self.qkvz(x_BSD).split([n.mixed, n.value_width], -1)
            return mixed, z, self.ba(x_BSD)
        mixed, z, ba = self.qkvz(x_BSD).split([n.mixed, n.value_width, n.gate_rows], -1)
        return mixed, z, ba

    def gates(
        self, ba_BSH: Tensor, padding_BS: Tensor | None = None, heads: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Logarithms of the decays, and beta, [B, S, H] in fp32; both 0 at padding.

        ba_BSH: the last result of `projected`. heads: the value heads that it has.
        """
        raise NotImplementedError

    def heads(self, mixed_BSX: Tensor, count: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, S, G, K], and values [B, S, H, V], of the convolution's result.

        count: number of key heads that are there; None: all.
        """
        n = self.sizes
        keys = n.key_width if count is None else count * n.key_dim
        q, k, v = mixed_BSX.split([keys, keys, mixed_BSX.shape[-1] - 2 * keys], -1)
        q, k = (rearrange(t, "b s (head k) -> b s head k", k=n.key_dim) for t in (q, k))
        return q, k, rearrange(v, "b s (head v) -> b s head v", v=n.value_dim)

    def result(self, o_BSHV: Tensor, inputs: Inputs, heads: slice = slice(None)) -> Tensor:
        """The rule's results with what the layer adds to them. heads: the value heads that are there."""
        return o_BSHV

    def gated(self, o_BSHV: Tensor, z_BSX: Tensor, spread: Spread = ALONE) -> Tensor:
        """The results, normed and gated, [B, S, H, V]; with tp, those of this rank's heads."""
        raise NotImplementedError

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
        mixed, z, ba = self.projected(x_BSD)
        weight, bias = self.taps
        mixed = short_conv(mixed, weight, runs, bias)
        inputs = (*self.heads(mixed), *self.gates(ba, padding_BS))
        o = delta_rule(*inputs, None if runs is None else runs.number_BS, self.correct)
        return self.out(self.gated(self.result(o, inputs), z).flatten(-2))

    def divided(self, x_BSD: Tensor, runs: Runs | None) -> Tensor:
        """`forward` of one of several ranks, which has some key heads, and the value heads that share them.

        tp gathers tokens before the projections, and scatters the sum of the results. cp sends, for each key
        head, its query, key, values and gates of this rank's tokens to the rank that has the head. Ranks have
        copies of a key head if there are fewer key heads than ranks.
        """
        n, spread = self.sizes, self.spread
        G = lcm(n.key_heads, spread.tp * spread.cp)  # with copies
        by_head, z = self.projected_heads(x_BSD, G)
        parts = spread.tokens_to_heads(torch.cat(by_head, -1)).split([t.shape[-1] for t in by_head], -1)
        q, k, v, *gates = (t.flatten(-2) for t in parts)
        padding_BS = None if runs is None else runs.padding_BS
        mixed = torch.cat([q, k, v], -1)
        if padding_BS is not None:
            mixed = mixed.masked_fill(padding_BS[..., None], 0.0)
        heads, R = spread.own_heads(G), n.value_heads // G
        rows = self.channels(heads, G)
        weight, bias = self.taps
        bias = None if bias is None else torch.cat([bias[r] for r in rows])
        mixed = short_conv(mixed, torch.cat([weight[r] for r in rows]), runs, bias)
        values = slice(heads.start * R, heads.stop * R)
        gates = self.gates(torch.cat(gates, -1), padding_BS, values)
        inputs = *self.heads(mixed, heads.stop - heads.start), *gates
        o = delta_rule(*inputs, None if runs is None else runs.number_BS, self.correct)
        y = self.gated(spread.from_heads(self.result(o, inputs, values)), z, spread)
        return spread.output(self.out, y.flatten(-2))

    def projected_heads(self, x_BSD: Tensor, G: int) -> tuple[list[Tensor], Tensor]:
        """Queries, keys, values and gates of the heads of this rank of tp, [B, S, heads, ...]; and z.

        G: number of key heads, copies included.
        """
        n, spread = self.sizes, self.spread
        own, R = spread.heads(G), n.value_heads // G
        keys = [i * n.key_heads // G for i in range(own.start, own.stop)]
        once = slice(keys[0], keys[-1] + 1)  # without copies
        first = 0, n.key_width, 2 * n.key_width, n.mixed, n.mixed + n.value_width  # of q, k, v, z, gates
        sizes = (once, n.key_dim), (once, n.key_dim), (own, R * n.value_dim), (own, R * n.value_dim)
        rows = [part(at, *size) for at, size in zip(first, sizes, strict=False)]
        every = [part(i, own, R) for i in range(0, n.gate_rows, n.value_heads)]  # of the gates
        if self.ba is None:
            rows += [slice(first[4] + r.start, first[4] + r.stop) for r in every]
        found = spread.project(self.qkvz, x_BSD, rows).split([r.stop - r.start for r in rows], -1)
        q, k, v, z, *gates = found
        if self.ba is not None:
            gates = spread.project(self.ba, x_BSD, every).chunk(len(every), -1)
        q, k = (rearrange(t, "b s (head k) -> b s head k", k=n.key_dim) for t in (q, k))
        if len(keys) > q.shape[2]:
            copies = [i - keys[0] for i in keys]
            q, k = q[:, :, copies], k[:, :, copies]
        of_values = (rearrange(t, "b s (head x) -> b s head x", head=len(keys)) for t in (v, *gates))
        return [q, k, *of_values], z

    @property
    def taps(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the convolution."""
        return self.rates.conv, self.rates.conv_bias

    def channels(self, heads: slice, G: int) -> list[slice]:
        """The channels of the convolution that belong to these of G key heads, copies included."""
        n = self.sizes
        keys = [i * n.key_heads // G for i in range(heads.start, heads.stop)]
        found = [part(first, slice(i, i + 1), n.key_dim) for first in (0, n.key_width) for i in keys]
        return [*found, part(2 * n.key_width, heads, n.value_width // G)]

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
        inputs, z, before = self.continued(x_B1D, state)
        o = delta_rule_step(inputs, state.state_BHKV, self.correct)
        state.inputs_BJX.copy_(before)
        return self.out(self.gated(self.result(o, inputs), z).flatten(-2))

    def go_on(self, x_BSD: Tensor, state: State) -> tuple[Tensor, State]:
        """y [B, S, D] for S more tokens of each sequence, and the states after them. Not differentiable."""
        inputs, z, before = self.continued(x_BSD, state)
        o, after = delta_rule_from(inputs, state.state_BHKV, self.correct)
        return self.out(self.gated(self.result(o, inputs), z).flatten(-2)), State(before, after)

    def continued(self, x_BSD: Tensor, state: State) -> tuple[Inputs, Tensor, Tensor]:
        """The rule's inputs of S more tokens, their gates z, and the last inputs of the convolution."""
        mixed, z, ba = self.projected(x_BSD)
        whole = torch.cat([state.inputs_BJX, mixed], 1)
        kept = self.sizes.conv - 1
        weight, bias = self.taps
        mixed = short_conv(whole, weight, None, bias)[:, kept:]
        return (*self.heads(mixed), *self.gates(ba)), z, whole[:, whole.shape[1] - kept :]


class DeltaNet(LinearLayer):
    """Gated DeltaNet."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        n = cfg.linear
        self.rates = Rates(n.mixed, n.conv, n.value_heads)
        self.norm = nn.RMSNorm(n.value_dim, cfg.norm_eps)  # its factor is the weight, with norm_offset too

    def gates(
        self, ba_BSH: Tensor, padding_BS: Tensor | None = None, heads: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(ba_BSH.dtype, torch.float32)
        beta, decay = ba_BSH.to(wide).chunk(2, -1)
        beta = beta.sigmoid()
        rate, bias = (t[heads].to(wide) for t in (self.rates.A_log, self.rates.dt_bias))
        g = -rate.exp() * F.softplus(decay + bias)
        if padding_BS is not None:
            g, beta = (t.masked_fill(padding_BS[..., None], 0.0) for t in (g, beta))
        return g, beta

    def heads(self, mixed_BSX: Tensor, count: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As in LinearLayer; queries and keys are normed to length 1."""
        q, k, v = super().heads(mixed_BSX, count)
        return of_length_1(q, self.sizes.key_dim**-0.5), of_length_1(k), v

    def gated(self, o_BSHV: Tensor, z_BSX: Tensor, spread: Spread = ALONE) -> Tensor:
        gate = rearrange(z_BSX, "b s (head v) -> b s head v", v=self.sizes.value_dim)
        wide = torch.promote_types(gate.dtype, torch.float32)
        y = self.norm(o_BSHV).to(wide) * F.silu(gate.to(wide))
        return y.to(gate.dtype)


def part(first: int, heads: slice, rows: int) -> slice:
    """The rows of some heads, of `rows` each, in a section that begins at row `first`."""
    return slice(first + heads.start * rows, first + heads.stop * rows)


def of_length_1(t: Tensor, factor: float = 1.0) -> Tensor:
    """t / sqrt(sum of t^2 over the last dimension + 1e-6), times a factor; computed in fp32."""
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    return (wide * ((wide.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt() * factor)).to(t.dtype)
