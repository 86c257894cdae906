"""Ops of losses: the head, cross-entropy and log-probabilities, without storing logits [T, V]."""
