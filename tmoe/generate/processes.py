"""The processes that a launcher has started for a model: whole copies of it, and experts spread over ranks.

Each process has whole dense weights. With ep, the processes of an expert group divide the experts.

next: generate/load.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from tmoe.checkpoint.errors import CheckpointError
from tmoe.config.check import ConfigError, divisors, require
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


class Processes:
    """All processes that the launcher has started; one without a launcher.

    ep: processes that divide the experts. The other axis, dp, has whole copies of them.
    ConfigError unless ep divides the number of processes.
    """

    def __init__(self, ep: int = 1) -> None:
        self.mesh: Mesh | None = None
        self.group: dist.ProcessGroup | None = None
        size = launcher_world().size
        require_ep(ep, size)
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
        result, error, failures = attempt(work, self.group, KINDS, text_of)
        if failures and self.rank:
            raise SystemExit(2)
        if failures:
            raise ConfigError(self.reasons(failures)) from error
        return cast(T, result)

    def from_first(self, value: T) -> T:
        """Rank 0's value. A collective."""
        values: list[Any] = [value]
        if self.group is not None:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def reasons(self, failures: Mapping[int, str]) -> str:
        """The reasons, each with its ranks unless all ranks have it, or rank 0, which reads the flags."""
        return "; ".join(
            why if len(ranks) == self.size or ranks == [0] else f"rank {', '.join(map(str, ranks))}: {why}"
            for why, ranks in by_reason(failures).items()
        )


def require_ep(ep: int, size: int) -> None:
    """ConfigError unless ep divides the number of processes."""
    fine = ep >= 1 and size % ep == 0
    require(fine, "parallel.ep", ep, f"must divide the {size} processes", divisors(size))


def text_of(error: BaseException) -> str:
    """The message of an error."""
    return error.text if isinstance(error, ConfigError) else str(error)
