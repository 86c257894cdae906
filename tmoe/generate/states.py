"""States of linear layers: of each slot's sequence, and of prompts whose answers wait for a slot.

A linear layer keeps, in place of keys and values of all tokens, one state of fixed size. The states of a step
are the first rows of tensors whose addresses never change, so that a step can be a CUDA graph. A prompt's
state is passed on between the pieces of the prompt, and copied to the slot of each of its answers.

next: generate/slots.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from tmoe.model.linear import LinearLayer, State
from tmoe.model.transformer import Transformer


class States:
    """The states of a call. A model without linear layers has none, and every method then does nothing."""

    def __init__(self, model: Transformer, slots: int):
        """Allocates the states of `slots` slots."""
        weight = model.head_weight
        self.layers: list[LinearLayer] = [
            block.attention for block in model.blocks if isinstance(block.attention, LinearLayer)
        ]
        self.kind = weight.dtype, weight.device
        self.slots = [layer.begin(slots, *self.kind) for layer in self.layers]
        self.prompts: dict[int, list[State]] = {}

    def begin(self, prompt: int) -> None:
        """The prompt's first token will be computed next."""
        self.prompts.pop(prompt, None)

    def of_prompt(self, prompt: int) -> list[State]:
        """The prompt's state in each linear layer, after the tokens computed so far; the list is kept."""
        if prompt not in self.prompts and self.layers:
            self.prompts[prompt] = [layer.begin(1, *self.kind) for layer in self.layers]
        return self.prompts.get(prompt, [])

    def seat(self, seated: Mapping[int, int], slots_I: Tensor) -> None:
        """Copies the states of prompts to slots. seated: slot -> prompt; slots_I: these slots."""
        if not self.layers:
            return
        found = [self.of_prompt(prompt) for prompt in seated.values()]
        for i, of_slots in enumerate(self.slots):
            for part, rows in zip(zip(*(states[i] for states in found), strict=True), of_slots, strict=True):
                rows[slots_I] = torch.cat(part)

    def move(self, targets_I: Tensor, sources_I: Tensor) -> None:
        """Copies the states of some slots to others."""
        for of_slots in self.slots:
            for rows in of_slots:
                rows[targets_I] = rows[sources_I]

    def keep(self, wanted: Callable[[int], bool]) -> None:
        """Frees the states of all prompts for which `wanted` is false."""
        for prompt in [prompt for prompt in self.prompts if not wanted(prompt)]:
            del self.prompts[prompt]


def rows_of_states(states: Iterable[State], rows: int) -> list[State]:
    """The first rows of the states of all slots, as views."""
    return [State(*(part[:rows] for part in state)) for state in states]
