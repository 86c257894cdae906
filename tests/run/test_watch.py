"""The guard of a step together with other code: threads, later runs, slow ranks, no stderr.

And the user's own signal handlers.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist
from faulty import EP2, LIMIT, before_step, finish, start
from gloo import shared
from orphans import no_orphans  # noqa: F401

import train
from benchmarks.launch import launch
from tmoe.run import process as runtime
from tmoe.run.watch import heartbeat
from tmoe.run.watch.failure_messages import cause

pytestmark = pytest.mark.usefixtures("no_orphans")


def steps(watch, n: int, act, timeout: float | None = None) -> None:
    """n steps, each of which may stand still for a second, on cores of one's own."""
    timeout = shared(1.0) if timeout is None else timeout
    with watch:
        for step in watch.watched_steps(range(n), timeout):
            dist.all_reduce(torch.ones(4))
            act(step)
            watch.compare_calls()


def again(rank: int, world: int) -> str:
    """Two runs of one process, of which the second's error is caught.

    Then code that takes longer than a step may stand still.
    """
    unit = shared(2.0)
    watch = runtime.start(0).watch
    steps(watch, 3, lambda _: time.sleep(0.05), unit)
    steps(
        watch,
        4,
        lambda step: [
            (dist.all_reduce(torch.ones(4)), time.sleep(0.4 * unit)) for _ in range(5 * (step == 2))
        ],
        unit,
    )

    def fails(step):
        if step == 3:
            raise ValueError(f"of rank {rank}")

    said = ""
    try:
        steps(watch, 5, fails, unit)
    except ValueError as error:
        said = "".join(error.__notes__)
    time.sleep(2.5 * unit)
    other = runtime.start(
        0
    ).watch  # of the same process group: what the first left in the store is not this one's
    try:
        with other:
            raise RuntimeError(f"anew, of rank {rank}")
    except RuntimeError as error:
        assert "ValueError" not in error.__notes__[0], error.__notes__
    return said


@pytest.mark.slow
def test_a_run_after_another_is_guarded_and_what_follows_lives():
    ends = launch(2, again, timeout=60, limit=LIMIT)
    assert [end.code for end in ends] == [0, 0], ends
    assert all("in step 4: ValueError: of rank" in end.result for end in ends), ends


def second_stands(rank: int, world: int) -> None:
    watch = runtime.start(0).watch
    steps(watch, 3, lambda _: None)
    steps(watch, 4, lambda step: time.sleep(60 * rank) if step == 2 else None)


def test_the_second_run_is_guarded_too():
    ends = launch(2, second_stands, timeout=60, limit=LIMIT)
    assert [end.code for end in ends] == [1, 1], ends
    # the first to end may end the other, whose connection is gone
    found = [re.search(r"error: nothing has moved for (\d+\.\d) s", end.said) for end in ends]
    assert any(found), ends
    assert all(1.0 <= float(moved[1]) < shared(3.0) for moved in found if moved), ends


def in_a_thread(rank: int, world: int, argv: list[str], how: str) -> None:
    """A Trainer as a notebook or a server has it: in a thread that is not the main one."""

    def act(_):
        if how == "parts":  # sums of unlike things would pass for results
            dist.all_reduce(torch.ones(())) if rank else None
            dist.all_reduce(torch.full((), 10.0)) if not rank else None
        elif rank:
            time.sleep(60)

    def work():
        trainer = start(rank, world, argv)
        before_step(trainer, 3, act)
        take = trainer.optimizer.step
        trainer.optimizer.step = lambda: (
            print(f"weights changed in step {trainer.step}", flush=True),
            take(),
        )
        finish(trainer)

    thread = threading.Thread(target=work, name="trainer")
    thread.start()
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["parts", "stands"])
def test_a_trainer_in_a_thread_is_watched(tmp_path, how):
    flags = [*EP2, "--train.timeout", f"{shared(2.0):.1f}", "--out", str(tmp_path)]
    ends = launch(2, in_a_thread, flags, how, timeout=120, limit=LIMIT)
    for end in ends:
        assert "weights changed in step 2" in end.said and "weights changed in step 3" not in end.said, (
            end.said
        )
        assert how == "stands" or "DivergenceError: step 4: the ranks' collectives part" in end.said, end.said
    if how == "stands":
        assert [end.code for end in ends] == [1, 1] and "time.sleep(60)" in ends[1].said, ends


def slow_alone(rank: int, world: int, argv: list[str]) -> None:
    """Rank 0 needs longer to write a validation's loss than a step may last; the other ranks do not."""
    trainer = start(rank, world, argv)
    real = trainer.metrics.validated
    long = 4 * trainer.cfg.train.timeout
    trainer.metrics.validated = lambda *loss: (time.sleep(0 if rank else long), real(*loss))[1]
    finish(trainer)


@pytest.mark.slow
def test_nobody_is_ended_for_what_another_does_behind_a_validation(tmp_path):
    flags = [*EP2, "--train.timeout", f"{shared(1.0):.1f}", "--train.eval-every", "2", "--steps", "4"]
    ends = launch(2, slow_alone, [*flags, "--out", str(tmp_path)], timeout=shared(60), limit=LIMIT)
    assert [end.code for end in ends] == [0, 0], ends


def hangs_in_stderr(rank: int, world: int) -> None:
    """Rank 1 stands where its guard's words would go: a pipe that is never read."""
    heartbeat.HEARS_S = 1.0
    watch = runtime.start(0).watch

    def act(step):
        if step == 2 and rank:
            os.dup2(os.pipe()[1], 2)
            print("x" * 10_000_000, file=sys.stderr, flush=True)

    steps(watch, 4, act)


@pytest.mark.slow
def test_a_rank_whose_words_hang_ends_as_well():
    ends = launch(2, hangs_in_stderr, timeout=60, limit=LIMIT)
    assert [end.code for end in ends] == [1, 1], ends


def without_stderr(rank: int, world: int, argv: list[str]) -> None:
    sys.stderr = None
    finish(start(rank, world, argv))


@pytest.mark.slow
def test_a_run_needs_no_stderr(tmp_path):
    ends = launch(2, without_stderr, [*EP2, "--steps", "2", "--out", str(tmp_path)], timeout=120, limit=LIMIT)
    assert [end.code for end in ends] == [0, 0], ends


def own_timer(rank: int, world: int) -> None:
    faulthandler.dump_traceback_later(1.5, exit=True)
    steps(runtime.start(0).watch, 3, lambda _: time.sleep(0.3), timeout=0.0)
    time.sleep(20)


@pytest.mark.slow
def test_without_a_timeout_the_users_own_timer_stands():
    ends = launch(2, own_timer, timeout=120, limit=LIMIT)
    assert [end.code for end in ends] == [1, 1] and all("Timeout (0:00:01" in end.said for end in ends), ends


def test_the_cause_is_named_before_what_failed_behind_it():
    try:
        try:
            raise RuntimeError("the cause\nand more")
        finally:
            raise OSError("closing")
    except OSError as error:
        assert cause(error) == "RuntimeError: the cause, then OSError: closing"
    try:
        try:
            raise KeyError("x")
        except KeyError as inner:
            raise ValueError("what it means") from inner
    except ValueError as error:
        assert cause(error) == "ValueError: what it means"


SMALL = (
    "tiny --no-compile --log.no-progress --log.no-report --model.layers 2 --model.dim 32 --model.heads 2 "
    "--model.kv-heads 1 --train.seq 32"
)
HERE = Path(train.__file__).parent


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_behind_a_run_signals_are_the_users_again(tmp_path, signum):
    code = f"""
import os, signal, sys, time, train
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
train.main({[*SMALL.split(), "--steps", "2", "--out", str(tmp_path)]!r})
os.kill(os.getpid(), {int(signum)})
time.sleep(5)
print("not ended")
"""
    ran = forked.run(["-c", code])
    assert ran.returncode == -signum and "not ended" not in ran.stdout, ran


@pytest.mark.slow
def test_ctrl_c_saves_where_stderr_is_a_pipe_that_ends_first(tmp_path):
    """The terminal sends `2>&1 | tee log` the same signal."""
    reads, writes = os.pipe()
    code = (
        "import signal, sys, train; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "train.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, *SMALL.split(), "--steps", "100000", "--log.every", "1"]
    run = subprocess.Popen([*command, "--out", str(tmp_path)], stdout=writes, stderr=writes, cwd=HERE)
    os.close(writes)
    try:
        metrics = tmp_path / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert run.poll() is None
            time.sleep(0.1)
        os.close(reads)
        run.send_signal(signal.SIGINT)
        assert run.wait() == 0
    finally:
        run.kill()
    assert len(list(tmp_path.glob("checkpoints/step-*/manifest.json"))) == 1
