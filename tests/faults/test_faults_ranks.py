"""Cases 25 to 28 of the fault list: a rank stops, raises, strays from the others or was started wrongly.

All ranks end, and say why.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faulty import EP2, LIMIT, TIMEOUT, before_step, finish, start
from gloo import shared
from orphans import no_orphans  # noqa: F401
from tiers import slow_but

import train
from benchmarks.launch import End, launch
from tmoe.base import exit_message
from tmoe.data.convert import convert
from tmoe.log.metrics import Metrics
from tmoe.run.watch import heartbeat, standstill
from tmoe.run.watch.failure_messages import explain
from tmoe.run.watch.heartbeat import Heartbeat
from tmoe.run.watch.journal import Journal
from tmoe.run.watch.standstill import Standstill

pytestmark = pytest.mark.usefixtures("no_orphans")


def stops(rank: int, world: int, argv: list[str], stopped: int, where: str) -> None:
    """Stops in step 3, before the forward pass or when backward begins, or in the save that follows it."""
    trainer = start(rank, world, argv)
    backward = torch.Tensor.backward
    write = trainer.checkpoints._write

    def stop(*_):
        if rank == stopped:
            print("stopped", time.monotonic(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)

    if where == "forward":
        before_step(trainer, 3, stop)
    elif where == "backward":

        def backward_with_stop(loss, *args):
            if trainer.step == 3:
                loss.register_hook(stop)
            backward(loss, *args)

        torch.Tensor.backward = backward_with_stop
    else:
        trainer.checkpoints._write = lambda *args: (stop(), write(*args))[1]
    finish(trainer)


@pytest.mark.parametrize(
    ("world", "stopped", "where"),
    slow_but([(2, 1, "forward")], [(2, 1, "forward"), (4, 2, "backward"), (2, 0, "save")]),
)
def test_25_stopped_rank_is_named(tmp_path, world, stopped, where):
    """Its peers end within the timeout and 2 s, also those in its subgroups.

    They name the rank, the step and the collective that the rank came to last.
    """
    flags = [*EP2, "--train.batch", "1", "--checkpoint.every", "4", "--out", str(tmp_path)]
    timeout = shared(TIMEOUT)
    ends = launch(world, stops, flags, stopped, where, timeout=timeout, waits=world - 1, limit=LIMIT)
    stopped_at = float(ends[stopped].said.split("stopped ")[1].split()[0])
    assert ends[stopped].code is None
    for rank, end in enumerate(ends):
        if rank != stopped:
            assert end.code == 1 and end.at - stopped_at < timeout + shared(2), end.said
            assert f"rank {stopped} is silent for" in end.said, end.said
            assert re.search("last heard of in step [45], in or after all_", end.said), end.said
            assert re.search(rf"rank {rank} ended in step [45], in or after all_", end.said), end.said
    assert not list(tmp_path.glob("checkpoints/step-4"))


def killed(rank: int, world: int, argv: list[str], error_file: str) -> None:
    os.environ["TORCHELASTIC_ERROR_FILE"] = error_file
    trainer = start(rank, world, argv)
    before_step(trainer, 3, lambda _: rank == 1 and os.kill(os.getpid(), signal.SIGKILL))
    finish(trainer)


@pytest.mark.parametrize("world", slow_but([2], [2, 3]))
def test_25_a_killed_rank_is_named_first_and_alone(tmp_path, world):
    """The others only lost it; nothing is said of collectives, which nobody strayed from.

    What stands last, below the traceback, is in torchrun's file as well.
    """
    flags, told = [*EP2, "--parallel.ep", "1", "--out", str(tmp_path)], tmp_path / "error.json"
    ends = launch(world, killed, flags, str(told), timeout=shared(TIMEOUT), limit=LIMIT)
    losers = ", ".join(str(rank) for rank in range(world) if rank != 1)
    for rank in {*range(world)} - {1}:
        note = ends[rank].said[ends[rank].said.index("rank 1 is silent for") :].strip().splitlines()
        assert note[1].startswith(f"rank {rank} ended in step 4, "), note
        assert note[-1].startswith("in short: rank 1 was killed or stopped in step 4"), note
        assert world > 2 or note[-1].endswith(f"; rank {losers} lost contact"), note
        assert "part at number" not in ends[rank].said and "failed" not in "".join(note), note
    assert json.loads(told.read_text())["message"]["message"].startswith(
        "in short: rank 1 was killed or stopped in step 4"
    )


def heard(**of_ranks: tuple[float, str | None, list[str]]) -> dict[int, dict]:
    """What ranks have told the store: when, the failure, and the journal of the step."""
    return {
        int(name[1:]): dict(beat=1, step=3, failure=failure, stands=False, at=at, votes=3, sites=sites)
        for name, (at, failure, sites) in of_ranks.items()
    }


LOSS = "RuntimeError: [../gloo/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"


@pytest.mark.parametrize(
    ("now", "says", "not_says", "short"),
    [
        # killed: the survivor's loss is no cause, and its next collective is no parting
        (
            heard(r0=(9.0, LOSS, ["a", "b"]), r1=(8.9, None, ["a"])),
            ["rank 1 is silent"],
            ["first to fail", "part at"],
            "rank 1 was killed or stopped in step 3; rank 0 lost contact",
        ),
        # gloo aborts a rank that got too much: here they did part
        (
            heard(r0=(9.0, LOSS, ["a", "b"]), r1=(8.9, None, ["a", "c"])),
            ["rank 1 is silent", "part at number 2: rank 0: b; rank 1: c"],
            ["first to fail"],
            "the ranks called different collectives, and no weights were changed by it, as above",
        ),
        # an error of one's own is a cause beside a silent rank, and before a loss
        (
            heard(r0=(9.0, "ValueError: no such row", ["a"]), r1=(8.9, None, ["a"])),
            ["rank 1 is silent", "rank 0 also failed, in step 3: ValueError: no such row"],
            ["part at"],
            "rank 1 was killed or stopped in step 3",
        ),
        (
            heard(r0=(8.0, LOSS, ["a", "b"]), r1=(8.9, "ValueError: no such row", ["a"])),
            ["the first to fail was rank 1 in step 3: ValueError: no such row"],
            ["part at", "silent"],
            "rank 1 failed in step 3: ValueError: no such row",
        ),
        # losses alone: the network, or a store that was not told in time
        (
            heard(r0=(9.0, LOSS, ["a"]), r1=(8.9, LOSS, ["a"])),
            [f"the first to fail was rank 1 in step 3: {LOSS}"],
            ["part at", "silent"],
            f"rank 1 failed in step 3: {LOSS}",
        ),
    ],
)
def test_25_what_is_said_of_the_others(now, says, not_says, short):
    text = explain(0, 2, now, now, 12.1, "rank 0 ended in step 3")
    assert "silent" not in text[0] or "rank 1 is silent for 3.2 s" in text[0]
    assert text[-1] == f"in short: {short}"
    assert all(any(words in line for line in text[:-1]) for words in says), text
    assert not any(words in line for line in text for words in not_says), text
    assert text.index("rank 0 ended in step 3") >= 1


def test_25_torchrun_takes_a_cause_before_a_loss_of_the_same_second(tmp_path, monkeypatch):
    seconds = []
    for behind in (False, True):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{behind}.json"))
        monkeypatch.setattr(exit_message.time, "time", lambda: 1234.5)
        exit_message.leave("in short: …", behind)
        told = json.loads((tmp_path / f"{behind}.json").read_text())
        seconds.append(int(told["message"]["extraInfo"]["timestamp"]))
    assert seconds == [1234, 1235]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "RuntimeError: a guard of rank 1"),
        (["--model.moe.top-k", "9"], "--model.moe.top-k=9: must be 1 to --model.moe.experts=4"),
    ],
)
def test_25_torchruns_report_holds_the_line(tmp_path, flags, line):
    """It is the last that one sees; rank 1 raises, or all refuse a setting."""
    script = tmp_path / "one_raises.py"
    script.write_text(
        "import sys, train\n"
        "real = train.Trainer.forward_backward\n"
        "def fails(self, *args):\n"
        "    if self.step == 3 and self.run.rank == 1: raise RuntimeError('a guard of rank 1')\n"
        "    return real(self, *args)\n"
        "train.Trainer.forward_backward = fails\n"
        "train.main(sys.argv[1:])\n"
    )
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    root = str(Path(train.__file__).parent)
    ran = subprocess.run(
        [sys.executable, *agent, *EP2, *flags, "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=os.environ | dict(PYTHONPATH=root, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
    )
    *_, last, border = ran.stderr.strip().splitlines()
    assert ran.returncode == 1 and set(border) == {"="} and line in last, ran.stderr


def two_seconds() -> str:
    """What --train.timeout is given: how long a step may stand still, on cores that others use as well."""
    return f"{min(shared(2.0), 24.0):.1f}"


def raise_here() -> None:
    raise RuntimeError("the cause")


def stands(rank: int, world: int, argv: list[str], how: str) -> None:
    """In step 3 the last rank stops, or it lives and does not go on, holding Python's lock or not.

    Or all ranks do something that takes longer than a step may stand still.
    """
    trainer = start(rank, world, argv)
    mine = rank == world - 1
    unit = trainer.cfg.train.timeout / 2 or 1.0  # 1 s on cores of one's own
    if how == "stopped":
        before_step(trainer, 3, lambda _: mine and os.kill(os.getpid(), signal.SIGSTOP))
    elif how == "asleep":
        before_step(trainer, 3, lambda _: time.sleep(60) if mine else None)
    elif how == "slow to end":
        before_step(trainer, 3, lambda _: raise_here() if mine else None)
        close = trainer.metrics.close
        trainer.metrics.close = lambda **how: (time.sleep(6 * unit), close(**how))[1]
    elif how == "asleep behind a save":
        # longer than the save and the time limit together, on a loaded machine as well
        before_step(trainer, 3, lambda _: time.sleep(60 * unit) if mine else None)
        write = trainer.checkpoints._write
        trainer.checkpoints._write = lambda *args: (time.sleep(6 * unit), write(*args))[1]
    elif how == "slow":
        before_step(trainer, 3, lambda _: time.sleep(5 * unit) if mine else None)
    elif how == "locked":  # as a launch into the full queue of a GPU does
        before_step(trainer, 3, lambda _: ctypes.PyDLL(None).sleep(60) if mine else None)
    else:  # step 0, a save, a validation
        before_step(trainer, 0, lambda _: time.sleep(2.5 * unit))
        for name in ("save", "validate"):
            real = getattr(trainer, name)
            setattr(trainer, name, lambda real=real: (time.sleep(2.5 * unit), real())[1])
    finish(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "asleep", "locked"])
def test_25_a_step_that_stands_still_ends(tmp_path, how):
    """Long before the collectives' own timeout.

    Each rank says where it stands itself and what it knows of the others.
    """
    still = two_seconds()
    flags = [*EP2, "--train.timeout", still, "--out", str(tmp_path)]
    began = time.monotonic()
    ends = launch(2, stands, flags, how, timeout=shared(60), waits=1 if how == "stopped" else 2, limit=LIMIT)
    assert max(end.at for end in ends) - began < shared(25)
    assert ends[0].code == 1 and ends[1].code == (None if how == "stopped" else 1), ends
    assert "ended in step 4, in or after all_" in ends[0].said, ends
    assert how == "asleep" or "rank 1 is silent for" in ends[0].said, ends
    if how != "locked":  # that rank may be gone before the other has waited as long
        moved = re.search(r"error: nothing has moved for (\d+\.\d) s \(--train.timeout\)", ends[0].said)
        assert moved and float(still) <= float(moved[1]) < 2 * float(still), ends
    if how != "stopped":
        says = "Timeout (0:00:" if how == "locked" else "time.sleep(60)"
        assert says in ends[1].said and "test_faults_ranks.py" in ends[1].said, ends


@pytest.mark.slow
def test_25_who_waits_has_not_failed(tmp_path):
    flags = [*EP2, "--train.timeout", two_seconds(), "--parallel.ep", "1", "--out", str(tmp_path)]
    ends = launch(3, stands, flags, "stopped", timeout=shared(60), waits=2, limit=LIMIT)
    for end in ends[:2]:
        assert "rank 2 is silent for" in end.said and "the first to fail" not in end.said, end.said
    assert any(f"rank {1 - rank} stood still, in step 4" in ends[rank].said for rank in (0, 1)), ends


@pytest.mark.slow
def test_25_the_cause_is_said(tmp_path):
    """The cause is the error of the rank that raised.

    Its end may take longer than a step may stand still: metrics on their way to a server, for example.
    """
    flags = [*EP2, "--train.timeout", two_seconds(), "--out", str(tmp_path)]
    ends = launch(2, stands, flags, "slow to end", timeout=shared(60), limit=LIMIT)
    assert [end.code for end in ends] == [1, 1]
    assert "RuntimeError: the cause" in ends[1].said and "raise_here" in ends[1].said, ends[1].said
    assert "error: nothing has moved for" in ends[1].said


def test_25_who_waited_for_a_save_has_time_behind_it(monkeypatch):
    monkeypatch.setattr(standstill, "patience", lambda: timedelta(minutes=10))
    armed = []  # for real it would end this process, which no beat tells that all is well
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, exit: armed.append(seconds))
    clock = Standstill(lambda stood: pytest.fail(f"ended after {stood} s"))
    clock.begin(0.2, time.monotonic() - 5.0)
    clock.saving = lambda: True
    clock.guard()
    clock.saving = lambda: False
    clock.guard()
    assert armed == [600.0, 0.2]
    ended = []
    clock.give_up = ended.append
    moved = clock.since
    time.sleep(0.3)
    clock.guard()
    assert len(ended) == 1 and 0.2 < ended[0] <= time.monotonic() - moved


def test_25_last_words_do_not_wait_for_a_stopped_store(monkeypatch):
    heart = Heartbeat(0, 1, Journal(0, 1))
    silent = threading.Event()  # set at the end: a test that waited for the store would not come there
    monkeypatch.setattr(heartbeat, "HEARS_S", 0.2)
    monkeypatch.setattr(heart, "last_words", lambda error: silent.wait())
    assert heart.words(RuntimeError()).endswith("the store does not answer")
    silent.set()


@pytest.mark.slow
def test_25_a_save_under_way_ends_first(tmp_path):
    flags = [*EP2, "--train.timeout", two_seconds(), "--checkpoint.every", "3", "--out", str(tmp_path)]
    ends = launch(2, stands, flags, "asleep behind a save", timeout=shared(60), limit=LIMIT)
    assert [end.code for end in ends] == [1, 1] and (
        tmp_path / "checkpoints/step-3/manifest.json"
    ).exists(), ends


@pytest.mark.parametrize(
    "how",
    slow_but(
        ["raise error"],
        [
            "raise error",
            "raise ValueError('another') from error",
            "raise ExceptionGroup('of two', [error])",
            "pass",
        ],
    ),
)
def test_a_process_leaves_behind_what_nobody_catches(how):
    """It says so with its traceback, and before what CUDA would do at the end.

    A caller that catches the error goes on as if nothing had happened, and holds nothing.
    """
    code = f"""
import atexit, gc, weakref
from tmoe.run.watch.standstill import leave_behind
atexit.register(print, "the end")
class Model: pass
def fails(held):
    model = Model()
    held.append(weakref.ref(model))
    raise RuntimeError("of all")
held = []
for _ in range(2):
    try:
        fails(held)
    except RuntimeError as caught:
        leave_behind(caught)
gc.collect()
assert not any(model() for model in held)
error = RuntimeError("of all")
leave_behind(error)
{how}
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(train.__file__).parent
    )
    assert (ran.returncode, ran.stdout) == ((0, "the end\n") if how == "pass" else (1, "")), ran
    assert ("RuntimeError: of all" in ran.stderr) is (how != "pass")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "timeout"), [("patient", True), ("slow", False)])
def test_25_what_may_take_long(tmp_path, how, timeout):
    """The first step, a save and a validation: the two seconds are for an ordinary step.

    And any step, where no timeout is set.
    """
    flags = [
        *EP2,
        "--train.timeout",
        two_seconds() if timeout else "0",
        "--train.eval-every",
        "2",
        "--checkpoint.every",
        "2",
        "--steps",
        "4",
    ]
    ends = launch(2, stands, [*flags, "--out", str(tmp_path)], how, timeout=shared(60), limit=LIMIT)
    assert [end.code for end in ends] == [0, 0], ends
    assert all("nothing has moved" not in end.said for end in ends)


def raises(rank: int, world: int, argv: list[str], where: str) -> None:
    def guard(*_):
        if rank == 0:
            print("raised", time.monotonic(), flush=True)
            raise RuntimeError(f"a guard of rank 0 at {where}")  # no user's error, which would be one line

    if where == "start":
        Metrics.open_files = guard
        return train.main(argv)
    trainer = start(rank, world, argv)
    before_step(trainer, 3, guard)
    finish(trainer)


@pytest.mark.parametrize("where", slow_but(["step"], ["start", "step"]))
def test_26_one_rank_raises(tmp_path, where):
    """All end within 5 s, and the last words of each rank hold the first error."""
    ends = launch(2, raises, [*EP2, "--out", str(tmp_path)], where, timeout=30, limit=LIMIT)
    raised_at = float(ends[0].said.split("raised ")[1].split()[0])
    assert [end.code for end in ends] == [1, 1]
    assert max(end.at for end in ends) - raised_at < shared(5)
    for end in ends:
        assert (
            f"the first to fail was rank 0 in step {4 if where == 'step' else 0}: RuntimeError: a guard"
            in end.said
        )


def strays(rank: int, world: int, argv: list[str], how: str) -> None:
    """In step 3 the last rank leaves the others' path; a rank that changes weights in it says so."""
    trainer = start(rank, world, argv)
    mine = rank == world - 1
    scalar = torch.ones(())
    real = dist.all_reduce

    def part(batch):
        if how == "skipped by one":
            mine or dist.all_reduce(scalar)
        elif how == "skipped by each":
            # counts and sizes are equal, and so sums of unlike things pass for results
            dist.all_reduce(scalar) if mine else None
            dist.all_reduce(torch.full((), 10.0)) if not mine else None
        elif how == "other operation":
            dist.all_reduce(scalar) if mine else dist.broadcast(scalar, 0)
        elif how == "other reduction":
            dist.all_reduce(scalar, dist.ReduceOp.MAX if mine else dist.ReduceOp.SUM)
        elif how == "other type":
            dist.all_reduce(torch.ones(4, dtype=torch.int32 if mine else torch.float32))
        elif how.startswith("other size"):
            dist.all_reduce(torch.ones({"other size": 4, "other size, larger": 16}[how] if mine else 8))
        elif how == "skipped inside" and mine:
            # below any replacement of the function: only the group knows
            dist.all_reduce = lambda *args, **kwargs: setattr(dist, "all_reduce", real)

    before_step(trainer, 3, part)
    if how == "after the last step":
        validate = trainer.validate
        trainer.validate = lambda: (None if mine else dist.all_reduce(scalar), validate())[1]
    take = trainer.optimizer.step
    trainer.optimizer.step = lambda: (print(f"weights changed in step {trainer.step}", flush=True), take())
    finish(trainer)


PARTINGS = ["skipped by one", "skipped by each", "skipped inside"]
PARTINGS += ["other operation", "other reduction", "other type", "other size", "other size, larger"]


@pytest.mark.parametrize("how", slow_but(["skipped by each"], [*PARTINGS, "after the last step"]))
def test_27_ranks_part(tmp_path, how):
    """No rank changes its weights with a wrong sum; all end and name the call at which they parted."""
    ends = launch(2, strays, [*EP2, "--out", str(tmp_path)], how, timeout=shared(TIMEOUT), limit=LIMIT)
    assert all(end.code not in (0, None) for end in ends), ends
    last = 7 if how == "after the last step" else 2
    for end in ends:
        assert (
            f"weights changed in step {last}" in end.said
            and f"weights changed in step {last + 1}" not in end.said
        )
    assert_parting_named(ends, how)


@pytest.mark.slow
def test_27_one_of_four_parts(tmp_path):
    flags = [*EP2, "--train.batch", "1", "--out", str(tmp_path)]
    ends = launch(4, strays, flags, "other size", timeout=shared(TIMEOUT), limit=LIMIT)
    assert all(end.code not in (0, None) and "weights changed in step 3" not in end.said for end in ends), (
        ends
    )
    assert_parting_named(ends, "other size")


def assert_parting_named(ends: list[End], how: str) -> None:
    """Each rank names it that gloo does not abort: gloo aborts one that gets more bytes than it asked for."""
    said = [end.said for end in ends if end.code != -signal.SIGABRT]
    assert len(said) == len(ends) or (said and how.startswith(("other size", "skipped inside"))), ends
    assert all("the ranks' collectives part at number" in text for text in said), said
    place = "collectives.py" if how == "skipped inside" else "test_faults_ranks.py"
    assert all(place in text for text in said), said
    if how == "other size":
        assert all(
            f"all_reduce of {n} float32 sum at test_faults" in text for n in (4, 8) for text in said
        ), said


# ---- 28: bad input ----


def save_nan(rank: int, world: int, argv: list[str]) -> None:
    trainer = start(rank, world, argv)
    with torch.no_grad():
        dict(trainer.model.named_parameters())["blocks.1.ffn_norm.weight"].to_local()[3] = float("nan")
    trainer.checkpoints.save(
        0, trainer.tensors(), dict(step=0, tokens=0, guard=trainer.guard.state_dict()), {}
    )
    trainer.checkpoints.finish()


def shards(folder: Path) -> Path:
    text = folder / "a.txt"
    text.write_text("".join(chr(ord("a") + i * i % 26) for i in range(4000)))
    convert((str(text),), out=folder / "shards")
    return folder / "shards"


@pytest.mark.parametrize(
    ("bad", "says"),
    slow_but(
        lambda case: case[0] == "experts",
        [
            ("id", "00000.bin: token id 122 at byte "),
            ("id", "valid ids are 0 to --model.vocab=120 - 1"),
            ("empty", "00000.bin: "),
            (
                "nan",
                "NaN or infinity in model.blocks.1.ffn_norm.weight: "
                "start from another checkpoint (--resume, --init)",
            ),
            ("experts", "--parallel.ep=2: must divide --model.moe.experts=5; valid: [1, 5]"),
        ],
    ),
)
def test_28_bad_input(tmp_path, gloo, bad, says):
    """Every rank ends soon, before the first step.

    Rank 0 says once which field or file is wrong and what would be valid.
    """
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
    ends = launch(2, enter, flags, timeout=60, limit=LIMIT)
    assert max(end.at for end in ends) - began < shared(6)
    assert all(end.code not in (0, None) for end in ends), ends
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", ends[0].said).split())  # tyro frames what it says
    assert words.count(says) == 1 and "Traceback" not in words, ends[0].said
    assert not list(tmp_path.glob("run/metrics.jsonl"))


def enter(rank: int, world: int, argv: list[str]) -> None:
    train.main(argv)
