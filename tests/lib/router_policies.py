"""The experts and weights that routers must choose: computed one token, or one expert, at a time in fp64.

Written from the papers' and Megatron-Core's formulas (topk_routing_with_score_function, group_limited_topk,
sinkhorn, qb_dual_update), without torch's top-k, softmax or sort.
"""

import math
from collections.abc import Sequence

from tmoe.config.model import MoEConfig

Row = list[float]


def score(logits: Row, name: str) -> Row:
    """Scores of all experts."""
    if name in ("softmax", "cosine"):
        most = max(logits)
        exps = [math.exp(v - most) for v in logits]
        return [v / sum(exps) for v in exps]
    if name == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in logits]
    return [math.sqrt(math.log1p(math.exp(v))) for v in logits]


def best(values: Row, count: int, among: Sequence[int] | None = None) -> list[int]:
    """Indices of the largest values; among equal values the first."""
    return sorted(range(len(values)) if among is None else among, key=lambda i: (-values[i], i))[:count]


def open_experts(wanted: Row, worth: Row, cfg: MoEConfig, groups: int, count: int, K: int) -> list[int]:
    """The experts of a token's best groups, and all identity experts."""
    size = cfg.experts // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    if cfg.group_score == "max":
        value = [max(wanted[e] for e in group) for group in members]
    else:
        n = 2 if cfg.group_score == "top2" else max(1, K // count)
        value = [sum(sorted((worth[e] for e in group), reverse=True)[:n]) for group in members]
    experts = [e for g in best(value, count) for e in members[g]]
    return sorted(experts) + list(range(cfg.experts, cfg.outputs))


def weigh(logits: Row, chosen: Sequence[int], cfg: MoEConfig) -> dict[int, float]:
    """The weights of the chosen experts, however they were chosen."""
    scores = score(logits, cfg.score)
    if cfg.softmax == "after":
        scores = [math.exp(v - max(logits)) for v in logits]
    divided = cfg.renormalize or cfg.softmax == "after"
    total = sum(scores[e] for e in chosen) if divided else 1.0
    return {e: scores[e] / total * cfg.scaling for e in chosen}


def top_k(
    logits: Row, cfg: MoEConfig, bias: Row | None = None, devices: int = 1, K: int | None = None
) -> dict[int, float]:
    """A token's experts and weights under selection=topk."""
    K = cfg.top_k if K is None else K
    scores = score(logits, cfg.score)
    worth = logits if cfg.softmax == "after" else scores
    wanted = logits
    if bias is not None:
        wanted = worth = [s + b for s, b in zip(scores, bias, strict=True)]
    groups, count = (devices, cfg.top_devices) if cfg.top_devices else (cfg.groups, cfg.top_groups)
    among = None if count >= groups else open_experts(wanted, worth, cfg, groups, count, K)
    return weigh(logits, best(wanted, K, among), cfg)


def expert_choice(rows: list[Row], live: list[bool], cfg: MoEConfig) -> list[dict[int, float]]:
    """All tokens' experts and weights if each expert selects its best tokens."""
    shares = [share(row, cfg.score) for row in rows]
    tokens = [t for t in range(len(rows)) if live[t]]
    capacity = math.ceil(len(tokens) * cfg.top_k / cfg.outputs)
    taken: list[list[int]] = [[] for _ in rows]
    for e in range(cfg.outputs):
        for t in best([row[e] for row in shares], capacity, tokens):
            taken[t].append(e)
    return [weigh(row, chosen, cfg) if chosen else {} for row, chosen in zip(rows, taken, strict=True)]


def share(logits: Row, name: str) -> Row:
    """Scores divided by their sum."""
    scores = score(logits, name)
    return [s / sum(scores) for s in scores]


def round_half_even(count: int, tile: int) -> int:
    """The nearest multiple of `tile`; if two are equally near, the even multiple."""
    low, rest = divmod(count, tile)
    up = 2 * rest > tile or (2 * rest == tile and low % 2 == 1)
    return (low + up) * tile


def tile_counts(counts: list[int], tokens: int, tile: int, how: str) -> list[int]:
    """Every expert's number of tokens after rounding to tiles."""
    rule = {
        "down": lambda n: n // tile * tile,
        "up": lambda n: -(-n // tile) * tile,
        "nearest": lambda n: round_half_even(n, tile),
    }[how]
    return [min(rule(n), tokens // tile * tile) for n in counts]


def quantile(rows: list[Row], K: int, beta: Row) -> Row:
    """Each expert's (T K / E + 1)-th largest of logit - the token's (K+1)-th largest of logit - beta."""
    E = len(beta)
    place = len(rows) * K // E
    cutoffs = [sorted((v - b for v, b in zip(row, beta, strict=True)), reverse=True)[K] for row in rows]
    return [
        sorted((row[e] - c for row, c in zip(rows, cutoffs, strict=True)), reverse=True)[place]
        for e in range(E)
    ]
