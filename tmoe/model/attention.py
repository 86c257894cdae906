"""Causal grouped-query attention with rotary positions and optional QK-norm.

next: model/attention_backend.py
"""

import torch
from torch import Tensor, nn

from tmoe.config.model import ModelConfig
from tmoe.model.attention_backend import Mask, attend
from tmoe.model.rope import rotate


class Attention(nn.Module):
    """softmax(q k^T / sqrt(C)) v over earlier tokens.

    G key/value heads serve H query heads (Ainslie et al. 2023).
    window: how many tokens one sees, itself among them; 0: itself and all before it. `sinks`: see attend.
    """

    def __init__(self, cfg: ModelConfig, window: int = 0):
        super().__init__()
        self.cfg = cfg
        self.window = window
        H, G, C = cfg.heads, cfg.kv_heads, cfg.head_dim
        # rows: queries, keys, values; one product
        self.qkv = nn.Linear(cfg.dim, (H + 2 * G) * C, cfg.qkv_bias)
        self.o = nn.Linear(H * C, cfg.dim, cfg.o_bias)
        self.sinks = nn.Parameter(torch.empty(H)) if cfg.sinks else None
        if cfg.qk_norm != "none":
            self.q_norm = nn.RMSNorm(C if cfg.qk_norm == "head" else H * C, cfg.norm_eps)
            self.k_norm = nn.RMSNorm(C if cfg.qk_norm == "head" else G * C, cfg.norm_eps)

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor, mask: Mask) -> Tensor:
        """y [B, S, D].

        cos_SC, sin_SC: rope_table's. mask: make_mask's; None for plain causal attention.
        """
        cfg = self.cfg
        widths = [n * cfg.head_dim for n in (cfg.heads, cfg.kv_heads, cfg.kv_heads)]
        q, k, v = self.qkv(x_BSD).split(widths, -1)
        if cfg.qk_norm == "full":
            q = self.q_norm(q)
            k = self.k_norm(k)

        q, k, v = (t.unflatten(-1, (-1, cfg.head_dim)) for t in (q, k, v))
        if cfg.qk_norm == "head":
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = rotate(q, cos_SC, sin_SC)
        k = rotate(k, cos_SC, sin_SC)
        y = attend(q, k, v, mask, cfg.attention_multiplier, self.window, self.sinks)
        return self.o(y.flatten(-2))
