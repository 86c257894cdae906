"""Blocks are compiled before the first step: then a step compiles nothing, and no collective waits for it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from faulty import LIMIT, finish, start
from gloo import shared
from orphans import no_orphans  # noqa: F401
from runs import SMALL
from torch._dynamo.utils import counters

import train
from benchmarks.launch import launch
from tmoe.model import compile_ahead as compiling
from tmoe.model.compiler import Compiler
from tmoe.run import process as runtime

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_orphans")]
SHORT = [*SMALL, "--compile", "--steps", "2", "--checkpoint.mode", "off", "--resume", "none"]
LAYOUTS = {
    "plain, dropout": "1 --model.dropout 0.1 --model.moe.jitter 0.1",
    "two kinds, a frozen table": "1 --model.dense-layers 1 --model.ffn-dim 32 --optim.freeze embedding",
    "experts by FSDP2": "2 --parallel.dp 2 --parallel.gathered-gib 0 --train.dtype bf16",
    "ep, recomputed": "2 --parallel.ep 2 --parallel.checkpoint block",
    "pipeline": "2 --parallel.pp 2 --train.accumulate 2 --parallel.schedule v --model.layers 4",
}
REWARDS = "--grpo.rewards exact --grpo.prompts 4 --grpo.group 4 --grpo.max-tokens 6"
TASKS = {
    "preference": "--task preference",
    "grpo": f"--task grpo {REWARDS} --grpo.kl 0.1 --grpo.updates 2 --grpo.replay old",
}


def compiled() -> tuple[int, int]:
    """Graphs that this process has traced, and those, backwards among them, that inductor has made."""
    made = counters["inductor"]
    return counters["stats"]["unique_graphs"], made["fxgraph_cache_miss"] + made["fxgraph_cache_hit"]


def counted(rank: int, world: int, argv: list[str]) -> tuple[tuple[int, int], tuple[int, int], bool]:
    """The graphs compiled before the first step and at the end; whether compiling drew random numbers.

    A graph in the compiler's cache counts as compiled.
    """
    trainer = start(rank, world, argv)
    state = torch.get_rng_state()
    trainer.prepare()
    before, drew = compiled(), not torch.equal(state, torch.get_rng_state())
    trainer.prepare = lambda: None
    with trainer.metrics:
        trainer.train()
    return before, compiled(), drew


@pytest.mark.parametrize("case", LAYOUTS)
def test_steps_and_validations_compile_nothing(gloo, tmp_path, case):
    world, *flags = LAYOUTS[case].split()
    for before, behind, drew in gloo(int(world), counted, [*SHORT, *flags, "--out", str(tmp_path)]):
        assert before == behind and before[0] >= 2 and before[1] >= 3, (before, behind)
        assert not drew


@pytest.mark.parametrize("case", TASKS)
def test_tasks_compile_nothing_later(gloo, tmp_path, case):
    rows = [(f"{a}+{b}=", str(a + b)) for a in range(12) for b in range(12)]
    fields = [
        dict(prompt=p, chosen=n, rejected=p) if case == "preference" else dict(prompt=p, answer=n)
        for p, n in rows
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, fields)))
    flags = [*SHORT, *TASKS[case].split(), "--data.path", str(tmp_path / "rows.jsonl"), "--parallel.ep", "2"]
    for before, behind, _ in gloo(2, counted, [*flags, "--out", str(tmp_path / "run")]):
        assert before == behind and before[0] >= 1, (before, behind)


def one_is_slow(rank: int, world: int, argv: list[str], cache: str, seconds: float, ahead: bool) -> None:
    """A run whose last rank's compiler takes longer than a collective waits."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    make = Compiler.__call__

    def slowly(self, *args):
        if rank == world - 1:
            time.sleep(seconds)
        return make(self, *args)

    Compiler.__call__ = slowly
    if not ahead:
        train.compile_ahead = lambda *_: None
    finish(start(rank, world, argv))


def test_no_collective_waits_for_a_compiler(tmp_path):
    """Two ranks, cold caches. Compiled in the step itself, the same run ends in a collective's patience."""
    timeout = shared(6.0)
    words = [*SHORT, "--parallel.ep", "2", "--out", str(tmp_path / "run")]
    for ahead in (True, False):
        slow = words, str(tmp_path / "cache"), 2 * timeout, ahead
        ends = launch(2, one_is_slow, *slow, timeout=timeout, limit=LIMIT)
        assert [end.code for end in ends] == ([0] * 2 if ahead else [1] * 2), ends
        assert ahead or "imed out" in ends[0].said or "lost" in ends[0].said, ends
    assert list(Path(tmp_path / "cache").glob("**/*.so")), "the caches were not cold: the test lost its point"


def fails_ahead(rank: int, world: int, argv: list[str]) -> tuple[int, int, str]:
    """Graphs before the first step, and at the end, by a compiler that works only in steps; what was said."""
    make = Compiler.__call__

    def works_late(self, *args):
        if not self.runs:
            raise RuntimeError("no compiler yet")
        return make(self, *args)

    Compiler.__call__ = works_late
    said: list[str] = []
    compiling.log.warning = lambda text, *args: said.append(text % args)
    trainer = start(rank, world, argv)
    trainer.prepare()
    before = compiled()[1]
    trainer.prepare = lambda: None
    with trainer.metrics:
        trainer.train()
    return before, compiled()[1], " ".join(said)


def test_what_fails_ahead_is_compiled_in_the_step(gloo, tmp_path):
    words = [*SHORT, "--out", str(tmp_path / "run")]
    ((before, behind, said),) = gloo(1, fails_ahead, words)
    assert before == 0 and behind >= 3, (before, behind)
    assert "could not be compiled before the first step" in said and "no compiler yet" in said, said


def meets(rank: int, world: int, how: str) -> None:
    watch = runtime.start(0).watch
    with watch:
        if rank == 2 and how == "fails":
            raise ValueError("no compiler")
        if rank == 2 and how == "comes late":
            time.sleep(shared(4.0))
        if rank == 2 and how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        watch.wait_for_ranks()


@pytest.mark.parametrize("how", ["comes late", "fails", "stops"])
def test_a_meeting_has_no_limit_but_life(how):
    """The patience of collectives is that of silence here: one that comes later than that still beats."""
    timeout = shared(2.0)
    ends = launch(3, meets, how, timeout=timeout, waits=2 + (how != "stops"), limit=LIMIT)
    if how == "comes late":
        assert [end.code for end in ends] == [0] * 3, ends
        return
    wanted = "rank 2 failed in step 0: ValueError: no compiler" if how == "fails" else "rank 2 is silent"
    assert all(end.code == 1 and wanted in end.said for end in ends[:2]), ends
