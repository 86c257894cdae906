"""Compares a rollout's log-probs with those of training's forward over the same answers, packed in a row.

next: tests/generate/test_bits.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tmoe.generate import Sample
from tmoe.model.attention_backend import BLOCK
from tmoe.model.loss import Given
from tmoe.model.transformer import Transformer
from tmoe.moe.balance import Totals
from tmoe.ops import logprobs


def in_training(
    model: Transformer, prompts: Sequence[list[int]], answers: Sequence[Sequence[Sample]], temperature: float
) -> list[Tensor]:
    """Log-probs of each answer's tokens, fp32 on the CPU, from one forward over a row that holds all answers.

    Every sequence begins at a multiple of 128. The padding after it belongs to its document and is routed to
    no expert.
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
    collected = []

    def collect(h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, given: Given) -> Tensor:
        collected.append(logprobs(h_TD.detach(), weight_VD.detach(), targets_T, temperature))
        return h_TD.sum() * 0.0

    marks = (torch.cat(parts)[None] for parts in (documents, padding, positions))
    names = "documents_BS", "padding_BS", "positions_BS"
    row_1S, targets_1S = torch.cat(tokens)[None], torch.cat(targets)[None]
    one = torch.ones((), device=device)
    more = dict(zip(names, marks, strict=True))
    model(row_1S, targets_1S, **more, totals=Totals(one, one, one), objective=collect)
    parts = collected[0].split([len(t) for t in targets])
    return [part[first : len(row) - 1].cpu() for part, first, row in zip(parts, firsts, rows, strict=True)]


def share_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[float, float]:
    """(share of tokens whose bits are equal, the largest difference)."""
    a, b = torch.cat(list(ours)), torch.cat(list(theirs))
    return (a == b).float().mean().item(), (a - b).abs().max().item()
