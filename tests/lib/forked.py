"""Python programs forked from the server of gloo.py, which has imported torch and train already.

    done = forked.run(["train.py", "tiny", "--dry-run"])      # or ["-m", "tmoe.report", …], ["-c", code]
    assert done.returncode == 0, done.stderr

As subprocess.run([sys.executable, *words]), without the 4 s of a processor that the imports take. Not for
a program whose environment must be there when torch is imported, nor for one whose interpreter must end:
atexit is run, but no object is taken down.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import gloo
import torch

ROOT = Path(__file__).parents[2]


def run(
    words: Sequence[str | os.PathLike],
    cwd: str | os.PathLike = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 800.0,
) -> subprocess.CompletedProcess:
    """What a program left: returncode (negative: the signal), stdout and stderr.

    words: a script and its arguments, or -m or -c and what follows. env: the whole environment, as of this
    process without it. timeout: seconds, after which the program is killed.

    Raises: subprocess.TimeoutExpired with what the program had said.
    """
    return together([words], cwd, [env], timeout)[0]


def together(
    programs: Sequence[Sequence[str | os.PathLike]],
    cwd: str | os.PathLike = ROOT,
    envs: Sequence[Mapping[str, str] | None] | None = None,
    timeout: float = 800.0,
) -> list[subprocess.CompletedProcess]:
    """As `run`, several programs side by side."""
    gloo.start_server()
    gloo.imported()
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for i, words in enumerate(programs):
            said = f"{folder}/{i}.out", f"{folder}/{i}.err"
            env = dict(os.environ if envs is None or envs[i] is None else envs[i])
            job = context.Process(target=_program, args=([os.fspath(w) for w in words], str(cwd), env, *said))
            job.start()
            jobs.append((job, words, said))
        try:
            ended = []
            for job, words, said in jobs:
                job.join(timeout)
                if job.exitcode is None:
                    raise subprocess.TimeoutExpired(list(words), timeout, *map(_read, said))
                ended.append(subprocess.CompletedProcess(list(words), job.exitcode, *map(_read, said)))
            return ended
        finally:
            for job, *_ in jobs:
                _kill(job)


def _read(path: str) -> str:
    return Path(path).read_text(errors="replace") if Path(path).exists() else ""


def _kill(job: multiprocessing.process.BaseProcess) -> None:
    """Ends a program and what it started: it leads a process group."""
    try:
        os.killpg(job.pid, signal.SIGKILL)
    except ProcessLookupError:
        job.kill()
    job.join()


def _program(words: list[str], cwd: str, env: dict[str, str], out: str, err: str) -> None:
    os.setsid()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(1)
    how, *rest = words
    sys.path.insert(0, str(ROOT))
    try:
        try:
            _execute(how, rest)
        finally:
            atexit._run_exitfuncs()
    except KeyboardInterrupt:  # as Python ends by it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _execute(how: str, rest: list[str]) -> None:
    if how == "-m":
        sys.modules.pop(rest[0], None)
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [how, *rest]
        runpy.run_path(how, run_name="__main__")


def _die_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)
