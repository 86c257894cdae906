"""Loads a model with quantised matrices from a step folder or a Hugging Face folder, a tensor at a time.

Memory: the quantised model, one tensor of the unquantised model (the experts of a layer are two), and on a
CPU what reading the folder takes.

next: model/quantised.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tmoe.checkpoint.manifest import Manifest
from tmoe.checkpoint.rewrite import read_whole
from tmoe.config.model import ModelConfig
from tmoe.hf.files import MODEL
from tmoe.hf.load_weights import read_hf
from tmoe.model.quantised import make_room
from tmoe.model.transformer import Transformer


class Place(NamedTuple):
    """Where a model is loaded to."""

    device: torch.device
    dtype: torch.dtype
    lay_out: Callable[[Transformer], None] | None = None
    """divides the model, on the meta device, over ranks"""


def load_quantised(
    path: Path, manifest: Manifest | None, cfg: ModelConfig, kind: str, to: Place
) -> Transformer:
    """A model on a device, with matrices of a kind and all other tensors in a type.

    manifest: of a step folder, whose tensors fit the model; None: path is a Hugging Face folder.
    """
    with torch.device("meta"):
        model = Transformer(cfg).to(to.dtype)
    wanted = model.state_dict()
    slots = make_room(model, kind)
    model = model.to_empty(device=to.device)
    state = model.state_dict()
    tensors = _of_step(path, manifest, wanted) if manifest else read_hf(path, wanted, cfg, to.device)
    with torch.no_grad():
        for name, tensor in tensors:
            if name in slots:
                slots[name].put(tensor.to(to.device, wanted[name].dtype))
            else:
                state[name].copy_(tensor)
            del tensor  # freed before the next one is read
    return model


def _of_step(step: Path, manifest: Manifest, wanted: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors in a step folder, one after the other, checked while reading."""
    for name in wanted:
        yield name, read_whole(step, manifest.tensors[f"{MODEL}{name}"])
