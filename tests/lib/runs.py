"""Runs of train.py in a test: short commands, what they wrote, and whether two ended alike."""

import contextlib
import io
import json
import os
import signal
from pathlib import Path

import torch

import train
from tmoe.run import process as runtime
from tmoe.run.cli import parse

SMALL = """tiny --no-compile --log.no-progress --model.layers 2 --model.dim 32 --model.heads 2 --model.kv-heads 1
    --model.head-dim 16 --model.moe.experts 4 --model.moe.ffn-dim 32 --train.seq 32 --steps 8 --optim.warmup 2
    --optim.eps 1e-4 --train.eval-every 0 --train.eval-batches 1""".split()
NOISY = "--model.dropout 0.1 --model.moe.jitter 0.1 --optim.ema 0.9".split()


def run(rank: int, world: int, argv: list[str], stop_at: int | None = None) -> dict[str, torch.Tensor]:
    """One run in a gloo worker. Returns every tensor of the final state, whole."""
    cfg = parse(argv, "", rank=rank, world=world)
    process = runtime.start(cfg.seed)
    trainer = train.Trainer(cfg, process)
    if stop_at is not None and rank == world - 1:
        log = trainer.log

        def log_then_stop(step, *args):
            log(step, *args)
            if step == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)

        trainer.log = log_then_stop
    with trainer.metrics:
        trainer.train()
    return whole(trainer)


def load(rank: int, world: int, argv: list[str]) -> dict[str, torch.Tensor]:
    cfg = parse(argv, "", rank=rank, world=world)
    return whole(train.Trainer(cfg, runtime.start(cfg.seed)))


def whole(trainer) -> dict[str, torch.Tensor]:
    return {
        n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in trainer.tensors().items()
    }


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def numbers(out: Path, first: int) -> list[tuple]:
    return [
        (r["step"], r["loss"], r["grad_norm"], r["lr"], r["expert_counts"])
        for r in lines(out)
        if r["step"] >= first
    ]


def assert_equal_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def changes(rank: int, world: int, argv: list[str]) -> list[str]:
    cfg = parse(argv, "", rank=rank, world=world)
    return train.Trainer(cfg, runtime.start(cfg.seed)).changes


def begin(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            cfg = parse(argv, "", rank=rank, world=world)
            train.Trainer(cfg, runtime.start(cfg.seed))
        except SystemExit as error:
            return error.code, said.getvalue()
    return 0, said.getvalue()
