"""Runs that a test disturbs on purpose, in three parts: start, a disturbance before a step, finish."""

from __future__ import annotations

from collections.abc import Callable

from runs import SMALL

import train
from tmoe.cli.parse import parse
from tmoe.run import process as runtime

EP2 = [*SMALL, "--parallel.ep", "2", "--train.batch", "2"]
TIMEOUT = 4.0  # seconds, of collectives, on unshared cores
LIMIT = 300.0  # seconds after which ranks that should have ended are killed


def start(rank: int, world: int, argv: list[str]) -> train.Trainer:
    """A trainer in a gloo worker, before its first step. It draws no report.png."""
    cfg = parse(argv, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    return trainer


def before_step(trainer: train.Trainer, step: int, act: Callable) -> None:
    """Makes the trainer call act(batch) before the forward pass of this step.

    If `act` returns a value, that is the step's batch.
    """
    original = trainer.forward_backward

    def forward_backward(batch, totals):
        batch = (act(batch) if trainer.step == step else None) or batch
        return original(batch, totals)

    trainer.forward_backward = forward_backward


def finish(trainer: train.Trainer) -> None:
    """Trains to the end, in the same way as train.main."""
    with trainer.run.watch, trainer.metrics:
        trainer.train()
    trainer.run.close()
