"""Records which experts each token is sent to, and replays a recorded choice.

    with keeping(model) as calls:            # calls[i]: [Y, T, K] of the i-th forward in training
        model(tokens, targets).backward()
    with replaying(model, calls[0]):         # around the backward too: recomputed layers replay them again
        model(tokens, targets).backward()

A replay fixes the choice alone. Weights are computed from the current scores, and gradients flow through
them.

Both functions also accept the stages of a pipeline. calls[i] is then micro-batch i, in the MoE layers of this
rank's chunks. A replay needs the whole list `calls`, because stages process several micro-batches at a time.

next: moe/exchange/dispatch.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tmoe.moe.balance import Balancer
from tmoe.moe.layer import MoE
from tmoe.ops.argument_checks import require


def layers_of(model: nn.Module) -> list[MoE]:
    """The MoE layers, from the first to the last, without those that predict further tokens."""
    return [module for module in model.modules() if isinstance(module, MoE) and not module.further]


def trace(model: nn.Module) -> None:
    """Makes the layers return their choices with their loads, from the next call on.

    A compiled layer needs another graph to return them. Therefore a run that traces some steps calls this
    function once, before the first step.
    """
    for moe in layers_of(model):
        moe.traced = True


@contextmanager
def keeping(model: nn.Module) -> Iterator[list[Tensor]]:
    """In this context, the choices [Y, T, K] of each training forward are appended to the list; -1: none.

    model: a Transformer, whose Y MoE layers are traced from now on, or a pipeline's stages. T: the tokens of
    this rank. For a pipeline's stages the list is filled at the end.
    """
    if is_pipeline(model):
        with ExitStack() as inside:
            calls_of_parts = [inside.enter_context(keeping(part)) for part in model]  # pyrefly: ignore
            calls: list[Tensor] = []
            yield calls
        calls += [torch.cat(call) for call in zip(*filter(None, calls_of_parts), strict=True)]
        return
    balancer = getattr(model, "balancer", None)
    if not isinstance(balancer, Balancer):
        require(False, "model", f"a {type(model).__name__}", "a Transformer")
    assert isinstance(balancer, Balancer)
    trace(model)
    before, balancer.trace = balancer.trace, []
    try:
        yield balancer.trace
    finally:
        balancer.trace = before


@contextmanager
def replaying(model: nn.Module, ids: Tensor | Sequence[Tensor]) -> Iterator[None]:
    """In this context, the MoE layers use these experts.

    ids: one [T, K] or [B, S, K] for each layer, whole numbers, -1 for no expert, for the tokens that each
        call gets on this rank. For a pipeline's stages: such a list for each micro-batch. Keep the backward
        inside the context; otherwise recomputed layers would choose again.

    Raises ValueError for a wrong number of layers. The layers' calls raise it for a wrong number of tokens,
    and a pipeline raises it for a wrong number of micro-batches.
    """
    layers = layers_of(model)
    pipeline = is_pipeline(model)
    calls: Any = ids if pipeline else [ids]
    valid = f"ids of {len(layers)} layers, as in the model"
    for call in calls:
        require(len(call) == len(layers), "ids", f"ids of {len(call)} layers", valid)
    taken = [[of_layer.flatten(0, -2).to(torch.int32) for of_layer in call] for call in calls]
    before = [moe.given_TK for moe in layers]
    if pipeline:
        model.replayed = [dict(zip(layers, call, strict=True)) for call in taken]  # pyrefly: ignore
    else:
        give(layers, taken[0])
    try:
        yield
    finally:
        if pipeline:
            model.replayed = None  # pyrefly: ignore
        give(layers, before)


def give(layers: Iterable[MoE], ids: Iterable[Tensor | None]) -> None:
    """Makes each layer use its ids [T, K] from now on; None: the layer chooses its experts."""
    for moe, given_TK in zip(layers, ids, strict=True):
        moe.given_TK = None if given_TK is None else given_TK.to(moe.router.weight.device)


def is_pipeline(model: nn.Module) -> bool:
    """Whether the model is a pipeline's stages (model/stages.py, which this module may not import)."""
    return hasattr(model, "replayed")
