"""Quantises a model's experts and dense matrices for inference, a tensor at a time.

Quantised are the matrices of experts, attention, linear layers, shared experts, dense blocks and the latent
space of experts. Embedding, head, norms, routers, gates of shared experts, biases and sinks stay as they are,
and so do the decays of linear layers with their matrix (`ba`), which decide what a state keeps.

    slots = make_room(model, "int4")        modules with empty codes and scales take the place of matrices
    slots["blocks.0.attention.qkv.weight"].put(weight)

next: generate/load_quantised.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tmoe.config.check import require
from tmoe.model.nf4 import NARROW, Nf4Linear
from tmoe.model.slot import Slot
from tmoe.model.transformer import Block, Transformer
from tmoe.moe.quantised_experts import QuantisedExperts, held, hold
from tmoe.ops.quantised.gpu import KINDS, Matrix
from tmoe.ops.quantised.op import quantised_linear, quantised_values


class QuantisedLinear(nn.Module):
    """nn.Linear with a quantised weight [W, L], for inference.

    Its buffers are weight_codes, weight_scales and so on. `weight` computes the weight's values.
    """

    def __init__(self, linear: nn.Linear, kind: str):
        super().__init__()
        self.kind, self.shape = kind, tuple(linear.weight.shape)
        self.dtype = linear.weight.dtype
        hold(self, "weight", kind, linear.weight)
        self.bias = linear.bias

    @property
    def matrix(self) -> Matrix:
        return held(self, "weight", self.kind, self.shape)

    def forward(self, x: Tensor) -> Tensor:
        return quantised_linear(x, self.matrix, self.bias)

    @property
    def weight(self) -> Tensor:
        """The values [W, L], in the type of the weight that was quantised."""
        return quantised_values(self.matrix, self.dtype)


def make_room(model: Transformer, kind: str) -> dict[str, Slot]:
    """Replaces matrices by empty quantised ones, on the model's device, which may be meta.

    Returns the slots by the names of the weights in the model before. ConfigError for another kind than
    those of `KINDS`.
    """
    require(kind in KINDS, "quantize", kind, "unknown", " or ".join(KINDS))
    slots = {}
    for number, block in model.blocks.named_children():
        assert isinstance(block, Block)
        parents: dict[str, nn.Module | None] = dict(attention=block.attention, ffn=block.ffn)
        if block.moe is not None:
            room = QuantisedExperts(block.moe.experts, kind)
            block.moe.experts = room
            for name in ("gate_up", "down"):
                weight = f"blocks.{number}.moe.experts.{name}"
                slots[weight] = Slot(weight, room, name)
            parents |= {"moe.shared": block.moe.shared}
        for path, parent in parents.items():
            for name, linear in [] if parent is None else list(parent.named_children()):
                if isinstance(linear, nn.Linear) and name not in NARROW:
                    _replace(parent, f"blocks.{number}.{path}.", name, kind, slots)
        for name in ("to_latent", "from_latent"):
            if block.moe is not None and getattr(block.moe, name) is not None:
                _replace(block.moe, f"blocks.{number}.moe.", name, kind, slots)
    return slots


def _replace(parent: nn.Module | None, prefix: str, name: str, kind: str, slots: dict[str, Slot]) -> None:
    room = QuantisedLinear(getattr(parent, name), kind)
    setattr(parent, name, room)
    weight = f"{prefix}{name}.weight"
    slots[weight] = Slot(weight, room, "weight")


@torch.no_grad()
def quantised_copy(model: Transformer, kind: str) -> Transformer:
    """A quantised model with the weights of a model on one device, in evaluation."""
    state = model.state_dict()
    with torch.device("meta"):
        copy = Transformer(model.cfg).to(model.head_weight.dtype)
    slots = make_room(copy, kind)
    copy = copy.to_empty(device=model.head_weight.device)
    rest = copy.state_dict()
    for name, weight in state.items():
        if name in slots:
            slots[name].put(weight)
        else:
            rest[name].copy_(weight)
    return copy.eval()


def quantised_to(model: nn.Module) -> str:
    """The kind to which a model's matrices are quantised; "" for a model that is not quantised."""
    for module in model.modules():
        if isinstance(module, QuantisedLinear | QuantisedExperts | Nf4Linear):
            return module.kind
    return ""
