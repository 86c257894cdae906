"""Bytes that a rank holds for the rollouts of --task grpo, by purpose, in closed form.

next: tmoe/commands/dry_run.py
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from tmoe.base.types import FLOATS
from tmoe.config.axes import Axes
from tmoe.config.run import Config
from tmoe.config.sizes import compute_bytes, master_bytes
from tmoe.generate.cache import PAGE, bytes_a_token, bytes_of_states
from tmoe.generate.pages import Span, most_needed
from tmoe.plan.block_memory import layer_bytes

AT_ONCE = 8192  # tokens of prompts in one pass; generate/gathered_model.py has the same on a GPU


def several_micros(cfg: Config, axes: Axes) -> bool:
    """Whether gradients add up over micro-batches.

    With --task grpo the number of micro-batches depends on how answers are packed; this formula counts a row
    for each answer.
    """
    if cfg.task != "grpo":
        return cfg.train.accumulate > 1
    return ceil(cfg.grpo.prompts / axes.readers) * cfg.grpo.group > cfg.train.batch


def answers_at_once(cfg: Config, axes: Axes) -> list[Span]:
    """The answers of a rank's largest call, if every prompt is as long as --train.seq allows."""
    g, seq = cfg.grpo, cfg.train.seq
    own = ceil(ceil(g.prompts / axes.readers) / axes.parts)
    prompts = min(own, max(1, 2 * g.rollout_slots // g.group))
    return [Span(p, seq - cfg.answer_tokens, seq) for p in range(prompts) for _ in range(g.group)]


def pool_bytes(cfg: Config, axes: Axes) -> int:
    """Bytes of keys and values of all slots, at most --grpo.pool-gib, and of the states of linear layers."""
    dtype = FLOATS[cfg.train.dtype]
    page = PAGE * bytes_a_token(cfg.model, dtype)
    spans = answers_at_once(cfg, axes)
    pages = 1 + most_needed(spans, min(cfg.grpo.rollout_slots, len(spans)))
    pool = cfg.grpo.pool_gib
    pages = pages if pool is None or not page else min(pages, int(pool * 2**30 // page))
    return page * pages + bytes_of_states(cfg.model, min(cfg.grpo.rollout_slots, len(spans)), dtype)


def passing_bytes(cfg: Config, axes: Axes) -> int:
    """Temporaries of a rollout: those of a block, for a row of prompts, or the logits of all slots."""
    rows = replace(cfg, train=replace(cfg.train, batch=-(-AT_ONCE // cfg.train.seq)))
    whole = replace(axes, cp=1, tp=1)  # attention is not divided: each rank has its own prompts
    block = max(layer_bytes(rows, whole, layer) for layer in range(cfg.model.layers))
    return max(block, cfg.grpo.rollout_slots * cfg.model.vocab * compute_bytes(cfg))


def with_rollout(
    parts: dict[str, int], cfg: Config, axes: Axes, whole: int, masters: int, trained: int
) -> dict[str, int]:
    """The same parts, plus the parts that --task grpo adds.

    whole: elements of a rank's weights, gathered. masters: the part of them that a rank computes with in
    place. trained: elements that the rank stores, without frozen ones. With adapters the reference is their
    base.
    """
    if cfg.task != "grpo":
        return parts
    return parts | {
        "reference": master_bytes(cfg) * trained if cfg.grpo.kl and not cfg.lora.rank else 0,
        "rollout": compute_bytes(cfg) * (whole - masters) + passing_bytes(cfg, axes),
        "pool": pool_bytes(cfg, axes),
        "away": parts["moments"] * cfg.grpo.offload,
    }
