"""Losses of finetuning, preferences and policies by name; each is a pure function.

tokens.py, sequences.py and pairs.py have the formulas, by the inputs of a loss. policy.py has the code that
all losses of sampled tokens share, sums.py the counts and weights by which the shares of ranks add up.

next: sums.py
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from tmoe.post.losses.pairs import Pairs, hinge, ipo, orpo, robust, sigmoid, simpo
from tmoe.post.losses.policy import Policy
from tmoe.post.losses.sequences import Completions, gspo, kto, rloo
from tmoe.post.losses.sums import Per, StepCounts, over
from tmoe.post.losses.tokens import Estimator, cispo, clipped, dppo, sft

Task = Literal["sft", "preference", "grpo"]


class Loss(NamedTuple):
    """A loss by name: its formula and its facts. `of` names the formula's inputs."""

    task: Task
    of: Literal["tokens", "sequences", "pairs", "completions"]
    formula: Callable[..., Tensor]
    per: Per | None = None  # how tokens are weighted; None: a mean over pairs or completions
    needs_reference: bool = False
    changed: tuple[tuple[str, Any], ...] = ()  # options whose defaults differ from the formula's

    @property
    def options(self) -> dict[str, Any]:
        """The formula's settings and their defaults."""
        parameters = inspect.signature(self.formula).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        return defaults | dict(self.changed)


LOSSES: dict[str, Loss] = {
    "sft": Loss("sft", "tokens", sft, "token"),
    "sigmoid": Loss("preference", "pairs", sigmoid, needs_reference=True),
    "robust": Loss("preference", "pairs", robust, needs_reference=True),
    "hinge": Loss("preference", "pairs", hinge, needs_reference=True),
    "ipo": Loss("preference", "pairs", ipo, needs_reference=True),
    "simpo": Loss("preference", "pairs", simpo),
    "orpo": Loss("preference", "pairs", orpo),
    "kto": Loss("preference", "completions", kto, needs_reference=True),
    "grpo": Loss("grpo", "tokens", clipped, "sequence"),
    "dapo": Loss("grpo", "tokens", clipped, "token", changed=(("high", 0.28),)),
    "dr_grpo": Loss("grpo", "tokens", clipped, "constant"),
    "gspo": Loss("grpo", "sequences", gspo, "sequence"),
    "cispo": Loss("grpo", "tokens", cispo, "token"),
    "dppo": Loss("grpo", "tokens", dppo, "token"),
    "rloo": Loss("grpo", "sequences", rloo, "sequence"),
}


def find(name: str, task: Task, options: dict[str, Any]) -> tuple[Loss, dict[str, Any]]:
    """The loss of this name for this task, and all its options. ValueError for an unknown name or option."""
    valid = [other for other, loss in LOSSES.items() if loss.task == task]
    if name not in valid:
        raise ValueError(f"loss={name!r}: must be one of {', '.join(valid)} for {task}")
    known = LOSSES[name].options
    for option, value in options.items():
        if option not in known:
            raise ValueError(f"{option}={value!r}: is no option of {name}, which has {', '.join(known)}")
    return LOSSES[name], known | options


def preference_share(
    name: str,
    batch: Pairs | Completions,
    counts: StepCounts,
    baseline: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """This micro-batch's share of a preference loss, 0-dim fp32. All shares of a step sum to its loss.

    Args:
        name: of the loss.
        batch: Pairs; the loss is the mean over the step's pairs. For kto Completions; the loss is the mean
            over the step's completions.
        counts: of the whole step.
        baseline: for kto only: `baseline_of` of the whole step.
        options: of the loss's formula.
    """
    loss, chosen = find(name, "preference", options)
    if (loss.of == "completions") != (baseline is not None):
        raise ValueError(f"baseline: is for kto and needed there; the loss is {name}")
    if loss.of == "completions":
        return over(loss.formula(batch, baseline, **chosen), counts.sequences).float()
    return over(loss.formula(batch, **chosen), counts.pairs).float()


def make_policy(
    name: str,
    kl: float = 0.0,
    entropy: float = 0.0,
    max_tokens: int | None = None,
    estimator: Estimator = "k2",
    per: Per | None = None,
    **options: Any,
) -> Policy:
    """The policy loss of this name. ValueError for an unknown name or option.

    Args:
        name: of the loss.
        kl: factor of the divergence from the reference.
        entropy: factor of the entropy, which is subtracted from the loss.
        max_tokens: the most tokens of a completion, by which dr_grpo divides.
        estimator: of the divergence.
        per: how tokens are weighted; None: as the loss does by default.
        options: of the loss's formula.
    """
    loss, chosen = find(name, "grpo", options)
    per = per or loss.per
    if per == "constant" and (max_tokens is None or max_tokens < 1):
        raise ValueError(f"max_tokens={max_tokens}: {name} needs the most tokens of a completion, at least 1")
    assert per is not None
    return Policy(
        loss.formula,
        per,
        fused=loss.of == "tokens",
        kl=kl,
        entropy=entropy,
        max_tokens=max_tokens,
        estimator=estimator,
        options=chosen,
    )
