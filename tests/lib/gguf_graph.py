"""llama.cpp's graph of a qwen35moe file, in plain loops and fp64: what the names and rows of a file mean.

Written after src/models/qwen35moe.cpp of ggml-org/llama.cpp (02ebd8f). The length of queries and keys is that
of transformers, 1e-6 under the root: llama.cpp has a lower bound of the norm's epsilon there.

next: tests/hf/test_gguf.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gguf import GGUFReader
from torch import Tensor

ARCH = "qwen35moe"


class Graph:
    """The tensors and keys of a file."""

    def __init__(self, path: Path):
        file = GGUFReader(path)
        self.fields = {name: field.contents() for name, field in file.fields.items()}
        self.tensors = {t.name: torch.from_numpy(t.data.copy()).double() for t in file.tensors}
        self.eps = self.key("attention.layer_norm_rms_epsilon")

    def key(self, name: str) -> Any:
        return self.fields[f"{ARCH}.{name}"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.tensors[name]

    def logits(self, ids: list[int]) -> Tensor:
        """[S, V] for S tokens, fp64."""
        x = self.tensors["token_embd.weight"][ids]
        for i in range(self.key("block_count")):
            w = {n.removeprefix(f"blk.{i}."): t for n, t in self.tensors.items() if n.startswith(f"blk.{i}.")}
            linear = (i + 1) % self.key("full_attention_interval") != 0
            u = self.norm(x, f"blk.{i}.attn_norm.weight")
            x = x + (self.linear(u, w, i) if linear else self.attention(u, w, i))
            x = x + self.experts(self.norm(x, f"blk.{i}.post_attention_norm.weight"), w)
        return self.norm(x, "output_norm.weight") @ self.tensors["output.weight"].T

    def linear(self, u: Tensor, w: dict[str, Tensor], i: int) -> Tensor:
        """The gated delta net; value head h reads key head h modulo their number."""
        G, H, K = (self.key(f"ssm.{name}") for name in ("group_count", "time_step_rank", "state_size"))
        S, taps = len(u), w["ssm_conv1d.weight"]
        mixed = F.pad(u @ w["attn_qkv.weight"].T, (0, 0, taps.shape[1] - 1, 0))
        mixed = F.silu(sum(mixed[j : j + S] * taps[:, j] for j in range(taps.shape[1])))
        q, k, v = (t.view(S, -1, K) for t in mixed.split([G * K, G * K, H * K], 1))
        q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, k = q.repeat(1, H // G, 1) * K**-0.5, k.repeat(1, H // G, 1)
        beta = (u @ w["ssm_beta.weight"].T).sigmoid()
        decay = (w["ssm_a"] * F.softplus(u @ w["ssm_alpha.weight"].T + w["ssm_dt.bias"])).exp()
        state, found = u.new_zeros(H, K, K), []
        for t in range(S):
            state = decay[t, :, None, None] * state
            change = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t, :, :, None] * change[:, None]
            found.append(torch.einsum("hkv,hk->hv", state, q[t]))
        z = (u @ w["attn_gate.weight"].T).view(S, H, K)
        y = self.norm(torch.stack(found), f"blk.{i}.ssm_norm.weight") * F.silu(z)
        return y.flatten(1) @ w["ssm_out.weight"].T

    def attention(self, u: Tensor, w: dict[str, Tensor], i: int) -> Tensor:
        """Attention with gates: a head's rows are its query, then its gate."""
        S, C, turned = len(u), self.key("attention.key_length"), self.key("rope.dimension_count")
        q, gate = (u @ w["attn_q.weight"].T).view(S, -1, 2 * C).chunk(2, -1)
        k, v = ((u @ w[f"attn_{n}.weight"].T).view(S, -1, C) for n in "kv")
        at = torch.arange(S, dtype=u.dtype)[:, None, None]
        angle = at * self.key("rope.freq_base") ** (-torch.arange(0, turned, 2, dtype=u.dtype) / turned)

        def rotated(t: Tensor) -> Tensor:
            a, b, rest = t.split([turned // 2, turned // 2, C - turned], -1)
            return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)

        q, k = (rotated(self.norm(t, f"blk.{i}.attn_{n}_norm.weight")) for t, n in ((q, "q"), (k, "k")))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = torch.einsum("shc,thc->hst", q, k) * C**-0.5
        future = torch.ones(S, S, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        y = torch.einsum("hst,thc->shc", weights, v) * gate.sigmoid()
        return y.flatten(1) @ w["attn_output.weight"].T

    def experts(self, u: Tensor, w: dict[str, Tensor]) -> Tensor:
        """The best experts by softmax, whose weights add up to 1; and the shared expert with its gate."""

        def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
            return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

        best = (u @ w["ffn_gate_inp.weight"].T).softmax(-1).topk(self.key("expert_used_count"), -1)
        shares = best.values / best.values.sum(-1, keepdim=True)
        names = ("gate", "up", "down")
        y = swiglu(u, *(w[f"ffn_{n}_shexp.weight"] for n in names))
        y = y * (u @ w["ffn_gate_inp_shexp.weight"].view(-1, 1)).sigmoid()
        for t, (experts, weights) in enumerate(zip(best.indices.tolist(), shares, strict=True)):
            for e, share in zip(experts, weights, strict=True):
                y[t] += share * swiglu(u[t], *(w[f"ffn_{n}_exps.weight"][e] for n in names))
        return y
