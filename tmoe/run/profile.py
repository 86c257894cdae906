"""Observes a run's speed: compiled graphs, the garbage collector, the profiler's trace."""

import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction

from tmoe.base.optional import Onlooker
from tmoe.run.process import counters, log


class GraphCounter:
    """Counts compiled graphs: new ones after a phase's first pass are recompiles, and a steady run has none.

    Compilation leaves half a million Python objects that stay. Python's garbage collector takes 0.2 to 0.5 s
    to traverse them, on each rank at a different time, while the other ranks wait. Therefore the objects that
    exist after a phase's first pass are excluded from collection (`gc.freeze`); `collecting` reverts that.
    """

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.recompiles = 0

    def passed(self, phase: str) -> None:
        """Counts the new graphs; call it after each pass of a phase ("train", "validate")."""
        total = counters["stats"]["unique_graphs"] if counters else 0
        new = total - sum(self.known.values())
        if phase in self.known:
            self.recompiles += new
        else:
            gc.collect()
            gc.freeze()
        self.known[phase] = self.known.get(phase, 0) + new


@contextmanager
def collecting() -> Iterator[None]:
    """On exit, Python's garbage collector handles all objects again, also those that the caller froze."""
    try:
        yield
    finally:
        gc.unfreeze()


def profiler(steps: tuple[int, ...], out: str, rank: int, start: int) -> AbstractContextManager:
    """Traces these steps (numbered from 1, as in metrics.jsonl) into the folder `out`.

    Call `.step()` of the returned object after each step that follows the first `start` steps. The context
    gives None if there is nothing to trace. If a trace cannot be made or written, one line reports it, the
    run continues, and nothing more is traced.
    """

    def action(i: int) -> ProfilerAction:
        step = start + i + 1
        follows = step + 1 in steps
        # Before the first traced step the GPU finishes its earlier work, which would otherwise be in the
        # trace.
        if step in steps and step - 1 not in steps and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if step in steps:
            return ProfilerAction.RECORD if follows else ProfilerAction.RECORD_AND_SAVE
        # The tracer starts a step early, because the ranks take different times to start it: in the traced
        # step they would wait for each other.
        return ProfilerAction.WARMUP if follows else ProfilerAction.NONE

    def write(p: torch.profiler.profile) -> None:
        # Raises nothing: if torch's profiler is left in the middle of a step, it may crash the process when
        # it stops.
        look(lambda: export(p))

    def export(p: torch.profiler.profile) -> None:
        path = Path(out, f"trace-step{start + p.step_num}-rank{rank}.json.gz")
        aside = path.with_name(f"part-of-{path.name}")
        try:
            p.export_chrome_trace(str(aside))
            os.replace(aside, path)  # so a file with this name is always complete
        finally:
            aside.unlink(missing_ok=True)

    look = Onlooker(f"--profile on rank {rank}: no trace could be written into {out}", log.warning)
    made = look(lambda: Profiler(look, schedule=action, on_trace_ready=write)) if steps else None
    return made or nullcontext()


class Profiler(torch.profiler.profile):
    """torch's profiler as an Onlooker: once anything in it has failed, also writing, it records no more."""

    def __init__(self, look: Onlooker, **settings: Any):
        super().__init__(**settings)
        self.look = look

    def start(self) -> None:
        self.look(super().start)

    def step(self) -> None:
        self.look(self.step_or_stop)

    def step_or_stop(self) -> None:
        super().step()
        if not self.look.works:
            super().stop()

    def stop(self) -> None:
        self.look(super().stop)
