"""What watches a run's speed: compiled graphs, the garbage collector, the profiler's trace."""

import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction

from tmoe.onlookers import Onlooker
from tmoe.run.process import counters, log


class Graphs:
    """Counts compiled graphs: new ones after a phase's first pass are recompiles, and a steady run has none.

    What compilation leaves in memory is half a million Python objects that stay. Walking them takes Python's collector 0.2 to 0.5 s,
    on each rank at another time while the others wait; so it is told to leave alone what a first pass left (see `collecting`).
    """

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.recompiles = 0

    def passed(self, phase: str) -> None:
        """Call after each pass of a phase ("train", "validate")."""
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
    """Behind it Python's collector looks at everything again, what the caller had frozen included."""
    try:
        yield
    finally:
        gc.unfreeze()


def profiler(steps: tuple[int, ...], out: str, rank: int, start: int) -> AbstractContextManager:
    """Traces these steps (numbered as in metrics.jsonl) into the folder `out`; `.step()` after each step, from `start`
    on. Of a trace that cannot be made or written one line tells, the run goes on, and nothing more is traced."""
    none, warm, record, save = (
        getattr(ProfilerAction, a) for a in ("NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE")
    )

    def action(i: int) -> ProfilerAction:
        step, follows = start + i, start + i + 1 in steps
        # The tracer starts a step early: each rank takes its own time for that, and the others would wait for it in the traced step.
        # Then the GPU ends what it has been given: the rest of the step before would be in the trace.
        if step in steps and step - 1 not in steps and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return (record if follows else save) if step in steps else warm if follows else none

    def write(p: torch.profiler.profile) -> None:
        # raises nothing: torch's profiler, left halfway through a step, may crash the process when it stops
        look(lambda: export(p))

    def export(p: torch.profiler.profile) -> None:
        path = Path(out, f"trace-step{start + p.step_num - 1}-rank{rank}.json.gz")
        aside = path.with_name(f"part-of-{path.name}")
        try:
            p.export_chrome_trace(str(aside))
            os.replace(aside, path)  # a trace that is cut short never takes the name
        finally:
            aside.unlink(missing_ok=True)

    look = Onlooker(f"--profile on rank {rank}: no trace could be written into {out}", log.warning)
    made = look(lambda: Profiler(look, schedule=action, on_trace_ready=write)) if steps else None
    return made or nullcontext()


class Profiler(torch.profiler.profile):
    """Of torch, as an onlooker: once anything of it has failed, writing included, it records nothing more."""

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
