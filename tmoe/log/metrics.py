"""Records a run: config.json, metrics.jsonl, routing.bin, progress, TensorBoard and W&B; then report.png.

next: tmoe/log/report.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import math
import resource
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor

from tmoe.base.disk import written_whole
from tmoe.base.optional import Onlooker, reason
from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError, Setting, require
from tmoe.config.run import Config
from tmoe.log import routing_log
from tmoe.log.idle import IdleExperts
from tmoe.log.metrics_file import COMPACT, COUNTED, append, rewind
from tmoe.log.progress import Display
from tmoe.model.count import count_parameters, mfu

GIB = 2**30
log = logging.getLogger(__name__)


class LoggedRouterStats(Protocol):
    """Load of the MoE layers, summed over all ranks. L: the MoE layers only, without dense layers."""

    @property
    def counts_LE(self) -> Tensor: ...  # routed (token, expert) pairs
    @property
    def entropy_L(self) -> Tensor: ...  # mean entropy of the router's softmax over E, nats
    @property
    def dropped_L(self) -> Tensor: ...  # choices that got no expert
    @property
    def dropped_LE(self) -> Tensor: ...  # pairs that were dropped for lack of capacity
    @property
    def bias_LE(self) -> Tensor: ...  # the choice bias
    @property
    def losses_LX(self) -> Tensor: ...  # the losses that MoEConfig.logged names, without coefficients


class Metrics:
    """The log of a run, in the folder cfg.out.

    It is created and called on every rank; only rank 0 reads tensors and writes.

    A line of metrics.jsonl holds
        step                    from 1, as checkpoints/step-N and the screen count
        from                    1: steps are counted from 1; lines of older runs lack it and count from 0
        tokens, seconds         since the run began, restarts included, without the time between restarts
        loss, grad_norm, lr
        tokens_per_s            of all ranks
        tflops, mfu             of one GPU
        peak_gib                most memory allocated on rank 0's GPU; on a CPU rank 0's peak resident memory
        skipped, recompiles     as given
        what the task measures  of post/: rewards/accuracy, for example
        loss_scale              with --train.dtype fp16: factor of the loss in this step's backward
        expert_counts           [layers][E], of the MoE layers
        max_violation, entropy, dropped     [layers], of the MoE layers
        router_losses           {name: [layers]}, means over the line's steps, without their coefficients
    A value that is unknown or not finite is null. A validation adds its own line after its step's line:
        step, from, val_loss, and val_ with each name that the task measures
    `read_steps` of log/metrics_file.py merges the two lines.
    A record of routing.bin (log/routing_log.py) holds a line's counts by layer and expert, and the other
    numbers of the routers.

    start_step: number of steps done; lines of later steps are dropped, because they will be written again.
    flops_per_token: from model/count.py.
    peak: FLOP/s of one GPU in the compute type, or None.
    versions: from `versions()`.
    held: from Runtime.claim; closed with the log.
    facts: other facts to keep in config.json; log/report.py draws a line at facts["unigram_entropy"].

    If a file cannot be written at the start (a full disk), the run ends. Later, a failure to write is only a
    note, and training continues without the file; other failures of the log have the same effect
    (base/optional.py). With cfg.eval_only nothing is written, and notes are printed.
    Raises ConfigError if W&B is asked for: on every rank if it is not installed; on rank 0, before any file
    is touched, if it cannot be started.
    """

    def __init__(
        self,
        cfg: Config,
        *,
        rank: int,
        world: int,
        device: torch.device,
        flops_per_token: float,
        peak: float | None,
        start_step: int,
        versions: dict[str, Any],
        facts: dict[str, Any] | None = None,
        held: BinaryIO | None = None,
    ) -> None:
        there = cfg.log.wandb is None or importlib.util.find_spec("wandb") is not None
        missing = "the package wandb is missing: pip install wandb, or leave the flag out"
        require(there, "log.wandb", cfg.log.wandb, missing)
        self.cfg = cfg
        self.world = world
        self.device = device
        self.start_step = start_step
        self.flops_per_token = flops_per_token
        self.peak = peak
        self.held = held
        self.clock = ThroughputClock()
        self.lines: BinaryIO | None = None  # set on rank 0 of a run that trains
        self.records: BinaryIO | None = None  # set on the same rank, if the model has MoE layers
        self.failing: set[Path] = set()  # files whose last write failed
        self.display = Display(cfg, start_step) if rank == 0 else None
        self.memory = Onlooker("peak_gib: could not be read", self.note)
        if rank == 0 and not cfg.eval_only:
            self.open_files(versions, facts or {})
        if self.display is not None:  # last, so that an error above leaves no bar on the terminal
            self.display.begin()

    def open_files(self, versions: dict[str, Any], facts: dict[str, Any]) -> None:
        self.run = Path(self.cfg.out)
        self.run.mkdir(parents=True, exist_ok=True)
        sinks = make_sinks(self.cfg, self.run, self.start_step, self.note)
        self.sinks = [(Onlooker(f"{sink.where}: could not be written", self.note), sink) for sink in sinks]
        write_config(self.run, self.cfg, self.world, self.start_step, versions, facts)

        # All lines are copied where a user may still want the dropped ones. A run that resumes from an
        # earlier step (--resume STEP) leaves the later checkpoints in place for now: another run may continue
        # from one of them, and these lines are its record. A run that starts from step 0 has no checkpoint
        # that explains the lines in its folder.
        self.path = self.run / "metrics.jsonl"
        copies = (self.run / f"metrics.before-{n}.jsonl" for n in itertools.count(1))
        goes_on = self.cfg.resume == "auto" and self.start_step > 0
        keep = None if goes_on else next(path for path in copies if not path.exists())
        model = self.cfg.model
        self.idle = IdleExperts([i for i in range(model.layers) if model.is_moe(i)], model.moe.experts)
        self.seconds_before, dropped = rewind(self.path, self.start_step, keep, self.seen)
        self.idle.begin(self.start_step)
        if dropped:
            copy_note = f"; {keep.name} has all" if keep else ""
            what = f"torn or of steps after {self.start_step}"
            self.note(f"{self.path}: dropped {dropped} lines, {what}{copy_note}")
        self.routing = self.run / "routing.bin"
        routing_log.rewind(self.routing, self.start_step, keep and routing_before(keep))
        # The files stay open, and each line is written at once.
        self.lines = open(self.path, "ab", buffering=0)  # noqa: SIM115
        if any(map(self.cfg.model.is_moe, range(self.cfg.model.layers))):
            self.records = open(self.routing, "ab", buffering=0)  # noqa: SIM115

    def seen(self, line: dict[str, Any]) -> None:
        """Reads a line of the run's earlier steps, whose idle experts were named when it was written."""
        with contextlib.suppress(TypeError, ValueError, IndexError):  # a malformed line is reported elsewhere
            if line.get("expert_counts"):
                self.idle.see(line["step"], line["expert_counts"])

    def due(self, step: int) -> bool:
        """Whether `step`, counted from 0 as in the loop, gets a line; the same on every rank.

        A line is due at the first step of this process (throughput is measured from its end), at every
        cfg.log.every-th step, at a step followed by a validation, and at the last step. Work that only the
        log needs, such as the routers' collective, is done at these steps only.
        """
        every, eval_every = self.cfg.log.every, self.cfg.train.eval_every
        validated = eval_every > 0 and (step + 1) % eval_every == 0
        return step in (self.start_step, self.cfg.steps - 1) or (step + 1) % every == 0 or validated

    def log(
        self,
        step: int,
        *,
        loss: Tensor | float,
        grad_norm: Tensor | float,
        lr: float,
        tokens: int,
        router: LoggedRouterStats | None,
        skipped: int = 0,
        recompiles: int = 0,
        ended: float | None = None,
        measured: Mapping[str, Tensor | float] | None = None,
    ) -> None:
        """Called after every step; writes a line if the step is `due`, else only updates the progress bar.

        Numbers hold for all ranks, as 0-dim tensors or floats. Tensors are read only for a line, by one copy
        to the host, on rank 0.

        step: from 0, as in the loop.
        tokens: of all ranks since the run began.
        router: None if no line is due, or without MoE layers.
        ended: time.perf_counter() when the device had finished the step; None: it has only just finished.
        measured: what the task measured in the step in addition to its loss, by name.
        """
        if self.lines is None or self.display is None:
            return
        if not self.due(step):
            return self.display.advance(step)

        values: dict[str, Any] = {"loss": loss, "grad_norm": grad_norm} | dict(measured or {})
        if router is not None:
            values["expert_counts"] = router.counts_LE
            values["entropy"] = router.entropy_L
            values["dropped"] = router.dropped_L
            more = "dropped_LE", "bias_LE", "losses_LX"
            values |= {name: getattr(router, name) for name in more}
        values = to_host(values, self.device)
        rate = self.clock.lap(tokens, ended)  # after the copy: the device has finished the step

        # keys in the order in which they are written
        seconds = self.seconds_before + self.clock.total()
        line: dict[str, Any] = {"step": step + 1, "tokens": tokens, "seconds": seconds, "lr": lr}
        line |= {"expert_counts": None, "max_violation": None, "entropy": None, "dropped": None}
        line |= {"router_losses": None} | values | self.speed(rate)
        line["peak_gib"] = self.memory(lambda: peak_gib(self.device))
        line["skipped"] = skipped
        line["recompiles"] = recompiles
        if router is not None:
            counts_LE = [[round(count) for count in counts_E] for counts_E in line["expert_counts"]]
            line["expert_counts"] = counts_LE
            line["dropped"] = [round(count) for count in line["dropped"]]
            line["max_violation"] = [max_violation(counts_E) for counts_E in counts_LE]
            self.record(line)
            if idle := self.idle.see(step + 1, counts_LE):
                self.note(idle)
        line = finite(line)
        self.write(line)
        self.line = line
        self.show(scalars(line))

    def validated(self, loss: float, measured: Mapping[str, float] | None = None, name: str = "val") -> None:
        """Writes the loss of a validation, or of a test (name: test), and what the task measured in it.

        The validation is of the step that `log` wrote last.

        The numbers get their own line, because the step's line is written before the validation and before
        the checkpoint. If the step's line waited for them, a run that is killed meanwhile and resumed would
        never have that line.
        """
        if self.lines is None:
            return
        values = {"loss": loss} | dict(measured or {})
        numbers = finite({f"{name}_{key}": value for key, value in values.items()})
        self.write({"step": self.line["step"]} | numbers)
        self.line |= numbers
        self.show(scalars(numbers))

    def record(self, line: dict[str, Any]) -> None:
        """Appends the routers' numbers of a line to routing.bin, and keeps the short ones in the line."""
        names = self.cfg.model.moe.logged
        more = {name: line.pop(name) for name in ("dropped_LE", "bias_LE", "losses_LX")}
        losses_XL = [list(of_layers) for of_layers in zip(*more["losses_LX"], strict=True)]
        line["router_losses"] = dict(zip(names, losses_XL, strict=True))
        if self.records is None:
            return
        arrays = {name: np.array(value) for name, value in more.items()}
        counts = dict(counts_LE=np.array(line["expert_counts"]), entropy_L=np.array(line["entropy"]))
        packed = routing_log.pack(routing_log.RoutingRecord(line["step"], names, **counts, **arrays))
        with self.going_on(self.routing):
            append(self.records, packed)

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line, of finite numbers, to metrics.jsonl."""
        assert self.lines is not None
        text = json.dumps(line | COUNTED, allow_nan=False, separators=COMPACT) + "\n"
        with self.going_on(self.path):
            append(self.lines, text.encode())

    def show(self, numbers: dict[str, float]) -> None:
        """Sends `numbers` of the last step to the sinks, and the step's whole line to the display."""
        for look, sink in self.sinks:
            look(lambda sink=sink: sink.write(numbers, self.line["step"]))
        if self.display is not None:
            self.display.show(self.line)

    def speed(self, tokens_per_s: float | None) -> dict[str, float | None]:
        """A line's numbers of speed; all None while the throughput is unknown."""
        if tokens_per_s is None:
            return {"tokens_per_s": None, "tflops": None, "mfu": None}
        per_rank = tokens_per_s / self.world
        share = mfu(self.flops_per_token, per_rank, self.peak)
        return {"tokens_per_s": tokens_per_s, "tflops": per_rank * self.flops_per_token / 1e12, "mfu": share}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time spent inside (a validation) from tokens_per_s."""
        self.synchronize()  # steps still in the queue belong to the time before the pause
        with self.clock.paused():
            yield
            self.synchronize()

    def synchronize(self) -> None:
        """On rank 0, waits until the device has finished all queued work."""
        if self.lines is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def note(self, *lines: str) -> None:
        """Prints lines above the progress bar, on rank 0."""
        for line in lines if self.display is not None else ():
            self.display.note(line)

    @contextlib.contextmanager
    def going_on(self, path: Path) -> Iterator[None]:
        """Surrounds the writing of the run's record: a failure is reported, and training continues.

        A failure is reported once, and again only if a write has succeeded in between.
        """
        try:
            yield
        except (OSError, ValueError) as error:
            if path not in self.failing:
                why = error.strerror if isinstance(error, OSError) else None
                self.note(f"{path}: could not be written, training continues without it: {why or error}")
            self.failing.add(path)
        else:
            self.failing.discard(path)

    def close(self, report: bool = True) -> None:
        """Ends the bar, closes the files, and draws report.png if any step was logged.

        report: whether to draw report.png, if cfg.log.report asks for it too. A second call does nothing.
        """
        if self.display is not None:
            self.display.close()
        if self.lines is None:
            return
        with self.going_on(self.path):
            self.lines.close()
        if self.records is not None:
            with self.going_on(self.routing):
                self.records.close()
        self.lines = self.records = None
        if self.held:
            with contextlib.suppress(OSError):
                self.held.truncate(0)  # so that nothing signals the process whose id the file holds
            self.held.close()
        for look, sink in self.sinks:
            look(sink.close)
        if report and self.cfg.log.report:
            Onlooker(f"{self.run / 'report.png'}: could not be written", self.note)(self.draw)

    def draw(self) -> None:
        if self.path.exists() and self.path.stat().st_size:
            # Imported late: matplotlib takes a second to import, and only rank 0 needs it, at the end.
            from tmoe.log.report import draw

            draw(self.run)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, error: type | None, *_: object) -> None:
        failed = error is not None and issubclass(error, Exception)
        # After an error no picture is drawn, because other ranks wait for this one to end:
        # `python -m tmoe.report` draws it.
        self.close(report=not failed)


class ThroughputClock:
    """Measures tokens per second between laps, without the first lap (compilation) and without pauses.

    It uses a clock that never runs backwards.
    """

    def __init__(self) -> None:
        self.start = self.mark = time.perf_counter()
        self.tokens: int | None = None
        self.idle = 0.0

    def total(self) -> float:
        return time.perf_counter() - self.start

    def lap(self, tokens: int, now: float | None = None) -> float | None:
        """Ends a lap and returns its tokens per second; None for the first lap.

        tokens: total so far.
        now: time.perf_counter() at the end of the lap; None: the current time.
        """
        now = time.perf_counter() if now is None else now
        busy = now - self.mark - self.idle
        rate = None if self.tokens is None or busy <= 0 else (tokens - self.tokens) / busy
        self.mark = now
        self.tokens = tokens
        self.idle = 0.0
        return rate

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.idle += time.perf_counter() - begin


# Numbers ---------------------------------------------------------------------------------------------------


def to_host(values: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The tensors among `values` as floats or nested lists, by a single device-to-host copy."""
    tensors = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
    if not tensors:
        return values
    if all(t.is_cpu for t in tensors.values()):
        device = torch.device("cpu")
    # fp64: a step's counts may exceed 2^24, above which fp32 cannot represent every whole number
    flat = torch.cat([t.reshape(-1).to(device, torch.float64) for t in tensors.values()]).cpu()
    parts = flat.split([t.numel() for t in tensors.values()])
    named = zip(tensors.items(), parts, strict=True)
    return values | {name: part.view(t.shape).tolist() for (name, t), part in named}


def max_violation(counts_E: list[float]) -> float | None:
    """max_e count_e / mean count - 1 (MaxVio, Wang et al. 2024); None if nothing was routed.

    0 when experts are balanced, E - 1 when one expert gets every pair.
    """
    mean = sum(counts_E) / len(counts_E)
    return max(counts_E) / mean - 1.0 if mean else None


def finite(value: Any) -> Any:
    """Replaces NaN and infinities by None, because strict JSON cannot express them."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(line: dict[str, Any]) -> dict[str, float]:
    """The known numbers of a line by TensorBoard's names; for lists over layers, the mean and the largest."""
    out = {name: value for name, value in line.items() if isinstance(value, int | float) and name != "step"}
    lists = {name: line.get(name) for name in ("max_violation", "entropy", "dropped")}
    lists |= {f"{name}_loss": layers for name, layers in (line.get("router_losses") or {}).items()}
    for name, values in lists.items():
        layers = [value for value in values or [] if value is not None]
        if layers:
            out |= {f"router/{name}_mean": sum(layers) / len(layers), f"router/{name}_max": max(layers)}
    return out


def peak_gib(device: torch.device) -> float:
    """Peak memory so far: allocated by torch on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def routing_before(lines_before: Path) -> Path:
    """The file that keeps the records of metrics.before-N.jsonl: routing.before-N.bin."""
    return lines_before.with_name(lines_before.stem.replace("metrics", "routing") + ".bin")


# Files -----------------------------------------------------------------------------------------------------


def write_config(
    run: Path, cfg: Config, world: int, start_step: int, versions: dict[str, Any], facts: dict[str, Any]
) -> None:
    """Writes config.json: the settings and layout that run now, and under `starts` every start of this run.

    A start has its step, time, layout and versions. Raises ConfigError if the folder has a config.json that
    is not a run's.
    """
    path = run / "config.json"
    axes = Axes.of(cfg.parallel, world)
    mesh = {"dp": axes.dp, "ep": axes.ep}
    start = {
        "step": start_step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "world": world,
        "mesh": mesh,
        "versions": versions,
    }
    try:
        starts = json.loads(path.read_text())["starts"] if path.exists() else []
        starts = [*(old for old in starts if old["step"] < start_step), start]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        # a config.json of another program, such as a model's
        away = f"move it away, or choose another {Setting('out')}"
        raise ConfigError(f"{path}: no config.json of a run ({error}); {away}") from error
    total, active, _ = count_parameters(cfg.model)
    content = {
        "config": dataclasses.asdict(cfg),
        "world": world,
        "mesh": mesh,
        "parameters": {"total": total, "active": active},
        "versions": versions,
        "facts": facts,
        "starts": starts,
    }
    with written_whole(path) as file:
        file.write(json.dumps(content, indent=2) + "\n")


# Sinks besides the file ------------------------------------------------------------------------------------


class TensorBoard:
    def __init__(self, run: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.where = run / "tensorboard"
        self.writer = SummaryWriter(str(self.where), purge_step=start_step + 1)

    def write(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class Wandb:
    def __init__(self, cfg: Config, run: Path, start_step: int) -> None:
        import wandb  # pyrefly: ignore[missing-import] (an extra)

        self.where = run / "wandb"
        name = run / "wandb_id"  # a resumed run continues the same run of W&B
        run_id = name.read_text() if start_step and name.exists() else uuid.uuid4().hex
        self.session = wandb.init(
            project=cfg.log.wandb,
            name=run.name,
            id=run_id,
            resume="allow",
            dir=str(run),
            config=dataclasses.asdict(cfg),
        )
        # The step is logged as a value: W&B's own step must not decrease, and a resumed run's step does.
        self.session.define_metric("*", step_metric="step")
        name.write_text(run_id)  # last: a start that fails leaves the previous id in place

    def write(self, numbers: dict[str, float], step: int) -> None:
        self.session.log(numbers | {"step": step})

    def close(self) -> None:
        self.session.finish()


Sink = TensorBoard | Wandb


def make_sinks(cfg: Config, run: Path, start_step: int, note: Callable[[str], Any]) -> list[Sink]:
    """The sinks that the settings ask for.

    If TensorBoard cannot be started, the run continues, with a note. If W&B cannot, ConfigError is raised: a
    user who asked for W&B will look for the run there and nowhere else.
    """
    sinks: list[Sink] = []
    if cfg.log.wandb is not None:
        sinks.append(start_wandb(cfg, run, start_step))
    if cfg.log.tensorboard:
        look = Onlooker(f"{run / 'tensorboard'}: could not be written", note)
        board = look(lambda: TensorBoard(run, start_step))
        sinks += [board] if board else []
    return sinks


def start_wandb(cfg: Config, run: Path, start_step: int) -> Wandb:
    try:
        return Wandb(cfg, run, start_step)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: the other ranks wait for news of the failure
        mend = "mend that (`wandb login`, or WANDB_MODE=offline in the environment), or leave the flag out"
        wrong = f"W&B could not be started; {mend}: {reason(error)}"
        raise ConfigError.of("log.wandb", cfg.log.wandb, wrong) from error
