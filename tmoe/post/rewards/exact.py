"""exact: 1 for an answer that equals the right one letter by letter, apart from white space at its ends."""

from tmoe.post.rewards.reward_sample import RewardSample, truth_of


def exact(sample: RewardSample) -> float:
    return float(sample.answer.strip() == truth_of(sample).strip())
