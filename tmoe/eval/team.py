"""The processes of an evaluation: rank 0 reads and reports, and gives every process a share of the work.

next: generate/processes.py, eval/worker.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from tmoe.config.check import ConfigError
from tmoe.eval.worker import Worker
from tmoe.generate.processes import KINDS, Processes, text_of
from tmoe.parallel.agree import attempt


class Team(Processes):
    """All processes that the launcher has started, with the jobs that rank 0 gives them."""

    busy = False
    """whether ranks are in a job, and so do not listen to rank 0"""

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
            lambda: getattr(worker, name)(share, *settings), self.group, KINDS, text_of
        )
        if failures:
            refused = ConfigError(self.reasons(failures))
            refused.__cause__ = error
            return [], refused
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(result, found, dst=0, group=self.group)
        return found or [], None
