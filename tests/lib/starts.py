"""Runs that start from given weights: two short steps in fp32."""

from runs import SMALL

import train
from tmoe.cli.parse import parse
from tmoe.run import process as runtime

FLAGS = [*SMALL, "--train.dtype", "fp32", "--steps", "2"]


def train_two_steps(rank: int, world: int, argv: list[str]) -> None:
    """One run in a gloo worker; `argv` holds FLAGS and the weights to start from."""
    cfg = parse(argv, "", rank=rank, world=world)
    trainer = train.Trainer(cfg, runtime.start(cfg.seed))
    with trainer.metrics:
        trainer.train()
