"""Muon's matrices in a Transformer: the rows of each in fused weights, and a line on the work of a step.

next: optim/matrices.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tmoe.base.activations import activation
from tmoe.config.axes import Axes
from tmoe.config.run import Config
from tmoe.model.attention import Attention
from tmoe.model.count import flops_per_token
from tmoe.model.freeze import freeze
from tmoe.model.latent import LatentAttention
from tmoe.model.linear import DeltaNet, LinearLayer
from tmoe.model.mamba2 import Mamba2
from tmoe.model.stages import Stages
from tmoe.model.transformer import Transformer
from tmoe.moe.experts import Experts
from tmoe.moe.layer import SwiGLU
from tmoe.optim.matrices import Parts, Rows, chosen, work


def parts_of(model: nn.Module, by_head: bool = False) -> dict[str, Parts]:
    """The parts of every fused weight of a Transformer, or of a stage's parts of it, by parameter name.

    Weights that are one matrix, modules of your own and models of Hugging Face are left out.
    by_head: queries, keys and values are one matrix for each head.
    """
    found: dict[str, Parts] = {}
    for part in model if isinstance(model, Stages) else (model,):
        for name, module in part.named_modules():
            for kind, read in READERS.items():
                if isinstance(module, kind):
                    found |= {f"{name}.{weight}": rows for weight, rows in read(module, by_head).items()}
    return found


def describe(cfg: Config, axes: Axes) -> list[str]:
    """A line on what Muon trains, and on the share of its products in those of a step; none without Muon."""
    pattern, iterations = cfg.optim.muon, cfg.optim.muon_iterations
    if pattern is None or cfg.eval_only:
        return []
    with torch.device("meta"):
        model = Transformer(cfg.model)
    freeze(model, cfg.optim.freeze)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: tuple(named[name].shape) for name in chosen(pattern, named.items())}
    count, flops = work(shapes, parts_of(model, cfg.optim.muon_heads), iterations)
    numbers = sum(named[name].numel() for name in shapes)
    line = f"Muon trains {count:,} matrices, {numbers:,} numbers in {len(shapes)} weights, "
    line += f"and AdamW the other {len(named) - len(shapes)} weights; its products are {_flop(flops)} a step"
    if cfg.task == "grpo":  # the tokens of a step follow from its answers
        return [line]
    tokens = axes.readers * cfg.train.batch * cfg.train.accumulate * cfg.train.seq
    step = flops_per_token(cfg.model, cfg.train.seq) * tokens
    return [f"{line}, {flops / step:.1%} of the model's {_flop(step)} for {tokens:,} tokens"]


def _flop(n: float) -> str:
    """A number of FLOPs with its unit."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n / 1e9:.2f} GFLOP"


def heads(first: int, count: int, rows: int, by_head: bool) -> Rows:
    """`count` heads of `rows` rows each, one after the other."""
    return Rows(first, rows, count, apart=True) if by_head else Rows(first, count * rows)


def of_attention(module: Attention, by_head: bool) -> dict[str, Parts]:
    """Queries, keys, values, and gates of the query heads."""
    cfg, G = module.cfg, module.key_heads
    H, C, V = cfg.heads, cfg.head_dim, cfg.value_dim
    counts = [(H, C), (G, C), (G, V), *([(H, V)] if cfg.attention_gate else [])]
    return {"qkv.weight": in_turn(counts, by_head)}


def in_turn(counts: Sequence[tuple[int, int]], by_head: bool) -> Parts:
    """Parts that follow one another. counts: of each, its heads and the rows of a head."""
    found, first = [], 0
    for count, rows in counts:
        found.append(heads(first, count, rows, by_head))
        first += count * rows
    return found


def of_linear(module: LinearLayer, by_head: bool) -> dict[str, Parts]:
    """Queries, keys, values and gates of a linear layer; its beta and its decays."""
    n = module.sizes
    keys, values = (n.key_heads, n.key_dim), (n.value_heads, n.value_dim)
    found = in_turn([keys, keys, values, values], by_head)
    gates = in_turn([(n.value_heads, 1)] * (n.gate_rows // n.value_heads), False)
    if module.ba is not None:
        return {"qkvz.weight": found, "ba.weight": gates}
    rows = n.mixed + n.value_width
    return {"qkvz.weight": [*found, *(part._replace(first=rows + part.first) for part in gates)]}


def of_latent(module: LatentAttention, by_head: bool) -> dict[str, Parts]:
    """Latents of queries, or queries; latents of keys; shared keys; keys and values, which alternate."""
    mla, H = module.mla, module.heads
    width, both = mla.nope_dim + mla.rope_dim, mla.nope_dim + mla.v_dim
    first, latent, shared = module.widths
    queries = Rows(0, first) if mla.q_rank else heads(0, H, width, by_head)
    found: dict[str, Parts] = {
        "qkv_a.weight": [queries, Rows(first, latent), Rows(first + latent, shared)],
        "kv_b.weight": [
            Rows(0, both, H, 0, mla.nope_dim, by_head),
            Rows(0, both, H, mla.nope_dim, mla.v_dim, by_head),
        ],
    }
    return found | ({"q_b.weight": [heads(0, H, width, by_head)]} if mla.q_rank else {})


def of_dense(module: SwiGLU, by_head: bool) -> dict[str, Parts]:
    """Gate and up of a dense feed-forward or a shared expert; relu squared has up alone."""
    rows = module.gate_up.weight.shape[0] // module.halves
    return {"gate_up.weight": [Rows(i * rows, rows) for i in range(module.halves)]}


def of_experts(module: Experts, by_head: bool) -> dict[str, Parts]:
    """Gate and up of all experts; an activation without a gate has up alone."""
    if "gate_up" not in dict(module.named_parameters(recurse=False)):  # in NF4, or your own
        return {}
    halves = activation(module.activation).halves
    rows = module.gate_up.shape[1] // halves
    return {"gate_up": [Rows(i * rows, rows) for i in range(halves)]}


READERS: dict[type[nn.Module], Callable[..., dict[str, Parts]]] = {
    Attention: of_attention,
    DeltaNet: of_linear,
    Mamba2: of_linear,
    LatentAttention: of_latent,
    SwiGLU: of_dense,
    Experts: of_experts,
}
