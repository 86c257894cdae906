"""A rollout's log-probs beside those of training's forward over the same answers, packed as training packs.

next: tests/generate/test_bits.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe.generate import Sample
from tmoe.model.attention_backend import BLOCK
from tmoe.model.transformer import Transformer
from tmoe.ops import logprobs


def in_training(
    model: Transformer, prompts: Sequence[list[int]], answers: Sequence[Sequence[Sample]], temperature: float
) -> list[Tensor]:
    """Log-probs of each answer's tokens, fp32 on the CPU, by one forward over a row that holds all of them.

    Every sequence begins on a block of 128; the gap behind it is of its document, and goes to no expert.
    """
    device = model.head_weight.device
    rows = [
        [*prompt, *sample.ids.tolist()]
        for prompt, group in zip(prompts, answers, strict=True)
        for sample in group
    ]
    firsts = [len(prompt) - 1 for prompt, group in zip(prompts, answers, strict=True) for _ in group]
    tokens, documents, positions, padding, targets = ([] for _ in range(5))
    for number, row in enumerate(rows):
        n = len(row) - 1
        gap = -n % BLOCK
        whole = torch.tensor(row, device=device)
        tokens.append(F.pad(whole[:-1], (0, gap)))
        targets.append(F.pad(whole[1:], (0, gap), value=-100))
        documents.append(torch.full((n + gap,), number, device=device))
        positions.append(F.pad(torch.arange(n, device=device), (0, gap)))
        padding.append(torch.arange(n + gap, device=device) >= n)
    one = [torch.cat(parts)[None] for parts in (tokens, documents, padding, positions)]
    h_1SD, _ = model.hidden(one[0], documents_BS=one[1], padding_BS=one[2], positions_BS=one[3])
    h_TD, target_T = model.scaled(h_1SD)[0], torch.cat(targets)
    logp_T = logprobs(h_TD.detach(), model.head_weight.detach(), target_T, temperature)
    parts = logp_T.split([len(t) for t in targets])
    return [part[first : len(row) - 1].cpu() for part, first, row in zip(parts, firsts, rows, strict=True)]


def share_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[float, float]:
    """(share of tokens that are equal in bits, the largest difference)."""
    a, b = torch.cat(list(ours)), torch.cat(list(theirs))
    return (a == b).float().mean().item(), (a - b).abs().max().item()
