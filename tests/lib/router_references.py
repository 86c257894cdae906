"""The correct balancing losses of routers: the formula in three lines, and plain loops over tokens.

Shape suffixes are those of tmoe/config/run.py: B, S, T (tokens), E (experts), K (experts per token).
"""

import torch
from torch import Tensor


def reference_loss(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """The balancing loss E/(K T^2) sum_e (sum_t p_te) count_e (Switch, Fedus et al. 2021)."""
    T, E = logits_TE.shape
    counts_E = torch.nn.functional.one_hot(ids_TK.long(), E).sum((0, 1)).float()
    return E / (ids_TK.shape[1] * T**2) * (logits_TE.softmax(-1).sum(0) * counts_E).sum()


def naive_losses(logits_BSE: Tensor, ids_BSK: Tensor, keep_BS: Tensor, scope: str) -> tuple[Tensor, Tensor]:
    """Balancing loss and z-loss of one layer, both with coefficient 1, token by token in fp64.

    Tokens whose `keep_BS` is False are not counted. scope: with "sequence" each sequence is balanced
    separately and the mean over sequences is returned; otherwise all tokens are balanced together.
    """
    B, S, E = logits_BSE.shape
    K = ids_BSK.shape[-1]
    # for each sequence: by expert the sum of probabilities and the number of choices; its number of tokens
    probs = [[0.0] * E for _ in range(B)]
    counts = [[0] * E for _ in range(B)]
    tokens = [0] * B
    z = 0.0
    for b in range(B):
        for s in range(S):
            if not keep_BS[b, s]:
                continue
            exps = [logits_BSE[b, s, e].double().exp() for e in range(E)]
            total = sum(exps)
            z = z + total.log() ** 2
            tokens[b] += 1
            for e in range(E):
                probs[b][e] = probs[b][e] + exps[e] / total
            for e in ids_BSK[b, s].tolist():
                counts[b][e] += 1

    n = sum(tokens)
    if scope == "sequence":
        pairs = [(b, e) for b in range(B) for e in range(E) if tokens[b]]
        aux = sum(counts[b][e] / (K * tokens[b]) * probs[b][e] / tokens[b] for b, e in pairs) / B
    else:
        aux = sum(sum(c[e] for c in counts) / (K * n) * sum(p[e] for p in probs) / n for e in range(E))
    return E * aux, z / n
