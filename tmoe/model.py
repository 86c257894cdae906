"""The Transformer: embedding, blocks, head. Knows nothing of how many ranks there are.

next: attention.py, then moe.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tmoe.attend import document_mask
from tmoe.attention import Attention, rope_table
from tmoe.balance import Balancer, Load, Totals, stack
from tmoe.config import ModelConfig
from tmoe.experts import LocalExperts
from tmoe.init import initialise
from tmoe.loss import IGNORE, cross_entropy_sum
from tmoe.moe import MoE, SwiGLU


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); pre-norm. The feed-forward is an MoE or dense."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.dropout = cfg.dropout
        self.attention_norm = nn.RMSNorm(cfg.dim, cfg.norm_eps)
        self.attention = Attention(cfg)
        self.ffn_norm = nn.RMSNorm(cfg.dim, cfg.norm_eps)
        self.moe = MoE(cfg.dim, cfg.moe) if cfg.is_moe(layer) else None
        self.ffn = SwiGLU(cfg.dim, cfg.ffn_dim) if self.moe is None else None
        self.must_compile = False

    def forward(self, x: Tensor, *context) -> tuple[Tensor, Load | None]:
        """Eager on purpose: FSDP2's hooks, of the block and of the experts' scope, stand around the compiled `compute`."""
        if self.moe is None:
            return self.compute(x, *context)
        return self.moe.experts(self.compute, x, *context)

    def compute(
        self, x, cos_SC, sin_SC, mask, padding, experts: LocalExperts | None = None
    ) -> tuple[Tensor, Load | None]:
        if self.must_compile and not torch.compiler.is_compiling():  # traced once, so it costs nothing when compiled
            raise RuntimeError("a block that should be compiled ran eager; --no-compile allows that")
        x = x + self.drop(self.attention(self.attention_norm(x), cos_SC, sin_SC, mask))
        if self.ffn is not None:
            return x + self.drop(self.ffn(self.ffn_norm(x))), None
        assert self.moe is not None and experts is not None
        y, load = self.moe.route(self.ffn_norm(x), padding, experts)
        return x + self.drop(y), load

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Transformer(nn.Module):
    """A decoder-only language model.

    `model(tokens_BS)` returns logits [B, S, V]. `model(tokens_BS, targets_BS)` returns the loss: mean cross-entropy over
    the targets that are not -100, plus the balancing losses. Weights are initialised as init.py says.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.embedding = nn.Embedding(cfg.vocab, cfg.dim)
        self.blocks = nn.ModuleList(Block(cfg, i) for i in range(cfg.layers))
        self.norm = nn.RMSNorm(cfg.dim, cfg.norm_eps)
        self.head = None if cfg.tied else nn.Linear(cfg.dim, cfg.vocab, bias=False)
        self.balancer = Balancer(cfg.moe)
        self.init_weights()

    def init_weights(self, seed: int | None = None) -> None:
        initialise(self, self.cfg.init_std, self.cfg.layers, seed)

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        *,
        documents_BS: Tensor | None = None,
        padding_BS: Tensor | None = None,
        totals: Totals | None = None,
    ) -> Tensor:
        """
        Args:
            tokens_BS, targets_BS: int64; targets of -100 count nothing.
            documents_BS: number of the document that a token belongs to; tokens attend inside their own only.
            padding_BS: bool, True at tokens that nobody attends to, that go to no expert and count in no loss.
            totals: targets, tokens and sequences of the whole step over all ranks, when this call is a part of it; the
                losses of the parts then add up. None: this call is all.
        """
        h_BSD, load = self.hidden(tokens_BS, documents_BS, padding_BS)
        weight_VD = self.embedding.weight if self.head is None else self.head.weight
        if targets_BS is None:
            return F.linear(h_BSD, weight_VD)
        if padding_BS is not None:
            targets_BS = targets_BS.masked_fill(padding_BS, IGNORE)
        count = (targets_BS != IGNORE).sum().clamp(min=1) if totals is None else totals.targets
        loss = cross_entropy_sum(h_BSD.flatten(0, 1), weight_VD, targets_BS.flatten()) / count
        self.cross_entropy = loss.detach()
        return loss if load is None else loss + self.balancer.loss(load, totals)

    def hidden(
        self, tokens_BS: Tensor, documents_BS: Tensor | None = None, padding_BS: Tensor | None = None
    ) -> tuple[Tensor, Load | None]:
        """Final hidden states [B, S, D], and the routers' load stacked over MoE layers (None: no such layer)."""
        S = tokens_BS.shape[1]
        if self.cfg.rope.max_seq < S:
            raise ValueError(f"tokens: {S} positions, but model.rope.max_seq={self.cfg.rope.max_seq}")
        cos_SC, sin_SC = rope_table(self.cfg.rope, self.cfg.head_dim, S, tokens_BS.device)
        if padding_BS is not None:
            documents_BS = torch.zeros_like(tokens_BS) if documents_BS is None else documents_BS
            documents_BS = documents_BS.masked_fill(padding_BS, -1)
        mask = None if documents_BS is None else document_mask(documents_BS)
        x, loads = self.embedding(tokens_BS), []
        for block in self.blocks:
            x, load = block(x, cos_SC, sin_SC, mask, padding_BS)
            if load is not None:
                loads.append(load)
        load = stack(loads) if loads else None
        if load is not None and self.training:
            self.balancer.record(load)
        return self.norm(x), load
