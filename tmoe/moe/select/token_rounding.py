"""Token rounding: top-k, then each expert's number of tokens is rounded to a multiple of the products' tile.

(SonicMoE, Guo et al. 2025, arXiv 2512.14080.) Where the number decreases, an expert drops the tokens in which
it has the smallest share. Where it increases, it adds the tokens with the largest share among those that did
not choose it. This is done in training only: evaluation is plain top-k.

next: moe/select/quantile.py
"""

import torch
from torch import Tensor

from tmoe.moe.select import selection
from tmoe.moe.select.selection import Choice, RouterInput, best_tokens, in_columns, shares


def choose(asked: RouterInput) -> Choice:
    """Rounded top-k in training, else plain top-k."""
    plain = selection.choose(asked)
    if not asked.training:
        return plain
    ids_TK = plain.ids_TK.long()
    shares_TE = shares(asked.cfg, asked.logits_TE)
    chosen_TK = shares_TE.gather(-1, ids_TK)
    if asked.K > 1:  # for K = 1 all shares would become 1
        chosen_TK = chosen_TK / chosen_TK.sum(-1, keepdim=True)
    # a token that chose the expert always precedes a token that did not
    worth_TE = (shares_TE - 1).scatter(-1, ids_TK, chosen_TK)
    picked_TE = torch.zeros_like(shares_TE, dtype=torch.bool).scatter(-1, ids_TK, True)
    live_T = asked.live_T
    if live_T is not None:
        picked_TE = picked_TE & live_T[:, None]

    tokens = torch.full((), len(ids_TK), device=ids_TK.device) if live_T is None else live_T.sum()
    counts_E = rounded(picked_TE.sum(0), tokens, asked.cfg.tile, asked.cfg.tile_rounding)
    taken_TE = best_tokens(worth_TE, counts_E, live_T)
    E = asked.cfg.experts
    if asked.cfg.identity_experts:  # without products they have no tiles
        taken_TE = torch.cat([taken_TE[:, :E], picked_TE[:, E:]], -1)
    return Choice(in_columns(taken_TE, worth_TE, asked.cfg.slots))


def rounded(counts_E: Tensor, tokens: Tensor, tile: int, how: str) -> Tensor:
    """Counts as multiples of a tile, at most the number of tokens. Nearest: halves round to even."""
    if how == "down":
        tiles_E = counts_E // tile
    elif how == "up":
        tiles_E = (counts_E + tile - 1) // tile
    else:
        tiles_E = (counts_E.double() / tile).round().long()
    return tiles_E.minimum(tokens // tile) * tile
