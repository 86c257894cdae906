"""Which experts each token went to: kept while a model runs, and given to it again in place of a choice.

    with keeping(model) as calls:            # calls[i]: [Y, T, K] of the i-th forward in training
        model(tokens, targets).backward()
    with replaying(model, calls[0]):         # around the backward too: recomputed layers take them again
        model(tokens, targets).backward()

A replay takes the choice alone. Weights are of the live scores, and gradients flow through them.

next: moe/dispatch.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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

    model: a Transformer, whose Y MoE layers are traced from now on. T: its rank's own tokens.
    """
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
    gets on this rank. Keep the backward inside, or recomputed layers would choose anew.
    Raises ValueError for another number of layers; the layers' calls do for another number of tokens.
    """
    layers = layers_of(model)
    valid = f"those of {len(layers)}, as in the model"
    require(len(ids) == len(layers), "ids", f"those of {len(ids)} layers", valid)
    before = [moe.given_TK for moe in layers]
    for moe, of_layer in zip(layers, ids, strict=True):
        moe.given_TK = of_layer.flatten(0, -2).to(moe.router.weight.device, torch.int32)
    try:
        yield
    finally:
        for moe, given_TK in zip(layers, before, strict=True):
            moe.given_TK = given_TK
