"""The complete loss of sampled tokens: a policy's formula, its normaliser, KL and entropy.

next: tokens.py
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmoe.post.losses.sums import Per, StepCounts, sequence_sums, token_weights
from tmoe.post.losses.tokens import Estimator, kl


class Rollouts(NamedTuple):
    """A micro-batch of sampled sequences: T tokens of N sequences, in the layout that sums.py describes."""

    old_T: Tensor  # log-probs when the tokens were drawn
    advantages_N: Tensor
    mask_T: Tensor  # True at trained tokens
    segments_T: Tensor
    lengths_N: Tensor  # `trained_tokens`
    reference_T: Tensor | None = None  # a reference's log-probs
    correction_T: Tensor | None = None  # `tokens.correction`


class Policy:
    """A policy loss with its settings. It does not hold tensors.

    If it is `fused`, its derivative is computed while the logits of a chunk of tokens are in memory:

        found = ops.token_loss(h, W, targets, policy, policy.inputs(rollouts, counts),
                               temperature, entropy=policy.needs_entropy)     # found.loss is the share

    In all cases:

        logp, entropy = ops.logprobs(h, W, targets, temperature, entropy=True)
        share = policy.share(logp, rollouts, counts, entropy)
    """

    def __init__(
        self,
        formula: Callable[..., Tensor],
        per: Per,
        *,
        fused: bool,
        kl: float = 0.0,
        entropy: float = 0.0,
        max_tokens: int | None = None,
        estimator: Estimator = "k2",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Use `make_policy` for a loss by name.

        Args:
            formula: if fused, (logp, old, advantage) of tokens -> their losses; else
                (logp, old, tokens, advantage) of sequences -> their losses, with sums of log-probs.
            per: how tokens are weighted (`token_weights`).
            fused: whether it is a loss of single tokens.
            kl: factor of the policy's divergence from the reference.
            entropy: factor of the entropy, which is subtracted from the loss.
            max_tokens: for per "constant": the most tokens of a completion.
            estimator: of the divergence.
            options: of the formula.
        """
        self.formula, self.per, self.fused = formula, per, fused
        self.kl, self.entropy, self.max_tokens = kl, entropy, max_tokens
        self.estimator: Estimator = estimator
        self.options = dict(options or {})

    @property
    def needs_entropy(self) -> bool:
        return self.entropy != 0.0

    @property
    def needs_reference(self) -> bool:
        return self.kl != 0.0

    def inputs(self, rollouts: Rollouts, counts: StepCounts) -> tuple[Tensor, ...]:
        """The inputs of `__call__` for each token, in addition to log-prob and entropy.

        Where tp or cp divide sequences, compute them of whole rows, then select this rank's tokens.
        """
        r = rollouts
        weights = token_weights(r.mask_T, r.segments_T, r.lengths_N, counts, self.per, self.max_tokens)
        corrected = weights if r.correction_T is None else weights * r.correction_T
        tensors = [r.old_T, r.advantages_N[r.segments_T], corrected]
        if self.needs_reference:
            if r.reference_T is None:
                raise ValueError(f"kl={self.kl}: needs the reference's log-probs, reference_T of Rollouts")
            tensors += [weights, r.reference_T]
        elif self.needs_entropy:
            tensors += [weights]
        return tuple(tensors)

    def __call__(self, logp: Tensor, *inputs: Tensor) -> Tensor:
        """Each token's part of the share: the function f of `ops.token_loss`.

        inputs: the entropy, if it is needed, and the result of `inputs`, for all tokens or for some.
        """
        if not self.fused:
            raise ValueError(f"{self.formula.__name__}: is a loss of whole sequences: call share")
        *H, old, advantage, corrected = inputs[: 3 + self.needs_entropy]
        losses = corrected * self.formula(logp, old, advantage, **self.options)
        return losses + self._beside(logp, H, inputs[3 + self.needs_entropy :])

    def share(
        self, logp_T: Tensor, rollouts: Rollouts, counts: StepCounts, entropy_T: Tensor | None = None
    ) -> Tensor:
        """This micro-batch's share of the step's loss, 0-dim. All shares of a step sum to its loss.

        logp_T, entropy_T: the results of `ops.logprobs`, [T].
        """
        H = [self._entropy(entropy_T)] if self.needs_entropy else []
        inputs = self.inputs(rollouts, counts)
        if self.fused:
            return self(logp_T, *H, *inputs).sum()
        trained = rollouts.mask_T.float()
        if rollouts.correction_T is not None:
            raise ValueError("correction_T: a loss of whole sequences has no factors of tokens")
        segments, n = rollouts.segments_T, len(rollouts.lengths_N)
        logp_N, old_N = (sequence_sums(t * trained, segments, n) for t in (logp_T, rollouts.old_T))
        return self.of_sequences(logp_N, old_N, rollouts, counts) + self._beside(logp_T, H, inputs[3:]).sum()

    def of_sequences(self, logp_N: Tensor, old_N: Tensor, rollouts: Rollouts, counts: StepCounts) -> Tensor:
        """The formula's share, from sums over whole sequences.

        Where cp divides sequences, the sums must be over all its ranks; each of them then gets the same
        share.
        """
        r = rollouts
        losses = self.formula(logp_N, old_N, r.lengths_N, r.advantages_N, **self.options)
        return (losses * (r.lengths_N > 0) / counts.sequences.clamp(min=1)).sum().float()

    def _beside(self, logp: Tensor, H: list[Tensor], rest: tuple[Tensor, ...]) -> Tensor:
        """The terms of KL and entropy of each token."""
        losses = torch.zeros_like(logp)
        if self.needs_reference:
            losses = losses + self.kl * rest[0] * kl(logp, rest[1], self.estimator)
        if self.needs_entropy:
            losses = losses - self.entropy * rest[0] * H[0]
        return losses

    def _entropy(self, entropy_T: Tensor | None) -> Tensor:
        if entropy_T is None:
            raise ValueError(f"entropy={self.entropy}: needs entropy_T, of ops.logprobs(..., entropy=True)")
        return entropy_T
