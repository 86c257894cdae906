"""Causal grouped-query attention with rotary positions and optional QK-norm.

next: model/attention_parallel.py, then model/attention_backend.py
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from tmoe.config.model import ModelConfig
from tmoe.model.attention_backend import Mask, attend
from tmoe.model.attention_parallel import ALONE
from tmoe.model.norm import norm_of
from tmoe.model.rope import rotate


class Attention(nn.Module):
    """softmax(q k^T / sqrt(C)) v over earlier tokens.

    G key/value heads serve H query heads (Ainslie et al. 2023). Values may have another number of channels
    than keys. window: the number of tokens that a token attends to, itself included; 0: itself and all
    earlier tokens. `sinks`: see attend. With `attention_gate` each channel of the result is multiplied by the
    sigmoid of a projection of the input.
    """

    def __init__(self, cfg: ModelConfig, window: int = 0):
        super().__init__()
        self.cfg = cfg
        self.window = window
        self.spread = ALONE  # model/parallelize.py: how tp and cp divide the work
        self.key_heads = cfg.kv_heads_in(window)
        H, G, C, V = cfg.heads, self.key_heads, cfg.head_dim, cfg.value_dim
        # rows: queries, keys, values, and gates of the query heads, in one product
        self.qkv = nn.Linear(cfg.dim, (H + G) * C + (G + H * cfg.attention_gate) * V, cfg.qkv_bias)
        self.o = nn.Linear(H * V, cfg.dim, cfg.o_bias)
        self.largest_H: Tensor | None
        self.register_buffer("largest_H", None, persistent=False)  # set by model/qk_clip.py
        self.sinks = nn.Parameter(torch.empty(H)) if cfg.sinks_in(window) else None
        if cfg.qk_norm != "none":
            whole = cfg.qk_norm == "full"
            self.q_norm = norm_of(cfg, H * C if whole else C)
            self.k_norm = norm_of(cfg, G * C if whole else C)

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor, mask: Mask) -> Tensor:
        """y [B, s, D] for the s tokens of this rank: all S of the sequence, unless tp or cp divide them.

        cos_SC, sin_SC: from rope_table, for the tokens that tp gathers.
        mask: from make_mask; None for plain causal attention.
        """
        spread, C = self.spread, self.cfg.head_dim
        q, k, v, gate = self.project(x_BSD, cos_SC, sin_SC)
        if spread.by_keys:  # k and v together, in one exchange
            k, v = spread.gather_keys(torch.cat([k, v], -1)).split([C, self.cfg.value_dim], -1)
        q, k, v = spread.to_heads(q, k, v)
        window = 0 if spread.by_keys else self.window  # with by_keys the mask includes the window
        sinks_H = spread.of_heads(self.sinks)
        if self.largest_H is not None and self.training and torch.is_grad_enabled():
            scale = self.cfg.attention_multiplier
            q = spread.note_logits(self.largest_H, q, k, mask, C**-0.5 if scale is None else scale, window)
        y = attend(q, k, v, mask, self.cfg.attention_multiplier, window, sinks_H)
        return spread.output(self.o, gated(spread.from_heads(y), gate).flatten(-2))

    def project(
        self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys [B, S, heads, C], normed and rotated; values and gates; all for this rank's heads."""
        cfg, spread, C, V = self.cfg, self.spread, self.cfg.head_dim, self.cfg.value_dim
        H, G = cfg.heads, self.key_heads
        heads, key_heads = spread.heads(H), spread.key_heads(G)
        spans = [
            (0, heads, C),
            (H * C, key_heads, C),
            ((H + G) * C, key_heads, V),
            *([((H + G) * C + G * V, heads, V)] if cfg.attention_gate else []),
        ]  # for queries, keys, values and gates: first row in qkv's weight, this rank's heads, rows per head
        rows = [
            slice(first + own_heads.start * n, first + own_heads.stop * n) for first, own_heads, n in spans
        ]
        qkv = spread.project(self.qkv, x_BSD, rows)
        q, k, v, *gates = qkv.split([part.stop - part.start for part in rows], -1)
        if cfg.qk_norm == "full":
            q = spread.norm(self.q_norm, q, rows[0], 1)
            key_rows = slice(key_heads.start * C, key_heads.stop * C)
            k = spread.norm(self.k_norm, k, key_rows, max(1, spread.tp // G))

        q, k = (rearrange(t, "b s (head c) -> b s head c", c=C) for t in (q, k))
        v, *gates = (rearrange(t, "b s (head c) -> b s head c", c=V) for t in (v, *gates))
        v = v if cfg.value_multiplier == 1.0 else v * cfg.value_multiplier
        if cfg.qk_norm == "head":
            q = self.q_norm(q)
            k = self.k_norm(k)
        q, k = (rotate(t, cos_SC, sin_SC, cfg.rope.interleave) for t in (q, k))
        if cfg.qk_norm == "rotated":
            q = self.q_norm(q)
            k = self.k_norm(k)
        return q, k, v, gates[0] if gates else None


def gated(y_BSHC: Tensor, gate_BSHC: Tensor | None) -> Tensor:
    """Attention's result times sigmoid(gate), if there is a gate."""
    return y_BSHC if gate_BSHC is None else y_BSHC * gate_BSHC.sigmoid()
