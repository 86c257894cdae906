"""QK-Clip: query and latent key weights are scaled so that no head's logits exceed a limit (Kimi K2, 2025).

gamma_h = min(1, limit / S_h), with S_h the largest |logit| of head h in a step, over tokens and ranks.

    grouped attention   rows of queries of head h, and their bias: gamma_h; keys, which a group shares, stay
    latent attention    queries without position, and keys of head h: sqrt(gamma_h); queries with position,
                        whose key all heads share: gamma_h

Then the same tokens give the logit gamma_h S_h. Where queries or keys are normed, the norm divides a factor
out and bounds the logits: such a model is not clipped.

next: ops/largest_logit.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tmoe.config.check import Setting, require
from tmoe.config.run import Config
from tmoe.model.attention import Attention
from tmoe.model.latent import LatentAttention
from tmoe.parallel.copies import make_stale
from tmoe.parallel.mesh import local_part, local_slices

Watched = Attention | LatentAttention


def why_not(cfg: Config) -> str:
    """Why the logits of this model are not clipped; "" if they are."""
    if not any(map(cfg.model.attends, cfg.model.numbered)):
        return "no block has attention"
    if cfg.model.attention == "mla" or cfg.model.qk_norm == "none":
        return ""
    return f"--model.qk-norm={cfg.model.qk_norm} norms queries and keys, which bounds the logits"


def describe(cfg: Config) -> list[str]:
    """A line if logits should be clipped and are not."""
    why = why_not(cfg) if cfg.optim.qk_clip and not cfg.eval_only else ""
    return [f"--optim.qk-clip={cfg.optim.qk_clip:g} is off: {why}"] if why else []


def watch_logits(model: nn.Module, cfg: Config) -> None:
    """From now on the forwards of training record each head's largest logit. Call it before `parallelize`.

    ConfigError if the weights of attention are frozen.
    """
    if not cfg.optim.qk_clip or why_not(cfg):
        return
    for module in model.modules():
        if isinstance(module, Watched):
            ones = torch.ones(heads_of(module), device=module.o.weight.device)
            free = all(p.requires_grad for p, _ in scaled_rows(module, ones))
            wrong = f"not with {Setting('optim.freeze', cfg.optim.freeze)}, which freezes queries"
            require(free, "optim.qk_clip", cfg.optim.qk_clip, wrong, "0")
            module.largest_H = torch.zeros_like(ones)


@torch.no_grad()
def clip_logits(
    model: nn.Module, most: float, finite: Tensor | None = None, group: dist.ProcessGroup | None = None
) -> None:
    """Scales the weights of all heads whose logits were above `most` since the last call.

    A collective of the group, the ranks of a pipeline stage; None: this rank alone.
    finite: 0-dim; with 0 no weight changes.
    """
    layers, found = [], []
    for module in model.modules():
        if isinstance(module, Watched) and module.largest_H is not None:
            layers.append(module)
            found.append(module.largest_H)
    if not layers:
        return
    found_NH = torch.stack(found)
    if group is not None:
        dist.all_reduce(found_NH, dist.ReduceOp.MAX, group=group)
    for largest_H in found:
        largest_H.zero_()
    gamma_NH = (most / found_NH).clamp(max=1.0).nan_to_num(1.0)
    if finite is not None:
        gamma_NH = torch.where(finite.bool(), gamma_NH, 1.0)
    changed: list[Tensor] = []
    for layer, gamma_H in zip(layers, gamma_NH, strict=True):
        for p, factor_R in scaled_rows(layer, gamma_H):
            local = local_part(p.detach())
            own = factor_R[local_slices(p)[0]].to(local.dtype)
            local.mul_(own.view(-1, *[1] * (local.ndim - 1)))
            changed.append(p)
    torch.autograd.graph.increment_version(changed)
    make_stale(changed)


def heads_of(module: Watched) -> int:
    """Query heads of all ranks."""
    return module.heads if isinstance(module, LatentAttention) else module.cfg.heads


def scaled_rows(module: Watched, gamma_H: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter that makes logits, and the factor of each of its rows."""
    if isinstance(module, LatentAttention):
        mla, root_H = module.mla, gamma_H.sqrt()
        of_head = [root_H[:, None].expand(-1, mla.nope_dim), gamma_H[:, None].expand(-1, mla.rope_dim)]
        queries = torch.cat(of_head, 1).flatten()
        yield _first_rows(module.q_b if mla.q_rank else module.qkv_a, queries)
        ones = torch.ones_like(root_H)[:, None].expand(-1, mla.v_dim)
        keys = root_H[:, None].expand(-1, mla.nope_dim)
        yield _first_rows(module.kv_b, torch.cat([keys, ones], 1).flatten())
        return
    queries = gamma_H.repeat_interleave(module.cfg.head_dim)
    yield _first_rows(module.qkv, queries)
    if module.qkv.bias is not None:
        yield module.qkv.bias, _first_rows(module.qkv, queries)[1]


def _first_rows(linear: nn.Linear, factors: Tensor) -> tuple[Tensor, Tensor]:
    """A weight, and factors of its rows: the given ones, then ones."""
    rest = factors.new_ones(linear.weight.shape[0] - len(factors))
    return linear.weight, torch.cat([factors, rest])
