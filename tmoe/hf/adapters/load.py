"""Loads the adapters of a folder of PEFT's directly into a model: each rank keeps its part.

next: hf/adapters/read.py
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from tmoe.checkpoint.base import find_adapters, settings_of
from tmoe.checkpoint.errors import CheckpointError
from tmoe.checkpoint.resume import require_same_adapters, require_same_settings
from tmoe.config.check import ConfigError
from tmoe.config.run import Config, LoraConfig
from tmoe.data.chat.format import ChatFormat
from tmoe.data.tokenizer import Carried
from tmoe.hf.adapters.base_model import BaseModel
from tmoe.hf.adapters.names import parameter
from tmoe.hf.adapters.read import PeftFolder
from tmoe.hf.foreign import ADAPTER
from tmoe.hf.tokenizer_files import carried_by
from tmoe.model.lora import lora_of_settings
from tmoe.parallel.mesh import local_part, local_slices


def is_peft(path: str | Path) -> bool:
    """Whether this is a folder of PEFT's."""
    return (Path(path) / ADAPTER).is_file()


def open_folder(path: Path, base: Path, setting: str, weights: bool = True) -> PeftFolder:
    """A folder of PEFT's, whose base is the model at `base`.

    setting: the flag that names the folder, for errors. weights: False if the base need not have weights.
    ConfigError for a folder that cannot be read, and for one that is not an adapter of the base.
    """
    try:
        named = "init" if setting == "lora.init" else ""  # elsewhere the base is an argument without a flag
        return PeftFolder(path, BaseModel(base, named, weights).sites)
    except CheckpointError as error:
        raise ConfigError.of(setting, path, str(error)) from None


def settings_at(path: Path, base: Path, weights: bool) -> tuple[LoraConfig, list[str]]:
    """The settings of the adapters at --lora.init, a folder of PEFT's or a step, and notes on them.

    They are the settings that decide what the adapters compute; dropout is left out.
    """
    if is_peft(path):
        folder = open_folder(path, base, "lora.init", weights)
        return replace(folder.settings(), dropout=0.0), folder.notes()
    _, manifest = find_adapters(path)
    lora = lora_of_settings(settings_of(manifest))
    assert lora is not None  # find_adapters checks it
    return replace(lora, dropout=0.0), []


def require_start(path: Path, cfg: Config) -> None:
    """ConfigError if the adapters at --lora.init have other settings than the run's. Reads no weights."""
    if is_peft(path):
        open_for_run(path, cfg, weights=False)
    else:
        require_same_adapters(*find_adapters(path), cfg, base=False)


def open_for_run(path: Path, cfg: Config, weights: bool = True) -> PeftFolder:
    """The folder of PEFT's at --lora.init. ConfigError if it holds other adapters than the run's settings.

    weights: False if the base need not have weights.
    """
    assert cfg.init is not None
    folder = open_folder(path, Path(cfg.init), "lora.init", weights)
    require_same_settings(path, asdict(folder.settings()), cfg)
    return folder


@torch.no_grad()
def read_into(folder: PeftFolder, tensors: dict[str, Tensor]) -> None:
    """Fills the adapters of a model from a folder of PEFT's; a rank keeps its part of each.

    tensors: by the parameters' names, DTensors or plain tensors of any type; names that are no adapter's are
        ignored. The model's adapters have the folder's settings.
    """
    for matrix in folder.matrices:
        names = {part: parameter(matrix, part) for part in ("a", "b")}
        if not any(name in tensors for name in names.values()):
            continue  # of another stage of a pipeline
        a, b, _ = folder.adapter(matrix)
        for name, whole in zip(names.values(), (a, b), strict=True):
            local_part(tensors[name]).copy_(whole[local_slices(tensors[name])])


def chat_of(folder: PeftFolder, base: Carried | None) -> ChatFormat | None:
    """The format of conversations of an adapter's own chat template; None if it has none, or the base's.

    base: what the base's folder carries.
    """
    own = carried_by(folder.path)
    if own is None or own.chat is None or own.chat.template is None:
        return None
    chat = base.chat if base else None
    if chat is not None and (chat.template, chat.tools) == (own.chat.template, own.chat.tools):
        return None
    found = own.chat
    return (chat or found)._replace(template=found.template, tools=found.tools, source=found.source)


def tokenizer_notes(folder: PeftFolder, base: Carried | None) -> list[str]:
    """A note on a tokenizer next to the adapter that is not the base's."""
    own = carried_by(folder.path)
    if not own or not own.fingerprint or (base and own.fingerprint in (base.fingerprint, *base.others)):
        return []
    return [f"{folder.path}: its tokenizer is not that of the base, which is used"]
