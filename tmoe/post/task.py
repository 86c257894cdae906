"""The base class of the tasks that train.py trains for. It is pretraining; other tasks override parts of it.

The loop, the Trainer, layouts, checkpoints, faults and the report are the same for all tasks.

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
from tmoe.model.compile_ahead import Pass
from tmoe.model.loss import Objective
from tmoe.model.stages import Stages
from tmoe.model.transformer import Transformer
from tmoe.parallel.mesh import Mesh
from tmoe.run.process import Runtime


class NothingToLearn(RuntimeError):
    """Raised on every rank in the same step: the model can learn nothing more. The run is saved and ends."""


class Task:
    """Pretraining: the cross-entropy of each next token, in windows of running text."""

    objective: Objective | None = None
    """this rank's share of the loss, a sum that is not divided yet; None: cross-entropy"""
    measures: tuple[str, ...] = ()
    """names of the logged numbers of a step, in addition to its loss: sums, divided as the loss is"""
    spikes: bool = True
    """whether a loss far above the previous ones is reported; False where losses are close to 0"""
    updates: int = 1
    """updates of the weights with one batch"""
    offloads: bool = False
    """whether AdamW's moments are in the host's memory during rollouts, and while `evaluate` runs"""
    evaluate: Callable[[Any, Any, Runtime], tuple[float, dict[str, float]] | None] | None = None
    """(model, held-out data, run) -> the number that a validation reports, and further numbers by name; None
    once any rank has to stop. A collective. A task without `evaluate` reports the mean loss"""

    def __init__(self, cfg: Config, mesh: Mesh):
        self.cfg = cfg
        self.mesh = mesh
        self.measured: Tensor | None = None

    def open(self, split: Split, carried: Carried | None) -> Dataset:
        """The data of a split; its batches are a function of the step alone."""
        return open_data(self.cfg.data, self.cfg.train.seq, self.cfg.model.vocab, split, carried)

    @property
    def passes(self) -> list[Pass]:
        """The kinds of forward pass of a run: that of a step, and that of a validation."""
        return [Pass(), Pass(grad=False)]

    def example(self, batch: Batch, device: torch.device) -> Micro:
        """A micro-batch with the shapes and types of all micro-batches, for compiling
        (model/compile_ahead.py).

        batch: the data that is read for a step.
        """
        return next(self.micros(batch, device))

    def facts(self, val_data: Dataset) -> dict[str, Any]:
        """Facts of the data, kept in config.json and shown in the report."""
        return dict(unigram_entropy=unigram_entropy(val_data))

    def notes(self, facts: dict[str, Any]) -> list[str]:
        """Lines that are printed at the start of a run."""
        entropy = facts["unigram_entropy"]
        if entropy is None:
            return []
        best = "a context-free model's best loss"
        return [f"unigram entropy of the validation bytes: {entropy:.3f} nats, {best}"]

    def prepare(self, model: Transformer | Stages, data: Sequence[Dataset], run: Runtime, step: int) -> None:
        """Computes what must be known before the first step. A collective.

        step: the steps that the run has done; the model has the weights after them.
        """

    def rollout(self, model: Transformer | Stages, batch: Batch, run: Runtime, step: int) -> Batch | None:
        """The batch that the step is trained on, from the data that was read for it. A collective.

        None, on all ranks, once any of them has to stop.
        """
        return batch

    def state(self) -> dict[str, Any]:
        """The task's state for a checkpoint, of types that JSON has, equal on all ranks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned; empty from a checkpoint of another task, or of an older version."""

    def objective_of(self, batch: Batch) -> Objective | None:
        """The objective of this batch."""
        return self.objective

    def micros(self, batch: Batch, device: torch.device) -> Iterator[Micro]:
        """A batch's micro-batches on the device, with the inputs of the objective."""
        return batch.micros(device, self.cfg.train.isolate_documents)

    def rows(self, batch: Batch) -> Iterator[Micro]:
        """A batch's micro-batches on the CPU, without inputs of the objective."""
        return batch.micros(torch.device("cpu"), self.cfg.train.isolate_documents)

    def divisor(self, batch: Batch) -> float:
        """The part of a batch in the divisor of its step's loss: its trained tokens."""
        return (batch.targets_ABS != IGNORE).sum().item()

    def measure(self, sums: Tensor) -> None:
        """Adds this rank's share of a micro-batch, fp32 [M], to the sums of `measures`."""
        self.measured = sums if self.measured is None else self.measured + sums

    def read_measured(self, like: Tensor) -> Tensor:
        """This rank's sums since the last call [M], on the device of `like`."""
        measured, self.measured = self.measured, None
        return torch.zeros(len(self.measures), device=like.device) if measured is None else measured
