"""Supervised finetuning: the cross-entropy of the assistant's tokens in conversations.

next: post/preference.py
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tmoe.config.run import Config
from tmoe.data.chat.chat_dataset import ChatBatch, ChatDataset, open_chat
from tmoe.data.corpus import Split
from tmoe.data.dataset import Micro
from tmoe.data.tokenizer import Carried
from tmoe.model.loss import Given
from tmoe.ops import token_loss
from tmoe.parallel.mesh import Mesh
from tmoe.post.losses.tokens import sft
from tmoe.post.task import Task


class Sft(Task):
    """The mean of -ln p(token), in nats, over the trained tokens of a step.

    With --sft.neftune A, noise of uniform(-1, 1) A / sqrt(n D) is added to each channel of a token's
    embedding, where n is the number of tokens of its conversation (NEFTune, Jain et al. 2023). With --sft.dft
    a token's loss is weighed by its probability.
    """

    def __init__(self, cfg: Config, mesh: Mesh):
        super().__init__(cfg, mesh)
        if cfg.sft.dft:
            self.objective = dft

    def open(self, split: Split, carried: Carried | None) -> ChatDataset:
        cfg = self.cfg
        return open_chat(cfg.data, cfg.train.seq, cfg.model.vocab, split, "sft", carried)

    def facts(self, val_data: ChatDataset) -> dict[str, Any]:
        return dict(conversations=val_data.describe())

    def notes(self, facts: dict[str, Any]) -> list[str]:
        return []

    def micros(self, batch: ChatBatch, device: torch.device) -> Iterator[Micro]:
        alpha = self.cfg.sft.neftune
        for micro in batch.micros(device, True):
            given = {"members": (micro.given or {})["members"]}
            given |= {"noise": self.noise(micro, alpha)} if alpha else {}
            yield micro._replace(given=given)

    def rows(self, batch: ChatBatch) -> Iterator[Micro]:
        return batch.micros(torch.device("cpu"), True)

    def noise(self, micro: Micro, alpha: float) -> Tensor:
        """Alpha / sqrt(n D) for each token [B, S], with n the tokens of its sequence; 0 for padding."""
        given = micro.given or {}
        sequences_BS, count = given["sequences"], given["numbers"].numel()
        lengths = sequences_BS.flatten().add(1).bincount(minlength=count + 1)
        lengths[0] = 0
        amplitude = alpha / (lengths * self.cfg.model.dim).float().sqrt()
        return amplitude.where(lengths > 0, 0.0)[sequences_BS + 1]


def dft(h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, given: Given) -> Tensor:
    """The objective of dynamic finetuning: the sum over tokens of `losses.tokens.sft` with dft."""
    return token_loss(h_TD, weight_VD, targets_T, partial(sft, dft=True)).loss
