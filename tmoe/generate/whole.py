"""A model that lies over ranks, made ready for a call: weights gathered once, attention undivided, in step.

    weights     FSDP2 gathers each unit, and working copies stand in, from the call's beginning to its end.
                No rank holds a second copy, and the masters are not touched.
    attention   tp, cp and etp divide work alone, not storage: each rank has whole matrices, and answers its
                own prompts with them.
    experts     Where ep spreads them, all ranks of an expert group must pass each layer together. Each pass
                of one rank (a chunk of prompts, or a token of each slot) is a pass of all, with no rows where
                a rank has none.

next: generate/slots.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tmoe.config.check import Setting, require
from tmoe.model.float8 import in_compute_type
from tmoe.model.spread import ALONE
from tmoe.model.transformer import Block, Transformer
from tmoe.moe.exchange.dispatch import SymmDispatcher
from tmoe.moe.exchange.symm import graphs_end_here
from tmoe.moe.layer import MoE
from tmoe.parallel.collectives import group_of

STOP = 2**30  # in place of a number of rows: a rank of the group was told to stop
AT_ONCE = 8192  # tokens of prompts in one pass, at most
ON_CPU = 1024  # where a mask is [S, S]


class Stopped(Exception):
    """A call has ended early, because a rank was told to stop: on all ranks of its expert group at one pass.

    What there is of its answers is lost.
    """


def require_whole(model: object) -> None:
    """ValueError for what is no Transformer, or a part of one."""
    valid = "valid is a Transformer, on one device or laid out by parallelize"
    kind = type(model).__name__
    stage = kind == "Stages" or (isinstance(model, Transformer) and not (model.first and model.last))
    one = f"{Setting('parallel.pp')} must be 1 for an engine"
    require(not stage, f"model: got a {kind} of a pipeline, but {one}")
    require(isinstance(model, Transformer), f"model: got a {kind}, {valid}")


def is_laid_out(model: Transformer) -> bool:
    """Whether a call is one of several ranks: weights or experts lie on others."""
    spread = bool(model.expert_group) or any(isinstance(module, FSDPModule) for module in model.modules())
    return spread and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def gathered(model: Transformer, slots: int, told: Callable[[], bool] = lambda: False) -> Iterator[Ranks]:
    """Inside, modules hold their weights whole, in the type of computation, and compute as in evaluation.

    slots: rows of this rank's steps, at most. told: see `Ranks`. A collective of all ranks that the model
    lies on, in the beginning alone; what it gives are the ranks that must pass the experts together.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    layers = [block.moe for block in blocks if block.moe is not None]
    divided = [model, *(block.attention for block in blocks)]
    spread = model.spread
    modes = {module: module.training for module in model.modules()}
    with ExitStack() as stack:
        # what is gathered outlives a caller's inference mode, and autograd would refuse it
        with torch.inference_mode(False), torch.no_grad():
            for unit in units:
                unit.reshard()  # it may be left from a forward, with weights of that time
            for unit in units:
                stack.callback(unit.reshard)
                unit.unshard()
            for module in model.modules():
                stack.enter_context(getattr(module, "standing_in", nullcontext)())
        ranks = Ranks(model, layers, told)
        for exchange in exchanges(layers):
            stack.enter_context(graphs_end_here(exchange.group))
        stack.enter_context(room(layers, ranks.join(max(slots, ranks.at_once))))
        stack.enter_context(in_compute_type(model))
        try:
            model.eval()
            for part in divided:
                part.spread = ALONE
            yield ranks
        finally:
            for part in divided:
                part.spread = spread
            for module, mode in modes.items():
                module.training = mode


class Ranks:
    """The ranks that pass the experts together. Without an expert group: this one alone.

    told: asked before each pass; whether this rank is to stop.
    """

    def __init__(self, model: Transformer, layers: list[MoE], told: Callable[[], bool]):
        self.told = told
        self.group = group_of(model.expert_group) if model.expert_group else None
        self.device = model.head_weight.device
        self.side = torch.cuda.Stream() if self.group and self.device.type == "cuda" else None
        self.pads = self.group is not None and any(moe.router.cfg.pad for moe in layers)
        # whether a pass keeps no host waiting: its experts are here, or their rows go through peers' memory
        self.free = self.group is None or all(
            isinstance(moe.dispatcher, SymmDispatcher) and moe.router.cfg.capacity_factor is None
            for moe in layers
        )
        # no more than exchanges have room for: they keep what they once had, and copy all of it
        rooms = [exchange.tokens for exchange in exchanges(layers) if exchange.tokens]
        self.at_once = min([AT_ONCE if self.device.type == "cuda" else ON_CPU, *rooms])
        self.at_once = model.rounding.piece(self.at_once)

    def join(self, rows: int) -> int:
        """The most rows that any rank has in the next pass, which all must make; below 0: none has one.

        rows: of this rank; -1: it has no pass to make. A collective, beside the work on the device, of which
        the host waits for none. Raises Stopped on all of these ranks where one of them was told to stop.
        """
        rows = STOP if self.told() else rows
        most = self._most(rows)
        if most == STOP:
            raise Stopped
        return most

    def _most(self, rows: int) -> int:
        """The largest number of any of these ranks. A collective."""
        if self.group is None:
            return rows
        with torch.cuda.stream(self.side) if self.side else nullcontext():
            most = torch.tensor(rows, device=self.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            return int(most)

    def rows(self, rows: int) -> int:
        """`join`; returns how many rows experts must be given, 0 if any number will do."""
        most = self.join(rows)
        return most if self.pads else 0


def exchanges(layers: list[MoE]) -> set[SymmDispatcher]:
    """Those that go through the peers' memory."""
    dispatchers = {way for moe in layers for way in (moe.dispatcher, *moe.ways.values())}
    return {way for way in dispatchers if isinstance(way, SymmDispatcher)}


@contextmanager
def room(layers: list[MoE], tokens: int) -> Iterator[None]:
    """Inside, exchanges through the peers' memory have room for so many tokens of any rank."""
    before = {exchange: exchange.tokens for exchange in exchanges(layers)}
    try:
        for exchange in before:
            exchange.tokens = max(exchange.tokens, tokens)
        yield
    finally:
        for exchange, had in before.items():
            exchange.tokens = had
