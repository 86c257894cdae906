"""Runs that are disturbed on purpose: started, waited for, and ended."""

from __future__ import annotations

from orphans import no_orphans  # noqa: F401
from runs import SMALL

import train
from tmoe.run import process as runtime
from tmoe.run.cli import parse

EP2 = [*SMALL, "--parallel.ep", "2", "--train.batch", "2"]
TIMEOUT = 4.0  # of collectives


def start(rank: int, world: int, argv: list[str]) -> train.Trainer:
    cfg = parse(argv, "", rank=rank, world=world)
    return train.Trainer(cfg, runtime.start(cfg.seed))


def finish(trainer: train.Trainer) -> None:
    """What train.main does with a trainer."""
    with trainer.run.watch, trainer.metrics:
        trainer.train()
    trainer.run.close()


def before_step(trainer: train.Trainer, step: int, act) -> None:
    """Calls act(batch) before the step's forward pass; what it returns, if anything, is the step's batch."""
    original = trainer.forward_backward

    def forward_backward(batch, totals):
        batch = (act(batch) if trainer.step == step else None) or batch
        return original(batch, totals)

    trainer.forward_backward = forward_backward
