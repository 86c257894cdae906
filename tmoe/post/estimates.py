"""What samples say of a policy: pass@k without bias, mean@n, and the share of answers that were cut off.

next: post/rewards/__init__.py
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without putting back, hold one of the c that are right.

    1 - C(n-c, k) / C(n, k): from n samples it is without bias, where "any of the first k" is only noisier,
    and 1 - (1 - c/n)^k is biased. Chen et al. 2021, arXiv 2107.03374, equation 1. Binomials of large n are no
    floats, so their quotient is summed up in logarithms: exact to rounding also where the chance is tiny.
    """
    if n < 1 or not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"n={n}, c={c}, k={k}: must be n >= 1, 0 <= c <= n and 1 <= k <= n")
    if n - c < k:
        return 1.0
    few, many = sorted((c, k))  # both products are the same
    return -math.expm1(math.fsum(math.log1p(-many / (n - i)) for i in range(few))) + 0.0  # no -0


def estimates(
    prompts: Sequence[int],
    rewards: Sequence[float | None],
    finishes: Sequence[str],
    ks: Sequence[int],
    right: float = 1.0,
) -> dict[str, float]:
    """Of all samples of an evaluation: {"mean@n": ..., "truncated": ..., "pass@k": ... for each k}.

    prompts: the number of each sample's prompt. A sample is right if its reward is at least `right`. A reward
    of None is no sample for mean@n and pass@k. Every prompt counts alike, however many samples it has. n in
    the name is the largest number of a prompt's samples. A k of which a prompt has not as many samples is
    taken over the other prompts; NaN without any.
    """
    if not len(prompts) == len(rewards) == len(finishes):
        told = f"{len(prompts)} prompts, {len(rewards)} rewards, {len(finishes)} finishes"
        raise ValueError(f"{told}: must be as many of each")
    groups: dict[int, list[float]] = {}
    for prompt, reward in zip(prompts, rewards, strict=True):
        if reward is not None and not math.isnan(reward):
            groups.setdefault(prompt, []).append(reward)
    most = max(Counter(prompts).values(), default=0)
    found = {
        f"mean@{most}": _mean([fmean(group) for group in groups.values()]),
        "truncated": _mean([float(finish == "length") for finish in finishes]),
    }
    for k in ks:
        counts = [(len(group), sum(reward >= right for reward in group)) for group in groups.values()]
        found[f"pass@{k}"] = _mean([pass_at_k(n, c, k) for n, c in counts if n >= k])
    return found


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
