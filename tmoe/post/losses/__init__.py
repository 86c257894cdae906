"""Losses of finetuning, preferences and policies by name; each is a pure function.

tokens.py, sequences.py and pairs.py have the formulas by what these are of. policy.py has what all losses of
sampled tokens share, sums.py the counts and weights that make shares add up.

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
    """What a loss is made of; what it takes is told by `of`."""

    task: Task
    of: Literal["tokens", "sequences", "pairs", "completions"]
    formula: Callable[..., Tensor]
    per: Per | None = None  # how tokens are weighed; None: a mean over pairs or completions
    needs_reference: bool = False
    changed: tuple[tuple[str, Any], ...] = ()  # options whose default differs from the formula's

    @property
    def options(self) -> dict[str, Any]:
        """The formula's settings and their defaults."""
        parameters = inspect.signature(self.formula).parameters.values()
        found = {p.name: p.default for p in parameters if p.default is not p.empty}
        return found | dict(self.changed)


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
    """The loss of this name for this task, and all its options; ValueError for what there is not."""
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
    """This micro-batch's share of a preference loss, 0-dim fp32: shares of ranks and micro-batches add up.

    Args:
        batch: Pairs, whose loss is the mean over the step's pairs; for kto Completions, and over its
            sequences.
        baseline: for kto alone: `baseline_of`, of the whole step.
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
    """The policy loss of this name; ValueError for a name or an option that there is not.

    max_tokens: the most tokens of a completion, which dr_grpo divides by. per: how tokens are weighed, if not
    as the loss has it.
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
