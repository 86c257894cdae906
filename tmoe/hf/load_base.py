"""Loads the frozen base of adapters into NF4 (--lora.base nf4), from a Hugging Face folder or a step folder.

Each rank reads every tensor, one after the other, and quantises it on its device.

next: model/nf4.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tmoe.checkpoint.base import refuse_adapters
from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.manifest import read_manifest
from tmoe.checkpoint.resume import require_same_model
from tmoe.checkpoint.rewrite import read_whole
from tmoe.hf.files import MODEL
from tmoe.hf.foreign import is_folder
from tmoe.hf.load_weights import read_hf
from tmoe.model.lora import is_adapter
from tmoe.model.nf4 import slots_of
from tmoe.model.transformer import Transformer
from tmoe.parallel.mesh import local_part, local_slices


@torch.no_grad()
def load_base(folder: Path, model: Transformer, setting: str = "init") -> int:
    """Fills a model's weights, all but its adapters; returns the number of tensors.

    folder: a Hugging Face folder or a step folder. setting: that names it, for errors. Raises the errors of
    load_hf and of a step that does not fit.
    """
    slots, state = slots_of(model), model.state_dict()
    device = next(iter(state.values())).device
    with torch.device("meta"):
        wanted = Transformer(model.cfg).to(model.head_weight.dtype).state_dict()
    tensors = (
        read_hf(folder, wanted, model.cfg, device) if is_folder(folder) else of_step(folder, model, setting)
    )
    for name, tensor in tensors:
        if name in slots:
            slots[name].put(tensor.to(device, slots[name].module.dtype))
        else:
            local_part(state[name]).copy_(tensor[local_slices(state[name])])
        del tensor  # freed before the next one is read
    left = {name for name in wanted if name not in slots and (name not in state or is_adapter(name))}
    refuse(f"{folder} does not fit", sorted(left))
    return len(wanted)


def of_step(folder: Path, model: Transformer, setting: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a step folder that holds a whole model, one after the other."""
    manifest = read_manifest(folder)
    refuse_adapters(folder, manifest, setting)
    require_same_model(folder, model.cfg)
    for name, entry in manifest.tensors.items():
        if name.startswith(MODEL):
            yield name.removeprefix(MODEL), read_whole(folder, entry)
