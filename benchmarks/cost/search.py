"""Finds the fastest layouts for some GPUs among all mixtures of axes, by predicted time and memory.

Settings that save memory are searched as well: recomputation, moments on the host, moments and sums of
gradients in bf16, and fewer micro-batches.

A layout's compute is a lower bound of its time and is the same in many worlds; for any tp and cp, so is the
communication of its parameters. Layouts are examined in the order of such bounds and predicted in full last,
until no remaining layout can be among the best.

next: page.py
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

from benchmarks.cost.network import moving_seconds
from benchmarks.cost.step_time import (
    RECOMPUTED,
    Prediction,
    chunk_kind,
    copy_seconds,
    layers_by_kind,
    passes,
    predict,
    steady,
)
from tmoe.config import check
from tmoe.config.axes import Axes
from tmoe.config.check import ConfigError
from tmoe.config.run import Config
from tmoe.config.sizes import master_bytes, moment_bytes, sum_bytes
from tmoe.model.block_time import block_seconds
from tmoe.model.count import block_shapes, count_parameters, numel
from tmoe.parallel.pipeline_cut import cut
from tmoe.plan.memory import blocks_bytes, held_at_most

Recomputed = Literal["none", "moe", "attention", "block"]
divisors = functools.cache(check.divisors)
LEAST = 256  # least tokens of a sequence that a rank works on
STAGES = 32  # most stages of a pipeline
CLOSE = 0.02  # relative time by which a layout left out may be faster: the model is less exact than that
NODES = 8  # most nodes that an expert group spans


class Choice(NamedTuple):
    """One layout, with the settings that it was predicted for."""

    cfg: Config
    axes: Axes
    step: Prediction

    @property
    def per_token(self) -> float:
        """Seconds per token and GPU."""
        return 1 / self.step.tokens_per_s_gpu


class Work(NamedTuple):
    """The settings that a rank's compute depends on, `offload` and `narrow`, but no world size or placements.

    narrow: moments (--optim.states) and sums of gradients (--optim.sums) are bf16.
    """

    tp: int
    cp: int
    cp_exchange: str
    ep: int
    etp: int
    batch: int
    checkpoint: Recomputed = "none"
    offload: bool = False
    narrow: bool = False


class Savings(NamedTuple):
    """How much a layout saves memory."""

    recomputed: frozenset[str]
    offload: bool
    micros: int
    narrow: bool = False

    def beyond(self, other: Savings) -> bool:
        """Whether this saves as much as `other` in every respect, and so takes as long or rounds more.

        A single micro-batch is not compared: it needs no sums of gradients, so it can be faster.
        """
        fewer = self.micros == other.micros or 1 < self.micros < other.micros
        states = self.offload >= other.offload and self.narrow >= other.narrow
        return fewer and states and self.recomputed >= other.recomputed


class Flow(NamedTuple):
    """How micro-batches are sent through a pipeline's stages."""

    schedule: str
    pp: int
    chunks: int  # chunks per stage


WHOLE = Flow("1f1b", 1, 1)  # no pipeline


class Search:
    """All layouts of one model, for any number of GPUs; common results are computed once."""

    def __init__(self, cfg: Config, m: SimpleNamespace, batch_tokens: int):
        """batch_tokens: most tokens of a step; a step has as many micro-batches as fit into it.

        The axes and the schedule of cfg, its recomputation and its offload are ignored, for all are searched.
        If cfg asks for narrower moments or sums of gradients, they are kept, and not searched.
        Its batch only limits the tokens that a rank has in a micro-batch.
        """
        self.cfg, self.m, self.batch_tokens = cfg, m, batch_tokens
        self.work_seconds = functools.cache(self._work_seconds)
        self.settings = functools.cache(self._settings)
        self.moved = functools.cache(self._moved)
        self.several = functools.cache(lambda n: replace(cfg, train=replace(cfg.train, accumulate=n)))
        self.section = functools.cache(lambda name, **new: replace(getattr(cfg, name), **new))
        self.held = functools.cache(self._held)
        self.works = functools.cache(lambda shard: list(self._works(shard)))
        self.parameters = count_parameters(cfg.model).total
        layers = range(cfg.model.layers)
        self.kinds = layers_by_kind(cfg.model, layers)
        self.experts = sum(numel(block_shapes(cfg.model, layer)[1]) for layer in layers)
        self.dense = self.parameters - self.experts
        self.kept = functools.cache(self._kept)
        self.bytes = functools.cache(self._bytes)
        self.placements = functools.cache(self._placements)
        self.predicted = 0

    def best(self, gpus: int, count: int = 10) -> list[Choice]:
        """The fastest layouts that fit into memory, the fastest first; one layout for each set of axes.

        If a layout fits, the same layout that saves more memory is not examined, because it is slower.
        Moments and sums in bf16 are not slower; they are examined only where fp32 does not fit.
        """
        number = itertools.count()
        # `what`: a work, a flow and a number of micro-batches, and, once parameters are placed, the axes
        waiting: list[tuple[float, int, list[Any]]] = [
            (bound, next(number), what) for bound, *what in self._begin(gpus)
        ]
        heapq.heapify(waiting)
        choices: dict[Axes, Choice] = {}
        fits: dict[tuple, list[Savings]] = {}  # of a layout, without its savings
        limit = float("inf")
        while waiting and waiting[0][0] < limit * (1 - CLOSE):
            bound, _, what = heapq.heappop(waiting)
            if len(what) == 3:
                for axes, more in self._placed(gpus, bound, *what):
                    heapq.heappush(waiting, (bound + more, next(number), [*what, axes]))
                continue
            work, flow, micros, axes = what
            plain = work._replace(checkpoint="none", offload=False, narrow=False)
            known = fits.setdefault((plain, flow, axes), [])
            savings = Savings(frozenset(RECOMPUTED[work.checkpoint]), work.offload, micros, work.narrow)
            if any(map(savings.beyond, known)) or (work.narrow and self.fits_whole(work, flow, micros, axes)):
                continue
            if (held := self.held(work, flow, micros, axes)) > self.m.room:
                continue
            cfg = self.settings(work, flow, micros)
            assert cfg is not None
            known.append(savings)
            self.predicted += 1
            choice = Choice(cfg, axes, predict(cfg, axes, self.m, held=held))
            if axes not in choices or choice.per_token < choices[axes].per_token:
                choices[axes] = choice
                times = sorted(choice.per_token for choice in choices.values())
                limit = times[count - 1] if len(times) >= count else limit
        return sorted(choices.values(), key=lambda choice: choice.per_token)[:count]

    def fits_whole(self, work: Work, flow: Flow, micros: int, axes: Axes) -> bool:
        """Whether the layout fits with moments and sums in fp32."""
        return self.held(work._replace(narrow=False), flow, micros, axes) <= self.m.room

    def _held(self, work: Work, flow: Flow, micros: int, axes: Axes) -> float:
        """Most bytes of the fullest rank; infinite if train.py would refuse the layout."""
        cfg = self.settings(work, flow, micros)
        return float("inf") if cfg is None else held_at_most(steady(cfg, axes), axes)

    def _begin(self, gpus: int) -> Iterator[tuple[float, Work, Flow, int]]:
        """(least seconds per token and GPU, work, flow, micro-batches) for all ways to compute."""
        seq, layers = self.cfg.train.seq, self.cfg.model.layers
        for pp in divisors(gpus):
            if pp > min(STAGES, layers):
                break
            stage = gpus // pp
            flows = [Flow("1f1b", pp, 1)]
            if pp > 1:
                flows += [Flow("interleaved", pp, n) for n in (2, 4)] + [Flow("v", pp, 2)]
            flows = [flow for flow in flows if pp * flow.chunks <= layers]
            for work in self.works(stage):
                parts = work.tp * work.cp
                sequences = self.batch_tokens // (stage // parts * seq)  # for one reader in a step
                for batch in self._batches(min(self.cfg.train.batch * parts, sequences // pp)):
                    for flow, micros in self._micros(flows, sequences // batch):
                        what = work._replace(batch=batch)
                        yield self._compute(what, flow, micros), what, flow, micros

    @staticmethod
    def _batches(most: int) -> list[int]:
        """Sequences of a micro-batch: `most`, half and a quarter of it."""
        return sorted({most, most // 2, most // 4} - {0})

    @staticmethod
    def _micros(flows: list[Flow], most: int) -> Iterator[tuple[Flow, int]]:
        """Each flow with the numbers of micro-batches to try: the most, and fewer, which need less memory."""
        for flow in flows:
            whole = most // flow.pp * flow.pp if flow.schedule == "interleaved" else most
            for micros in sorted({whole, min(whole, 2 * flow.pp if flow.pp > 1 else 1), min(whole, flow.pp)}):
                yield flow, micros

    def _compute(self, work: Work, flow: Flow, micros: int) -> float:
        """Least seconds per token and GPU: compute of the busiest stage, and the least time that it waits."""
        whole, quickest, slowest = self.work_seconds(work._replace(offload=False, narrow=False))
        busiest = max(whole / flow.pp, -(-self.cfg.model.layers // flow.pp) * quickest)
        # The cut is as even as whole blocks allow.
        least = max(quickest, whole / (flow.pp * flow.chunks) - slowest)
        waits = 0.0 if flow.schedule == "v" else (flow.pp - 1) * least
        seconds = micros * busiest + waits
        tokens = micros * work.batch * self.cfg.train.seq / (work.tp * work.cp * flow.pp)
        return seconds / tokens

    def _placed(
        self, gpus: int, computing: float, work: Work, flow: Flow, micros: int
    ) -> Iterator[tuple[Axes, float]]:
        """(axes, additional least seconds per token and GPU) for all ways to place parameters for this work.

        computing: seconds per token and GPU of compute, the most communication that can be hidden.
        """
        m = self.m
        tokens = micros * work.batch * self.cfg.train.seq / (work.tp * work.cp * flow.pp)
        spread = work._replace(batch=1, checkpoint="none", offload=False, narrow=False, cp_exchange="keys")
        states, moments, least, whole = self.bytes(work._replace(batch=1, checkpoint="none"))
        kept = None
        for axes, alone in self.placements(gpus // flow.pp, flow.pp, spread):
            # bytes that the mean rank certainly holds: weights and moments, gradients, kept activations
            local_parameters = self.parameters / axes.shard / flow.pp
            if states * local_parameters > m.room:
                continue
            if kept is None:
                kept = self.kept(work) + whole / flow.pp * (micros > 1)
            if states * local_parameters + max(least * local_parameters, kept) > m.room:
                continue
            for_two, for_three = (self.moved(alone, flow.chunks, min(micros, n), work.narrow) for n in (2, 3))
            moving, near, copying = (
                a + max(0, micros - 2) * (b - a) for a, b in zip(for_two, for_three, strict=True)
            )
            exposed = max((1 - min(1.0, m.fsdp_overlap)) * moving, moving - computing * tokens)
            slowed = m.slowed * near * (1 - exposed / moving) if moving else 0.0
            stepping = m.optimizer_bytes * local_parameters / m.memory_rate
            if work.offload:
                stepping = max(stepping, moments * local_parameters / m.host_rate)
            yield axes, (exposed + slowed + copying + stepping) / tokens

    def _placements(self, stage: int, pp: int, work: Work) -> list[tuple[Axes, Axes]]:
        """All ways to place a stage's parameters on its ranks, and each of them with tp and cp of 1."""
        found = []
        for replicate in divisors(stage):
            shard = stage // replicate
            if shard % (work.ep * work.etp) or shard % (work.tp * work.cp):
                continue
            if replicate > 1 and shard % self.m.node:  # a replica must fill whole nodes
                continue
            dp = shard // (work.ep * work.etp)
            axes = Axes(pp=pp, replicate=replicate, dp=dp, ep=work.ep, etp=work.etp, tp=work.tp, cp=work.cp)
            found.append((axes, replace(axes, tp=1, cp=1)))
        return found

    def _bytes(self, work: Work) -> tuple[float, float, float, float]:
        """Bytes of a parameter: its states, its moments, its gradient at least. Bytes of the whole sums.

        The whole sums are a rank's sums of gradients over several micro-batches, for all stages.
        """
        cfg = self.settings(work)
        assert cfg is not None
        moments = moment_bytes(cfg, 1) if cfg.optim.states != "int8" else 2
        moments //= 1 if cfg.optim.muon is None else 2  # Muon has one, AdamW two
        dense = 0 if self.cfg.parallel.shard == 2 else self.dense  # whose gradients are kept whole
        states = master_bytes(cfg) + (0 if work.offload else moments)
        least = min(master_bytes(cfg), sum_bytes(cfg))
        return states, moments, least, sum_bytes(cfg) * (dense + self.experts / work.ep)

    def _kept(self, work: Work) -> float:
        """Bytes that autograd certainly keeps on the fullest stage, which has a micro-batch of each stage.

        They are a tenth less than those of all blocks, because a stage has whole blocks.
        """
        cfg = self.settings(work._replace(offload=False, narrow=False))
        assert cfg is not None
        return 0.9 * blocks_bytes(cfg, work_axes(work), range(cfg.model.layers))

    def _moved(self, axes: Axes, chunks: int, micros: int, narrow: bool) -> tuple[float, float, float]:
        """Seconds of a step for communicating parameters and gradients, the same on one node, and for copies.

        They are those of the mean stage.

        From two micro-batches on, each further micro-batch takes the same time.
        """
        cfg = self.several(micros)
        cfg = replace(cfg, optim=replace(cfg.optim, sums="bf16")) if narrow else cfg
        machines = [self.m, SimpleNamespace(**{**vars(self.m), "node": axes.world})]
        same: dict[tuple, tuple[float, ...]] = {}
        by_span = []
        for span in cut(cfg.model.layers, axes.pp * chunks):
            if (kind := chunk_kind(cfg.model, span)) not in same:
                each = [moving_seconds(cfg, axes, span, m) for m in machines]
                moving = [
                    first + (micros - 1) * (later + backward) + last for first, later, backward, last in each
                ]
                same[kind] = *moving, copy_seconds(cfg, axes, span, self.m)
            by_span.append(same[kind])
        moving, near, copying = (sum(seconds) / axes.pp for seconds in zip(*by_span, strict=True))
        return moving, near, copying

    def _works(self, stage: int) -> Iterator[Work]:
        """The ways to divide a block's work over the ranks of a stage."""
        seq, node, model = self.cfg.train.seq, self.m.node, self.cfg.model
        sparse = any(map(model.is_moe, range(model.layers)))
        degrees = divisors(stage)
        for tp, cp in itertools.product(degrees, degrees):
            parts = tp * cp
            if parts > max(1, seq // LEAST) or stage % parts or tp > node or (node % tp and stage > node):
                continue
            for ep, etp in itertools.product(degrees, degrees):
                group = ep * etp
                if stage % group or model.moe.experts % ep or ep > NODES * node or not (sparse or group == 1):
                    continue
                inside = node % group == 0 or stage <= node
                if not inside and (etp > 1 or ep % node):
                    continue
                for by in ("keys", "heads") if cp > 1 and parts <= node else ("keys",):
                    work = Work(tp, cp, by, ep, etp, 1)
                    if self.settings(work):
                        narrow = [n for n in (False, True) if self.settings(work._replace(narrow=n))]
                        ways = itertools.product(get_args(Recomputed), (False, True), narrow)
                        for checkpoint, offload, n in ways:
                            yield work._replace(checkpoint=checkpoint, offload=offload, narrow=n)

    def _settings(self, work: Work, flow: Flow = WHOLE, micros: int = 1) -> Config | None:
        """The settings of a run; None if train.py would refuse them, or if they are narrow already."""
        optim = self.cfg.optim
        if work.narrow and (optim.states, optim.masters, optim.sums) != ("fp32",) * 3:
            return None
        narrow = dict(states="bf16", sums="bf16") if work.narrow else {}
        parallel: dict[str, Any] = dict(dp=None, ep=work.ep, etp=work.etp, tp=work.tp, cp=work.cp)
        parallel |= dict(cp_exchange=work.cp_exchange, checkpoint=work.checkpoint)
        parallel |= dict(pp=flow.pp, schedule=flow.schedule, chunks=None if flow.pp == 1 else flow.chunks)
        train = dict(batch=work.batch, accumulate=micros)
        try:
            return replace(
                self.cfg,
                parallel=self.section("parallel", **parallel),
                train=self.section("train", **train),
                optim=self.section("optim", offload=work.offload, **narrow),
            )
        except ConfigError:
            return None

    def _work_seconds(self, work: Work) -> tuple[float, float, float]:
        """Seconds of a micro-batch: all blocks and the head, the quickest block, the slowest of all."""
        cfg, model = self.settings(work), self.cfg.model
        assert cfg is not None
        axes = work_axes(work)
        busiest = 1.0 if work.ep == 1 else self.m.skew
        head = passes(cfg, axes, range(model.layers - 1, model.layers), self.m, busiest)[0]["loss"]
        whole, blocks = head, []
        for layers in self.kinds.values():
            forward, backward = block_seconds(cfg, axes, layers[0], self.m, busiest)
            again = sum(forward[part] for part in RECOMPUTED[cfg.parallel.checkpoint])
            blocks.append(sum(forward.values()) + sum(backward.values()) + again)
            whole += len(layers) * blocks[-1]
        return whole, min(blocks), max(*blocks, head)


def work_axes(work: Work) -> Axes:
    """The axes of a world in which a rank has this work."""
    return Axes(dp=work.tp * work.cp, ep=work.ep, etp=work.etp, tp=work.tp, cp=work.cp)
