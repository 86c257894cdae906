"""Expert choice: each expert chooses its best tokens, as many as its capacity, so all loads are equal.

(Zhou et al. 2022, arXiv 2202.09368.) A token may be chosen by any number of experts, so ids have E columns,
or `--model.moe.max-top-k`. The choice depends on this rank's other tokens, later tokens included. Therefore a
causal model that is trained with it is evaluated on a different task than it was trained on.

next: moe/select/token_rounding.py
"""

import torch

from tmoe.moe.select.selection import Choice, RouterInput, best_tokens, in_columns, shares


def choose(asked: RouterInput) -> Choice:
    """Each expert's ceil(T K / E) best of T tokens: the tokens whose share for this expert is largest."""
    shares_TE = shares(asked.cfg, asked.logits_TE)
    T, E = shares_TE.shape
    if asked.live_T is None:
        capacity = torch.full((), -(-T * asked.K // E), device=shares_TE.device)
    else:
        capacity = (asked.live_T.sum() * asked.K + E - 1) // E
    taken_TE = best_tokens(shares_TE, capacity, asked.live_T)
    return Choice(in_columns(taken_TE, shares_TE, asked.cfg.slots))
