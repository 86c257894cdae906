"""The degree of every axis that a world of ranks is divided along, and the counts that follow from them.

`Axes` is a plain value: it needs neither torch nor a process group. Settings, estimates and offline tools use
it, and so does `build_mesh`.

next: tmoe/parallel/mesh.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from tmoe.config.check import ConfigError, Setting, divisors

if TYPE_CHECKING:
    from tmoe.config.run import ParallelConfig


class RankPlace(NamedTuple):
    """A rank's index on every axis, counted from 0 (`Axes.place`)."""

    pp: int
    replicate: int
    dp: int
    etp: int
    ep: int
    reader: int
    """which of the `Axes.readers` the rank belongs to: ranks of one reader work on the same sequences"""
    cp: int
    tp: int


@dataclass(frozen=True)
class Copies:
    """How processes that torchrun starts divide a model that answers: --parallel of serve and eval."""

    ep: int = 1
    """processes that divide the experts of one copy of the model; more processes have more copies"""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Degrees of the axes, all 1 by default.

    world = pp x replicate x dp x ep x etp. tp and cp are factors of dp x ep x etp: the same ranks that divide
    the experts by dp, ep and etp divide attention by tp and cp.

    Raises ValueError for a degree that is not a whole number of 1 or more, and where cp x tp does not divide
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
        parts = self.cp * self.tp
        if self.shard % parts:
            product = f"{self.cp} x {Setting('parallel.tp', self.tp)} = {parts}"
            wrong = f"must divide dp x ep x etp = {self.shard}"
            raise ConfigError.of("parallel.cp", product, wrong, divisors(self.shard))

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.stage

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.replicate * self.shard

    @property
    def shard(self) -> int:
        """Ranks that divide one copy of a stage's dense parameters."""
        return self.dp * self.ep * self.etp

    @property
    def sharers(self) -> int:
        """Ranks of one copy that hold the same experts, each a part of them.

        Storage makes no difference between dp and etp.
        """
        return self.dp * self.etp

    @property
    def parts(self) -> int:
        """Ranks that work on the same sequences, each on its own tokens."""
        return self.cp * self.tp

    @property
    def readers(self) -> int:
        """Number of groups of cp x tp ranks, each of which reads its own sequences."""
        return self.stage // self.parts

    def place(self, rank: int) -> RankPlace:
        """A rank's place: pp varies slowest, then replicate; dp, etp, ep divide the rest, and so do reader,
        cp, tp."""
        pp, in_stage = divmod(rank, self.stage)
        replicate, in_shard = divmod(in_stage, self.shard)
        sharer, ep = divmod(in_shard, self.ep)
        dp, etp = divmod(sharer, self.etp)
        reader, part = divmod(in_stage, self.parts)
        cp, tp = divmod(part, self.tp)
        return RankPlace(pp, replicate, dp, etp, ep, reader, cp, tp)

    def __str__(self) -> str:
        """The degrees in words: `dp 2 x ep 4`, and the other axes where they are more than 1."""
        more = [field.name for field in fields(self) if field.name not in ("dp", "ep")]
        names = ["dp", "ep", *(name for name in more if getattr(self, name) > 1)]
        return " x ".join(f"{name} {getattr(self, name)}" for name in names)

    @classmethod
    def of(cls, parallel: ParallelConfig, world: int, experts: int = 0) -> Axes:
        """The axes that the settings give in a world of `world` ranks. Raises ConfigError as `over` does.

        experts: number of experts of the model, which ep must divide as well; 0: not known.
        """
        p = parallel
        more = dict(tp=p.tp, cp=p.cp, pp=p.pp, replicate=p.replicate, etp=p.etp)
        return cls.over(world, dp=p.dp, experts=experts, ep=p.ep, **more)

    @classmethod
    def over(cls, world: int, *, dp: int | None = None, experts: int = 0, **others: int) -> Axes:
        """The axes of a world of `world` ranks.

        dp: None: the world divided by the other axes.
        experts: number of experts of the model, so that errors call only degrees of ep valid that divide it;
            0: not known.
        others: degrees by the names of the fields; 1 where they are left out.
        Raises ValueError, which names the flags and the valid values, where a degree is not a whole number of
        1 or more, where the axes do not multiply to the world, or where tp and cp do not fit into a stage.
        """
        for name, size in dict(dp=1 if dp is None else dp, **others).items():
            _require_degree(name, size)
        factors = {name: others.get(name, 1) for name in ("pp", "replicate", "ep", "etp")}
        used = {name: size for name, size in factors.items() if size > 1 or name == "ep"}
        (first, size), *more = used.items()
        times = "".join(f" x {Setting(f'parallel.{name}', degree)}" for name, degree in more)
        product = math.prod(factors.values())
        if dp is None:
            if world % product:
                valid = divisors(world)
                if not more and experts:
                    valid = [d for d in valid if experts % d == 0]
                value = f"{size}{times} = {product}" if more else size
                wrong = f"must divide the world of {world} processes"
                raise ConfigError.of(f"parallel.{first}", value, wrong, valid)
            dp = world // product
        if dp * product != world:
            hint = f"torchrun with {dp * product} processes"
            if world % product == 0:
                hint = f"{Setting('parallel.dp')} {world // product}"
            axes = f"{Setting('parallel.dp', dp)} x {Setting(f'parallel.{first}', size)}{times}"
            raise ConfigError(f"{axes} = {dp * product} is not the world of {world} processes; use {hint}")
        return cls(dp=dp, **others)


def _require_degree(name: str, size: object) -> None:
    if type(size) is not int or size < 1:
        raise ConfigError.of(f"parallel.{name}", repr(size), "must be a whole number from 1 on")


ALONE = Axes()  # one rank
