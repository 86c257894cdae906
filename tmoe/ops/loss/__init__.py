"""Ops of losses: the head, cross-entropy and log-probabilities, without logits [T, V]."""
