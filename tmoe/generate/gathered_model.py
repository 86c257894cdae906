"""Prepares a laid-out model for a call: gathers weights, undivides attention, and keeps ranks in step.

    weights     FSDP2 gathers each unit, and working copies of weights are used, from the call's beginning to
                its end. No rank holds a second copy, and the masters are not changed.
    attention   tp, cp and etp divide work only, not storage: each rank has whole matrices, and answers its
                own prompts with them.
    experts     Where ep divides the experts, all ranks of an expert group must run each MoE layer at the same
                time. Each pass of one rank (a chunk of prompts, or a token of each slot) is a pass of all its
                ranks; ranks without rows take part with none.

next: generate/slots.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tmoe.config.check import Setting, require
from tmoe.model.attention_parallel import ALONE
from tmoe.model.float8 import in_compute_type
from tmoe.model.transformer import Block, Transformer
from tmoe.moe.exchange.dispatch import SymmDispatcher
from tmoe.moe.exchange.symm import graphs_end_here
from tmoe.moe.layer import MoE
from tmoe.parallel.collectives import group_of
from tmoe.parallel.mesh import patience

STOP = 2**30  # in place of a number of rows: a rank of the group must stop
AT_ONCE = 8192  # most tokens of prompts in one pass
ON_CPU = 1024  # the same on a CPU, where a mask is [S, S]


class Stopped(Exception):
    """A call has ended early because a rank must stop. All ranks of its expert group raise it at one pass.

    Unfinished answers are lost.
    """


def require_whole(model: object) -> None:
    """ValueError unless the model is a Transformer, and not a part of a pipeline."""
    valid = "valid is a Transformer, on one device or laid out by parallelize"
    kind = type(model).__name__
    stage = kind == "Stages" or (isinstance(model, Transformer) and not (model.first and model.last))
    rule = f"{Setting('parallel.pp')} must be 1 for an engine"
    require(not stage, f"model: got a {kind} of a pipeline, but {rule}")
    require(isinstance(model, Transformer), f"model: got a {kind}, {valid}")


def is_laid_out(model: Transformer) -> bool:
    """Whether several ranks must make a call together, because they share weights or experts."""
    spread = bool(model.expert_group) or any(isinstance(module, FSDPModule) for module in model.modules())
    return spread and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def gathered(
    model: Transformer,
    slots: int,
    told: Callable[[], bool] = lambda: False,
    questions: dist.ProcessGroup | None = None,
) -> Iterator[Ranks]:
    """A context in which modules have whole weights, in the compute type, and compute as in evaluation.

    It yields the ranks that must run the experts together. Entering it is a collective of all ranks of the
    model; leaving it is not.

    Args:
        slots: most rows of this rank's steps.
        told, questions: as in `Ranks`.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    layers = [block.moe for block in blocks if block.moe is not None]
    divided = [model, *(block.attention for block in blocks if block.attention is not None)]
    spread = model.spread
    modes = {module: module.training for module in model.modules()}
    with ExitStack() as stack:
        # gathered weights outlive a caller's inference mode, whose tensors autograd would refuse
        with torch.inference_mode(False), torch.no_grad():
            for unit in units:
                unit.reshard()  # it may still have old weights, gathered for an earlier forward
            for unit in units:
                stack.callback(unit.reshard)
                unit.unshard()
            for module in model.modules():
                stack.enter_context(getattr(module, "standing_in", nullcontext)())
        ranks = Ranks(model, layers, told, questions)
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
    """The ranks of one expert group, which must run each MoE layer at the same time.

    Without an expert group it is this rank alone.

    Args:
        layers: the model's MoE layers.
        told: called before each pass; returns whether this rank must stop.
        questions: a gloo group of the same ranks for `join`; None: the expert group. An idle rank then waits
            in the kernel; it would occupy a core and its GPU with nccl.
    """

    def __init__(
        self,
        model: Transformer,
        layers: list[MoE],
        told: Callable[[], bool],
        questions: dist.ProcessGroup | None = None,
    ):
        self.told = told
        self.group = group_of(model.expert_group) if model.expert_group else None
        self.asks = questions or self.group
        self.device = model.head_weight.device
        self.side = torch.cuda.Stream() if self.group and self.device.type == "cuda" else None
        self.pads = self.group is not None and any(moe.router.cfg.pad for moe in layers)
        # whether the host need not wait in a pass: experts are on this rank, or rows use the peers' memory
        self.free = self.group is None or all(
            isinstance(moe.dispatcher, SymmDispatcher) and moe.router.cfg.capacity_factor is None
            for moe in layers
        )
        # at most the tokens that the buffers hold: larger buffers would stay, and exchanges copy all of them
        rooms = [exchange.tokens for exchange in exchanges(layers) if exchange.tokens]
        self.at_once = min([AT_ONCE if self.device.type == "cuda" else ON_CPU, *rooms])
        self.at_once = model.rounding.piece(self.at_once)

    def join(self, rows: int) -> int:
        """The most rows of any rank in the next pass, which all ranks must run; below 0: no rank needs it.

        rows: of this rank; -1: it needs no pass. A collective on a separate stream, so that the host does not
        wait for the work on the device. Raises Stopped on all of these ranks if one of them must stop.
        """
        rows = STOP if self.told() else rows
        most = self._most(rows)
        if most == STOP:
            raise Stopped
        return most

    def _most(self, rows: int) -> int:
        """The largest number of these ranks. A collective."""
        if self.asks is None:
            return rows
        if self.asks is not self.group:
            most = torch.tensor(rows)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.asks)
            return int(most)
        with torch.cuda.stream(self.side) if self.side else nullcontext():
            most = torch.tensor(rows, device=self.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
            return int(most)

    def rows(self, rows: int) -> int:
        """Calls `join`. Returns the number of rows that experts must be given; 0: any number is valid."""
        most = self.join(rows)
        return most if self.pads else 0


def group_for_questions(model: Transformer) -> dist.ProcessGroup | None:
    """A gloo group of the model's expert group if its experts are on GPUs, else None.

    A collective of the expert group.
    """
    if not model.expert_group or model.head_weight.device.type != "cuda":
        return None
    group = group_of(model.expert_group)
    ranks, own = dist.get_process_group_ranks(group), dict(use_local_synchronization=True)
    return cast(dist.ProcessGroup, dist.new_group(ranks, patience(), backend="gloo", **own))


def exchanges(layers: list[MoE]) -> set[SymmDispatcher]:
    """The exchanges of MoE layers that use the peers' memory."""
    dispatchers = {dispatcher for moe in layers for dispatcher in (moe.dispatcher, *moe.ways.values())}
    return {dispatcher for dispatcher in dispatchers if isinstance(dispatcher, SymmDispatcher)}


@contextmanager
def room(layers: list[MoE], tokens: int) -> Iterator[None]:
    """A context in which exchanges through the peers' memory have room for `tokens` tokens of each rank."""
    before = {exchange: exchange.tokens for exchange in exchanges(layers)}
    try:
        for exchange in before:
            exchange.tokens = max(exchange.tokens, tokens)
        yield
    finally:
        for exchange, had in before.items():
            exchange.tokens = had
