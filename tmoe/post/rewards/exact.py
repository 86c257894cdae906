"""exact: 1 for an answer that is the right one letter by letter, white space at its ends left out."""

from tmoe.post.rewards.sample import RewardSample, truth_of


def exact(sample: RewardSample) -> float:
    return float(sample.answer.strip() == truth_of(sample).strip())
