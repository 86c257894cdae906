"""Loads a model's weights directly from a Hugging Face folder or a step folder: each rank reads its part.

next: hf/export.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tmoe.base.disk import no_folder_words
from tmoe.checkpoint.base import refuse_adapters
from tmoe.checkpoint.checkpoints import Checkpoints
from tmoe.checkpoint.errors import refuse
from tmoe.checkpoint.folders import resolve
from tmoe.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from tmoe.checkpoint.resume import require_same_model
from tmoe.checkpoint.rewrite import read_boxes
from tmoe.config.check import ConfigError, require
from tmoe.config.compare import as_flags, build_config, differences
from tmoe.config.model import ModelConfig
from tmoe.hf.config import architecture, read_config, text_settings
from tmoe.hf.files import MODEL, Folder, fill, settings_of, untied
from tmoe.hf.foreign import CONFIG, hint, is_folder
from tmoe.hf.rules import TensorPiece, most_further, require_names
from tmoe.hf.tensor_plan import blocks_said, blocks_there, plan_folder
from tmoe.model.shapes import model_shapes
from tmoe.moe.layer import warn_if_untrained
from tmoe.parallel.agree import attempt, gathered
from tmoe.parallel.layout import Box
from tmoe.parallel.mesh import local_part, local_slices

T = TypeVar("T")


def load_hf(
    hf_dir: str | Path,
    named_parameters: Iterable[tuple[str, Tensor]] | dict[str, Tensor],
    model_cfg: ModelConfig,
) -> None:
    """Fill a tmoe model's parameters from a Hugging Face folder that every rank can read.

    named_parameters: DTensors on any mesh, or plain tensors. A model with a choice bias (DeepSeek-V3) has a
        buffer to fill as well: give `model.state_dict()`, which is right for every model.

    Collective: every rank calls it. Each rank reads only the slices that it holds, converted to the
    parameter's type. Warns if the task's loss does not train the model's routers (`MoEConfig.untrained`).
    Raises on every rank, before any parameter changes: ConfigError for settings that tmoe does not compute;
    MismatchError that lists every setting in which config.json differs from `model_cfg`, and every tensor
    that is missing, extra or of another shape.
    """
    _load_hf(Path(hf_dir), dict(named_parameters), model_cfg)
    if any(map(model_cfg.is_moe, range(model_cfg.layers))):
        warn_if_untrained(model_cfg.moe)


@torch.no_grad()
def _load_hf(hf_dir: Path, parameters: dict[str, Tensor], model_cfg: ModelConfig) -> None:
    # Collect the names of all ranks, because pipeline stages hold different tensors.
    held = set().union(*gathered(list(parameters), dist.group.WORLD))
    plan = _together(lambda: _plan_load(hf_dir, parameters, held, model_cfg))

    def read() -> None:
        folder, pieces = plan
        for name, parameter in parameters.items():
            offset = tuple(part.start for part in local_slices(parameter))
            with folder.reading() as reading:
                fill(local_part(parameter), offset, pieces[name], reading)

    _together(read)


@torch.no_grad()
def read_hf(
    hf_dir: Path, wanted: dict[str, Tensor], model_cfg: ModelConfig, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a Hugging Face folder, one after the other, each in a new tensor on a device.

    wanted: the model's `state_dict()`, of which only names, shapes and types are read. Raises the errors of
    load_hf, before the first tensor.
    """
    folder, found = _plan_load(hf_dir, wanted, set(wanted), model_cfg)
    for name, like in wanted.items():
        tensor = torch.empty_like(like, device=device)
        with folder.reading() as reading:
            fill(tensor, (0,) * tensor.dim(), found[name], reading)
        yield name, tensor
        del tensor  # freed before the next one is made


def load_weights(
    path: Path, checkpoints: Checkpoints, parameters: dict[str, Tensor], model_cfg: ModelConfig
) -> None:
    """Fill `parameters`, a model's state_dict(), from a Hugging Face folder or step folder, on every rank.

    Weights of a step are converted to the parameter's type: a frozen weight is in bf16.

    Raises the errors of load_hf and of Checkpoints.load. A step whose settings compute another model raises
    MismatchError too, and a step of adapters ConfigError.
    """
    if is_folder(path):
        return _load_hf(path, parameters, model_cfg)

    def look() -> tuple[Path, Manifest]:
        step_dir, manifest = _find_step(path)
        refuse_adapters(step_dir, manifest, "init")
        require_same_model(step_dir, model_cfg)
        return step_dir, manifest

    step_dir, manifest = _together(look)
    named = {MODEL + name: tensor for name, tensor in parameters.items()}
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in named.items()}
    tensors = manifest.tensors
    if all(name not in tensors or tensors[name].dtype == kind for name, kind in kinds.items()):
        checkpoints.load(step_dir, named, only=MODEL)
    else:
        read_step(step_dir, manifest, named)


@torch.no_grad()
def read_step(step_dir: Path, manifest: Manifest, tensors: dict[str, Tensor], more: bool = False) -> None:
    """Fills tensors from a step folder and converts each to the tensor's type; a rank reads its own part.

    tensors: by their names in the step; DTensors or plain tensors. more: the step may contain other weights.
    A collective. MismatchError on every rank for names and shapes that differ.
    """
    asked = set().union(*gathered(list(tensors), dist.group.WORLD))
    entries = {name: entry for name, entry in manifest.tensors.items() if name.startswith(MODEL)}

    def read() -> None:
        problems = [f"{name}: not in the step" for name in tensors.keys() - entries.keys()]
        if not more:
            problems += [f"{name}: in the step, but not asked for" for name in entries.keys() - asked]
        problems += [
            f"{name}: shape {entries[name].shape} in the step, {tuple(t.shape)} asked for"
            for name, t in tensors.items()
            if name in entries and entries[name].shape != tuple(t.shape)
        ]
        refuse(f"{step_dir} does not fit", sorted(problems))
        for name, t in tensors.items():
            parts = local_slices(t)
            offset, shape = tuple(p.start for p in parts), tuple(p.stop - p.start for p in parts)
            local_part(t).copy_(next(read_boxes(step_dir, entries[name], (Box(0, offset, shape),))))

    _together(read)


def model_of(path: Path, weights: bool = True) -> ModelConfig:
    """The model of a Hugging Face folder, by its config.json, or of a step folder, by its run's settings.

    Reads no weights. weights: False if a Hugging Face folder need not hold any.

    Raises ConfigError or CheckpointError if there is no such folder, if it does not describe its model, or if
    tmoe does not compute the model.
    """
    if is_folder(path):
        return read_config(Folder(path).config if weights else settings_of(path))
    step_dir, manifest = _find_step(path)
    config = manifest.info.get("config")
    settings = config.get("model") if isinstance(config, dict) else None
    if not isinstance(settings, dict):
        wrong = f"{step_dir} does not say what its model is; name a preset and flags"
        raise ConfigError.of("init", path, wrong)
    return build_config(settings)


def require_model(path: Path, model_cfg: ModelConfig) -> None:
    """Raises the errors of `load_weights` for a folder or step whose settings are another model's.

    Reads no weights, which a Hugging Face folder need not hold. Weights decide whether its head is tied.
    """
    if not is_folder(path):
        return require_same_model(_find_step(path)[0], model_cfg)
    config = settings_of(path)
    arch, theirs = architecture(config), replace(read_config(config), mtp=model_cfg.mtp, tied=model_cfg.tied)
    names = Folder(path).shapes if any(path.glob("*.safetensors")) else ("mtp.",)  # unknown without weights
    require_names(arch, model_cfg, blocks_said(config, names), text_settings(arch, config))
    refuse(
        f"{path / CONFIG} is not this model's", differences(model_cfg, theirs), as_flags(model_cfg, theirs)
    )
    return None


def carried_blocks(path: Path, model: ModelConfig) -> str:
    """The end of a note on blocks of a folder that predict further tokens and are not trained."""
    if not is_folder(path):
        return ""
    config = settings_of(path)
    left = blocks_there(config, Folder(path).shapes) - model.mtp.depth
    trained = ", --model.mtp.depth trains them" if most_further(architecture(config)) else ""
    return (
        f"; blocks that predict further tokens and are kept for an export{trained}: {left}"
        if left > 0
        else ""
    )


def _find_step(path: Path) -> tuple[Path, Manifest]:
    """The folder of --init's step, and its manifest. An error states what the path is, or how to get one."""
    valid = "a run folder, a step folder or a Hugging Face folder"
    try:
        step_dir = resolve(path)
        require(step_dir.is_dir(), "init", path, no_folder_words(path), valid)
        return step_dir, read_manifest(step_dir)
    except CheckpointError as error:
        why = hint(path).removeprefix("; ") or str(error)
        raise CheckpointError(f"--init={path}: {why}; valid: {valid}") from None


def _plan_load(
    hf_dir: Path, parameters: dict[str, Tensor], held: set[str], cfg: ModelConfig
) -> tuple[Folder, dict[str, list[TensorPiece]]]:
    """The folder and the pieces of tmoe's tensors. MismatchError if it does not fit the model or parameters.

    held: names of the tensors that any rank fills.
    """
    folder = Folder(hf_dir)
    plan = plan_folder(folder, cfg.mtp)
    why = f" ({untied(hf_dir)})" if folder.own_head else ""
    refuse(f"{hf_dir / CONFIG} is not this model's{why}", differences(cfg, plan.cfg), as_flags(cfg, plan.cfg))
    shapes = model_shapes(plan.cfg)
    problems = plan.problems + [
        f"{name}: shape {tuple(p.shape)} here, by config.json {shapes.get(name)}"
        for name, p in parameters.items()
        if shapes.get(name) != tuple(p.shape)
    ]
    unfilled = sorted(shapes.keys() - held)
    problems += [f"{name}: not among the tensors to fill; give the model's state_dict()" for name in unfilled]
    refuse(f"{hf_dir} does not fit", problems)
    return folder, plan.pieces


def _together(work: Callable[[], T]) -> T:
    """The result of `work` on this rank. If it fails on any rank, an error is raised on every rank.

    So no rank waits for one that has failed.
    """
    result, error, failures = attempt(work, dist.group.WORLD)
    if error is not None:
        raise error
    for rank, why in failures.items():
        raise CheckpointError(f"rank {rank}: {why}")
    return cast(T, result)
