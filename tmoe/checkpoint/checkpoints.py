"""Saves and loads a run's state: a step is whole or absent, and all ranks decide together.

DCP (torch.distributed.checkpoint) plans which rank writes and reads which part of a tensor.

A save:
    stage (async: copy to pinned memory) -> vote -> DCP plans
    -> every rank writes, hashes and syncs its shards
    -> rank 0 writes the manifest and renames the folder -> old steps are removed.
A load:
    one choice for all ranks -> verify; the ranks divide the hashing
    -> compare names, shapes, dtypes
    -> DCP reads each rank's part of each tensor; hashes are checked again in memory.
Nothing is unpickled: DCP's metadata is rebuilt from the manifest, and payloads are read by
torch.load(weights_only=True).

Measured on an H200 with 12 GiB a rank: an async save returns after 0.23 s, the time of the bare copy to
pinned memory (51 GiB/s). The first one returns after 4.5 s, because it pins the buffers. The background then
hashes, writes and syncs 1.2 to 1.8 GiB/s, the disk's speed.

next: checkpoint/dcp.py, checkpoint/manifest.py, checkpoint/folders.py; checkpoint/tools.py for
`python -m tmoe.checkpoint`
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.tensor import DTensor

from tmoe.base.listing import counted, listed
from tmoe.checkpoint import folders
from tmoe.checkpoint import manifest as files
from tmoe.checkpoint.best import best_of, read_losses, write_losses
from tmoe.checkpoint.dcp import RNG, Files, Planner, Reader, ShardWriter, Tensors, write_stock_metadata
from tmoe.checkpoint.errors import MismatchError
from tmoe.checkpoint.manifest import CheckpointError, Manifest, read_manifest, verify
from tmoe.parallel.agree import attempt, by_reason, error_text, gathered
from tmoe.parallel.mesh import patience

__all__ = ["CheckpointError", "Checkpoints", "MismatchError", "read_manifest", "verify"]

T = TypeVar("T")

log = logging.getLogger(__name__)
# DCP gives this warning whenever there is no process group. A run of one process has none and needs no
# warning.
warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")


class Checkpoints:
    """The checkpoints of one run, `folder/step-N`.

    Every method except poll and saving is collective: all ranks call it, in the same order, and when one rank
    fails, all of them raise. Reading (find, load) never writes, so a second process may read a folder while
    training writes to it. Only one run may write to a folder.

    folder: shared by all ranks.
    keep: number of verified steps that are kept (0: all).
    keep_best: whether the step with the lowest validation loss is kept as well.
    mode: "async" writes in a background thread while training continues.
    info: facts about the run that JSON can hold, written into every manifest (config, versions).
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        mode: Literal["sync", "async"],
        info: dict[str, Any],
        keep_best: bool = False,
    ):
        self.folder = Path(folder)
        self.keep = keep
        self.keep_best = keep_best
        self.mode = mode
        self.info = info
        # The background thread needs its own group, because its collectives must not pair with training's.
        # The backend is gloo, because votes are CPU tensors.
        group = dist.new_group(backend="gloo", timeout=patience()) if dist.is_initialized() else None
        self._group = cast("dist.ProcessGroup | None", group)
        self._rank = dist.get_rank() if self._group else 0
        self._world = dist.get_world_size() if self._group else 1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future | None = None
        self._staging: dict[str, Tensor] = {}
        self._whole: dict[Path, tuple] = {}  # steps that were whole when checked -> their stamp at that time
        self._published: list[Path] = []  # by this process, in order
        self._told = 0  # number of published steps that take_published has returned
        self.losses: dict[int, float] = {}  # validation losses of saved steps, the same on every rank
        self.best: Path | None = None  # step with the lowest loss, as of the last removal of old steps
        self._saved: int | None = None  # the step saved last
        self._stays: Path | None = None  # the step that is kept only because of its validation
        self._said: Path | None = None  # the last such step that take_best has returned

    # ---- saving ----

    def save(
        self, step: int, tensors: dict[str, Tensor | DTensor], state: dict[str, Any], rng: dict[str, Tensor]
    ) -> None:
        """Write `folder/step-{step}`. A step of that name is replaced: always the old or the new one exists.

        tensors: name -> plain tensor (equal on all ranks that have it; one of them writes it) or DTensor on
            any mesh.
        state: values that JSON can hold, equal on all ranks. They are loaded as JSON returns them (tuples as
            lists).
        rng: this rank's generator states, CPU uint8.

        Async: returns when everything is copied; the tensors may change from then on. Errors of the
        background are raised by poll, finish and the next save.
        Raises CheckpointError on every rank when any of them fails. The temporary folder is then removed.
        """
        self.finish()
        self._saved = step
        self.losses.pop(step, None)  # the loss of the step that is now replaced
        named = tensors | {f"{RNG}{self._rank}.{name}": value for name, value in rng.items()}
        local: dict[str, Tensor] = {}

        def prepare() -> str:
            if taken := [name for name in tensors if name.startswith(RNG)]:
                raise ValueError(
                    f"tensors {taken}: names that start with {RNG} belong to the generator states"
                )
            local.update(self._stage(named))
            return json.dumps(state)

        states = self._together(f"saving step {step}", prepare)
        if differing := [rank for rank, text in enumerate(states) if text != states[0]]:
            raise CheckpointError(
                f"saving step {step}: rank 0's state differs from that of ranks {differing}: {states[0]}"
            )
        # A copy of the losses: a later validation must not change them in the background of some ranks only.
        what = step, named, local, states[0], dict(self.losses)
        if self.mode == "async":
            self._pending = self._thread.submit(self._write, *what)
        else:
            self._write(*what)

    def saving(self) -> bool:
        """Whether a background save is in progress on this rank."""
        pending = self._pending  # read once: the heartbeat calls this from its own thread
        return pending is not None and not pending.done()

    def poll(self) -> None:
        """Raise the error of a background save that has failed; otherwise it costs nothing.

        Not collective: call it every step.
        """
        if self._pending and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the background save, if one is in progress, and raise its error."""
        pending = self._pending
        self._pending = None
        if pending:
            pending.result()

    @property
    def newest(self) -> Path | None:
        """The step that this process published last."""
        return self._published[-1] if self._published else None

    def take_published(self) -> list[Path]:
        """The steps that were completed on the disk since the last call. Not collective."""
        new = self._published[self._told :]
        self._told += len(new)
        return new

    @torch.no_grad()
    def _stage(self, tensors: dict[str, Tensor | DTensor]) -> dict[str, Tensor]:
        """This rank's part of every tensor.

        Async: the parts are copied into buffers that are kept for later saves, because pinning memory is
            slow.
        """
        local = {
            name: (t.to_local() if isinstance(t, DTensor) else t).detach() for name, t in tensors.items()
        }
        if torch.cuda.is_initialized():
            # The copies of offloaded moments to the host may not have finished yet.
            torch.cuda.current_stream().synchronize()
        if self.mode == "sync":
            return local
        previous = self._staging
        self._staging = {name: _buffer_like(source, previous.get(name)) for name, source in local.items()}
        for name, source in local.items():
            self._staging[name].copy_(source, non_blocking=True)
        if any(source.is_cuda for source in local.values()):
            torch.cuda.current_stream().synchronize()
        return self._staging

    @torch.no_grad()
    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        local: dict[str, Tensor],
        state: str,
        losses: dict[int, float],
    ) -> None:
        """Write the staged parts `local` of `tensors` as one step, all ranks together; remove old steps."""
        final = self.folder / f"step-{step}"
        temporary = Path(self._together(f"saving {final}", lambda: self._make_temporary(final))[0])
        planner = Planner(local)
        writer = ShardWriter(
            temporary, self._rank, planner, partial(self._publish, final, temporary, step, state)
        )
        try:
            self._dcp(
                f"saving {final}", lambda **how: dcp.save(tensors, storage_writer=writer, **how), planner
            )
        except BaseException:
            if self._rank == 0:
                folders.remove(temporary)
            raise
        if stamp := files.stamp(final):
            self._whole[final] = stamp
        self._published.append(final)
        self._retain(losses)

    def _make_temporary(self, final: Path) -> str:
        """On rank 0, remove what killed saves left, and make the folder that all ranks write into."""
        if self._rank:
            return ""
        self.folder.mkdir(parents=True, exist_ok=True)
        folders.sweep(self.folder)
        temporary = folders.sibling(final, "tmp")
        temporary.mkdir()
        return str(temporary)

    def _publish(
        self, final: Path, temporary: Path, step: int, state: str, tensors: Tensors, entries: Files
    ) -> None:
        """On rank 0, when every shard is on the disk: write DCP's metadata and the manifest, then rename."""
        fields = json.loads(state)
        manifest = Manifest(
            step=step,
            tokens=fields.get("tokens"),
            world=self._world,
            saved_ns=folders.next_saved_ns(self.folder),
            info=self.info,
            state=fields,
            files=entries | {".metadata": write_stock_metadata(temporary, tensors)},
            tensors=tensors,
        )
        files.write_manifest(temporary, manifest)
        if problems := verify(temporary, share=None):
            raise CheckpointError(
                f"rank 0 misses what others wrote; is the folder shared? {'; '.join(problems)}"
            )
        folders.publish(temporary, final)

    def _retain(self, losses: dict[int, float]) -> None:
        """Remove the steps saved before the newest `keep` whole ones, except the step with the lowest loss.

        Damaged steps do not count towards `keep`. They are kept if they are newer than those whole steps.
        """
        steps, _ = self._steps()
        whole = 0
        self.best = best_of(losses, steps)
        best = self.best if self.keep_best else None
        stays = None
        for path in steps if 0 < self.keep < len(steps) else ():
            if whole == self.keep:
                if path == best:
                    stays = path
                else:
                    self._remove(path)
            elif problems := self._problems(path):
                self._warn(problems)
            else:
                whole += 1
        self._stays = stays

    def _remove(self, path: Path) -> None:
        try:
            if self._rank == 0:
                folders.remove(path)
        except OSError as error:  # the new step is safe, so the run continues
            log.warning("an old checkpoint could not be removed: %s", error)

    # ---- the best step ----

    def begin(self, step: int) -> None:
        """Read the validation losses of the run's steps up to the one that it continues from. Collective."""
        losses = self._together("reading validations", lambda: read_losses(self.folder))[0]
        self.losses = {done: loss for done, loss in losses.items() if done <= step}
        if self._rank == 0 and self.losses != losses:
            write_losses(self.folder, self.losses)

    def validated(self, step: int, loss: float) -> None:
        """Record the validation loss of a step, if it was saved. Every rank passes the same values."""
        if step == self._saved and math.isfinite(loss):
            self.losses[step] = loss
            if self._rank == 0:
                write_losses(self.folder, self.losses)

    def retain(self) -> None:
        """Remove the steps that all validations so far do not keep.

        Collective; no save may be in progress.
        """
        if self._saved is not None:
            self._retain(self.losses)

    def news(self, last: bool) -> list[str]:
        """A line for each step saved since the last call, and one for the best step if it has changed.

        last: whether the run ends now; then one more line names the best step of the run.
        """
        lines = [f"saved {path}" for path in self.take_published()]
        if (path := self.take_best()) is not None:
            lines.append(f"{path} stays: its validation is the best")
        if last and len(self.losses) > 1 and self.best:
            lines.append(f"the best validation of a saved step: {self.best}")
        return lines

    def take_best(self) -> Path | None:
        """The step that is kept only because of its validation, if it has changed. Not collective."""
        before, self._said = self._said, self._stays
        return None if before == self._said else self._said

    # ---- loading ----

    def find(self, resume: str) -> Path | None:
        """The step folder to resume from, the same on every rank; it is whole, with every byte hashed.

        resume: "none" -> None; "auto" -> the newest whole step of the folder, None if it has no step; else
            the path of a step folder. Newest means saved last. Damaged steps are named in a warning and not
            used.
        Raises CheckpointError if the path given, or every step of the folder, is damaged: starting over
        without a message would be worse than stopping.
        """
        self.finish()
        if resume == "none":
            return None
        if resume != "auto":
            path = self._together(f"--resume={resume}", lambda: folders.resolve(Path(resume)))[0]
            if problems := self._problems(path):
                head = f"--resume={resume}: must be 'auto', 'none' or a whole step folder"
                raise CheckpointError(listed(head, problems, indent=""))
            return path
        steps, skipped = self._steps()
        for path in steps:
            if not (problems := self._problems(path)):
                self._warn(skipped)
                return path
            skipped += problems
        if skipped:
            head = f"{self.folder}: no whole checkpoint (--resume none starts over)"
            raise CheckpointError(listed(head, skipped, indent=""))
        return None

    @torch.no_grad()
    def load(
        self,
        path: Path,
        tensors: dict[str, Tensor | DTensor],
        only: str | tuple[str, ...] | None = None,
        *,
        rng: bool | None = None,
    ) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        """Fill `tensors` in place from the step folder `path`, whatever mesh and world it was saved on.

        only: load only the saved tensors whose name starts with this (or with one of these), e.g. "model.".
        rng: whether generator states are wanted; None: unless `only` is given.
        Returns (state, rng). rng is this rank's saved generator states, or None if the world size differs,
        they are not wanted, or none were saved.
        Raises, before any tensor changes: CheckpointError if a byte of the folder is damaged; MismatchError
        that lists every tensor that is missing, not asked for, or of other shape or dtype.
        """
        self.finish()
        if problems := self._problems(path):
            raise CheckpointError(listed("", problems, indent=""))
        manifest = read_manifest(path)
        self._compare(path, manifest, tensors, only)
        same = self._world == manifest.world and (only is None if rng is None else rng)
        prefix = f"{RNG}{self._rank}."
        states = {
            name: torch.empty(entry.shape, dtype=files.dtype_of(entry.dtype))
            for name, entry in manifest.tensors.items()
            if same and name.startswith(prefix)
        }
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = Reader(path, manifest)
        self._dcp(
            f"loading {path}", lambda **how: dcp.load(tensors | states, storage_reader=reader, **how), planner
        )
        if not states:
            return manifest.state, None
        return manifest.state, {name.removeprefix(prefix): value for name, value in states.items()}

    def _compare(
        self, path: Path, manifest: Manifest, tensors: dict[str, Tensor], only: str | tuple[str, ...] | None
    ) -> None:
        """Raises MismatchError if the tensors asked for on all ranks are not the tensors saved."""
        saved = {
            n: e for n, e in manifest.tensors.items() if not n.startswith(RNG) and n.startswith(only or "")
        }
        votes = self._together(f"loading {path}", lambda: (list(tensors), _differences(saved, tensors)))
        # The names from all ranks, because pipeline stages hold different tensors.
        asked = {name for names, _ in votes for name in names}
        problems = {line for _, lines in votes for line in lines}
        problems |= {f"{name}: in the checkpoint, but not asked for" for name in saved.keys() - asked}
        if problems:
            what = f"{path} does not fit: {counted(len(problems), 'difference')}"
            raise MismatchError(listed(what, sorted(problems)))

    # ---- deciding together ----

    def _steps(self) -> tuple[list[Path], list[str]]:
        """Published steps that any rank sees, newest first, and the problems of unreadable ones.

        Both lists are the same on every rank.
        """
        votes = self._together(f"looking into {self.folder}", lambda: folders.published(self.folder))
        newest_first = sorted({step for steps, _ in votes for step in steps}, reverse=True)
        problems = dict.fromkeys(problem for _, problems in votes for problem in problems)
        return list(dict.fromkeys(path for _, path in newest_first)), list(problems)

    def _problems(self, path: Path) -> list[str]:
        """The problems that any rank finds in a step folder, the same list on every rank.

        The ranks divide the hashing.
        """

        def look() -> tuple[tuple | None, str | None, list[str]]:
            stamp = files.stamp(path)
            known = stamp is not None and self._whole.get(path) == stamp
            if problems := [] if known else verify(path, (self._rank, self._world)):
                return None, None, problems
            return stamp, hashlib.sha256((path / files.NAME).read_bytes()).hexdigest(), []

        votes = self._together(f"verifying {path}", look)
        problems = list(dict.fromkeys(problem for _, _, lines in votes for problem in lines))
        if not problems and len({digest for _, digest, _ in votes}) > 1:
            problems = [
                f"{path / files.NAME}: ranks see different contents; is the folder shared by all of them?"
            ]
        if not problems and (stamp := votes[self._rank][0]):
            self._whole[path] = stamp
        return problems

    def _warn(self, problems: list[str]) -> None:
        for problem in problems if self._rank == 0 else ():
            log.warning("skipped a damaged checkpoint: %s", problem)

    def _together(self, doing: str, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and return all the results on every rank.

        Raises CheckpointError on every rank if a rank fails; it names each rank that failed and the reason.
        """
        result, error, failures = attempt(work, self._group, words=_describe)
        if failures:
            raise CheckpointError(_report(doing, failures)) from error
        return gathered(cast(T, result), self._group)

    def _dcp(self, doing: str, call: Callable[..., object], planner: SavePlanner | LoadPlanner) -> None:
        """Call DCP, which sends a rank's failure to all ranks, and raise the failures as CheckpointError."""
        try:
            call(planner=planner, process_group=self._group, no_dist=self._group is None)
        except CheckpointException as error:
            raise CheckpointError(
                _report(doing, {rank: _describe(e) for rank, (e, _) in error.failures.items()})
            ) from error


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else error_text(error)


def _report(doing: str, failures: dict[int, str]) -> str:
    """One line for each distinct failure, with the ranks where it happened."""
    failed = [f"{doing} failed: rank {_some(ranks)}: {why}" for why, ranks in by_reason(failures).items()]
    return listed("", failed, indent="")


def _some(ranks: list[int]) -> str:
    """The numbers of the ranks; if there are many, the first eight and how many more there are."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more


def _differences(saved: dict[str, files.TensorEntry], tensors: dict[str, Tensor]) -> list[str]:
    """One line for each difference between the tensors asked for and the tensors saved."""
    lines = []
    for name, tensor in tensors.items():
        entry = saved.get(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if entry is None:
            lines.append(f"{name}: not in the checkpoint")
        elif entry.shape != tuple(tensor.shape):
            lines.append(f"{name}: shape {entry.shape} in the checkpoint, {tuple(tensor.shape)} asked for")
        elif entry.dtype != dtype:
            hint = "" if dtype == "float16" else "; `reshard --dtype` writes it so"
            lines.append(f"{name}: {entry.dtype} in the checkpoint, {dtype} asked for{hint}")
        if tensor.is_meta:  # DCP would fill a copy and leave the tensor itself without data
            lines.append(f"{name}: asked for on the meta device, which holds no data")
    return lines


def _buffer_like(source: Tensor, previous: Tensor | None) -> Tensor:
    """`previous` if it has the shape and dtype of `source`; else a new host buffer, pinned for CUDA."""
    if previous is not None and (previous.shape, previous.dtype) == (source.shape, source.dtype):
        return previous
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
