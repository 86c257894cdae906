"""The degree of every axis that a world of ranks is divided along, and the counts that follow from them.

A plain value: neither torch nor a process group is needed, so settings, estimates and offline tools use it as
well as `build_mesh` does.

next: tmoe/parallel/mesh.py
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tmoe.config.run import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Degrees of the axes, all 1 by default. `Axes.over` makes only dp and ep more than 1 today.

    world = pp x replicate x dp x ep x etp. tp and cp are carved out of dp x ep x etp: they divide attention
    among ranks that divide the experts in another way.

    Raises ValueError for a degree that is no whole number from 1 on, and where cp x tp does not divide
    dp x ep x etp.
    """

    pp: int = 1
    """pipeline stages"""
    replicate: int = 1
    """whole copies of a stage's parameters"""
    dp: int = 1
    """data-parallel degree outside the expert group: ranks that share the same experts"""
    ep: int = 1
    """expert-parallel degree: ranks that divide the experts"""
    etp: int = 1
    """ranks that divide every expert"""
    tp: int = 1
    """ranks that divide attention's heads"""
    cp: int = 1
    """ranks that divide a sequence"""

    def __post_init__(self) -> None:
        for field in fields(self):
            _require_degree(field.name, getattr(self, field.name))
        if self.shard % (self.cp * self.tp):
            raise ValueError(
                f"--parallel.cp={self.cp} x --parallel.tp={self.tp}: must divide dp x ep x etp = {self.shard}"
            )

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.replicate * self.shard

    @property
    def shard(self) -> int:
        """Ranks that divide one copy of a stage's dense parameters."""
        return self.dp * self.ep * self.etp

    @property
    def readers(self) -> int:
        """Ranks, or groups of them, that read sequences of their own."""
        return self.replicate * self.shard // (self.cp * self.tp)

    def __str__(self) -> str:
        """In words: `dp 2 x ep 4`, and the other axes where they are more than 1."""
        more = [field.name for field in fields(self) if field.name not in ("dp", "ep")]
        names = ["dp", "ep", *(name for name in more if getattr(self, name) > 1)]
        return " x ".join(f"{name} {getattr(self, name)}" for name in names)

    @classmethod
    def of(cls, parallel: ParallelConfig, world: int) -> Axes:
        """Those of the settings in a world of so many ranks. Raises ValueError as `over` does."""
        return cls.over(world, dp=parallel.dp, ep=parallel.ep)

    @classmethod
    def over(cls, world: int, *, dp: int | None = None, ep: int = 1, **others: int) -> Axes:
        """Those of a world of so many ranks; dp None takes what the other axes leave of it.

        others: degrees of tp, cp, pp, replicate and etp, of which 1 alone is valid today.

        Raises ValueError, which names the flag and the valid values, where an axis is not built yet, a degree
        is no whole number from 1 on, or the axes do not multiply to the world.
        """
        for name, size in others.items():
            if size != 1:
                raise ValueError(f"{name}={size}: this axis is not built yet; valid: 1")
        if dp is not None:
            _require_degree("dp", dp)
        _require_degree("ep", ep)
        if dp is None:
            if world % ep:
                valid = [d for d in range(1, world + 1) if world % d == 0]
                raise ValueError(
                    f"--parallel.ep={ep}: must divide the world of {world} processes; valid: {valid}"
                )
            dp = world // ep
        if dp * ep != world:
            hint = f"--parallel.dp {world // ep}" if world % ep == 0 else f"torchrun with {dp * ep} processes"
            raise ValueError(
                f"--parallel.dp={dp} x --parallel.ep={ep} = {dp * ep} is not the world of {world} processes; "
                f"use {hint}"
            )
        return cls(dp=dp, ep=ep, **others)


def _require_degree(name: str, size: object) -> None:
    if type(size) is not int or size < 1:
        raise ValueError(f"--parallel.{name}={size!r}: must be a whole number from 1 on")


ALONE = Axes()  # one rank
