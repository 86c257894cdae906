"""Whatever only looks at a run may raise anything, anywhere: the run goes on.

Or, if W&B was asked for, it ends before step 0 with one line.

next: test_metrics.py
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from run_logs import config, start, step
from runs import lines
from tiers import slow_but

import train
from benchmarks.launch import launch
from tmoe.base import optional as onlookers
from tmoe.base import versions
from tmoe.base.optional import LONGEST, Onlooker, reason
from tmoe.log import metrics, progress, report
from tmoe.run import profile as runtime

ROOT = Path(train.__file__).parent
TINY = (
    "tiny --no-compile --log.no-progress --model.layers 1 --train.batch 2 --train.seq 32 "
    "--train.eval-batches 1"
).split()
GOES_ON = ", training continues without it: "


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words either")


class Panic(BaseException):
    """What a library written in Rust raises."""


def raising(error):
    def call(*_, **__):
        raise error

    return call


# ---- the mechanism ----


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(28, "No space left on device", "/a/b"), "No space left on device"),
        (OSError("no number"), "OSError: no number"),
        (ValueError("first line\n\n  second"), "ValueError: first line second"),
        (KeyError(), "KeyError"),
        (SystemExit(1), "SystemExit: 1"),
        (Panic("unwrap"), "Panic: unwrap"),
        (Mute(), "Mute"),
        (RuntimeError("x" * 10_000), f"RuntimeError: {'x' * LONGEST}..."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_an_onlooker_raises_is_one_line_and_the_last_that_is_heard_of_it(error, why):
    said, calls = [], []
    look = Onlooker("RUN/x: could not be written", said.append, leave=lambda: calls.append("left") or 1 / 0)
    assert look(lambda: 3) == 3 and not said
    for _ in range(3):
        assert look(lambda: calls.append("looked") or raising(error)()) is None
    assert calls == ["looked", "left"] and not look.works
    assert said == [f"RUN/x: could not be written{GOES_ON}{why}"]
    assert reason(error) == why


def test_the_users_second_ctrl_c_passes():
    with pytest.raises(KeyboardInterrupt):
        Onlooker("x", print)(raising(KeyboardInterrupt()))


# ---- W&B ----

WANDB = """
import os
class MailboxClosedError(Exception): pass
own = MailboxClosedError("wandb-core exited\\nlook there")
ERRORS = dict(own=own, exit=SystemExit(3), type=TypeError("x"))
def fails(where):
    if where in os.environ["FAILS"].split(): raise ERRORS[os.environ["ERROR"]]
class Run:
    lines = 0
    def define_metric(self, *a, **k): fails("define")
    def log(self, *a, **k):
        Run.lines += 1
        if Run.lines > 2: fails("log")
    def finish(self): fails("finish")
fails("import")
def init(**k):
    fails("init")
    return Run()
"""


def with_wandb(rank: int, world: int, argv: list[str], package: str, fails: str, error: str) -> None:
    os.environ.update(FAILS=fails, ERROR=error)
    sys.path.insert(0, package)
    train.main([*argv, "--log.wandb", "mine"])


@pytest.fixture
def package(tmp_path) -> str:
    (tmp_path / "package" / "wandb").mkdir(parents=True)
    (tmp_path / "package" / "wandb" / "__init__.py").write_text(WANDB)
    return str(tmp_path / "package")


@pytest.mark.parametrize(
    ("fails", "error"),
    slow_but([("init", "own")], [("import", "type"), ("init", "own"), ("init", "exit"), ("define", "own")]),
)
def test_wandb_that_cannot_start_is_one_line_before_step_0(tmp_path, package, fails, error):
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step":0}\n')
    (out / "wandb_id").write_text("of the run before")
    ends = launch(2, with_wandb, [*TINY, "--steps", "2", "--out", str(out)], package, fails, error)
    assert [end.code for end in ends] == [2, 2], ends
    assert not any("Traceback" in end.said for end in ends)
    (line,) = [line for end in ends for line in end.said.splitlines() if "error: " in line]
    why = dict(
        own="MailboxClosedError: wandb-core exited look there", exit="SystemExit: 3", type="TypeError: x"
    )
    assert "--log.wandb=mine: W&B could not be started" in line and line.endswith(f": {why[error]}")
    # nothing of the run that was there has changed
    assert (out / "metrics.jsonl").read_text() == '{"step":0}\n' and not (out / "config.json").exists()
    assert (out / "wandb_id").read_text() == "of the run before"


@pytest.mark.parametrize(
    ("fails", "error"),
    slow_but([("log", "exit")], [("log finish", "own"), ("log", "exit"), ("finish", "type")]),
)
def test_wandb_that_dies_later_is_a_note(tmp_path, package, fails, error):
    ends = launch(
        2, with_wandb, [*TINY, "--steps", "5", "--out", str(tmp_path / "run")], package, fails, error
    )
    assert [end.code for end in ends] == [0, 0], ends
    said = "".join(end.said for end in ends)
    assert "Traceback" not in said and said.count(f"run/wandb: could not be written{GOES_ON}") == 1
    assert len(lines(tmp_path / "run")) == 5
    assert (tmp_path / "run" / "report.png").exists() and (
        tmp_path / "run/checkpoints/step-5/manifest.json"
    ).exists()


# ---- TensorBoard, the picture, readings ----


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(report, "draw", lambda path: path)


@pytest.mark.parametrize("when", ["import", "open", "write", "close"])
@pytest.mark.usefixtures("no_pictures")
def test_tensorboard_may_fail_anywhere(tmp_path, monkeypatch, capsys, when):
    fake = types.ModuleType("torch.utils.tensorboard")
    methods = dict(__init__=lambda *a, **k: None, add_scalar=lambda *a: None, close=lambda *a: None)
    broken = dict(open="__init__", write="add_scalar", close="close").get(when)
    if broken:
        methods[broken] = raising(TypeError("Descriptors cannot be created directly"))
    fake.SummaryWriter = type("SummaryWriter", (), methods)
    # None: an import of it raises ImportError
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None if when == "import" else fake)
    with start(config(tmp_path, tensorboard=True)) as log:
        step(log, 0)
        step(log, 1)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(f"{tmp_path}/tensorboard: could not be written{GOES_ON}")


@pytest.mark.parametrize(
    "error", [AttributeError("a font"), MemoryError(), Panic("x"), RecursionError("deep")]
)
def test_a_picture_may_raise_anything(tmp_path, monkeypatch, capsys, error):
    monkeypatch.setattr(report, "load", raising(error))
    with start(config(tmp_path)) as log:
        step(log, 0)
    assert capsys.readouterr().out == f"{tmp_path}/report.png: could not be written{GOES_ON}{reason(error)}\n"


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "tmoe.log.report")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with start(config(tmp_path)) as log:
        step(log, 0)
    assert f"report.png: could not be written{GOES_ON}ModuleNotFoundError: " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["nope", "svg"])
def test_the_picture_needs_no_backend(tmp_path, backend):
    """The environment may name one of a notebook or of another machine.

    A program that plots later still has it, if it is one.
    """
    (tmp_path / "metrics.jsonl").write_text('{"step":0,"loss":1.0}\n')
    code = f"""
import os
from tmoe.log import report
report.draw({str(tmp_path)!r})
import matplotlib
print(os.environ["MPLBACKEND"], matplotlib.get_backend(auto_select=False))
"""
    environment = os.environ | {"MPLBACKEND": backend}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.png").stat().st_size > 20_000
    assert done.stdout.split() == [backend, "svg" if backend == "svg" else "None"]


@pytest.mark.usefixtures("no_pictures")
def test_memory_that_cannot_be_read_is_null(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(metrics, "peak_gib", raising(RuntimeError("NVML: driver mismatch")))
    with start(config(tmp_path)) as log:
        step(log, 0)
        step(log, 1)
    assert [line["peak_gib"] for line in lines(tmp_path)] == [None, None]
    assert (
        capsys.readouterr().out
        == f"peak_gib: could not be read{GOES_ON}RuntimeError: NVML: driver mismatch\n"
    )


def test_versions_that_cannot_be_read_are_none(monkeypatch):
    said = []
    monkeypatch.setattr(versions, "git_state", raising(UnicodeError("no text")))
    monkeypatch.setattr(metrics.importlib.metadata, "version", raising(KeyError("Version")))
    found = versions.versions(said.append)
    assert (
        found["torch"] == torch.__version__ and (found["git"], found["triton"], found["tmoe"]) == (None,) * 3
    )
    assert said == [
        f"version of triton: could not be read{GOES_ON}KeyError: 'Version'",
        f"version of tmoe: could not be read{GOES_ON}KeyError: 'Version'",
        f"version of git: could not be read{GOES_ON}UnicodeError: no text",
    ]


# ---- the trace ----


def traced(rank: int, world: int, argv: list[str], breaks: str) -> None:
    out = Path(argv[argv.index("--out") + 1])
    if breaks == "write":  # and this rank's alone
        if rank == 1:
            (out / "trace-step1-rank1.json.gz" / "in the way").mkdir(parents=True)
    else:
        setattr(torch.profiler.profile, breaks, raising(RuntimeError("CUPTI_ERROR_NOT_INITIALIZED")))
    train.main(argv)


@pytest.mark.parametrize("breaks", ["write", "__init__", "start", "step", "stop"])
def test_a_trace_that_cannot_be_made_ends_no_run(tmp_path, breaks):
    flags = [*TINY, "--steps", "5", "--profile", "1", "3", "--out", str(tmp_path)]
    ends = launch(2, traced, flags, breaks)
    assert [end.code for end in ends] == [0, 0], ends
    told = f"could be written into {tmp_path}{GOES_ON}"
    assert [end.said.count(told) for end in ends] == [0 if breaks == "write" else 1, 1]
    assert not any("Traceback" in end.said for end in ends) and (tmp_path / "checkpoints/step-5").is_dir()
    files = sorted(path.name for path in tmp_path.glob("*trace*") if path.is_file())
    if breaks == "write":
        assert "--profile on rank 1: " in ends[1].said
        assert files == ["trace-step1-rank0.json.gz", "trace-step3-rank0.json.gz"]


@pytest.mark.parametrize("steps", [(1, 3), (1, 4, 5), (1,)], ids=str)
def test_behind_a_trace_that_failed_nothing_is_recorded(tmp_path, caplog, steps):
    """A profiler that went on would fill the memory."""
    (tmp_path / "trace-step1-rank0.json.gz" / "in the way").mkdir(parents=True)
    recorded = []
    with caplog.at_level(logging.WARNING), runtime.profiler(steps, str(tmp_path), 0, 0) as profile:
        for _ in range(8):
            recorded.append(torch.autograd._profiler_enabled())
            profile.step()
    assert recorded == [True, *[False] * 7]
    assert caplog.text.count("no trace could be written") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["trace-step1-rank0.json.gz"]


# ---- the terminal ----


@pytest.fixture
def terminal(monkeypatch):
    """A terminal to write to, and the file number of its other side.

    Once that side is closed, writing raises EIO.
    """
    master, slave = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    stream = open(slave, "w")  # noqa: SIM115
    yield stream, master
    os.dup2(os.open(os.devnull, os.O_WRONLY), slave)
    stream.close()


@pytest.mark.usefixtures("no_pictures")
def test_a_terminal_that_is_closed_ends_no_training(tmp_path, terminal, monkeypatch):
    stream, other_side = terminal
    monkeypatch.setattr(progress, "BAR_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stdout", stream)
    with start(config(tmp_path, progress=True)) as log:
        step(log, 0)
        assert sys.stdout is not stream  # but rich's, which prints above the bar
        os.close(other_side)
        step(log, 1)
        log.note("unseen")
        assert not log.display.look.works and sys.stdout is stream
        step(log, 2)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.usefixtures("no_pictures")
def test_rich_ends_no_training_where_nobody_reads_its_pipe(tmp_path, monkeypatch):
    """With FORCE_COLOR rich takes a pipe for a terminal, and raises SystemExit when `| head` has ended."""
    reads, writes = os.pipe()
    os.close(reads)
    said = []
    with open(writes, "w") as pipe, monkeypatch.context() as m:
        m.setenv("FORCE_COLOR", "1")
        m.setattr(sys, "stdout", pipe)
        m.setattr(progress, "say", said.append)
        with start(config(tmp_path, progress=True)) as log:
            step(log, 0)
            log.note("still told")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert said == [f"progress could not be shown{GOES_ON}SystemExit: 1", "still told"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--log.progress"], []], ids=["lines", "notes"])
def test_a_run_whose_output_goes_to_a_full_disk_ends_with_0(tmp_path, flags):
    command = [sys.executable, "train.py", *TINY, *flags, "--log.no-report"]
    command += ["--steps", "2", "--out", str(tmp_path)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, env=buffered, stdout=full, stderr=full, timeout=800)
    assert done.returncode == 0 and (tmp_path / "checkpoints/step-2").is_dir()


def test_what_cannot_be_printed_is_lost(monkeypatch):
    monkeypatch.setattr(onlookers, "print", raising(Mute()), raising=False)
    onlookers.say("text")
