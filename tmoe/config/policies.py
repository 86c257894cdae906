"""The names that routing is composed of: scores, selections, forced routings; what settings may go together.

A router makes logits, turns them into scores, selects experts, and weighs them; balance is apart, in
moe/balance.py. Formulas of scores are in moe/select/scores.py, by the same names. A selection is a file in
tmoe/moe and a line of SELECTIONS.

next: model.py"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple


class ScoreFacts(NamedTuple):
    """What settings ask of a score; its formula is in moe/select/scores.py."""

    softmax: bool
    """it is the softmax of the logits, so it may be taken of the chosen ones alone"""


SCORES = {
    "softmax": ScoreFacts(softmax=True),
    "sigmoid": ScoreFacts(softmax=False),
    "sqrtsoftplus": ScoreFacts(softmax=False),
    "cosine": ScoreFacts(softmax=True),
}


class Selection(NamedTuple):
    """A way to choose experts, and what it goes together with."""

    module: str
    """where its `choose` is: a file in tmoe/moe, or any module by its whole name"""
    columns: bool = False
    """a token may get more or fewer than K experts, up to --model.moe.max-top-k"""
    looks: Literal["", "training", "always"] = ""
    """when a token's experts depend on other tokens, later ones too"""
    limited: bool = True
    """it keeps to --model.moe.groups and --model.moe.top-devices"""
    biased: bool = True
    """it adds --model.moe.choice-bias"""
    weighs: bool = False
    """its weights are the softmax over all experts, for K=1 the sigmoid, whatever the other settings say"""


SELECTIONS = {
    "topk": Selection("selection"),
    "sinkhorn": Selection("sinkhorn", looks="training", limited=False, biased=False, weighs=True),
    "quantile": Selection("quantile", limited=False, biased=False),
    "expert-choice": Selection("expert_choice", columns=True, looks="always", limited=False, biased=False),
    "tiles": Selection("tiles", columns=True, looks="training"),
}

if TYPE_CHECKING:
    ScoreName = str
else:
    ScoreName = Literal[tuple(SCORES)]
