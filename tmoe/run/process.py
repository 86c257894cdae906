"""The process around a run: process groups, device, seeds, signals, and what all ranks must decide together."""

import atexit
import fcntl
import logging
import math
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError
from tmoe.listing import listed
from tmoe.onlookers import say, settle_output
from tmoe.parallel.launcher import PATIENCE, join, launcher_world, meeting_place, require_a_gpu_each
from tmoe.parallel.mesh import default_store, patience
from tmoe.run.watch import Watch
from tmoe.stack import find, lacks, take

T = TypeVar("T")
LINGERS = 10.0  # s that a run which was killed may take to be gone
# By which terminals, launchers and schedulers end a job, and what each is set to in a process that never touched it.
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
    """One process of the run. `control` is a gloo group: small facts travel between CPUs and no GPU waits for them."""

    rank: int
    world: int
    device: torch.device
    control: dist.ProcessGroup
    watch: Watch
    stop: bool = field(default=False)  # a signal of ENDS, or another that was asked for, arrived here
    handlers: dict[int, Any] = field(default_factory=dict)  # of the signals, before this run heard them

    def sums(self, *values: float) -> list[float]:
        """Sum of each value over all ranks."""
        t = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(t, group=self.control)
        return t.tolist()

    def put(self, t: torch.Tensor) -> torch.Tensor:
        """On the device; through pinned memory, or the host would wait for all that the GPU has to do."""
        return t.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else t

    @property
    def speaks(self) -> bool:
        """Whether this rank says why all end: one of each node, as each has a log of its own."""
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
        """Runs what needs no collective on every rank. If it raises ValueError or OSError anywhere, all ranks end with code 2 and the
        first of each node prints each different message once, with the ranks that met it."""
        result, error = None, None
        try:
            result = work()
        except (ValueError, OSError) as caught:
            error = str(caught)
        errors: list[str | None] = [None] * self.world
        dist.all_gather_object(errors, error, group=self.control)
        if messages := sorted({e for e in errors if e}):
            who = {m: [r for r, e in enumerate(errors) if e == m] for m in messages}
            lines = (m if len(who[m]) == self.world else f"rank {who[m]}: {m}" for m in messages)
            if self.speaks:
                say(listed("", ["error: " + "\n".join(lines)], indent=""), sys.stderr)
            raise SystemExit(2)
        return cast(T, result)

    def alike(self, facts: Mapping[str, Any]) -> None:
        """Ends all ranks with code 2 where one has other facts than rank 0, which says which: ranks that train with other settings or data
        sum what does not belong together, and nothing else would tell."""
        told: list[Any] = [None] * self.world
        dist.all_gather_object(told, dict(facts), group=self.control)
        unlike = {
            name: [r for r in range(self.world) if told[r].get(name) != value]
            for name, value in told[0].items()
        }
        if lines := [
            f"{name}: {told[ranks[0]].get(name)} on rank {ranks}, {told[0][name]} on rank 0; must be the same on all"
            for name, ranks in unlike.items()
            if ranks
        ]:
            if self.speaks:
                say(listed("", ["error: " + "\n".join(lines)], indent=""), sys.stderr)
            raise SystemExit(2)

    @contextmanager
    def refusing(self, *kinds: type[Exception]) -> Iterator[None]:
        """Around collective work whose errors of these kinds (CheckpointError and ValueError) all ranks raise alike: they end with
        code 2, and the first of each node says why, once and without a traceback."""
        kinds = kinds or (CheckpointError, ValueError)
        try:
            yield
        except kinds as error:
            if self.speaks:
                say(f"error: {error}", sys.stderr)
            raise SystemExit(2) from None

    def claim(self, out: str) -> BinaryIO | None:
        """Keeps other processes out of the run folder until rank 0 closes this or is gone, however it ends. Rank 0 of another run that is
        still there may take LINGERS seconds to go: only then is known which checkpoint it leaves. ConfigError, as `together` has it, if it
        stays. Where the file system knows no locks, nobody is kept out."""

        def take() -> BinaryIO | None:
            if self.rank:
                return None
            Path(out).mkdir(parents=True, exist_ok=True)
            file, deadline = open(Path(out, ".lock"), "ab"), time.monotonic() + LINGERS  # noqa: SIM115 (stays open)
            while True:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return file
                except (BlockingIOError, PermissionError):
                    if time.monotonic() > deadline:
                        file.close()
                        what = f"--out={out}: another process trains into it; end that one, or choose another"
                        raise ConfigError(what) from None
                    time.sleep(0.1)
                except OSError:
                    return file

        return self.together(take)

    def blame(self, step: int, loss: float, norm: float, mean: float, samples: list[int]) -> None:
        """Says on rank 0 why a step is strange: the gradient norm alone is not finite; or the loss, and then which rank's tokens have the
        highest mean loss, or one that is not finite, and in which samples they are."""
        told: list[Any] = [None] * self.world
        dist.all_gather_object(told, (mean, samples), group=self.control)
        rank = max(range(self.world), key=lambda r: told[r][0] if math.isfinite(told[r][0]) else math.inf)
        if self.rank == 0 and math.isfinite(loss) and not math.isfinite(norm):
            log.warning("step %d: gradient norm %g, with a loss of %.4g", step, norm, loss)
        elif self.rank == 0:
            log.warning(
                "step %d: loss %.4g, highest on rank %d with %.4g: samples %s", step, loss, rank, *told[rank]
            )

    def close(self) -> None:
        (told,) = self.sums(self.stop)  # together: rank 0 holds the store, and nobody may still need it
        if not told:  # who was told to end, or is to be, is not ended halfway
            for signum, handler in self.handlers.items():
                signal.signal(signum, handler)
        dist.destroy_process_group()


def launched() -> tuple[int, int]:
    """(rank, world) as the launcher announces them, or of the process group there is; a plain `python train.py` is rank 0 of 1. What no
    launcher sets ends the process with code 2: half of it, a rank that its world does not have, more ranks on a host than it has GPUs,
    no place to meet at."""
    with one_error():
        if missing := lacks():
            raise ValueError(missing)
        world = launcher_world()
        if not dist.is_initialized():
            require_a_gpu_each(world)
            if world.launcher in ("mpiexec", "srun") and world.size > 1:
                meeting_place(world)
    return world.rank, world.size


@contextmanager
def one_error() -> Iterator[None]:
    """Around what comes before the process group: a ValueError ends this process with code 2 and one message."""
    try:
        yield
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def start(seed: int, timeout: float = PATIENCE.total_seconds(), also_stop_on: Iterable[str] = ()) -> Runtime:
    """Joins the process group, takes the device, seeds every generator (rank-dependent: dropout, jitter), hears
    signals: those of ENDS, and those named in `also_stop_on`.

    timeout: seconds that the ranks' meeting and each collective wait for a rank.
    """
    rank, world = launched()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("tmoe").setLevel(logging.INFO)
    if not torch.cuda.is_available():  # a compiler would warn of it on each rank
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

    if threading.current_thread() is threading.main_thread():
        hear_signals(runtime, also_stop_on)
    atexit.unregister(settle_output)  # once is enough
    atexit.register(settle_output)
    return runtime


def hear_signals(runtime: Runtime, also_stop_on: Iterable[str]) -> None:
    """From now on they set runtime.stop. One that is ignored stays so, and one that has a handler keeps it (nohup
    makes a process ignore SIGHUP, a shell what it starts in the background Ctrl-C); but for SIGTERM and what was
    asked for by name."""
    launcher = bool(
        launcher_world().launcher
    )  # it hands on the Ctrl-C that the terminal gave each process already

    def hear(signum, frame):
        runtime.stop = True
        if signum == signal.SIGINT and not launcher:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with suppress(OSError):  # Ctrl-C ends `tee` first
                # not print, which may be at work
                os.write(2, b"\nCtrl-C: this step is finished and saved; a second one ends without it\n")

    named = [signal.Signals[name] for name in also_stop_on]
    for signum in [*ENDS, *named]:
        if signum in (signal.SIGTERM, *named) or signal.getsignal(signum) == ENDS[signum]:
            runtime.handlers[signum] = signal.signal(signum, hear)


def rng_states(device: torch.device) -> dict[str, torch.Tensor]:
    """State of torch's generators, CPU and this device: what dropout and jitter draw from."""
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
    """1 or 0, and no host waits for it. The values are global, so every rank decides alike."""
    return torch.stack([v.isfinite() for v in values]).all().float()


def to_host(tree: Any) -> Any:
    """The same tuples, named ones and lists too, with their tensors on their way to the CPU."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", non_blocking=True)
    if isinstance(tree, tuple | list):
        parts = [to_host(part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


class OnItsWay:
    """Tensors (in any nest of tuples) whose copy to the host has begun; `read` waits for them alone, not for what the GPU was
    given since. `ended`, once read: when the GPU had them, as time.perf_counter() tells time. (The host's own time of reading
    would give a step's speed to its neighbour whenever the host is late: a step of 124% MFU was seen.)"""

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
            last = OnItsWay.last
            self.ended = (
                time.perf_counter() if last is None else last[1] + last[0].elapsed_time(self.copied) / 1e3
            )
            OnItsWay.last = self.copied, self.ended
        return self.host
