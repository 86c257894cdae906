"""Runs Python programs as forks of the server of gloo.py, which has already imported torch and train.

    done = forked.run(["train.py", "tiny", "--dry-run"])      # or ["-m", "tmoe.report", …], ["-c", code]
    assert done.returncode == 0, done.stderr
    done = forked.torchrun(2, ["train.py", "tiny", "--parallel.ep", "2"])      # two ranks of one program

`run` is like subprocess.run([sys.executable, *words]), without the 4 CPU seconds that the imports take. It
does not suit a program that reads its environment when torch is imported, or whose interpreter must end:
atexit functions run, but objects are not destroyed. With TRITON_INTERPRET=1 in its environment a program is
forked from a second server, which has imported triton with it, and triton's interpreter is faster
(interpreter.py).
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import gloo
import torch
from interpreter import save_repeated_work

ROOT = Path(__file__).parents[2]
INTERPRETED = ("early", "torch", "numpy", "pytest", "triton.language", "tmoe", "settled")  # without kernels
FAREWELL_S = 30.0  # seconds that torchrun too gives the remaining ranks after one has failed


def run(
    words: Sequence[str | os.PathLike],
    cwd: str | os.PathLike = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 800.0,
) -> subprocess.CompletedProcess:
    """The result of a program: returncode (negative: the signal), stdout and stderr.

    words: a script and its arguments, or -m or -c with the words after it.
    env: the whole environment; None: this process's.
    timeout: seconds after which the program is killed.

    Raises subprocess.TimeoutExpired with the program's output so far.
    """
    return together([words], cwd, [env], timeout)[0]


def together(
    programs: Sequence[Sequence[str | os.PathLike]],
    cwd: str | os.PathLike = ROOT,
    envs: Sequence[Mapping[str, str] | None] | None = None,
    timeout: float = 800.0,
) -> list[subprocess.CompletedProcess]:
    """Like `run` for several programs at once.

    FAREWELL_S after one has failed, the other programs are killed.
    """
    given = [os.environ if env is None else env for env in envs or [None] * len(programs)]
    if any(env.get("TRITON_INTERPRET") != "1" for env in given):
        gloo.start_server()
        gloo.imported()
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for i, words in enumerate(programs):
            files = f"{folder}/{i}.out", f"{folder}/{i}.err"
            env = dict(given[i])
            job = context.Process(
                target=_program, args=([os.fspath(w) for w in words], str(cwd), env, *files)
            )
            _start(job, env.get("TRITON_INTERPRET") == "1")
            jobs.append((job, words, files))
        try:
            _wait([job for job, *_ in jobs], timeout)
            ended = []
            for job, words, files in jobs:
                if job.exitcode is None:
                    raise subprocess.TimeoutExpired(list(words), timeout, *map(_read, files))
                ended.append(subprocess.CompletedProcess(list(words), job.exitcode, *map(_read, files)))
            return ended
        finally:
            for job, *_ in jobs:
                _kill(job)


def torchrun(
    world: int,
    words: Sequence[str | os.PathLike],
    cwd: str | os.PathLike = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 800.0,
) -> subprocess.CompletedProcess:
    """Like `run`, but runs the program on `world` ranks, in the environment that torchrun gives them.

    A rank that fails ends all other ranks, as torchrun's agent does. The result has the failed rank's code,
    and the output of all ranks in order of rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = dict(os.environ if env is None else env)
    given |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world))
    given |= dict(LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0", TORCHELASTIC_RUN_ID="none")
    envs = [given | dict(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(world)]
    ranks = together([words] * world, cwd, envs, timeout)
    codes = [rank.returncode for rank in ranks if rank.returncode]
    codes.sort(key=lambda code: code == -signal.SIGKILL)  # last: ranks that `together` killed
    output = ("".join(rank.stdout for rank in ranks), "".join(rank.stderr for rank in ranks))
    return subprocess.CompletedProcess(list(words), codes[0] if codes else 0, *output)


@cache
def _interpreter() -> forkserver.ForkServer:
    """The fork server of programs that run kernels in triton's interpreter."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(list(INTERPRETED))
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1"):
        server.ensure_running()
    return server


def _start(job: multiprocessing.process.BaseProcess, interpreted: bool) -> None:
    """Forks the program from its server; multiprocessing itself supports only one server."""
    if not interpreted:
        job.start()
        return
    with patch.object(forkserver, "connect_to_new_process", _interpreter().connect_to_new_process):
        job.start()


def _wait(jobs: list[multiprocessing.process.BaseProcess], timeout: float) -> None:
    """Returns when all jobs have ended, FAREWELL_S after one has failed, or after `timeout` seconds.

    The jobs that still run after a failure are killed.
    """
    end = time.monotonic() + timeout
    left = list(jobs)
    failed = False
    while left and (ready := wait([job.sentinel for job in left], max(0.0, end - time.monotonic()))):
        for job in [job for job in left if job.sentinel in ready]:
            job.join()
            left.remove(job)
            if job.exitcode and not failed:
                failed = True
                end = min(end, time.monotonic() + FAREWELL_S)
    for job in left if failed else ():
        _kill(job)


def _read(path: str) -> str:
    return Path(path).read_text(errors="replace") if Path(path).exists() else ""


def _kill(job: multiprocessing.process.BaseProcess) -> None:
    """Kills a program and the processes that it started: it leads a process group."""
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
    if env.get("TRITON_INTERPRET") == "1":
        save_repeated_work()
    if "torch._dynamo" in sys.modules:  # dynamo read the variable when it was imported
        torch._dynamo.config.disable = env.get("TORCH_COMPILE_DISABLE") == "1"
    how, *rest = words
    sys.path.insert(0, str(ROOT))
    try:
        try:
            _execute(how, rest)
        finally:
            atexit._run_exitfuncs()
    except KeyboardInterrupt:  # end by SIGINT, as Python does
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
