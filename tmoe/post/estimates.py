"""Estimates of a policy from samples: pass@k without bias, mean@n, and the share of answers cut off.

next: post/rewards/__init__.py
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that k of n samples, drawn without replacement, include one of the c right samples.

    It is 1 - C(n-c, k) / C(n, k), an unbiased estimate from n samples. "Any of the first k" is unbiased too,
    but noisier, and 1 - (1 - c/n)^k is biased. Chen et al. 2021, arXiv 2107.03374, equation 1. Binomials of
    large n overflow floats, so the quotient is a sum of logarithms: exact to rounding, even if the
    probability is tiny.
    """
    if n < 1 or not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"n={n}, c={c}, k={k}: must be n >= 1, 0 <= c <= n and 1 <= k <= n")
    if n - c < k:
        return 1.0
    few, many = sorted((c, k))  # c and k can be exchanged; the smaller one gives the shorter sum
    return -math.expm1(math.fsum(math.log1p(-many / (n - i)) for i in range(few))) + 0.0  # no -0


def estimates(
    prompts: Sequence[int],
    rewards: Sequence[float | None],
    finishes: Sequence[str],
    ks: Sequence[int],
    right: float = 1.0,
) -> dict[str, float]:
    """Estimates from all samples of an evaluation: {"mean@n": ..., "truncated": ..., "pass@k": ... each k}.

    Every prompt has the same weight, however many samples it has. The n in the name mean@n is the largest
    number of samples of a prompt. pass@k is the mean over prompts with at least k samples; NaN if there is
    none.

    Args:
        prompts: the number of each sample's prompt.
        rewards: the reward of each sample; one with None is not counted in mean@n and pass@k.
        finishes: how each sample ended; "length": it was cut off.
        ks: the values of k.
        right: the smallest reward of a sample that counts as right.
    """
    if not len(prompts) == len(rewards) == len(finishes):
        sizes = f"{len(prompts)} prompts, {len(rewards)} rewards, {len(finishes)} finishes"
        raise ValueError(f"{sizes}: must be as many of each")
    groups: dict[int, list[float]] = {}
    for prompt, reward in zip(prompts, rewards, strict=True):
        if reward is not None and not math.isnan(reward):
            groups.setdefault(prompt, []).append(reward)
    most = max(Counter(prompts).values(), default=0)
    figures = {
        f"mean@{most}": _mean([fmean(group) for group in groups.values()]),
        "truncated": _mean([float(finish == "length") for finish in finishes]),
    }
    for k in ks:
        counts = [(len(group), sum(reward >= right for reward in group)) for group in groups.values()]
        figures[f"pass@{k}"] = _mean([pass_at_k(n, c, k) for n, c in counts if n >= k])
    return figures


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
