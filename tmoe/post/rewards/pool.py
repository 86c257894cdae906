"""Processes that compute rewards and are killed if they hang, so that no reward can stop a run.

Each process is a fresh Python (worker.py), not a fork: a fork would have copies of this process's CUDA and
gloo, and locks held by threads that the fork does not have. A worker shares two pipes with this process and
nothing else. A signal inside a worker could not end a loop in C, so a late reward is ended by killing its
process, and a new process is started. That reward of the sample counts as hung; the sample's known rewards
are kept, and its remaining rewards are computed afterwards.

next: post/rewards/worker.py
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tmoe.config.check import ConfigError
from tmoe.post.rewards.reward_sample import RewardSample
from tmoe.post.rewards.reward_terms import SETTING, Term

WORKER = Path(__file__).with_name("worker.py")
START_S = 120.0  # limit of the time in which a worker imports the modules of its rewards
MOST_HUNG = 8  # number of hangs in a row after which a reward is not tried again in this step
MOST_STARTS = 3  # failed starts in a row, once all workers have run, after which the run fails
TICK_S = 0.1  # interval of the checks for ended processes whose children keep the pipe open
LONGEST_LINE = 2**16
LENGTH = 4  # bytes of a frame's length, which precedes the frame
OF_LAUNCHERS = "MASTER_ RANK WORLD_SIZE LOCAL_ GROUP_ ROLE_ TORCHELASTIC_ NCCL_ GLOO_ PMI OMPI_ SLURM_PROCID"


class Fault(NamedTuple):
    """The failure of a reward that gave no finite number."""

    kind: str
    told: str = ""
    """its traceback"""


Outcome = float | Fault


class Spoiled(Exception):
    """A worker's pipe has data that is not a worker's message."""


def understood(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Spoiled from error
    if not isinstance(message, dict):
        raise Spoiled
    return message


def environment() -> dict[str, str]:
    """This process's environment, without variables by which a worker could join the run or use its GPU.

    PYTHONHASHSEED gives sets of text the same order in every worker.
    """
    ours = tuple(OF_LAUNCHERS.split())
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return (
        variables
        | threads
        | dict(CUDA_VISIBLE_DEVICES="", PYTHONHASHSEED="0", TOKENIZERS_PARALLELISM="false")
    )


class Worker:
    """This process's side of one worker."""

    def __init__(self, hello: bytes) -> None:
        jobs, self.jobs = os.pipe()
        self.replies, replies = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(jobs), str(replies), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(jobs, replies),
                start_new_session=True,
                env=environment(),
            )
        except BaseException:
            os.close(self.jobs)
            os.close(self.replies)
            raise
        finally:
            os.close(jobs)
            os.close(replies)
        for ours in (self.jobs, self.replies):
            os.set_blocking(ours, False)
        self.ready = self.closed = self.over = False
        self.job: int | None = None
        self.end_of_job = 0  # the first term that is not the job's
        self.to_write = bytearray()
        self.read = bytearray()
        self.give(hello, START_S)

    def give(self, frame: bytes, seconds: float) -> None:
        self.to_write += len(frame).to_bytes(LENGTH, "big") + frame
        self.wait_for(seconds)

    def wait_for(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    @property
    def idle(self) -> bool:
        return self.ready and self.job is None

    def write(self) -> None:
        """Writes as much as the pipe accepts now. Data for a closed pipe is lost; reading shows why."""
        try:
            while self.to_write:
                del self.to_write[: os.write(self.jobs, self.to_write[: 2**16])]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.to_write.clear()

    def lines(self) -> Iterator[dict[str, Any]]:
        """The complete lines that have arrived. Raises Spoiled at one that is not a worker's message."""
        with contextlib.suppress(BlockingIOError):
            while len(self.read) <= LONGEST_LINE:
                some = os.read(self.replies, LONGEST_LINE)
                if not some:
                    self.closed = True
                    break
                self.read += some
        *whole, rest = bytes(self.read).split(b"\n")
        self.read = bytearray(rest)
        yield from map(understood, whole)
        if len(rest) > LONGEST_LINE:
            raise Spoiled

    def spoils(self) -> bool:
        """Whether an idle worker has ended or sent anything; no sample is at fault then."""
        try:
            return bool(list(self.lines()) or self.read or self.closed)
        except Spoiled:
            return True

    def has_ended(self) -> bool:
        """Whether the process has ended; waits for its end if it has closed its pipe, shortly before."""
        if self.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)
        return self.process.poll() is not None

    def end(self) -> None:
        """Kills the worker with its whole process group. A second call does nothing."""
        if self.over:
            return
        self.over = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for ours in (self.jobs, self.replies):
            os.close(ours)
        with contextlib.suppress(subprocess.TimeoutExpired):  # blocked by a file system: do not wait for it
            self.process.wait(5.0)


class Pool:
    """Workers that compute the terms. Raises ConfigError for a term that a worker cannot load."""

    def __init__(self, terms: Sequence[Term], workers: int, timeout_s: float) -> None:
        self.terms = terms
        self.timeout_s = timeout_s
        specs = [
            dict(name=t.name, argument=t.argument, file=t.file and str(t.file), source=t.source)
            for t in terms
        ]
        self.hello = pickle.dumps(dict(path=sys.path, timeout_s=timeout_s, terms=specs))
        self.started = False
        self.failed = 0  # failed starts in a row
        # A worker ends with the thread that started it (PR_SET_PDEATHSIG), so a thread that lives as long as
        # this pool starts all workers.
        self.starter = ThreadPoolExecutor(1, "rewards")
        self.workers: list[Worker] = []
        self._forget()
        try:
            for _ in range(workers):
                self.workers.append(self.start())
            while not all(worker.ready for worker in self.workers):
                self.wait()
        except BaseException:
            self.close()
            raise
        self.started = True

    def _forget(self) -> None:
        self.pickled: list[bytes] = []
        self.found: list[list[Outcome]] = []
        self.todo: deque[int] = deque()
        self.left = 0
        self.hung = [0] * len(self.terms)  # number of hangs in a row

    def start(self) -> Worker:
        return self.starter.submit(Worker, self.hello).result()

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers = []
        self.starter.shutdown()

    def run(self, samples: Sequence[RewardSample]) -> list[list[Outcome]]:
        """For each sample, the outcome of each term."""
        if not self.workers:
            raise RuntimeError("rewards: they are closed")
        self.pickled = [pickle.dumps(tuple(sample)) for sample in samples]
        outcomes = self.found = [[] for _ in samples]
        self.todo.extend(range(len(samples)))
        self.left = len(samples)
        try:
            while self.left:
                self.wait()
        except BaseException:  # workers have unfinished jobs
            self.close()
            raise
        self._forget()
        return outcomes

    def wait(self) -> None:
        """Gives samples to idle workers, and checks busy ones when data arrives or a deadline is over."""
        for i, worker in enumerate(self.workers):
            if worker.idle and self.todo and worker.spoils():
                self.replace(i)
            elif worker.idle and (job := self.next_job()) is not None:
                first, worker.job = len(self.found[job]), job
                given_up = (term for term in range(first, len(self.terms)) if self.gives_up(term))
                worker.end_of_job = next(given_up, len(self.terms))
                frame = job, first, worker.end_of_job, self.pickled[job]
                worker.give(pickle.dumps(frame), self.timeout_s)
        busy = [(i, worker) for i, worker in enumerate(self.workers) if not worker.idle]
        if not busy:
            return
        with selectors.DefaultSelector() as selector:
            for _, worker in busy:
                selector.register(worker.replies, selectors.EVENT_READ)
                if worker.to_write:
                    selector.register(worker.jobs, selectors.EVENT_WRITE)
            first = min(worker.deadline for _, worker in busy)
            selector.select(max(0.0, min(TICK_S, first - time.monotonic())))
        for i, worker in busy:
            self.look(i, worker)

    def gives_up(self, term: int) -> bool:
        """Whether a term is not tried again; else a term that always hangs would cost a timeout a sample."""
        return self.hung[term] >= MOST_HUNG

    def next_job(self) -> int | None:
        """The next sample with terms to be tried; terms that are given up are recorded as faults."""
        while self.todo:
            job = self.todo.popleft()
            while (term := len(self.found[job])) < len(self.terms) and self.gives_up(term):
                self.know(job, Fault("was not tried", f"it had hung {MOST_HUNG} times in a row"))
            if term < len(self.terms):
                return job
        return None

    def look(self, i: int, worker: Worker) -> None:
        """Handles the state of a worker: replies, the end of its process, or a missed deadline."""
        worker.write()
        ended = worker.has_ended()  # before its last lines are read
        try:
            for line in worker.lines():
                (self.take if worker.ready else self.greet)(worker, line)
        except Spoiled:
            return self.lose(i, worker, Fault("broke its pipe"))
        if worker.idle:
            return None
        late = time.monotonic() > worker.deadline
        if ended or (worker.closed and worker.has_ended()):
            self.lose(i, worker, Fault("died", f"exit code {worker.process.returncode}"))
        elif worker.closed:
            self.lose(i, worker, Fault("broke its pipe"))
        elif late:
            self.lose(
                i, worker, Fault("hung", f"for more than {self.timeout_s if worker.ready else START_S:g} s")
            )

    def greet(self, worker: Worker, line: dict[str, Any]) -> None:
        """Handles the first line of a worker. ConfigError, in the first start, for a term that it refuses."""
        if line.get("ready") is True:
            worker.ready = True
            self.failed = 0
        elif "refused" in line and not self.started:
            i, why = line["refused"]
            raise self.terms[i].refuse(why)

    def take(self, worker: Worker, line: dict[str, Any]) -> None:
        """Records the next outcome of the worker's sample. Raises Spoiled if the line is anything else."""
        job = worker.job
        if job is None or line.get("job") != job or line.get("term") != len(self.found[job]):
            raise Spoiled
        value, fault = line.get("value"), line.get("fault")
        if isinstance(fault, str):
            self.know(job, Fault(fault, str(line.get("told", ""))))
        elif isinstance(value, float) and math.isfinite(value):
            self.know(job, value)
        else:
            raise Spoiled
        self.hung[line["term"]] = 0
        worker.wait_for(self.timeout_s)
        if len(self.found[job]) == worker.end_of_job:
            worker.job = None
            if worker.end_of_job < len(self.terms):
                self.todo.appendleft(job)

    def know(self, job: int, outcome: Outcome) -> None:
        self.found[job].append(outcome)
        self.left -= len(self.found[job]) == len(self.terms)

    def lose(self, i: int, worker: Worker, fault: Fault) -> None:
        """Replaces a worker. The reward that it was computing gets this fault; the next ones follow later."""
        why = f"a process with these rewards {fault.kind} before it was ready ({fault.told})"
        if not worker.ready:
            self.failed += 1
            if not self.started:
                raise ConfigError.of(SETTING, " ".join(term.word for term in self.terms), why)
            if self.failed == MOST_STARTS:
                raise RuntimeError(f"rewards: {why}, {MOST_STARTS} times in a row")
        elif (job := worker.job) is not None:
            self.hung[len(self.found[job])] += fault.kind == "hung"
            self.know(job, fault)
            if len(self.found[job]) < len(self.terms):
                self.todo.appendleft(job)
        self.replace(i)

    def replace(self, i: int) -> None:
        self.workers[i].end()
        self.workers[i] = self.start()
