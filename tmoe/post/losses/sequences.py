"""Losses of whole sequences (GSPO, RLOO, KTO), advantages from rewards, and the penalty for length.

next: pairs.py
"""

from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.parallel.agree import gathered
from tmoe.post.losses.tokens import clipped

Baseline = Literal["normalised", "mean", "leave-one-out"]


def advantages(
    rewards_N: Tensor, prompts_N: Tensor, baseline: Baseline = "normalised", epsilon: float = 1e-4
) -> Tensor:
    """How much better each sample is than the other samples of its prompt, fp32 [N].

    With mean and std (n - 1) over the samples of equal prompt id, in the given order:
        normalised: (r - mean) / (std + epsilon). GRPO, Shao et al. 2024, arXiv 2402.03300; epsilon 1e-4 is
            TRL's, 1e-6 verl's.
        mean: r - mean. Dr.GRPO, Liu et al. 2025, arXiv 2503.20783: dividing by std gives easy and hard
            prompts more weight.
        leave-one-out: r - mean of the other samples = n / (n - 1) (r - mean). RLOO, Ahmadian et al. 2024.

    A reward of NaN means that there is none: it is in no mean, and its advantage is 0. The advantage of a
    prompt's only sample is 0 as well.
    rewards_N, prompts_N: rewards and integer prompt ids of all samples of the step.
    """
    rewards = rewards_N.double()
    group, n = _groups(rewards, prompts_N)
    known = ~rewards.isnan()
    mean = _sums(rewards.where(known, 0.0), group, len(n)) / n.clamp(min=1)
    away = (rewards - mean[group]).where(known, 0.0)
    if baseline == "mean":
        return away.float()
    others = (n - 1).clamp(min=1)
    if baseline == "leave-one-out":
        return (away * (n / others)[group]).float()
    if baseline != "normalised":
        raise ValueError(f"baseline={baseline!r}: must be normalised, mean or leave-one-out")
    std = (_sums(away.square(), group, len(n)) / others).sqrt()
    return (away / (std[group] + epsilon)).float()


def advantages_over_ranks(
    rewards_N: Tensor,
    prompts_N: Tensor,
    group: dist.ProcessGroup | None,
    baseline: Baseline = "normalised",
    epsilon: float = 1e-4,
) -> Tensor:
    """`advantages` of this rank's samples; other ranks may have samples of the same prompts.

    A collective over ranks, each of which may have any number of samples, also 0. group None: this process
    alone.
    """
    by_rank = gathered((rewards_N.tolist(), prompts_N.tolist()), group)
    everyone = [torch.tensor([x for part in column for x in part]) for column in zip(*by_rank, strict=True)]
    all_rewards, all_prompts = everyone[0].double(), everyone[1].long()
    before = sum(len(rewards) for rewards, _ in by_rank[: 0 if group is None else group.rank()])
    everywhere = advantages(all_rewards, all_prompts, baseline, epsilon)
    return everywhere[before : before + len(rewards_N)].to(rewards_N.device)


def has_unequal_rewards(rewards_N: Tensor, prompts_N: Tensor) -> Tensor:
    """Whether a sample's prompt has samples of unequal rewards, bool [N]; NaN: no reward.

    All samples of other prompts have advantage 0: DAPO's dynamic sampling replaces these prompts.
    """
    rewards = rewards_N.double()
    group, n = _groups(rewards, prompts_N)
    most, least = (
        torch.full_like(n, -sign * torch.inf).scatter_reduce(
            0, group, rewards.nan_to_num(-sign * torch.inf), "amax" if sign > 0 else "amin"
        )
        for sign in (1, -1)
    )
    return (most > least)[group]


def _groups(rewards: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """The group of each sample, and the number of known rewards of each group."""
    _, group = prompts.unique(return_inverse=True)
    groups = int(group.max()) + 1 if len(group) else 0
    return group, _sums((~rewards.isnan()).double(), group, groups)


def _sums(values: Tensor, group: Tensor, groups: int) -> Tensor:
    return values.new_zeros(groups).index_add(0, group, values)


def overlong_penalty(tokens_N: Tensor, longest: int, margin: int) -> Tensor:
    """Penalty that is added to the reward of an answer of n tokens: ((longest - margin) - n) / margin in
    [-1, 0].

    It falls from 0 to -1 over the last `margin` tokens before `longest`. DAPO, Yu et al. 2025, arXiv
    2503.14476, equation 13.
    """
    if not 0 < margin <= longest:
        raise ValueError(f"margin={margin}: must be above 0 and at most longest={longest}")
    return ((longest - margin - tokens_N.float()) / margin).clamp(-1.0, 0.0)


def without_truncated(mask_T: Tensor, segments_T: Tensor, truncated_N: Tensor) -> Tensor:
    """The mask without the tokens of truncated sequences; this changes the loss, not the attention."""
    return mask_T * ~truncated_N[segments_T]


def gspo(
    logp_N: Tensor,
    old_N: Tensor,
    tokens_N: Tensor,
    advantage_N: Tensor,
    low: float = 3e-4,
    high: float = 4e-4,
    dual: float | None = None,
) -> Tensor:
    """-min(s A, clip(s, 1 - low, 1 + high) A) of each sequence [N], in units of the advantage.

    s = e^mean(lp - old) over a sequence's trained tokens, not the product of their ratios. The step's loss is
    the mean over sequences. It equals GRPO with rho = sg(s) e^(lp - sg(lp)) at each token, in value and
    gradient. If routing to experts differs between the two policies, the ratios of single tokens change much
    more than s. Zheng et al. 2025, arXiv 2507.18071.

    Args:
        logp_N, old_N: sums of log-probs over a sequence's trained tokens [N].
        tokens_N: number of a sequence's trained tokens [N].
        advantage_N: of each sequence [N].
        low, high, dual: as in `tokens.clipped`.
    """
    tokens = tokens_N.clamp(min=1)
    return clipped(logp_N / tokens, old_N / tokens, advantage_N, low, high, dual)


def rloo(
    logp_N: Tensor,
    old_N: Tensor,
    tokens_N: Tensor,
    advantage_N: Tensor,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
) -> Tensor:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A) of each sequence [N], in units of the advantage.

    rho = e^(sum of lp - old) over a sequence's trained tokens. While the policy equals the old one, the
    gradient is -A times that of the sequence's log-prob: REINFORCE with the mean of the other samples as
    baseline (`advantages`, "leave-one-out"). The step's loss is the mean over sequences. Ahmadian et al.
    2024, arXiv 2402.14740.
    """
    return clipped(logp_N, old_N, advantage_N, low, high, dual)


class Completions(NamedTuple):
    """Sums of log-probs over a completion's trained tokens, [N] each, by the policy and the reference."""

    logp: Tensor
    ref: Tensor
    desirable: Tensor  # bool


def kto(
    completions: Completions,
    baseline: Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """w_D (1 - s(beta (lp - ref - z))) or w_U (1 - s(beta (z - lp + ref))), of each completion [N], no unit.

    The first formula is for desirable completions, the second for others; s is the logistic function. z,
    `baseline`: `baseline_of` of the whole step, in nats. If one kind is rare, choose its weight so that
    w_D n_D / (w_U n_U) is between 1 and 4/3. Ethayarajh et al. 2024, arXiv 2402.01306.
    """
    gain = completions.logp - completions.ref - baseline.detach()
    signed = gain.where(completions.desirable, -gain)
    # 1 - s(x) = s(-x), exact where s(x) is near 1
    weight = torch.where(completions.desirable, desirable_weight, undesirable_weight)
    return weight * (-beta * signed).sigmoid()


def baseline_of(gains_sum: Tensor, count: Tensor) -> Tensor:
    """z: the mean over a step of lp - ref of completions after other prompts, at least 0, without gradient.

    Completion i follows prompt i + 1 (the last completion follows the first prompt). z estimates the policy's
    KL from the reference. gains_sum, count: sum of lp - ref and number of completions, over all ranks and
    micro-batches, before the step's first loss.
    """
    return (gains_sum / count.clamp(min=1)).clamp(min=0).detach()
