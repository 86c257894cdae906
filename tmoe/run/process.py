"""The process around a run: process groups, device, seeds, signals, and what ranks must decide together."""

import atexit
import fcntl
import logging
import math
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from tmoe import front
from tmoe.base import last_line
from tmoe.base.listing import listed
from tmoe.base.optional import say, settle_output
from tmoe.base.private_torch import find, lacks, take
from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError
from tmoe.parallel.agree import attempt, by_reason, gathered, unlike
from tmoe.parallel.launcher import (
    PATIENCE,
    TOLD_WHOLE,
    join,
    launcher_world,
    meeting_place,
    require_a_gpu_each,
)
from tmoe.parallel.mesh import default_store, patience
from tmoe.run.watch import Watch

T = TypeVar("T")
STORE_EVERY = 32  # steps of answers between two looks into the store: each takes a message there and back
STARTS = count()  # of this process: as many on all ranks
LINGERS = 10.0  # s that a killed run may take to be gone
# Signals by which terminals, launchers and schedulers end a job, and what each is set to in a fresh process.
ENDS = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGXCPU: signal.SIG_DFL,
}
log = logging.getLogger(__name__)
counters = take("torch._dynamo.utils.counters", "recompiles are not counted")


@dataclass
class Runtime:
    """One process of the run.

    control: a gloo group, through which small facts travel between CPUs: no GPU waits for them.
    """

    rank: int
    world: int
    device: torch.device
    control: dist.ProcessGroup
    watch: Watch
    stop: bool = field(default=False)  # whether a signal that ends the run has arrived here
    told: str = field(default="")  # the name of that signal
    handlers: dict[int, Any] = field(default_factory=dict)  # what signals were set to before this run
    key: str = field(default="")  # in the store, once any rank was told to stop
    asked: int = field(default=0)
    said: bool = field(default=False)

    def sums(self, *values: float) -> list[float]:
        """Sum of each value over all ranks."""
        t = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(t, group=self.control)
        return t.tolist()

    def hears(self) -> bool:
        """Whether this rank was told to stop, or another rank, of which it hears some calls later.

        No collective, for ranks that are not at the same place: the others' word comes through the store,
        which is asked in one call of STORE_EVERY. `sums(stop)` is what all agree on afterwards.
        """
        if self.world == 1:
            return self.stop
        store = self.watch.connection
        if self.stop:
            if not self.said:
                store.set(self.key, "1")
            self.said = True
            return True
        self.asked += 1
        return self.asked % STORE_EVERY == 0 and store.check([self.key])

    def put(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor on the device.

        It goes through pinned memory, or the host would wait for all that the GPU has to do.
        """
        return t.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else t

    @property
    def speaks(self) -> bool:
        """Whether this rank says why all end: one rank of each node, as each node has a log of its own."""
        return self.rank == 0 or launcher_world().local_rank == 0

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    @property
    def memory(self) -> int:
        """Bytes of this rank's GPU, or its share of the host's."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (launcher_world().local_size or 1)

    def together(self, work: Callable[[], T]) -> T:
        """Runs `work`, which calls no collective, on every rank, and returns what it returns.

        If it raises ValueError or OSError on any rank, all ranks end with code 2. The first rank of each node
        prints each different message once, with the ranks that met it.
        """
        result, _, failures = attempt(work, self.control, (ValueError, OSError), front.spelt)
        reasons = sorted(by_reason(failures).items())
        self._refuse([m if len(ranks) == self.world else f"rank {ranks}: {m}" for m, ranks in reasons])
        return cast(T, result)

    def alike(self, facts: Mapping[str, Any]) -> None:
        """Ends all ranks with code 2 where a rank has other facts than rank 0, and says which.

        Ranks that train with other settings or data add up what does not belong together, and nothing else
        would tell.
        """
        self._refuse(unlike(facts, self.control))

    def _refuse(self, lines: list[str]) -> None:
        """Ends all ranks with code 2 if there are lines, which the first rank of each node prints."""
        if lines:
            line = listed("", ["error: " + "\n".join(lines)], indent="")
            if self.speaks:
                say(line, sys.stderr)
            last_line.leave(line)
            raise SystemExit(2)

    @contextmanager
    def refusing(self, *kinds: type[Exception]) -> Iterator[None]:
        """Around collective work that fails on all ranks alike: an error ends them with code 2.

        The first rank of each node says why, once and without a traceback.

        kinds: the errors that are meant; by default CheckpointError and ValueError.
        """
        kinds = kinds or (CheckpointError, ValueError)
        try:
            yield
        except kinds as error:
            line = f"error: {front.spelt(error)}"
            if self.speaks:
                say(line, sys.stderr)
            last_line.leave(line)
            raise SystemExit(2) from None

    def claim(self, out: str) -> BinaryIO | None:
        """Keeps other processes out of the run folder until rank 0 closes the returned file or is gone.

        Rank 0 of another run that is still there may take LINGERS seconds to go: only then it is known which
        checkpoint it leaves. If it stays, ConfigError is raised as `together` has it. Where the file system
        knows no locks, other processes are not kept out.
        """

        def take() -> BinaryIO | None:
            if self.rank:
                return None
            try:
                Path(out).mkdir(parents=True, exist_ok=True)
                file = open(Path(out, ".lock"), "a+b")  # noqa: SIM115 (stays open)
            except OSError as error:
                wrong = f"no files can be made there ({error.strerror}); name a folder on a disk"
                raise ConfigError.of("out", out, wrong) from None
            deadline = time.monotonic() + LINGERS
            while True:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    sign(file)
                    return file
                except (BlockingIOError, PermissionError):
                    if time.monotonic() > deadline:
                        holder = signed(file)
                        file.close()
                        wrong = f"another process{holder} trains into it; end that one, or choose another"
                        raise ConfigError.of("out", out, wrong) from None
                    time.sleep(0.1)
                except OSError:  # no locks here
                    return file

        return self.together(take)

    def blame(self, step: int, loss: float, norm: float, mean: float, samples: list[int]) -> None:
        """Says on rank 0 why a step is strange. A collective of all ranks.

        Either the gradient norm alone is not finite; or it is the loss, and then the rank whose tokens have
        the highest mean loss, or one that is not finite, is named with its samples.

        loss, norm: of all ranks. mean: of this rank's own targets. samples: those that this rank read.
        """
        told = gathered((mean, samples), self.control)
        rank = max(range(self.world), key=lambda r: told[r][0] if math.isfinite(told[r][0]) else math.inf)
        if self.rank == 0 and math.isfinite(loss) and not math.isfinite(norm):
            log.warning("step %d: gradient norm %g, with a loss of %.4g", step, norm, loss)
        elif self.rank == 0:
            words = "step %d: loss %.4g, highest on rank %d with %.4g: samples %s"
            log.warning(words, step, loss, rank, *told[rank])

    def close(self) -> None:
        """Leaves the process group. A collective: rank 0 holds the store, which no rank may still need then.

        Signals do again what they did before the run, unless the run was told to stop: a second signal must
        not end a process halfway that is ending already.
        """
        (told,) = self.sums(self.stop)
        if not told:
            for signum, handler in self.handlers.items():
                signal.signal(signum, handler)
        dist.destroy_process_group()


def sign(lock: BinaryIO) -> None:
    """Writes into a run's lock who holds it: process and host. A disk that is full now keeps no run out."""
    with suppress(OSError):
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"{os.getpid()} {socket.gethostname()}\n".encode())


def signed(lock: BinaryIO) -> str:
    """Who holds a run's lock, to stand behind "another process"; "" where it does not say."""
    lock.seek(0)
    words = lock.read(300).decode(errors="replace").split()
    return f", {words[0]} on {words[1]}," if len(words) == 2 else ""


def launched() -> tuple[int, int]:
    """(rank, world) as the launcher announces them, or of the process group that is there.

    A plain `python train.py` is rank 0 of 1. An announcement that cannot be right ends the process with code
    2: half of it is missing, the world has no such rank, a host has more ranks than GPUs, there is no place
    to meet at.
    """
    with one_error():
        if missing := lacks():
            raise ValueError(missing)
        world = launcher_world()
        if not dist.is_initialized():
            require_a_gpu_each(world)
            if world.launcher not in TOLD_WHOLE and world.size > 1:
                meeting_place(world)
    return world.rank, world.size


@contextmanager
def one_error() -> Iterator[None]:
    """Around what comes before the process group: a ValueError ends it with code 2 and one message."""
    try:
        yield
    except ValueError as error:
        line = f"error: {front.spelt(error)}"
        print(line, file=sys.stderr)
        last_line.leave(line)
        raise SystemExit(2) from None


def start(seed: int, timeout: float = PATIENCE.total_seconds(), also_stop_on: Iterable[str] = ()) -> Runtime:
    """Joins the process group, takes the device, seeds every generator and begins to hear signals.

    Seeds depend on the rank, for dropout and jitter.

    timeout: seconds that the ranks' meeting and each collective wait for a rank.
    also_stop_on: names of signals that end the run besides those of ENDS.
    """
    rank, world = launched()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("tmoe").setLevel(logging.INFO)
    if not torch.cuda.is_available():  # torch's compiler would warn of it on each rank
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    place = launcher_world()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", place.local_rank or 0)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        with one_error():
            join(timedelta(seconds=timeout))
    random.seed(seed + rank)
    np.random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    control = dist.new_group(backend="gloo", timeout=patience())
    assert isinstance(control, dist.ProcessGroup)
    runtime = Runtime(rank, world, device, control, Watch(rank, world, default_store(), control))
    runtime.key = f"tmoe stop {next(STARTS)}"

    if threading.current_thread() is threading.main_thread():
        hear_signals(runtime, also_stop_on)
    atexit.unregister(settle_output)  # of an earlier run in this process
    atexit.register(settle_output)
    return runtime


def hear_signals(runtime: Runtime, also_stop_on: Iterable[str]) -> None:
    """From now on the signals of ENDS, and those named in `also_stop_on`, set runtime.stop.

    A signal that is ignored stays so, and one that has a handler keeps it: nohup makes a process ignore
    SIGHUP, and a shell makes what it starts in the background ignore Ctrl-C. SIGTERM and signals asked for by
    name are always heard.
    """
    # A launcher hands on the Ctrl-C that the terminal has given each process already.
    launcher = bool(launcher_world().launcher)

    def hear(signum: int, frame: FrameType | None) -> None:
        runtime.stop, runtime.told = True, signal.Signals(signum).name
        if signum == signal.SIGINT and not launcher:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with suppress(OSError):  # Ctrl-C ends a `tee` behind stderr first
                # not print, in the middle of which the signal may have come
                os.write(2, b"\nCtrl-C: this step is finished and saved; a second one ends without it\n")

    named = [signal.Signals[name] for name in also_stop_on]
    for signum in [*ENDS, *named]:
        if signum in (signal.SIGTERM, *named) or signal.getsignal(signum) == ENDS[signum]:
            runtime.handlers[signum] = signal.signal(signum, hear)


def rng_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States of torch's generators, on the CPU and on this device: dropout and jitter draw from them."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def has_compiler() -> bool:
    """Whether torch.compile finds the C++ compiler that it needs on the CPU."""
    get_cpp_compiler = find("torch._inductor.cpp_builder.get_cpp_compiler")
    if get_cpp_compiler is None:
        return any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "clang++") if name)
    try:
        return bool(get_cpp_compiler())
    except RuntimeError:  # InvalidCxxCompiler is one
        return False


def all_finite(*values: torch.Tensor) -> torch.Tensor:
    """1 if all values are finite, else 0: a 0-dim fp32 tensor, for which no host waits.

    The values are the same on all ranks, so every rank decides alike.
    """
    return torch.stack([v.isfinite() for v in values]).all().float()


def to_host(tree: Any) -> Any:
    """The same nest of tuples, named tuples and lists, with its tensors on their way to the CPU."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", non_blocking=True)
    if isinstance(tree, tuple | list):
        parts = [to_host(part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


class OnItsWay:
    """Tensors (in any nest of tuples) whose copy to the host has begun.

    `read` waits for them alone, not for what the GPU was given since. `ended`, once read: when the GPU had
    them, as time.perf_counter() tells time. The time at which the host reads them would not do: when the host
    is late, a part of one step's time is counted in the next one's, and a step of 124% MFU was seen.
    """

    last: "tuple[torch.cuda.Event, float] | None" = None  # the one read before, and when it ended

    def __init__(self, tree: T):
        self.host = to_host(tree)
        self.ended = time.perf_counter()
        self.copied = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None
        if self.copied:
            self.copied.record()

    def read(self) -> T:
        if self.copied:
            self.copied.synchronize()
            if OnItsWay.last is None:
                self.ended = time.perf_counter()
            else:
                copied_before, ended_before = OnItsWay.last
                self.ended = ended_before + copied_before.elapsed_time(self.copied) / 1e3
            OnItsWay.last = self.copied, self.ended
        return self.host
