"""Which experts each token went to: kept while a model runs, and given to it again in place of a choice.

    with keeping(model) as calls:            # calls[i]: [Y, T, K] of the i-th forward in training
        model(tokens, targets).backward()
    with replaying(model, calls[0]):         # around the backward too: recomputed layers take them again
        model(tokens, targets).backward()

A replay takes the choice alone. Weights are of the live scores, and gradients flow through them.

Both take the stages of a pipeline as well: calls[i] is then micro-batch i, in the MoE layers of this rank's
chunks, and a replay takes `calls` whole, as stages work on many micro-batches at a time.

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
from tmoe.ops.check import require


def layers_of(model: nn.Module) -> list[MoE]:
    """The MoE layers, from the first to the last."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def trace(model: nn.Module) -> None:
    """Makes the layers hand out their choices with their loads, from the next call on.

    Compiled layers hand them out by another graph. So a run that traces some steps calls this once, before
    the first one.
    """
    for moe in layers_of(model):
        moe.traced = True


@contextmanager
def keeping(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, the choices [Y, T, K] of each forward in training are added to the list; -1: no expert.

    model: a Transformer, whose Y MoE layers are traced from now on. T: its rank's own tokens. Of a pipeline's
    stages the list is filled at the end.
    """
    if is_pipeline(model):
        with ExitStack() as inside:
            kept = [inside.enter_context(keeping(part)) for part in model]  # pyrefly: ignore
            calls: list[Tensor] = []
            yield calls
        calls += [torch.cat(call) for call in zip(*filter(None, kept), strict=True)]
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
    """Inside, the MoE layers take these experts.

    ids: one [T, K] or [B, S, K] for each layer, whole numbers, -1 for no expert, of the tokens that each call
    gets on this rank; of a pipeline's stages such ids for each micro-batch. Keep the backward inside, or
    recomputed layers would choose anew.
    Raises ValueError for another number of layers; the layers' calls do for another number of tokens, and a
    pipeline for one of micro-batches.
    """
    layers = layers_of(model)
    pipeline = is_pipeline(model)
    calls: Any = ids if pipeline else [ids]
    valid = f"those of {len(layers)}, as in the model"
    for call in calls:
        require(len(call) == len(layers), "ids", f"those of {len(call)} layers", valid)
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
    """Makes each layer take its [T, K] from now on; None: choose."""
    for moe, given_TK in zip(layers, ids, strict=True):
        moe.given_TK = None if given_TK is None else given_TK.to(moe.router.weight.device)


def is_pipeline(model: nn.Module) -> bool:
    """Whether these are a pipeline's stages (model/stages.py), which this module may not import."""
    return hasattr(model, "replayed")
