"""Compiles the blocks before the first step, so that no collective waits for a compiler.

From cold caches a compiler takes minutes, and not as many on every rank. A collective of the first step would
wait for the slowest rank, and give up on it. So each rank hands its blocks to the compiler before: forward
and backward are compiled, and not run. Nothing is gathered for it, and nothing travels. Then the ranks wait
for each other without a collective (run/watch, `meet`).

next: parallel/zero.py
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from tmoe.data.dataset import Micro
from tmoe.model.compiler import NotRun, compiler
from tmoe.model.stages import Stages
from tmoe.model.transformer import Block, Context, Transformer
from tmoe.moe.experts import Experts
from tmoe.moe.trace import give, layers_of, trace
from tmoe.parallel.mesh import Mesh

log = logging.getLogger(__name__)


class Pass(NamedTuple):
    """A kind of forward: each kind is a graph of its own."""

    grad: bool = True
    """with a backward, in training; else in evaluation"""
    replay: bool = False
    """with experts that are given, in place of a choice (moe/trace.py)"""
    traced: bool = False
    """its choices are handed out, as those of all later passes are then (moe/trace.py)"""


def compile_ahead(
    model: Transformer | Stages,
    mesh: Mesh,
    dtype: Literal["bf16", "fp32"],
    micro: Micro,
    passes: Iterable[Pass],
) -> None:
    """Compiles all blocks for micro-batches as this one. No collective; weights may be anywhere.

    dtype: of the products. micro: shapes and types count, values do not. Its rows are whole, as the model
    takes them. Where compiling fails, a line says so: it fails in the first step as well, or is done there.
    """
    if compiler is None:
        return
    wide = torch.bfloat16 if dtype == "bf16" else torch.float32
    try:
        with compiler.only_compiling():
            for kind in passes:
                if kind.traced:
                    trace(model)
                model.train(kind.grad)
                with torch.set_grad_enabled(kind.grad):
                    for part in model if isinstance(model, Stages) else [model]:
                        compile_part(part, mesh, wide, micro, kind)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        log.warning("blocks could not be compiled before the first step, which has to do it: %s", why)
    finally:
        model.train()


def compile_part(part: Transformer, mesh: Mesh, dtype: torch.dtype, micro: Micro, kind: Pass) -> None:
    """Of one kind of forward, the blocks of a model or of a pipeline's chunk."""
    rows = micro.tokens_BS, micro.documents_BS, micro.padding_BS, micro.positions_BS
    context = part.context(*rows, micro.given)
    B, S = part.own(micro.tokens_BS).shape
    x = torch.zeros(B, S, part.cfg.dim, dtype=dtype, device=micro.tokens_BS.device)
    # hidden states that come from another chunk always want a gradient
    grads = not part.first or part.embedding.weight.requires_grad
    for block in part.blocks:
        assert isinstance(block, Block)
        x.requires_grad_(kind.grad and grads)
        with empty_parameters(block, mesh, dtype), given_experts(block, B * S, kind.replay):
            compile_block(block, x, context)
        grads = grads or any(p.requires_grad for p in block.parameters())


def compile_block(block: Block, x: Tensor, context: Context) -> None:
    """As Block.forward calls its `compute`, past the hooks of FSDP2, which gather."""
    inputs = x, *context.turns[block.rope], context.masks[block.window], *context.of_tokens
    try:
        if block.moe is None:
            block.compute(*inputs)
        else:
            block.moe.experts.forward(block.compute, *inputs)
    except NotRun:
        return
    raise AssertionError("a block ran while it should only be compiled")


@contextmanager
def empty_parameters(block: Block, mesh: Mesh, dtype: torch.dtype) -> Iterator[None]:
    """Inside, parameters without memory are in the place of the block's, as it sees them when it runs."""
    scopes = [module for module in block.modules() if isinstance(module, Experts)]
    spread = {p: isinstance(scope, FSDPModule) for scope in scopes for p in scope.parameters()}
    slots = [
        (owner, name, p)
        for owner in block.modules()
        for name, p in owner.named_parameters(recurse=False, remove_duplicate=False)
    ]
    stand_ins = {p: stand_in(p, mesh, dtype, spread.get(p)) for _, _, p in slots}
    for owner, name, p in slots:
        owner._parameters[name] = stand_ins[p]
    try:
        yield
    finally:
        for owner, name, p in slots:
            owner._parameters[name] = p


def stand_in(p: nn.Parameter, mesh: Mesh, dtype: torch.dtype, by_fsdp: bool | None) -> nn.Parameter:
    """What p is to the block that runs: whole, or of experts those of this rank. It has no memory.

    by_fsdp: of experts, whether FSDP2 gathers them; None: it is none of theirs.
    """
    shape = list(p.shape)
    if by_fsdp is not None:
        shape[0] //= mesh.ep.size()
    kind = dtype if dtype == torch.bfloat16 else p.dtype
    empty = torch.empty(shape, dtype=kind, device=p.device)
    empty.untyped_storage().resize_(0)
    if by_fsdp:
        return nn.Parameter(DTensor.from_local(empty, mesh.ep, [Shard(0)], run_check=False), p.requires_grad)
    return nn.Parameter(empty, p.requires_grad)


@contextmanager
def given_experts(block: Block, tokens: int, replay: bool) -> Iterator[None]:
    """Inside, the block's MoE layer is given experts, if this is asked for."""
    layers = layers_of(block) if replay else []
    slots = (moe.router.cfg.slots for moe in layers)
    give(layers, [torch.zeros(tokens, K, dtype=torch.int32) for K in slots])
    try:
        yield
    finally:
        give(layers, [None] * len(layers))
