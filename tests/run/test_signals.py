"""Every signal by which terminals, launchers and schedulers end a job is a last step, saved, and exit code 0.

With one process and with two.

next: test_watch.py
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from runs import lines
from tiers import slow_but

import train
from benchmarks.launch import launch
from tmoe.cli.parse import parse
from tmoe.config.check import ConfigError
from tmoe.config.run import TrainConfig
from tmoe.run import process as runtime

ROOT = Path(train.__file__).parent
TINY = "tiny --model.layers 1 --train.batch 2 --train.seq 32 --train.eval-batches 1".split()
QUIET = ["--no-compile", "--log.no-progress"]
ASKED = ["--train.also-stop-on", "SIGUSR1", "SIGUSR2"]


def whole_steps(out: Path) -> list[str]:
    return sorted(manifest.parent.name for manifest in out.glob("checkpoints/step-*/manifest.json"))


def signalled(
    rank: int, world: int, argv: list[str], signum: int, before: signal.Handlers, times: int
) -> None:
    """The last rank gets the signal in step 2, `times` times, having set its handling to `before`.

    Whatever this process's parent had set.
    """
    signal.signal(signum, before)
    original = train.Trainer.forward_backward

    def forward_backward(trainer, *args):
        if trainer.step == 2 and rank == world - 1:
            for _ in range(times):
                os.kill(os.getpid(), signum)
        return original(trainer, *args)

    train.Trainer.forward_backward = forward_backward
    train.main(argv)


@pytest.mark.parametrize(
    ("world", "signum", "flags"),
    slow_but(
        lambda case: case[:2] in ((1, signal.SIGTERM), (2, signal.SIGHUP)),
        [
            (1, signal.SIGHUP, []),
            (2, signal.SIGHUP, []),
            (1, signal.SIGQUIT, []),
            (2, signal.SIGQUIT, []),
            (1, signal.SIGXCPU, []),
            (2, signal.SIGXCPU, []),
            (1, signal.SIGTERM, []),
            (2, signal.SIGUSR1, ASKED),
            (1, signal.SIGUSR2, ASKED),
        ],
    ),
)
def test_a_signal_to_one_rank_saves_all_and_ends_with_0(tmp_path, world, signum, flags):
    """A second and a third signal change nothing."""
    argv = [*TINY, *QUIET, *flags, "--steps", "50", "--out", str(tmp_path)]
    ends = launch(world, signalled, argv, signum, signal.SIG_DFL, 3)
    assert [end.code for end in ends] == [0] * world, ends
    assert whole_steps(tmp_path) in (["step-3"], ["step-4"]) and (tmp_path / "report.png").exists()
    step = f"{tmp_path}/checkpoints/{whole_steps(tmp_path)[0]}"
    assert f"saved {step}\n" in ends[0].said
    *_, last = ends[0].said.splitlines()
    assert last.startswith("stopped")
    assert f": its state is in {step}, and the same command continues it" in last


@pytest.mark.parametrize("signum", slow_but([signal.SIGHUP], [signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU]))
def test_what_is_ignored_stays_ignored(tmp_path, signum):
    """nohup's SIGHUP, and what a shell starts in the background."""
    argv = [*TINY, *QUIET, "--steps", "4", "--checkpoint.mode", "off", "--out", str(tmp_path)]
    (end,) = launch(1, signalled, argv, signum, signal.SIG_IGN, 1)
    assert end.code == 0 and len(lines(tmp_path)) == 4


def test_without_the_flag_sigusr1_ends_a_run_as_before(tmp_path):
    argv = [*TINY, *QUIET, "--steps", "4", "--out", str(tmp_path)]
    (end,) = launch(1, signalled, argv, signal.SIGUSR1, signal.SIG_DFL, 1)
    assert end.code == -signal.SIGUSR1 and not whole_steps(tmp_path)


def handlers_of_users(rank: int, world: int) -> list[bool]:
    mine = lambda *_: None  # noqa: E731
    for signum in (*runtime.ENDS, signal.SIGUSR1):
        signal.signal(signum, mine)
    run = runtime.start(0, also_stop_on=["SIGUSR1"])
    during = [signal.getsignal(signum) is mine for signum in (*runtime.ENDS, signal.SIGUSR1, signal.SIGUSR2)]
    run.close()
    behind = [signal.getsignal(signum) is mine for signum in (*runtime.ENDS, signal.SIGUSR1)]
    assert all(behind)
    return during


def test_a_users_own_handler_stays_but_for_sigterm_and_what_was_named():
    (end,) = launch(1, handlers_of_users)
    assert next(iter(runtime.ENDS)) == signal.SIGTERM
    assert end.result == [False, True, True, True, True, False, False], end


def test_signals_that_may_be_named():
    assert parse([*TINY, *ASKED], "").train.also_stop_on == ("SIGUSR1", "SIGUSR2")
    with pytest.raises(
        ConfigError, match=r"--train\.also-stop-on=\('SIGKILL',\): must be .* one of SIGUSR1, SIGUSR2"
    ):
        TrainConfig(also_stop_on=("SIGKILL",))


class OnTerminal:
    """A command whose terminal this is; `close` closes it, as the end of an ssh session does."""

    def __init__(self, command: list[str], **env: str):
        self.other_side, side = os.openpty()

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(side, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # this process may run under nohup

        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        environment |= {"TERM": "xterm", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | env
        streams = dict(stdin=side, stdout=side, stderr=side)
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, preexec_fn=take_terminal, **streams
        )
        os.close(side)
        self.said = bytearray()
        self.closing = threading.Event()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        os.set_blocking(self.other_side, False)
        while not self.closing.wait(0.02):
            try:
                self.said += os.read(self.other_side, 1 << 16)
            except BlockingIOError:
                continue
            except OSError:  # the command has ended
                break
        os.close(self.other_side)

    def close(self) -> None:
        self.closing.set()
        self.reader.join()

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_) -> None:
        self.close()
        self.process.kill()
        self.process.wait()


def wait_for_lines(out: Path, terminal: OnTerminal, lines: int) -> None:
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < lines:
        assert terminal.process.poll() is None, terminal.said.decode()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--no-compile"], []], ids=["eager", "compiled"])
def test_a_closed_terminal_takes_no_step_with_it(tmp_path, flags):
    """stdin, stdout, stderr, the bar and the compiler's helpers are gone with it."""
    words = ["train.py", *TINY, *flags, "--steps", "100000", "--out", str(tmp_path)]
    with OnTerminal([sys.executable, *words]) as terminal:
        wait_for_lines(tmp_path, terminal, 3)
        terminal.close()
        assert terminal.process.wait() == 0
    (step,) = whole_steps(tmp_path)
    assert step == f"step-{len(lines(tmp_path))}" and (tmp_path / "report.png").exists()


@pytest.mark.slow
def test_a_closed_terminal_of_torchrun(tmp_path):
    """torchrun hands SIGHUP on and ends with an error of its own; its workers have saved."""
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
        *TINY,
        *QUIET,
    ]
    with OnTerminal([sys.executable, *words, "--steps", "100000", "--out", str(tmp_path)]) as terminal:
        wait_for_lines(tmp_path, terminal, 3)
        terminal.close()
        terminal.process.wait()
    assert len(whole_steps(tmp_path)) == 1 and (tmp_path / "report.png").exists()
