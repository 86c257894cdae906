"""The processes of an evaluation: rank 0 reads and reports, and gives every process a share of the work.

Each process has whole dense weights. With ep, the processes of an expert group divide the experts.

next: eval/worker.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from tmoe.checkpoint.manifest import CheckpointError
from tmoe.config.check import ConfigError, require
from tmoe.eval.worker import Worker
from tmoe.generate.gathered_model import AT_ONCE
from tmoe.model.parallelize import apply_ep, require_divisible
from tmoe.model.transformer import Transformer
from tmoe.moe.layer import MoE
from tmoe.parallel.agree import attempt, by_reason
from tmoe.parallel.collectives import name_of
from tmoe.parallel.launcher import launcher_world
from tmoe.parallel.mesh import Mesh, build_mesh

T = TypeVar("T")
KINDS = ValueError, OSError, CheckpointError  # errors that are refusals
IDLE = timedelta(days=30)  # rank 0 may read data, or compute metrics, for longer than a collective may wait


class Team:
    """All processes that the launcher has started; one without a launcher.

    ep: processes that divide the experts. The other axis, dp, has whole copies of them.
    """

    def __init__(self, ep: int = 1) -> None:
        self.mesh: Mesh | None = None
        self.group: dist.ProcessGroup | None = None
        self.busy = False
        """whether ranks are in a job, and so do not listen to rank 0"""
        size = launcher_world().size
        require(ep >= 1 and size % ep == 0, "parallel.ep", ep, f"must divide the {size} processes")
        if size > 1:
            self.mesh = build_mesh(ep=ep)
            self.group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=IDLE))

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def spread(self, model: Transformer) -> None:
        """Divides the experts of a model on the meta device over the ranks of each expert group."""
        if self.mesh is None or self.mesh.axes.ep == 1:
            return
        layers = [module for module in model.modules() if isinstance(module, MoE)]
        require(len(layers) > 0, "parallel.ep", self.mesh.axes.ep, "the model has no experts", 1)
        for moe in layers:
            require_divisible(moe, self.mesh)
            apply_ep(moe, self.mesh, "auto", AT_ONCE)
        model.expert_group = name_of(self.mesh.ep.get_group())

    def agreed(self, work: Callable[[], T]) -> T:
        """The result of `work` on this rank. If it is refused on any rank, the command ends on all ranks.

        Rank 0 raises one error with all reasons. The other ranks end without a line. A collective.
        """
        if self.group is None:
            return work()
        result, error, failures = attempt(work, self.group, KINDS, _text)
        if failures and self.rank:
            raise SystemExit(2)
        if failures:
            raise ConfigError(self._reasons(failures)) from error
        return cast(T, result)

    def from_first(self, value: T) -> T:
        """Rank 0's value. A collective."""
        values: list[Any] = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def each(self, worker: Worker, job: str, shares: Sequence[Any], *settings: Any) -> list[Any]:
        """Calls a method of every rank's worker with its share; returns the results by rank. For rank 0.

        ConfigError with the reasons of all ranks that refuse their share. The other ranks wait for the next
        job then, so that rank 0 can say why before they end.
        """
        if self.group is None:
            return [getattr(worker, job)(shares[0], *settings)]
        mine: list[Any] = [None]
        jobs = [(job, share, *settings) for share in shares]
        self.busy = True
        dist.scatter_object_list(mine, jobs, src=0, group=self.group)
        found, error = self._do(worker, mine[0])
        self.busy = False
        if error is not None:
            raise error
        return found

    def serve(self, worker: Worker) -> None:
        """Does the jobs that rank 0 sends until it dismisses this rank. For all ranks except 0."""
        while True:
            mine: list[Any] = [None]
            dist.scatter_object_list(mine, None, src=0, group=self.group)
            if mine[0] is None:
                return
            self._do(worker, mine[0])

    def dismiss(self) -> None:
        """Ends `serve` on all other ranks, unless a job was broken off. For rank 0."""
        if self.group is not None and not self.busy:
            dist.scatter_object_list([None], [None] * self.size, src=0, group=self.group)

    def _do(self, worker: Worker, job: tuple[Any, ...]) -> tuple[list[Any], ConfigError | None]:
        """The results of all ranks, on rank 0, and why a rank has refused its share."""
        name, share, *settings = job
        result, error, failures = attempt(
            lambda: getattr(worker, name)(share, *settings), self.group, KINDS, _text
        )
        if failures:
            refused = ConfigError(self._reasons(failures))
            refused.__cause__ = error
            return [], refused
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(result, found, dst=0, group=self.group)
        return found or [], None

    def _reasons(self, failures: dict[int, str]) -> str:
        """The reasons, each with its ranks unless all ranks have it, or rank 0, which reads the flags."""
        reasons = by_reason(failures)
        return "; ".join(
            why if len(ranks) == self.size or ranks == [0] else f"rank {', '.join(map(str, ranks))}: {why}"
            for why, ranks in reasons.items()
        )


def _text(error: BaseException) -> str:
    return error.text if isinstance(error, ConfigError) else str(error)
