"""Cases 25 to 28 of the fault list: a rank stops, raises, strays from the others' path or was started wrongly. All end, and say why."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from orphans import no_orphans  # noqa: F401
from test_faults import EP2, TIMEOUT, before_step, finish, start

import train
from benchmarks.launch import End, launch
from tmoe.data import convert
from tmoe.metrics import Metrics

pytestmark = pytest.mark.usefixtures("no_orphans")


def stops(rank: int, world: int, argv: list[str]) -> None:
    trainer = start(rank, world, argv)

    def stop(batch):
        if rank == 1:
            print("stopped", time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)

    before_step(trainer, 3, stop)
    finish(trainer)


def test_25_stopped_rank_is_named(tmp_path):
    """Its peer ends within the timeout and 2 s, and names rank, step and the collective that it came to last."""
    ends = launch(2, stops, [*EP2, "--out", str(tmp_path)], timeout=TIMEOUT, waits=1, limit=15)
    assert ends[1].code is None and ends[0].code == 1, ends[0].said
    stopped_at = float(ends[1].said.split("stopped ")[1].split()[0])
    assert ends[0].at - stopped_at < TIMEOUT + 2
    assert "rank 1 is silent for" in ends[0].said and "last heard of in step 3, " in ends[0].said
    assert "rank 0 ended in step 3, in or after all_gather" in ends[0].said


def raises(rank: int, world: int, argv: list[str], where: str) -> None:
    def guard(*_):
        if rank == 0:
            print("raised", time.monotonic(), flush=True)
            raise FileExistsError(f"a guard of rank 0 at {where}")

    if where == "start":
        Metrics.open_files = guard
        return train.main(argv)
    trainer = start(rank, world, argv)
    before_step(trainer, 3, guard)
    finish(trainer)


@pytest.mark.parametrize("where", ["start", "step"])
def test_26_one_rank_raises(tmp_path, where):
    """All end within 5 s, and everybody's last words hold the first error."""
    ends = launch(2, raises, [*EP2, "--out", str(tmp_path)], where, timeout=30, limit=15)
    raised_at = float(ends[0].said.split("raised ")[1].split()[0])
    assert [end.code for end in ends] == [1, 1]
    assert max(end.at for end in ends) - raised_at < 5
    for end in ends:
        assert (
            f"the first to fail was rank 0 in step {3 if where == 'step' else 0}: FileExistsError: a guard" in end.said
        )


def strays(rank: int, world: int, argv: list[str], how: str) -> None:
    """In step 3 the ranks part; whoever changes weights in it says so."""
    trainer = start(rank, world, argv)
    mine, scalar = rank == 1, torch.ones(())

    def part(batch):
        if how == "skipped by one":
            mine or dist.all_reduce(scalar)
        elif how == "skipped by each":  # counts and sizes are equal, and so sums of unlike things pass for results
            dist.all_reduce(scalar) if mine else None
            dist.all_reduce(torch.full((), 10.0)) if not mine else None
        elif how == "other operation":
            dist.all_reduce(scalar) if mine else dist.broadcast(scalar, 0)
        elif how == "other size":
            dist.all_reduce(torch.ones(4 if mine else 8))

    before_step(trainer, 3, part)
    take = trainer.optimizer.step
    trainer.optimizer.step = lambda: (print(f"weights changed in step {trainer.step}", flush=True), take())
    finish(trainer)


# gloo may end a rank on the size before it can say where the calls part: seen once in about ten runs
OTHER_SIZE = pytest.param(
    "other size", marks=pytest.mark.xfail(strict=False, reason="the naming races with gloo's own error")
)


@pytest.mark.parametrize("how", ["skipped by one", "skipped by each", "other operation", OTHER_SIZE])
def test_27_ranks_part(tmp_path, how):
    """No rank changes its weights with what was summed wrongly; all end, naming the call at which they parted."""
    ends = launch(2, strays, [*EP2, "--out", str(tmp_path)], how, timeout=TIMEOUT, limit=15)
    assert all(end.code not in (0, None) for end in ends), ends
    for end in ends:
        assert "weights changed in step 2" in end.said and "weights changed in step 3" not in end.said
    assert_parting_named(ends, how)


def assert_parting_named(ends: list[End], how: str) -> None:
    said = [end.said for end in ends if "the ranks' collectives part at number" in end.said]
    assert said, ends
    assert len(said) == 2 or how == "other size", "one rank does not know why it ended"
    assert all("test_faults_ranks.py" in text for text in said)


# ---- 28: bad input ----


def save_nan(rank: int, world: int, argv: list[str]) -> None:
    trainer = start(rank, world, argv)
    with torch.no_grad():
        dict(trainer.model.named_parameters())["blocks.1.ffn_norm.weight"].to_local()[3] = float("nan")
    trainer.save()
    trainer.checkpoints.finish()


def shards(folder: Path) -> Path:
    text = folder / "a.txt"
    text.write_text("".join(chr(ord("a") + i * i % 26) for i in range(4000)))
    convert((str(text),), out=folder / "shards")
    return folder / "shards"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("id", "00000.bin: token id 122 at byte "),
        ("id", "valid ids are 0 to --model.vocab=120 - 1"),
        ("empty", "00000.bin: "),
        ("nan", "NaN or infinity in model.blocks.1.ffn_norm.weight: start from another checkpoint (--resume, --init)"),
        ("experts", "--parallel.ep=2: must divide --model.moe.experts=5; valid: [1, 5]"),
    ],
)
def test_28_bad_input(tmp_path, gloo, bad, says):
    """Every rank ends before the first step, soon; rank 0 says once which field or file is wrong, and what would be valid."""
    flags = [*EP2, "--out", str(tmp_path / "run"), "--data.val-fraction", "0.5"]
    if bad in ("id", "empty"):
        flags += ["--data.path", str(shards(tmp_path))]
    if bad == "id":
        flags += ["--model.vocab", "120"]
    elif bad == "empty":
        os.truncate(tmp_path / "shards/00000.bin", 0)
    elif bad == "nan":
        gloo(2, save_nan, [*EP2, "--out", str(tmp_path / "nan")])
        flags += ["--init", str(tmp_path / "nan/checkpoints/step-0")]
    else:
        flags += ["--model.moe.experts", "5"]
    began = time.monotonic()
    ends = launch(2, enter, flags, timeout=TIMEOUT, limit=15)
    assert max(end.at for end in ends) - began < 6
    assert all(end.code not in (0, None) for end in ends), ends
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", ends[0].said).split())  # tyro frames what it says
    assert words.count(says) == 1 and "Traceback" not in words, ends[0].said
    assert not list(tmp_path.glob("run/metrics.jsonl"))


def enter(rank: int, world: int, argv: list[str]) -> None:
    train.main(argv)
