"""Causal grouped-query attention with rotary positions and optional QK-norm.

next: model/attention_backend.py
"""

import torch
from torch import Tensor, nn

from tmoe.config.model import ModelConfig
from tmoe.model.attention_backend import attend
from tmoe.model.rope import rotate


class Attention(nn.Module):
    """softmax(q k^T / sqrt(C)) v over earlier tokens; G key/value heads serve H query heads (Ainslie et al. 2023).

    window: how many tokens one sees, itself among them (0: all before it). `sinks`: see attend.
    """

    def __init__(self, cfg: ModelConfig, window: int = 0):
        super().__init__()
        self.cfg, self.window = cfg, window
        H, G, C = cfg.heads, cfg.kv_heads, cfg.head_dim
        self.qkv = nn.Linear(
            cfg.dim, (H + 2 * G) * C, cfg.qkv_bias
        )  # rows: queries, keys, values; one product
        self.o = nn.Linear(H * C, cfg.dim, cfg.o_bias)
        self.sinks = nn.Parameter(torch.empty(H)) if cfg.sinks else None
        if cfg.qk_norm != "none":
            self.q_norm = nn.RMSNorm(C if cfg.qk_norm == "head" else H * C, cfg.norm_eps)
            self.k_norm = nn.RMSNorm(C if cfg.qk_norm == "head" else G * C, cfg.norm_eps)

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor, mask: Tensor | None) -> Tensor:
        """mask: None for plain causal attention, else document_mask's."""
        cfg = self.cfg
        q, k, v = self.qkv(x_BSD).split(
            [n * cfg.head_dim for n in (cfg.heads, cfg.kv_heads, cfg.kv_heads)], -1
        )
        if cfg.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, cfg.head_dim)) for t in (q, k, v))
        if cfg.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos_SC, sin_SC), rotate(k, cos_SC, sin_SC)
        y = attend(q, k, v, mask, cfg.attention_multiplier, self.window, self.sinks)
        return self.o(y.flatten(-2))
