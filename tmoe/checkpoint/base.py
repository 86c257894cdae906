"""The frozen model that a step's adapters were trained on: its folder, and the hash of its weights.

A step of adapters contains no weight of its base. Its manifest names the base's folder and its
`weights_hash`. So a base that was moved can be recognised, and other weights are refused.

next: checkpoint/manifest.py
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from tmoe.base.disk import no_folder_words
from tmoe.checkpoint.folders import newest_in, resolve, steps_in
from tmoe.checkpoint.manifest import CheckpointError, Manifest, is_step, read_manifest
from tmoe.config.check import ConfigError, Setting

PEFT = "adapter_config.json"  # the file that makes a folder one of PEFT's


class Base(NamedTuple):
    """The entry "base" of a manifest."""

    path: str
    """a Hugging Face folder or a step folder, absolute"""
    sha256: str
    """`weights_hash` of the folder"""


def base_of(manifest: Manifest) -> Base | None:
    """The base of a step of adapters; None for a step that contains all weights."""
    said = manifest.info.get("base")
    if not isinstance(said, dict) or not all(isinstance(said.get(name), str) for name in Base._fields):
        return None
    return Base(*(said[name] for name in Base._fields))


def find_adapters(path: Path, setting: str = "lora.init") -> tuple[Path, Manifest]:
    """The step of adapters at a path, and its manifest: a step folder, or a run's newest complete step.

    ConfigError for a folder of another kind. setting: the flag's name, for the error.
    """
    valid = "a run folder or a step folder of --lora.rank, or a folder of PEFT's"
    if not path.is_dir():
        raise ConfigError.of(setting, path, no_folder_words(path), valid)
    if (path / PEFT).is_dir():
        raise ConfigError.of(setting, path, f"{PEFT} in it is a folder, not a file", valid)
    try:
        steps = steps_in(path)
        step = newest_in(steps)[0] if steps else resolve(path)
        manifest = read_manifest(step)
    except CheckpointError as error:
        raise ConfigError.of(setting, path, str(error), valid) from None
    if not settings_of(manifest).get("rank"):
        raise ConfigError.of(setting, path, f"{step} holds no adapters", valid)
    return step, manifest


def settings_of(manifest: Manifest) -> dict[str, Any]:
    """The settings of a step's adapters, as in `LoraConfig`; {} if it has none."""
    config = manifest.info.get("config")
    lora = config.get("lora") if isinstance(config, dict) else None
    return lora if isinstance(lora, dict) else {}


def require_base(step: Path, base: Base, place: str | Path, again: str) -> Path:
    """The folder of a step's base, after its hash was checked.

    Args:
        place: the base's folder, named by the user; "": the folder in the step's manifest.
        again: the flags that name another folder, for the error.

    Raises ConfigError if the folder does not exist, or has other weights.
    """
    folder = Path(place or base.path)
    if not folder.is_dir():
        raise ConfigError(f"{step}: holds adapters on {folder}, which is not there", valid=again)
    if weights_hash(folder) != base.sha256:
        wrong = f"{folder} holds other weights than {base.path} did, on which its adapters were trained"
        raise ConfigError(f"{step}: {wrong}", valid=again)
    return folder


def refuse_adapters(step: Path, manifest: Manifest, setting: str = "") -> None:
    """ConfigError for a step of adapters, if a whole model is needed.

    setting: the flag that names the step; "": an argument without a flag. Only `init` is of train.py, whose
    flags the error then names.
    """
    base = base_of(manifest)
    if base is None and not settings_of(manifest).get("rank"):
        return
    of = f"on {base.path}, and not a model's weights" if base else "next to their base, drawn from the seed"
    if base and setting == "init":
        valid = f"{Setting('init', base.path)} {Setting('lora.init', step)} with {Setting('lora.rank')}"
    else:
        valid = f"the folder of a whole model that `python -m tmoe.hf merge {step} DIR` writes"
    wrong = f"holds adapters {of}"
    raise ConfigError.of(setting, step, wrong if setting else f"{step}: {wrong}", valid)


def weights_hash(folder: str | Path) -> str:
    """A hash of a model's weights: of a step folder's manifest, or of all bytes of a Hugging Face folder.

    A manifest has the hashes of its tensors, so no weight is read. A resharded step folder has another hash.
    ValueError for a folder with neither manifest nor safetensors.
    """
    folder = Path(folder)
    sha = hashlib.sha256()
    if is_step(folder):
        manifest = read_manifest(folder)
        names = sorted(name for name in manifest.tensors if name.startswith("model."))
        for name in names:
            entry = manifest.tensors[name]
            sha.update(f"{name} {entry.dtype} {entry.shape} {entry.sha256}\n".encode())
        model = (manifest.info.get("config") or {}).get("model")  # its rope, its scalings
        sha.update(json.dumps(model, sort_keys=True).encode())
        return sha.hexdigest()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: has neither a manifest nor safetensors, so no weights to hash")
    for path in [*files, *folder.glob("config.json")]:
        with open(path, "rb") as file:
            sha.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return sha.hexdigest()


def require_one_base(steps: list[Path], manifests: list[Manifest]) -> None:
    """CheckpointError if steps of adapters have different bases."""
    hashes: list[Any] = [base and base.sha256 for base in map(base_of, manifests)]
    for step, found in zip(steps, hashes, strict=True):
        if found != hashes[0]:
            raise CheckpointError(f"{step}: holds adapters on another base than {steps[0]}")
