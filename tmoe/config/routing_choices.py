"""The names of a router's parts (scores, selections), and which settings each selection can be combined with.

A router computes logits, turns them into scores, selects experts, and weighs them; balance is separate, in
moe/balance.py. Formulas of scores are in moe/select/scores.py, by the same names. A selection is a file in
tmoe/moe/select and a line of SELECTIONS.

next: model.py"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple


class ScoreFacts(NamedTuple):
    """Facts of a score on which the checks of settings depend; its formula is in moe/select/scores.py."""

    softmax: bool
    """whether it is a softmax of the logits, so that it can be taken over the chosen logits alone"""


SCORES = {
    "softmax": ScoreFacts(softmax=True),
    "sigmoid": ScoreFacts(softmax=False),
    "sqrtsoftplus": ScoreFacts(softmax=False),
    "cosine": ScoreFacts(softmax=True),
}


class Selection(NamedTuple):
    """A way to choose experts, and the settings that it can be combined with."""

    module: str
    """module of its function `choose`: a file in tmoe/moe/select, or any module by its whole name"""
    columns: bool = False
    """whether a token may get more or fewer than K experts, up to --model.moe.max-top-k"""
    looks: Literal["", "training", "always"] = ""
    """when a token's experts depend on other tokens, later ones included; "": never"""
    limited: bool = True
    """whether it obeys --model.moe.groups and --model.moe.top-devices"""
    biased: bool = True
    """whether it adds --model.moe.choice-bias"""
    weighs: bool = False
    """whether its weights are always the softmax over all experts, or for K=1 the sigmoid"""


SELECTIONS = {
    "topk": Selection("selection"),
    "sinkhorn": Selection("sinkhorn_selection", looks="training", limited=False, biased=False, weighs=True),
    "quantile": Selection("quantile", limited=False, biased=False),
    "expert-choice": Selection("expert_choice", columns=True, looks="always", limited=False, biased=False),
    "tiles": Selection("token_rounding", columns=True, looks="training"),
}

if TYPE_CHECKING:
    ScoreName = str
else:
    ScoreName = Literal[tuple(SCORES)]
