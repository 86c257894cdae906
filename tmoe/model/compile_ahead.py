"""Compiles the blocks before the first step, so that no collective waits for a compiler.

From cold caches a compiler takes minutes, and the ranks take different times. A collective of the first step
would wait for the slowest rank, and time out. Therefore each rank compiles its blocks before: forward and
backward are compiled, and not run. This gathers and sends nothing. Then the ranks wait for each other without
a collective (run/watch, `meet`).

next: parallel/zero.py
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from tmoe.base.activations import activation
from tmoe.base.types import FLOATS
from tmoe.config.run import Dtype
from tmoe.data.dataset import Micro
from tmoe.model.compiler import NotRun, compiler
from tmoe.model.lora import off
from tmoe.model.stages import Stages
from tmoe.model.transformer import Block, Context, Transformer
from tmoe.moe.experts import Experts
from tmoe.moe.trace import give, layers_of, trace
from tmoe.ops.experts.fp8_codes import blank
from tmoe.parallel.mesh import Mesh
from tmoe.parallel.precise import type_in

log = logging.getLogger(__name__)


class Pass(NamedTuple):
    """A kind of forward. Each kind has a separate graph."""

    grad: bool = True
    """True: with a backward, in training; False: in evaluation"""
    replay: bool = False
    """whether experts are given instead of chosen (moe/trace.py)"""
    traced: bool = False
    """whether its choices are returned; all later passes then return theirs too (moe/trace.py)"""
    adapters: bool = True
    """whether it computes the adapters, if there are some; False: a pass of the reference (model/lora.py)"""


def compile_ahead(
    model: Transformer | Stages,
    mesh: Mesh,
    dtype: Dtype,
    micro: Micro,
    passes: Iterable[Pass],
) -> None:
    """Compiles all blocks for micro-batches like `micro`. No collective; weights may be on any device.

    dtype: the dtype of the products. micro: only shapes and types matter, not values. Its rows are whole, as
    in the model's input. If compiling fails, a line is logged: the first step then compiles, or fails in the
    same way.
    """
    if compiler is None:
        return
    try:
        with compiler.only_compiling():
            for kind in passes:
                if kind.traced:
                    trace(model)
                model.train(kind.grad)
                with torch.set_grad_enabled(kind.grad), nullcontext() if kind.adapters else off(model):
                    for part in model if isinstance(model, Stages) else [model]:
                        compile_part(part, mesh, FLOATS[dtype], micro, kind)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        log.warning("blocks could not be compiled before the first step, which will compile them: %s", why)
    finally:
        model.train()


def compile_part(part: Transformer, mesh: Mesh, dtype: torch.dtype, micro: Micro, kind: Pass) -> None:
    """Compiles the blocks of a model or of a pipeline's chunk for one kind of forward."""
    rows = micro.tokens_BS, micro.documents_BS, micro.padding_BS, micro.positions_BS
    context = part.context(*rows, micro.given)
    B, S = part.own(micro.tokens_BS).shape
    x = torch.zeros(B, S, part.cfg.dim, dtype=dtype, device=micro.tokens_BS.device)
    # hidden states from another chunk always require a gradient
    grads = not part.first or part.embedding.weight.requires_grad
    for block in part.blocks:
        assert isinstance(block, Block)
        x.requires_grad_(kind.grad and grads)
        with empty_parameters(block, mesh, dtype), given_experts(block, B * S, kind.replay):
            compile_block(block, x, context)
        grads = grads or any(p.requires_grad for p in block.parameters())
    for depth, block in enumerate(part.mtp.blocks() if kind.grad else ()):
        grads = not part.cfg.mtp.detach or depth > 0
        x = torch.zeros(B, S, 2 * part.cfg.dim, dtype=dtype, device=x.device, requires_grad=grads)
        with empty_parameters(block, mesh, dtype):
            compile_block(block, x, context.without(torch.zeros(B, S, dtype=torch.bool, device=x.device)))


def compile_block(block: Block, x: Tensor, context: Context) -> None:
    """Calls `compute` as Block.forward does, without the hooks of FSDP2, which gather."""
    inputs = x, *context.of_block(block), *context.of_tokens
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
    """In this context, the block's parameters are replaced by parameters of the same kind without memory."""
    scopes = [module for module in block.modules() if isinstance(module, Experts)]
    spread = {p: isinstance(scope, FSDPModule) for scope in scopes for p in scope.parameters()}
    slots = [
        (owner, name, p)
        for owner in block.modules()
        for name, p in owner.named_parameters(recurse=False, remove_duplicate=False)
    ]
    stand_ins = {p: stand_in(owner, p, mesh, dtype, spread.get(p)) for owner, _, p in slots}
    for owner, name, p in slots:
        owner._parameters[name] = stand_ins[p]
    try:
        yield
    finally:
        for owner, name, p in slots:
            owner._parameters[name] = p


def stand_in(
    owner: nn.Module, p: nn.Parameter, mesh: Mesh, dtype: torch.dtype, by_fsdp: bool | None
) -> nn.Parameter:
    """A parameter without memory in the form of p that a running block sees: whole, or this rank's experts.

    owner: the module that has p.
    by_fsdp: for a parameter of experts, whether FSDP2 gathers it; None for other parameters.
    """
    shape = list(p.shape)
    if by_fsdp is not None:
        shape[0] //= mesh.ep.size()
    kind = p.dtype if dtype == torch.float32 else type_in(owner, dtype)
    empty = torch.empty(shape, dtype=kind, device=p.device)
    empty.untyped_storage().resize_(0)
    whole = DTensor.from_local(empty, mesh.ep, [Shard(0)], run_check=False) if by_fsdp else empty
    stands = nn.Parameter(whole, p.requires_grad)
    if isinstance(owner, Experts) and owner.fp8 and empty.dim() == 3:
        halves = activation(owner.activation).halves if p is owner.gate_up else 1
        vars(stands)["fp8_codes"] = [blank(empty, halves)]
    return stands


@contextmanager
def given_experts(block: Block, tokens: int, replay: bool) -> Iterator[None]:
    """In this context, the block's MoE layer is given experts, if `replay` is True."""
    layers = layers_of(block) if replay else []
    slots = (moe.router.cfg.slots for moe in layers)
    give(layers, [torch.zeros(tokens, K, dtype=torch.int32) for K in slots])
    try:
        yield
    finally:
        give(layers, [None] * len(layers))
