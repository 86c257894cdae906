"""Runs of train.py in a test: short commands, what they wrote, and whether two runs ended with equal state.

The functions that take (rank, world, argv) are for gloo workers: `gloo(2, run, flags)`.
"""

import contextlib
import io
import json
import os
import signal
from pathlib import Path

import pytest
import torch

import train
from tmoe.cli.parse import parse
from tmoe.log.metrics_file import read_steps
from tmoe.run import process as runtime

# Eight steps of a model with two layers and four experts, on sequences of 32 tokens. report.png is left out,
# because drawing it takes longer than such a run.
SMALL = """tiny --no-compile --log.no-progress --log.no-report --model.layers 2 --model.dim 32 --model.heads 2
    --model.kv-heads 1 --model.head-dim 16 --model.moe.experts 4 --model.moe.ffn-dim 32 --train.seq 32
    --steps 8 --optim.warmup 2 --optim.eps 1e-4 --train.eval-every 0 --train.eval-batches 1""".split()
# Settings that draw random numbers in a step, and an average, which is additional state.
NOISY = "--model.dropout 0.1 --model.moe.jitter 0.1 --optim.ema 0.9".split()


# ---- in a worker ----


def run(rank: int, world: int, argv: list[str], stop_at: int | None = None) -> dict[str, torch.Tensor]:
    """One run. Returns every tensor of the final state, unsharded.

    With `stop_at`, the last rank sends itself SIGTERM after this step has been logged.
    """
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
    """The state with which a run begins, unsharded: the loaded state or the initial weights."""
    cfg = parse(argv, "", rank=rank, world=world)
    return whole(train.Trainer(cfg, runtime.start(cfg.seed)))


def changes(rank: int, world: int, argv: list[str]) -> list[str]:
    """The changes that a resumed run reports."""
    cfg = parse(argv, "", rank=rank, world=world)
    return train.Trainer(cfg, runtime.start(cfg.seed)).changes


def begin(rank: int, world: int, argv: list[str]) -> tuple[int, str]:
    """Starts a run without any step. Returns its exit code (0 if it could begin) and its stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            cfg = parse(argv, "", rank=rank, world=world)
            train.Trainer(cfg, runtime.start(cfg.seed))
        except SystemExit as error:
            return error.code, stderr.getvalue()
    return 0, stderr.getvalue()


def whole(trainer: train.Trainer) -> dict[str, torch.Tensor]:
    """Every tensor of a trainer's state: DTensors gathered, others copied."""
    return {
        n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in trainer.tensors().items()
    }


def refusal(words, capsys) -> str:
    """The stderr of a command line that is refused with code 2."""
    with pytest.raises(SystemExit) as ended:
        parse([str(word) for word in words], "")
    assert ended.value.code == 2
    return capsys.readouterr().err


# ---- what runs wrote ----


def lines(out: Path) -> list[dict]:
    """The entries of a run folder's metrics.jsonl, one per step. An unreadable line fails the test."""
    for text in (out / "metrics.jsonl").read_text().splitlines():
        json.loads(text)
    return [line for _, line in read_steps(out / "metrics.jsonl")]


def numbers(out: Path, first: int) -> list[tuple]:
    """The numbers that two equal runs must have logged equally, for each step after the first `first`."""
    return [
        (r["step"], r["loss"], r["grad_norm"], r["lr"], r["expert_counts"])
        for r in lines(out)
        if r["step"] > first
    ]


def assert_equal_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Both states have the same tensors, equal to the bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
