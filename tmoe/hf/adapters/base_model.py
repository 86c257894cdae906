"""Finds a base of adapters: its folder, its settings, and the names of its modules.

next: checkpoint/base.py
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tmoe.base.disk import no_folder_words
from tmoe.checkpoint.base import Base, base_of, refuse_adapters, settings_of, weights_hash
from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.folders import newest_in, resolve, steps_in
from tmoe.checkpoint.manifest import Manifest, read_manifest
from tmoe.config.check import ConfigError
from tmoe.config.compare import build_config, differences
from tmoe.config.model import ModelConfig
from tmoe.hf.adapters.names import Sites, sites_of
from tmoe.hf.config import architecture, read_config, write_config
from tmoe.hf.export import find_origin
from tmoe.hf.files import Folder
from tmoe.hf.files import settings_of as settings_in
from tmoe.hf.foreign import ADAPTER, is_folder
from tmoe.hf.hub_folders import folder_of
from tmoe.hf.rules import Architecture


class BaseModel:
    """The model on which adapters are trained: a Hugging Face folder, or a step folder with all weights."""

    def __init__(self, path: Path, setting: str = "base", weights: bool = True):
        """setting: the flag that names it, for errors; "": none. weights: False if it need not hold them."""
        found = folder_of(path)
        if not found.is_dir():
            wrong = no_folder_words(found)
            valid = "the folder of the base: Hugging Face's, or a step"
            raise ConfigError.of(setting, path, wrong if setting else f"{path}: {wrong}", valid)
        self.manifest: Manifest | None = None
        if is_folder(found):
            self.path = found.absolute()
            config = Folder(self.path).config if weights else settings_in(self.path)
            self.arch: Architecture = architecture(config)
            self.cfg: ModelConfig = read_config(config)
            return
        self.path = step_at(found).absolute()
        self.manifest = read_manifest(self.path)
        refuse_adapters(self.path, self.manifest, setting)
        self.arch, self.cfg = of_step(self.path, self.manifest)

    @cached_property
    def sites(self) -> Sites:
        return sites_of(self.arch, self.cfg)

    def record(self) -> Base:
        """The entry of a manifest. Reads all weights of a Hugging Face folder."""
        return Base(str(self.path), weights_hash(self.path))


def of_step(step: Path, manifest: Manifest) -> tuple[Architecture, ModelConfig]:
    """The architecture and the settings of a step with all weights."""
    config = manifest.info.get("config")
    settings = config.get("model") if isinstance(config, dict) else None
    if not isinstance(settings, dict):
        raise ConfigError(f"{step}: its manifest does not say what the model is")
    cfg = build_config(settings)
    if settings_of(manifest).get("rank"):  # drawn from the seed, with adapters next to it
        return architecture(write_config(cfg, "float32")), cfg
    return architecture(find_origin(step, manifest, None).config), cfg


def step_at(path: Path) -> Path:
    """The step folder at a path: itself, or the newest complete one of a run folder."""
    steps = steps_in(path)
    return newest_in(steps)[0] if steps else resolve(path)


class AdaptedStep(NamedTuple):
    """A step of adapters, and its base."""

    step: Path
    manifest: Manifest
    base: BaseModel | None
    """None: the base was drawn from the seed, and the step has its weights"""
    arch: Architecture
    cfg: ModelConfig


def adapted_step(path: Path, base: Path | None) -> AdaptedStep:
    """The step of adapters at a path. base: where its base is now; None: where its manifest says.

    The weights of the base are not read. ConfigError for a step without adapters, for a folder of PEFT's, and
    for a base that is not there. MismatchError for a base with other settings.
    """
    if (path / ADAPTER).exists():
        wrong = f"{path}: a folder of PEFT's, not a step of tmoe's"
        first = f"the step that python -m tmoe.hf import-adapter {path} STEP --base BASE writes"
        raise ConfigError(wrong, valid=first)
    step = step_at(path)
    manifest = read_manifest(step)
    if not settings_of(manifest).get("rank"):
        raise ConfigError(f"{step}: holds no adapters", valid="a run folder or a step folder of --lora.rank")
    said = base_of(manifest)
    if said is None:
        if base is not None:
            wrong = f"{step} has the weights of its base, which was drawn from the seed"
            raise ConfigError.of("base", base, wrong, "without this flag")
        return AdaptedStep(step, manifest, None, *of_step(step, manifest))
    if base is None and not Path(said.path).is_dir():
        wrong = f"{step}: holds adapters on {said.path}, which is not there"
        raise ConfigError(wrong, valid="--base DIR, the folder that holds those weights now")
    found = BaseModel(base or Path(said.path))
    own = manifest.info["config"]["model"]
    refuse(f"{found.path} is not the base of {step}", differences(build_config(own), found.cfg))
    return AdaptedStep(step, manifest, found, found.arch, found.cfg)
