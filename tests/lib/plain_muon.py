"""Muon and AdamW as plain loops over one process's matrices, to compare trainings with.

The matrices of fused weights are computed from the settings, without the code under test.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from tmoe.config.model import ModelConfig
from tmoe.config.run import OptimConfig
from tmoe.ops.reference import MuonRule, muon
from tmoe.parallel.mesh import local_part

BY_ADAMW = "embedding|head.weight|router|shared_gate|bias|norm|sinks|rates"


def rows_of(name: str, cfg: ModelConfig, by_head: bool, layer: int) -> list[Tensor] | None:
    """Numbers of the rows of each matrix in a fused weight; None: it is one matrix."""
    m, H, C, V = cfg.mla, cfg.heads, cfg.head_dim, cfg.value_dim

    def take(*sizes: int) -> list[Tensor]:
        return list(torch.arange(sum(sizes)).split(list(sizes)))

    if name.endswith("attention.qkv.weight"):
        G = cfg.kv_heads_in(cfg.window_of(layer))
        heads = [(H, C), (G, C), (G, V)] + [(H, V)] * cfg.attention_gate
        if by_head:
            return take(*(width for count, width in heads for _ in range(count)))
        return take(*(count * width for count, width in heads))
    if name.endswith("qkvz.weight"):
        n = cfg.linear
        keys, values = (n.key_heads, n.key_dim), (n.value_heads, n.value_dim)
        heads = (keys, keys, values, values)
        steps = [n.value_heads] * (n.kind == "mamba2")
        if not by_head:
            return take(*(width * count for count, width in heads), *steps)
        return take(*(width for count, width in heads for _ in range(count)), *steps)
    if name.endswith("ba.weight"):
        return take(cfg.linear.value_heads, cfg.linear.value_heads)
    if name.endswith("qkv_a.weight"):
        width = m.nope_dim + m.rope_dim
        queries = [m.q_rank] if m.q_rank else [width] * H if by_head else [H * width]
        return take(*queries, m.kv_rank, m.rope_dim)
    if name.endswith("q_b.weight") and by_head:
        return take(*[m.nope_dim + m.rope_dim] * H)
    if name.endswith("kv_b.weight"):
        rows = torch.arange(H * (m.nope_dim + m.v_dim)).view(H, -1)
        parts = rows[:, : m.nope_dim], rows[:, m.nope_dim :]
        return [r for part in parts for r in part] if by_head else [part.flatten() for part in parts]
    if name.endswith(("ffn.gate_up.weight", "shared.gate_up.weight")):
        half = cfg.moe.shared_dim if "shared" in name else cfg.ffn_dim
        return take(*[half] * cfg.moe.shared_halves)
    if name.endswith("experts.gate_up"):
        return take(*[cfg.moe.ffn_dim] * cfg.moe.halves)
    return None


class PlainMuon:
    """An optimizer over one process's parameters: a loop over matrices, and torch's AdamW for the rest."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], optim: OptimConfig, cfg: ModelConfig):
        self.optim, self.cfg = optim, cfg
        self.named = {name: p for name, p in named if p.requires_grad}
        self.mine = {
            name: torch.zeros_like(local_part(p).detach())
            for name, p in self.named.items()
            if optim.muon and re.search(optim.muon, name) and not re.search(BY_ADAMW, name)
        }
        rest = {name: p for name, p in self.named.items() if name not in self.mine}
        decays = [p for name, p in rest.items() if p.ndim >= 2 and not name.endswith("bias")]
        none = [p for p in rest.values() if all(p is not d for d in decays)]
        groups = [dict(params=decays, weight_decay=optim.weight_decay), dict(params=none, weight_decay=0.0)]
        how = dict(lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=False)
        self.adamw = torch.optim.AdamW([group for group in groups if group["params"]], **how)

    @torch.no_grad()
    def step(self) -> None:
        rule = MuonRule(self.optim.lr, self.optim.weight_decay, self.optim.muon_momentum)
        for name, m in self.mine.items():
            p = self.named[name]
            layer = int(re.search(r"(blocks|mtp)\.(\d+)", name)[2])
            rows = rows_of(name, self.cfg, self.optim.muon_heads, layer)
            w, g = local_part(p).detach(), local_part(p.grad)
            for at in range(len(w)) if w.ndim == 3 else (...,):
                for r in rows or [torch.arange(w.shape[-2])]:
                    w[at][r], m[at][r] = muon(w[at][r], g[at][r], m[at][r], rule)
            torch.autograd.graph.increment_version(p)
            p.grad = None
        self.adamw.step()

    def zero_grad(self) -> None:
        for p in self.named.values():
            p.grad = None
