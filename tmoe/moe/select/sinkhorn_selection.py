"""Sinkhorn (S-BASE): in training the experts are the top-k of a plan that gives every expert the same load.

(Clark et al. 2022, arXiv 2202.01169, section 3.1; Megatron-Core's sinkhorn.) Among the plans with equal row
sums and equal column sums, it is the nearest to the scores, over this rank's tokens of a call. It has no
gradient. Weights are the softmax of the logits, or for K=1 their sigmoid. Evaluation is plain top-k of the
logits.

next: ops/router/sinkhorn.py, then moe/select/expert_choice.py
"""

from tmoe.moe.select import selection
from tmoe.moe.select.selection import Choice, RouterInput
from tmoe.ops.router.sinkhorn import sinkhorn


def choose(asked: RouterInput) -> Choice:
    """The K largest entries of each token's row of the plan. Notes the plan's residual for each token."""
    if not asked.training:
        return selection.choose(asked)
    potentials_E, residual = sinkhorn(asked.logits_TE, asked.live_T, asked.cfg.sinkhorn_iterations)
    # a token's row of the plan is the softmax of this sum, divided by T
    ids_TK = selection.best_experts(asked.logits_TE + potentials_E, asked.K)
    return Choice(ids_TK, residual.expand(len(ids_TK), 1))
