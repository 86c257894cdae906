"""Builds a step's tensors of packed conversations or preferences.

next: data/chat/chat_dataset.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from tmoe.config.model import IGNORE
from tmoe.data.dataset import Micro


class ChatBatch(NamedTuple):
    """The data of one rank for one step: A micro-batches of B rows of S tokens, each of several sequences.

    The two sequences of a preference are in the same row: sequence 2p of a micro-batch is the chosen answer
    of its pair p, and sequence 2p + 1 the rejected answer.
    """

    tokens_ABS: torch.Tensor
    """int64: ids; 0 in the padding after a row's last sequence"""
    targets_ABS: torch.Tensor
    """int64: the next token if it is trained; IGNORE elsewhere and at a sequence's last token"""
    documents_ABS: torch.Tensor
    """int64: index of the sequence within the row, from 0; the padding has the next index"""
    positions_ABS: torch.Tensor
    """int64: position of the token in its sequence, from 0"""
    sequences_ABS: torch.Tensor
    """int64: index of the sequence within the micro-batch, from 0; -1 in the padding"""
    numbers_AN: torch.Tensor
    """int64: for each sequence of a micro-batch its number in the data set (below ChatDataset.sequences),
    followed by -1 if another micro-batch has more sequences"""

    def micros(self, device: torch.device, documents: bool) -> Iterator[Micro]:
        """Each micro-batch, copied to the device, as by `Batch.micros`.

        documents: False leaves `documents_BS` None; the sequences of a row would then attend to each other.

        `given` holds `sequences` [B, S], the index of each token's sequence; `numbers` [n], the number of
        each sequence in the data set; and `members`, bool [B, S, at least 2]: whether a token belongs to the
        n-th sequence of its row.
        """
        for *micro, numbers_N in zip(*self, strict=True):
            numbers_N = numbers_N[numbers_N >= 0]
            count = int(micro[2].where(micro[4] >= 0, -1).max()) + 1
            places_M = torch.arange(max(count, 2), device=device)
            moved = (t.to(device, non_blocking=True) for t in (*micro, numbers_N))
            tokens_BS, targets_BS, documents_BS, positions_BS, sequences_BS, numbers_N = moved
            yield Micro(
                tokens_BS,
                targets_BS,
                documents_BS if documents else None,
                padding_BS=sequences_BS < 0,
                positions_BS=positions_BS,
                given=dict(
                    sequences=sequences_BS,
                    numbers=numbers_N,
                    members=(documents_BS[..., None] == places_M) & (sequences_BS >= 0)[..., None],
                ),
            )

    def count(self) -> int:
        """Number of tokens, without padding."""
        return int((self.sequences_ABS >= 0).sum())

    def count_sequences(self) -> int:
        """Number of conversations or answers, over which the `sequence` balancing loss is a mean."""
        return int((self.numbers_AN >= 0).sum())


def batch_of(rows: list[list[tuple[int, np.ndarray, np.ndarray]]], shape: tuple[int, int, int]) -> ChatBatch:
    """Rows of sequences as A micro-batches of B rows of S tokens; the last rows may be empty.

    rows: for each row its sequences, each as (number, ids, which ids are trained).
    shape: (A, B, S).
    """
    A, B, S = shape
    tokens, documents, positions = (np.zeros((A * B, S), np.int64) for _ in range(3))
    targets, sequences = np.full((A * B, S), IGNORE), np.full((A * B, S), -1)
    numbers: list[list[int]] = [[] for _ in range(A)]
    for r, row in enumerate(rows):
        micro_numbers = numbers[r // B]
        at = 0
        for document, (number, ids, trained) in enumerate(row):
            end = at + len(ids)
            tokens[r, at:end] = ids
            targets[r, at : end - 1] = np.where(trained[1:], tokens[r, at + 1 : end], IGNORE)
            documents[r, at:end] = document
            documents[r, end:] = document + 1
            positions[r, at:end] = np.arange(len(ids))
            sequences[r, at:end] = len(micro_numbers)
            micro_numbers.append(number)
            at = end
    width = max(map(len, numbers))
    padded = np.array([micro + [-1] * (width - len(micro)) for micro in numbers], np.int64).reshape(A, width)
    five = (torch.from_numpy(t).view(A, B, S) for t in (tokens, targets, documents, positions, sequences))
    return ChatBatch(*five, numbers_AN=torch.from_numpy(padded))
