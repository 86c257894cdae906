"""The process of a run: process groups, device, seeds, signals, and decisions that ranks make together."""

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
from tmoe.base import exit_message
from tmoe.base.listing import listed
from tmoe.base.optional import say, settle_output
from tmoe.base.private_torch import find, find_or_note, lacks
from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError
from tmoe.parallel.agree import attempt, by_reason, differing_facts, gathered
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
STORE_EVERY = 32  # calls of `stop_requested` between two reads of the store, each a network round trip
STARTS = count()  # numbers the starts of this process; equal on all ranks
LINGERS = 10.0  # seconds that a killed run may take to end
# Signals by which terminals, launchers and schedulers end a job, and their handlers in a new process.
ENDS = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGXCPU: signal.SIG_DFL,
}
log = logging.getLogger(__name__)
counters = find_or_note("torch._dynamo.utils.counters", "recompiles are not counted")


@dataclass
class Runtime:
    """One process of the run.

    control: a gloo group, through which small facts are sent between CPUs, so that no GPU waits for them.
    """

    rank: int
    world: int
    device: torch.device
    control: dist.ProcessGroup
    watch: Watch
    stop: bool = field(default=False)  # whether this rank received a signal that ends the run
    told: str = field(default="")  # the name of that signal
    handlers: dict[int, Any] = field(default_factory=dict)  # the handlers before this run
    key: str = field(default="")  # the store has this key once any rank must stop
    asked: int = field(default=0)
    said: bool = field(default=False)

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Sum of each value over all ranks."""
        t = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(t, group=self.control)
        return t.tolist()

    def stop_requested(self) -> bool:
        """Whether this rank or another rank was asked to stop; the latter is known some calls later.

        No collective, so ranks may call it at different places. Other ranks report a stop through the store,
        which is read in one of STORE_EVERY calls. Afterwards all ranks agree by `sums(stop)`.
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

    def to_device(self, t: torch.Tensor) -> torch.Tensor:
        """The tensor on the device.

        It is copied from pinned memory; otherwise the host would wait for all work of the GPU.
        """
        return t.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else t

    @property
    def prints_for_node(self) -> bool:
        """Whether this rank prints why all ranks end: one rank per node, as each node has its own log."""
        return self.rank == 0 or launcher_world().local_rank == 0

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    @property
    def memory(self) -> int:
        """Bytes of memory of this rank's GPU, or its share of the host's memory."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (launcher_world().local_size or 1)

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """Runs `work`, which calls no collective, on every rank, and returns its result.

        If it raises ValueError or OSError on any rank, all ranks end with code 2. The first rank of each node
        prints each different message once, with the ranks that raised it.
        """
        result, _, failures = attempt(work, self.control, (ValueError, OSError), front.spelt)
        reasons = sorted(by_reason(failures).items())
        self._refuse([m if len(ranks) == self.world else f"rank {ranks}: {m}" for m, ranks in reasons])
        return cast(T, result)

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """Ends all ranks with code 2 if a rank has other facts than rank 0, and prints which.

        Ranks with different settings or data would add up gradients that do not belong together, without an
        error.
        """
        self._refuse(differing_facts(facts, self.control))

    def _refuse(self, lines: list[str]) -> None:
        """Ends all ranks with code 2 if there are lines, which the first rank of each node prints."""
        if lines:
            line = listed("", ["error: " + "\n".join(lines)], indent="")
            if self.prints_for_node:
                say(line, sys.stderr)
            exit_message.leave(line)
            raise SystemExit(2)

    @contextmanager
    def refusing(self, *kinds: type[Exception]) -> Iterator[None]:
        """Around collective work that fails on all ranks in the same way: an error ends them with code 2.

        The first rank of each node prints the reason, once and without a traceback.

        kinds: the handled exceptions; by default CheckpointError and ValueError.
        """
        kinds = kinds or (CheckpointError, ValueError)
        try:
            yield
        except kinds as error:
            line = f"error: {front.spelt(error)}"
            if self.prints_for_node:
                say(line, sys.stderr)
            exit_message.leave(line)
            raise SystemExit(2) from None

    def claim(self, out: str) -> BinaryIO | None:
        """Locks the run folder against other processes until rank 0 closes the returned file or ends.

        Rank 0 of another run that still holds the lock may take LINGERS seconds to end: only then its last
        checkpoint is known. If it does not end, ConfigError is raised through `together`. If the file system
        has no locks, other processes are not locked out.
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
                        wrong = f"another process{holder} trains into it; end it, or choose another folder"
                        raise ConfigError.of("out", out, wrong) from None
                    time.sleep(0.1)
                except OSError:  # no locks on this file system
                    return file

        return self.on_all_ranks(take)

    def explain_bad_step(self, step: int, loss: float, norm: float, mean: float, samples: list[int]) -> None:
        """Logs on rank 0 why a step is strange. A collective of all ranks.

        If only the gradient norm is not finite, the norm is logged. Otherwise the loss is strange, and the
        log names the rank whose tokens have the highest mean loss, or a loss that is not finite, with the
        samples of that rank.

        loss, norm: of all ranks. mean: mean loss of this rank's own targets. samples: samples that this rank
        read.
        """
        by_rank = gathered((mean, samples), self.control)
        rank = max(
            range(self.world), key=lambda r: by_rank[r][0] if math.isfinite(by_rank[r][0]) else math.inf
        )
        if self.rank == 0 and math.isfinite(loss) and not math.isfinite(norm):
            log.warning("step %d: gradient norm %g, with a loss of %.4g", step, norm, loss)
        elif self.rank == 0:
            words = "step %d: loss %.4g, highest on rank %d with %.4g: samples %s"
            log.warning(words, step, loss, rank, *by_rank[rank])

    def close(self) -> None:
        """Leaves the process group. A collective: rank 0 holds the store, and must outlast all uses of it.

        The signal handlers of before the run are restored, unless the run was asked to stop: a second signal
        must not interrupt a process that is already ending.
        """
        (stops,) = self.sum_over_ranks(self.stop)
        if not stops:
            for signum, handler in self.handlers.items():
                signal.signal(signum, handler)
        dist.destroy_process_group()


def sign(lock: BinaryIO) -> None:
    """Writes the holder into a run's lock: process and host. An error, as of a full disk, is ignored."""
    with suppress(OSError):
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"{os.getpid()} {socket.gethostname()}\n".encode())


def signed(lock: BinaryIO) -> str:
    """The holder of a run's lock, formatted to follow "another process"; "" if the lock does not name it."""
    lock.seek(0)
    words = lock.read(300).decode(errors="replace").split()
    return f", {words[0]} on {words[1]}," if len(words) == 2 else ""


def launched() -> tuple[int, int]:
    """(rank, world) as the launcher announces them, or those of an existing process group.

    A plain `python train.py` is rank 0 of 1. An invalid announcement ends the process with code 2: a part of
    it is missing, the world has no such rank, a host has more ranks than GPUs, or there is no address for the
    rendezvous.
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
    """Around code before the process group exists: a ValueError ends it with code 2 and one message."""
    try:
        yield
    except ValueError as error:
        line = f"error: {front.spelt(error)}"
        print(line, file=sys.stderr)
        exit_message.leave(line)
        raise SystemExit(2) from None


def start(seed: int, timeout: float = PATIENCE.total_seconds(), also_stop_on: Iterable[str] = ()) -> Runtime:
    """Joins the process group, selects the device, seeds every generator and installs signal handlers.

    Seeds depend on the rank, for dropout and jitter.

    timeout: seconds that the rendezvous and each collective wait for a rank.
    also_stop_on: names of signals that end the run besides those of ENDS.
    """
    rank, world = launched()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("tmoe").setLevel(logging.INFO)
    if not torch.cuda.is_available():  # else torch's compiler warns on each rank
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
    atexit.unregister(settle_output)  # registered by an earlier run in this process
    atexit.register(settle_output)
    return runtime


def hear_signals(runtime: Runtime, also_stop_on: Iterable[str]) -> None:
    """From now on the signals of ENDS, and the signals named in `also_stop_on`, set runtime.stop.

    An ignored signal stays ignored, and an existing handler stays: nohup makes a process ignore SIGHUP, and a
    shell makes background processes ignore Ctrl-C. SIGTERM and the signals of `also_stop_on` are always
    handled.
    """
    # A launcher forwards the Ctrl-C that the terminal has already sent to each process.
    launcher = bool(launcher_world().launcher)

    def hear(signum: int, frame: FrameType | None) -> None:
        runtime.stop, runtime.told = True, signal.Signals(signum).name
        if signum == signal.SIGINT and not launcher:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with suppress(OSError):  # Ctrl-C may end a `tee` that reads stderr first
                # not print, which the signal may have interrupted
                os.write(2, b"\nCtrl-C: this step is finished and saved; a second one ends without saving\n")

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
    except RuntimeError:  # InvalidCxxCompiler is a RuntimeError
        return False


def all_finite(*values: torch.Tensor) -> torch.Tensor:
    """1 if all values are finite, else 0: a 0-dim fp32 tensor, computed without a wait of the host.

    The values are the same on all ranks, so every rank makes the same decision.
    """
    return torch.stack([v.isfinite() for v in values]).all().float()


def to_host(tree: Any) -> Any:
    """The same nest of tuples, named tuples and lists, with its tensors being copied to the CPU."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", non_blocking=True)
    if isinstance(tree, tuple | list):
        parts = [to_host(part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


class PendingHostCopy:
    """Tensors (in any nest of tuples) whose copy to the host has begun.

    `read` waits for these copies alone, not for later work of the GPU. `ended`, once read, is the time at
    which the copies were complete on the GPU, on the clock of time.perf_counter(). The time at which the host
    reads them would be wrong: when the host is late, a part of one step's time is counted in the next step,
    and a step of 124% MFU was observed.
    """

    last: "tuple[torch.cuda.Event, float] | None" = None  # the copy read before, and when it ended

    def __init__(self, tree: T):
        self.host = to_host(tree)
        self.ended = time.perf_counter()
        self.copied = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None
        if self.copied:
            self.copied.record()

    def read(self) -> T:
        if self.copied:
            self.copied.synchronize()
            if PendingHostCopy.last is None:
                self.ended = time.perf_counter()
            else:
                copied_before, ended_before = PendingHostCopy.last
                self.ended = ended_before + copied_before.elapsed_time(self.copied) / 1e3
            PendingHostCopy.last = self.copied, self.ended
        return self.host
