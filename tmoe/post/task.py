"""A task: what train.py trains for. This one is pretraining; others say where they differ.

The loop, the Trainer, layouts, checkpoints, faults and the report are the same for all of them.

next: post/sft.py, then post/grpo.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tmoe.config.model import IGNORE
from tmoe.config.run import Config
from tmoe.data.corpus import Split
from tmoe.data.dataset import Batch, Dataset, Micro, open_data, unigram_entropy
from tmoe.data.tokenizer import Carried
from tmoe.model.ahead import Pass
from tmoe.model.loss import Objective
from tmoe.model.stages import Stages
from tmoe.model.transformer import Transformer
from tmoe.parallel.mesh import Mesh
from tmoe.run.process import Runtime


class NothingToLearn(RuntimeError):
    """Raised on every rank in the same step: more steps would teach nothing. The run is saved and ends."""


class Task:
    """Pretraining: the cross-entropy of each next token, in windows of running text."""

    objective: Objective | None = None
    """this rank's share of what is trained for, a sum; None: cross-entropy"""
    measures: tuple[str, ...] = ()
    """names of what the log says of a step beside its loss: sums, divided as the loss is"""
    spikes: bool = True
    """whether a loss far above those before it is worth a word: not where losses lie around 0"""
    updates: int = 1
    """of the weights, with one batch"""
    offloads: bool = False
    """whether AdamW's moments lie in the host's memory in rollouts, and where `evaluate` is called"""
    evaluate: Callable[[Any, Any, Runtime], tuple[float, dict[str, float]] | None] | None = None
    """of a model, held-out data and the run: the number that a validation reports, and others by name; None
    once any rank was told to stop. A collective. Where there is none, it is the mean loss"""

    def __init__(self, cfg: Config, mesh: Mesh):
        self.cfg = cfg
        self.mesh = mesh
        self.measured: Tensor | None = None

    def open(self, split: Split, carried: Carried | None) -> Dataset:
        """The data of a split, whose batches are a function of the step alone."""
        return open_data(self.cfg.data, self.cfg.train.seq, self.cfg.model.vocab, split, carried)

    @property
    def passes(self) -> list[Pass]:
        """The kinds of forward that a run makes: a step's, and a validation's."""
        return [Pass(), Pass(grad=False)]

    def example(self, batch: Batch, device: torch.device) -> Micro:
        """What blocks are compiled for (model/ahead.py): a micro-batch in the shapes and types of all.

        batch: what is read for a step.
        """
        return next(self.micros(batch, device))

    def facts(self, val_data: Dataset) -> dict[str, Any]:
        """What config.json keeps of the data, and the report shows."""
        return dict(unigram_entropy=unigram_entropy(val_data))

    def notes(self, facts: dict[str, Any]) -> list[str]:
        """Lines at the start of a run."""
        entropy = facts["unigram_entropy"]
        if entropy is None:
            return []
        best = "a context-free model's best loss"
        return [f"unigram entropy of the validation bytes: {entropy:.3f} nats, {best}"]

    def prepare(self, model: Transformer | Stages, data: Sequence[Dataset], run: Runtime, step: int) -> None:
        """What must be known before the first step, of the weights after this step. A collective."""

    def rollout(self, model: Transformer | Stages, batch: Batch, run: Runtime, step: int) -> Batch | None:
        """What the step is trained on, of the data that was read for it. A collective.

        None, on all ranks, once any of them was told to stop.
        """
        return batch

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the task, as JSON can hold it, equal on all ranks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes up what `state` returned; empty from a checkpoint of another task, or of an older version."""

    def objective_of(self, batch: Batch) -> Objective | None:
        """What the model is trained for with this batch."""
        return self.objective

    def micros(self, batch: Batch, device: torch.device) -> Iterator[Micro]:
        """A batch's micro-batches on the device, with what the objective is given."""
        return batch.micros(device, self.cfg.train.isolate_documents)

    def divisor(self, batch: Batch) -> float:
        """What a batch adds to the number that the loss of its step is divided by."""
        return (batch.targets_ABS != IGNORE).sum().item()

    def measure(self, sums: Tensor) -> None:
        """Adds to the sums of `measures`: this rank's share of a micro-batch, fp32 [M]."""
        self.measured = sums if self.measured is None else self.measured + sums

    def read_measured(self, like: Tensor) -> Tensor:
        """This rank's sums since the last call [M], on the device of `like`."""
        measured, self.measured = self.measured, None
        return torch.zeros(len(self.measures), device=like.device) if measured is None else measured
