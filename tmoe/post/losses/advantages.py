"""Advantages of samples over others of the same prompt, wherever in the step these are."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.parallel.agree import gathered

Baseline = Literal["normalised", "mean", "leave-one-out"]


def advantages(
    rewards_N: Tensor, prompts_N: Tensor, baseline: Baseline = "normalised", epsilon: float = 1e-4
) -> Tensor:
    """How much better a sample is than those of its prompt, fp32 [N].

    With mean and std (n - 1) over the samples of equal prompt id, in the order in which they come:
        normalised: (r - mean) / (std + epsilon). GRPO, Shao et al. 2024, arXiv 2402.03300; epsilon 1e-4 is
            TRL's, 1e-6 verl's.
        mean: r - mean. Dr.GRPO, Liu et al. 2025, arXiv 2503.20783: std weighs easy and hard prompts more.
        leave-one-out: r - mean of the others = n / (n - 1) (r - mean). RLOO, Ahmadian et al. 2024.

    A reward of NaN stands for none: it is in no mean, and its advantage is 0. So is that of a prompt's only
    sample. rewards_N, prompts_N: all of the step's samples; ids are integers.
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
    """`advantages` of this rank's samples, whose prompts other ranks may have samples of too.

    A collective over ranks that have any number of samples, none too. group None: this process alone.
    """
    told = gathered((rewards_N.tolist(), prompts_N.tolist()), group)
    everyone = [torch.tensor([x for part in column for x in part]) for column in zip(*told, strict=True)]
    all_rewards, all_prompts = everyone[0].double(), everyone[1].long()
    before = sum(len(rewards) for rewards, _ in told[: 0 if group is None else group.rank()])
    found = advantages(all_rewards, all_prompts, baseline, epsilon)
    return found[before : before + len(rewards_N)].to(rewards_N.device)


def telling(rewards_N: Tensor, prompts_N: Tensor) -> Tensor:
    """Whether a sample's prompt has samples of unequal rewards, bool [N]; NaN stands for none.

    Others have advantage 0 throughout: DAPO's dynamic sampling draws further prompts in their place.
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
    """The group of each sample, and the known rewards of each group."""
    _, group = prompts.unique(return_inverse=True)
    groups = int(group.max()) + 1 if len(group) else 0
    return group, _sums((~rewards.isnan()).double(), group, groups)


def _sums(values: Tensor, group: Tensor, groups: int) -> Tensor:
    return values.new_zeros(groups).index_add(0, group, values)
