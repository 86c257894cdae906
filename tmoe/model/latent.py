"""Multi-head latent attention: queries, keys and values of all heads are computed from narrow latents.

next: model/attention_backend.py
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from tmoe.config.model import ModelConfig
from tmoe.model.attention_backend import Mask, attend
from tmoe.model.attention_parallel import ALONE, linear_of_rows
from tmoe.model.rope import rotate, yarn_scale
from tmoe.parallel.token_exchange import gather

# eps of the latents' norms, independent of norm_eps: DeepSeek's code does not use its setting for them
LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """DeepSeek-V2's attention (2024, sections 2.1.2 and 2.1.3), causal, in the form for training.

    No product is absorbed: generate/forward.py does that, over a cache of latents.

        latent_q, latent_kv, k_rot = qkv_a x
        q = q_b norm(latent_q)               for each of H heads
        k, v = kv_b norm(latent_kv)          for each of H heads

    A head's query and key have `nope_dim` channels without position and `rope_dim` channels with position.
    All heads share one k_rot. Values have `v_dim` channels. With `q_rank` 0, qkv_a computes the queries
    directly. YaRN may scale the logits (`mscale_all_dim`), and `rope.query_beta` the queries by their
    position.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        mla = cfg.mla
        self.mla = mla
        self.scale = softmax_scale(cfg)
        self.scales_queries = bool(cfg.rope.query_beta)
        self.spread = ALONE  # model/parallelize.py: how tp and cp divide the work
        self.heads = cfg.heads
        self.largest_H: Tensor | None
        self.register_buffer("largest_H", None, persistent=False)  # set by model/qk_clip.py
        H = cfg.heads
        queries = H * (mla.nope_dim + mla.rope_dim)
        self.widths = (mla.q_rank or queries, mla.kv_rank, mla.rope_dim)
        self.qkv_a = nn.Linear(cfg.dim, sum(self.widths), bias=False)  # all products of x in one
        if mla.q_rank:
            self.q_norm = nn.RMSNorm(mla.q_rank, LATENT_EPS)
            self.q_b = nn.Linear(mla.q_rank, queries, bias=False)
        self.kv_norm = nn.RMSNorm(mla.kv_rank, LATENT_EPS)
        # rows: k then v, head by head
        self.kv_b = nn.Linear(mla.kv_rank, H * (mla.nope_dim + mla.v_dim), bias=False)
        self.o = nn.Linear(H * mla.v_dim, cfg.dim, bias=False)

    def forward(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor, mask: Mask) -> Tensor:
        """y [B, s, D] for the s tokens of this rank: all S of the sequence, unless tp or cp divide them.

        cos_SC, sin_SC: from rope_table with `rope_dim` channels, for the tokens that tp gathers; with
            query_beta cos has one more column.
        mask: from make_mask; None for plain causal attention.
        """
        spread = self.spread
        q_nope, q_rot, latent, k_rot = self.narrow(x_BSD, cos_SC, sin_SC)
        if spread.by_keys:  # gather latents: they are narrower than the keys and values of all heads
            latent, k_rot = self.gather_latents(latent, k_rot)

        q = torch.cat([q_nope, q_rot], -1)
        q, k, v = spread.to_heads(q, *self.widen(latent, k_rot))
        if self.largest_H is not None and self.training and torch.is_grad_enabled():
            q = spread.note_logits(self.largest_H, q, k, mask, self.scale)
        y = attend(q, k, v, mask, self.scale)
        return spread.output(self.o, spread.from_heads(y).flatten(-2))

    def narrow(self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries without and with position [B, S, heads, ...], the normed latent [B, S, kv_rank], and k_rot.

        k_rot is [B, S, 1, rope_dim], rotated as the queries are. With query_beta the queries are scaled.
        """
        mla = self.mla
        q, latent, k_rot = self.latents(x_BSD)
        q = rearrange(q, "b s (head c) -> b s head c", c=mla.nope_dim + mla.rope_dim)
        if self.scales_queries:  # scaled before the rotation, which is linear
            cos_SC, scale_S1 = cos_SC.split([mla.rope_dim, 1], -1)
            q = q * scale_S1.unsqueeze(-1).to(q.dtype)
        q_nope, q_rot = q.split([mla.nope_dim, mla.rope_dim], -1)
        q_rot, k_rot = (rotate(self.halves(t), cos_SC, sin_SC) for t in (q_rot, k_rot.unsqueeze(2)))
        return q_nope, q_rot, latent, k_rot

    def widen(self, latent: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, S, heads, nope_dim + rope_dim] and values [B, S, heads, v_dim], from latent and k_rot."""
        mla = self.mla
        kv = linear_of_rows(self.kv_b, latent, self.rows(mla.nope_dim + mla.v_dim))
        kv = rearrange(kv, "b s (head c) -> b s head c", c=mla.nope_dim + mla.v_dim)
        k_nope, v = kv.split([mla.nope_dim, mla.v_dim], -1)
        return torch.cat([k_nope, k_rot.expand(-1, -1, k_nope.shape[2], -1)], -1), v

    def rows(self, width: int) -> slice:
        """The rows of this rank's heads in a matrix that has `width` rows per head."""
        heads = self.spread.heads(self.heads)
        return slice(heads.start * width, heads.stop * width)

    def latents(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of this rank's heads, the normed latent of keys and values, and k_rot.

        Under tp they are for all tokens of the tp group: the latents are gathered, not x.
        """
        mla, spread = self.mla, self.spread
        rows = self.rows(mla.nope_dim + mla.rope_dim)
        if spread.tp == 1:
            q, latent, k_rot = self.qkv_a(x_BSD).split(self.widths, -1)
            return (self.q_b(self.q_norm(q)) if mla.q_rank else q), self.kv_norm(latent), k_rot
        if mla.q_rank:
            q, latent, k_rot = self.qkv_a(x_BSD).split(self.widths, -1)
            parts = torch.cat([self.q_norm(q), self.kv_norm(latent), k_rot], -1)
            q, latent, k_rot = gather(parts, spread.tp_group).split(self.widths, -1)
            return linear_of_rows(self.q_b, q, rows), latent, k_rot
        # queries are rows of qkv_a: x is gathered for them, and is not kept
        q = spread.project(self.qkv_a, x_BSD, [rows])
        shared = linear_of_rows(self.qkv_a, x_BSD, slice(self.widths[0], sum(self.widths)))
        latent, k_rot = shared.split(self.widths[1:], -1)
        parts = gather(torch.cat([self.kv_norm(latent), k_rot], -1), spread.tp_group)
        latent, k_rot = parts.split(self.widths[1:], -1)
        return q, latent, k_rot

    def gather_latents(self, latent: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """The latents of all tokens of the sequence; k_rot is [B, S, 1, rope_dim], rotated."""
        parts = self.spread.gather_keys(torch.cat([latent, k_rot.squeeze(2)], -1))
        latent, k_rot = parts.split(self.widths[1:], -1)
        return latent, k_rot.unsqueeze(2)

    def halves(self, x: Tensor) -> Tensor:
        """Moves pairs (2i, 2i+1) to (i, i + C/2), where `rotate` expects them.

        Queries and keys are both moved, so no product changes.
        """
        return rearrange(x, "... (pair two) -> ... (two pair)", two=2) if self.mla.interleave else x


def softmax_scale(cfg: ModelConfig) -> float:
    """1/sqrt(C); under YaRN times its squared temperature for all channels (DeepSeek's released code)."""
    scale = (cfg.mla.nope_dim + cfg.mla.rope_dim) ** -0.5
    if cfg.rope.scaling != "yarn" or not cfg.rope.mscale_all_dim:
        return scale
    return scale * yarn_scale(cfg.rope.factor, cfg.rope.mscale_all_dim) ** 2
