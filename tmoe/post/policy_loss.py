"""The loss of a step's answers: a policy loss with KL, entropy and corrections, and numbers for the log.

next: post/losses/policy.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.config.model import IGNORE
from tmoe.config.run import Config
from tmoe.data.dataset import Micro
from tmoe.model.loss import Given, Objective
from tmoe.ops import logprobs, token_loss
from tmoe.parallel.mesh import Mesh
from tmoe.post.answers import Step
from tmoe.post.losses import LOSSES, make_policy
from tmoe.post.losses.policy import Rollouts
from tmoe.post.losses.sums import sequence_sums, token_weights, trained_tokens
from tmoe.post.losses.tokens import correction, is_clipped, kl, ratio

OF_TOKENS = "policy/entropy", "policy/kl", "policy/clipped"


class PolicyLoss:
    """--grpo.loss with its settings. It holds no tensors: a step's tensors are in the `Step`.

    measure: called with a micro-batch's sums of `OF_TOKENS`, fp32 [3].
    """

    def __init__(self, cfg: Config, mesh: Mesh, measure: Callable[[Tensor], None]):
        g = self.g = cfg.grpo
        self.mesh, self.measure = mesh, measure
        self.mismatch = g.mismatch or ("truncate" if LOSSES[g.loss].of == "tokens" else "off")
        self.kl = g.kl if g.kl_in == "loss" else 0.0
        given = dict(
            low=g.clip_low, high=g.clip_high, dual=g.dual_clip, cap=g.ratio_cap, pull=g.ratio_penalty
        )
        bounds: dict[str, Any] = {name: bound for name, bound in given.items() if bound is not None}
        self.policy = make_policy(
            g.loss,
            kl=self.kl,
            entropy=g.entropy,
            max_tokens=cfg.answer_tokens,
            estimator=g.kl_estimator or "k2",
            per=g.normaliser,
            **bounds,
        )
        self.formula = self._by_tokens if LOSSES[g.loss].of == "tokens" else self._by_answers

    def objective(self, step: Step) -> Objective:
        """The objective of this step.

        If a step has several updates, the first one appends each micro-batch's log-probs to `step.old`.
        """
        return partial(self.formula, step)

    def given(self, step: Step, a: int, micro: Micro, first: bool) -> Given:
        """The inputs of the objective for micro-batch a: weights, advantages and log-probs of its tokens.

        `drawn` has the sampler's log-probs. `reference` and, after the first update, `old` have log-probs of
        this rank's own tokens only. first: whether this is the step's first update.
        """
        given = micro.given or {}
        device = micro.tokens_BS.device
        numbers_N = given["numbers"].cpu()
        advantages_N = step.advantages_N[numbers_N] if len(numbers_N) else torch.zeros(1)
        advantages_N = advantages_N.to(device)
        segments_BS = given["sequences"].clamp(min=0)
        trained_BS = micro.targets_BS != IGNORE
        flat = trained_BS.flatten(), segments_BS.flatten()
        lengths_N = trained_tokens(*flat, len(advantages_N))
        weights_T = token_weights(*flat, lengths_N, step.counts, self.policy.per, self.policy.max_tokens)
        tensors = dict(
            segments=segments_BS,
            weights=weights_T.view_as(segments_BS),
            advantages=advantages_N[segments_BS],
            drawn=step.packed.drawn_ABS[a].to(device),
            of_answers=torch.stack([advantages_N, lengths_N]).flatten(),
            members=given["members"],
        )
        if step.old and not first:
            tensors["old"] = step.old[a]
        if step.reference and self.kl:
            tensors["reference"] = step.reference[a]
        return tensors

    def _by_tokens(
        self, step: Step, h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, given: Given
    ) -> Tensor:
        """The objective of losses that are sums over tokens."""
        old = [given["old"]] if "old" in given else []
        reference = [given["reference"]] if "reference" in given else []
        inputs = given["weights"], given["advantages"], given["drawn"], *old, *reference

        def losses(logp: Tensor, entropy: Tensor, weights: Tensor, *more: Tensor) -> Tensor:
            advantage, drawn, *rest = more
            before = rest.pop(0) if old else logp.detach()
            corrected = weights * self.corrected(before, drawn)
            H = [entropy] if self.policy.needs_entropy else []
            beside = [weights, *rest] if reference or H else []
            return self.policy(logp, *H, before, advantage, corrected, *beside)

        result = token_loss(
            h_TD, weight_VD, targets_T, losses, inputs, temperature=self.g.temperature, entropy=True
        )
        if not old and self.g.updates > 1:
            step.old.append(result.logp_T)
        before = old[0] if old else result.logp_T
        clipped_T = self.clipped(result.logp_T, before, given["advantages"])
        assert result.entropy_T is not None
        self.note(result.logp_T, result.entropy_T, clipped_T, targets_T, given)
        return result.loss * step.counts.tokens.clamp(min=1)

    def _by_answers(
        self, step: Step, h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, given: Given
    ) -> Tensor:
        """The objective of losses of whole answers, whose tokens tp and cp divide among ranks."""
        logp_T, entropy_T = logprobs(h_TD, weight_VD, targets_T, self.g.temperature, entropy=True)
        old_T = given["old"] if "old" in given else logp_T.detach()
        if "old" not in given and self.g.updates > 1:
            step.old.append(old_T)
        segments_T = given["segments"]
        advantages_N, lengths_N = given["of_answers"].view(2, -1)
        logp_N, old_N = (sequence_sums(t, segments_T, len(lengths_N)) for t in (logp_T, old_T))
        parts = self.mesh.axes.parts
        if parts > 1:
            both = torch.stack([logp_N.detach(), old_N])
            dist.all_reduce(both, group=self.mesh.groups["parts"])
            logp_N, old_N = logp_N + (both[0] - logp_N.detach()), both[1]
        trained_T = targets_T != IGNORE
        whole = Rollouts(old_T, advantages_N, trained_T, segments_T, lengths_N)
        loss = self.policy.of_sequences(logp_N, old_N, whole, step.counts)
        # Every rank that divides these rows has the whole loss: keep 1/parts of its value, the whole gradient
        loss = loss - loss.detach() * (1 - 1 / parts)
        if "reference" in given:
            far_T = kl(logp_T, given["reference"], self.policy.estimator)
            loss = loss + self.kl * (given["weights"] * far_T).sum()
        if self.g.entropy:
            loss = loss - self.g.entropy * (given["weights"] * entropy_T).sum()
        moved_N = (logp_N - old_N).detach()
        moved_N = moved_N / lengths_N.clamp(min=1) if self.g.loss == "gspo" else moved_N
        clipped_N = self.clipped(moved_N, torch.zeros_like(moved_N), advantages_N)
        self.note(logp_T.detach(), entropy_T.detach(), clipped_N[segments_T], targets_T, given)
        return loss * step.counts.tokens.clamp(min=1)

    def corrected(self, trainer: Tensor, sampler: Tensor) -> Tensor | float:
        """Factors on tokens' losses that correct for differences of the sampler's and trainer's log-probs."""
        if self.mismatch == "off":
            return 1.0
        return correction(trainer, sampler, self.g.mismatch_cap, self.mismatch)  # pyrefly: ignore

    def clipped(self, logp: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
        """Whether the loss clips a token, or a whole answer: bool, of the shape of logp."""
        options = self.policy.options
        if self.g.loss == "cispo":
            return ratio(logp, old) > options["cap"]
        if self.g.loss == "dppo":
            moved = logp.exp() - old.exp()
            return ((advantage > 0) & (moved > options["high"])) | (
                (advantage < 0) & (moved < -options["low"])
            )
        return is_clipped(logp, old, advantage, **options)

    def note(
        self, logp_T: Tensor, entropy_T: Tensor, clipped_T: Tensor, targets_T: Tensor, given: Given
    ) -> None:
        """Sums up the numbers that the log has of tokens: entropy, KL from the sampler, clipped tokens."""
        trained_T = targets_T != IGNORE
        measures = entropy_T, kl(logp_T, given["drawn"], "k3"), clipped_T.float()
        self.measure(torch.stack([t.where(trained_T, 0.0).sum() for t in measures]))
