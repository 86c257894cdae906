"""Chooses K experts for every token and weighs them: softmax top-k in fp32.

next: balance.py
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tmoe.config import MoEConfig


class Routing(NamedTuple):
    """What the router decided for T tokens."""

    weights_TK: Tensor  # fp32, differentiable
    ids_TK: Tensor  # int32 expert ids, -1 for tokens that go nowhere (padding)
    logits_TE: Tensor  # fp32, differentiable


class Router(nn.Module):
    """logits = x W^T, then the top K of E.

    `softmax="before"`: softmax over all E, the K largest, divided by their sum if `renormalize` (Qwen3, OLMoE, DeepSeek).
    `softmax="after"`: the K largest logits, softmax over those (Mixtral; the same numbers as before + renormalize).
    Both times `scaling`. Product, softmax and weights are fp32 whatever the type of x and W.
    """

    def __init__(self, dim: int, cfg: MoEConfig):
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.experts, dim))

    def forward(self, x_TD: Tensor, padding_T: Tensor | None = None) -> Routing:
        """x_TD of any float type; padding_T bool, True at tokens to leave out."""
        cfg = self.cfg
        with torch.autocast(x_TD.device.type, enabled=False):
            x_TD = x_TD.float()
            if cfg.jitter and self.training:
                x_TD = x_TD * (1 + cfg.jitter * (2 * torch.rand_like(x_TD) - 1))
            logits_TE = F.linear(x_TD, self.weight.float())
            if cfg.softmax == "before":
                weights_TK, ids_TK = logits_TE.softmax(-1).topk(cfg.top_k, -1)
                if cfg.renormalize:
                    weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
            else:
                top_TK, ids_TK = logits_TE.topk(cfg.top_k, -1)
                weights_TK = top_TK.softmax(-1)
        ids_TK = ids_TK.to(torch.int32)
        if padding_T is not None:
            ids_TK = ids_TK.masked_fill(padding_T[:, None], -1)
        return Routing(weights_TK * cfg.scaling, ids_TK, logits_TE)
